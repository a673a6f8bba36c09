"""Weights where samples do not come out even over ranks, streams, and loaders that are sharded already."""

from __future__ import annotations

import copy
import itertools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch import Tensor
from torch.utils.data import (
    DataLoader,
    DistributedSampler,
    IterableDataset,
    SequentialSampler,
)

from tests.distributed.case import build_trainer
from tests.distributed.tiny import (
    DP2_TP2,
    DP4,
    Blocks,
    Groups,
    Indices,
    Stream,
    Tiny,
    fit,
    fit_by_hand,
    numbered,
    weight_of,
)
from tests.harness import reference, run_ranks
from titanplug import TitanStrategy
from titanplug.strategy.loaders import Share, shard_map_loader

Read = list[list[list[int]]]
"""Indices by epoch and batch."""

# ---------------------------------------------------------------- weights where it doesn't come out even


def _cut(length: int, size: int) -> list[list[list[int]]]:
    return [[part.tolist()] for part in torch.arange(length).split(size)]


# Loader, data ranks by layout, and the steps that one process would make.
UNEVEN: dict[str, tuple[Callable[[], Any], dict[str, Any], list[Any]]] = {
    "two ranks without a share": (numbered(10, batch_size=2), DP4, _cut(10, 8)),
    "a short share": (numbered(11, batch_size=2), DP2_TP2, _cut(11, 4)),
    "one sample left": (numbered(9, batch_size=2), DP2_TP2, _cut(9, 4)),
    "one sample left, workers": (numbered(9, batch_size=2, num_workers=2), DP2_TP2, _cut(9, 4)),
    "fewer samples than ranks": (numbered(3, batch_size=2), DP4, _cut(3, 8)),
    "dropped": (numbered(11, batch_size=2, drop_last=True), DP2_TP2, _cut(8, 4)),
    "own batches": (
        lambda: DataLoader(Indices(9), batch_sampler=Groups(1, 4, 2, 2, shuffle=False)),
        DP2_TP2,
        [[range(5)], [range(5, 9)]],
    ),
    "own batches, an odd one": (
        lambda: DataLoader(Indices(9), batch_sampler=Groups(2, 4, 3, shuffle=False)),
        DP2_TP2,
        [[range(6)], [range(6, 9)]],
    ),
    "items are batches": (
        lambda: DataLoader(Blocks(1, 4, 2, 3, 5), batch_size=None),
        DP2_TP2,
        [[range(5)], [range(5, 10)], [range(10, 15)]],
    ),
}


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("name", UNEVEN)
def test_weights_where_shares_are_uneven(name: str, accumulate: int) -> None:
    loader, degrees, steps = UNEVEN[name]
    windows = [list(itertools.chain(*steps[i : i + accumulate])) for i in range(0, len(steps), accumulate)]
    expected = reference(fit_by_hand, windows)

    def run(rank: int, world_size: int) -> float:
        return weight_of(fit(rank, world_size, degrees, loader, accumulate_grad_batches=accumulate))

    for weight in run_ranks(run, 4, init_process_group=False):
        assert weight == pytest.approx(expected, rel=1e-12)


def _same_loader_twice(rank: int, world_size: int) -> tuple[float, list[Any], bool]:
    """Validation in the middle of the epoch reads the loader that training is reading."""
    loader = numbered(10, batch_size=1, shuffle=False)()
    before = copy.copy(loader.__dict__)

    class Validates(Tiny):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("seen", float(len(batch)), reduce_fx="sum", batch_size=1)

    module = Validates()
    trainer = build_trainer(world_size, TitanStrategy(**DP4), val_check_interval=1)
    seen: list[Any] = []
    trainer.callbacks.append(_Collects(seen))  # type: ignore[attr-defined]
    trainer.fit(module, loader, loader)
    return weight_of(module), seen, loader.__dict__ == before


class _Collects(L.Callback):
    def __init__(self, seen: list[Any]) -> None:
        self.seen = seen

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.seen.append(float(trainer.callback_metrics["seen"]))


def test_one_loader_for_training_and_validation() -> None:
    expected = reference(fit_by_hand, _cut(10, 4))
    for weight, seen, untouched in run_ranks(_same_loader_twice, 4, init_process_group=False):
        assert weight == pytest.approx(expected, rel=1e-12)
        assert seen == [10.0, 10.0, 10.0]
        assert untouched  # the user's loader is still the user's


class Pairs(Tiny):
    """Reads two loaders at a time."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        return self.errors(batch["a"]).mean() + self.errors(batch["b"]).mean()


def _two_loaders(rank: int, world_size: int, lengths: tuple[int, int]) -> float:
    def build() -> Any:
        return CombinedLoader(
            {name: numbered(n, batch_size=2)() for name, n in zip("ab", lengths, strict=True)},
            "max_size_cycle",
        )

    return weight_of(fit(rank, world_size, DP4, build, Pairs))


@pytest.mark.parametrize("lengths", [(10, 10), (8, 16), (8, 24)])
def test_several_loaders(lengths: tuple[int, int]) -> None:
    """Exact where they run out alike; the first of them decides how many rows a batch has."""
    (expected,) = run_ranks(_two_loaders_at_once, 1, lengths, init_process_group=False)
    for weight in run_ranks(_two_loaders, 4, lengths, init_process_group=False):
        assert weight == pytest.approx(expected, rel=1e-12)


def test_shares_of_a_loader_that_starts_again_within_an_epoch() -> None:
    loader: Any = shard_map_loader(numbered(10, batch_size=2)(), training=True, seed=0, rank=3, size=4)
    shares = loader.batch_sampler
    index = 0
    for _ in range(2):
        for _ in loader:
            assert shares.share(index) == [Share(2, 8), Share(0, 2)][index % 2]
            index += 1
    assert index == 4


def _two_loaders_at_once(rank: int, world_size: int, lengths: tuple[int, int]) -> float:
    """One process with the batches of all data ranks, the shorter loader starting again."""
    module = Pairs()
    optimizer = module.configure_optimizers()
    first, second = (list(torch.arange(n).split(8)) for n in lengths)
    for step, other in enumerate(second):
        optimizer.zero_grad()
        module.training_step({"a": first[step % len(first)], "b": other}, step).backward()
        optimizer.step()
    return weight_of(module)


# ---------------------------------------------------------------- iterable data sets


class Counts(Tiny):
    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("loss", self.errors(batch).mean(), batch_size=len(batch))
        self.log("seen", float(len(batch)), reduce_fx="sum", batch_size=len(batch))


def _stream(rank: int, world_size: int, length: int, degrees: Any) -> dict[str, Any]:
    def build() -> Any:
        return DataLoader(Stream(length), batch_size=2)

    L.seed_everything(7, verbose=False)
    trainer = build_trainer(world_size, TitanStrategy(**degrees), max_epochs=2)
    module = Counts()
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*set_data_parallel")
        trainer.fit(module, build())
    (logged,) = trainer.validate(module, build(), verbose=False)
    return {"weight": weight_of(module), "read": module.read, **logged}


def _steps_of_streams(length: int, num_ranks: int) -> list[list[list[int]]]:
    shares = [list(range(rank, length, num_ranks)) for rank in range(num_ranks)]
    longest = max(map(len, shares))
    return [[share[i : i + 2] for share in shares] for i in range(0, longest, 2)]


@pytest.mark.parametrize(
    ("length", "degrees"),
    [
        (12, DP2_TP2),
        (9, DP2_TP2),  # 3 and 2 batches
        (11, DP4),  # 2, 2, 2 and 1 batches, the last of each shorter
        (2, DP4),  # two ranks have no batch at all
    ],
)
def test_streams_are_told_their_share_and_kept_in_step(length: int, degrees: Any) -> None:
    steps = 2 * _steps_of_streams(length, degrees["dp_shard"])
    weight = reference(fit_by_hand, steps)
    for found in run_ranks(_stream, 4, length, degrees, init_process_group=False):
        assert found["weight"] == pytest.approx(weight, rel=1e-12)
        assert found["seen"] == length
        assert found["loss"] == pytest.approx(_mean_error(weight, length), rel=1e-6)


def _mean_error(weight: float, length: int) -> float:
    module = Tiny()
    with torch.no_grad():
        module.layer.weight.fill_(weight)
        return float(module.errors(torch.arange(length)).mean())


class DeafStream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        yield from range(4)


def _deaf(rank: int, world_size: int, shards: bool) -> tuple[list[str], Read]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        module = fit(
            rank,
            world_size,
            {},
            lambda: DataLoader(DeafStream(), batch_size=2),
            use_distributed_sampler=not shards,
        )
    return [str(w.message) for w in caught if "set_data_parallel" in str(w.message)], module.read


def test_a_stream_that_can_not_be_told_its_share_gets_a_warning() -> None:
    for told, read in run_ranks(_deaf, 2, False, init_process_group=False):
        assert len(told) == 1 and "DeafStream" in told[0] and "reads all of it" in told[0]
        assert read == [[[0, 1], [2, 3]]]
    for told, read in run_ranks(_deaf, 2, True, init_process_group=False):
        assert told == [] and read == [[[0, 1], [2, 3]]]


# ---------------------------------------------------------------- loaders that are sharded already


def _sharded_by_user(rank: int, world_size: int, kind: str) -> tuple[Read, float]:
    def build() -> Any:
        if kind == "own part":  # 3 batches on the first rank, 1 on the second
            part = Indices(6) if rank == 0 else Indices(2)
            return DataLoader(part, batch_size=2)
        if kind == "own stream":
            return DataLoader(Stream(6 if rank == 0 else 2), batch_size=2)
        if kind == "sampler":
            sampler: Any = DistributedSampler(Indices(8), world_size, rank, shuffle=False)
            return DataLoader(Indices(8), batch_size=2, sampler=sampler)
        return DataLoader(Indices(4), batch_size=2, sampler=SequentialSampler(Indices(4)))

    module = fit(rank, world_size, {}, build, Counts, build, use_distributed_sampler=kind == "sampler")
    return module.read, weight_of(module)


def test_loaders_are_left_alone_on_request() -> None:
    first, second = run_ranks(_sharded_by_user, 2, "all", init_process_group=False)
    assert first[0] == second[0] == [[[0, 1], [2, 3]]]
    expected = reference(fit_by_hand, _cut(4, 2))
    assert first[1] == second[1] == pytest.approx(expected, rel=1e-12)


def test_a_distributed_sampler_of_the_user_is_left_alone() -> None:
    first, second = run_ranks(_sharded_by_user, 2, "sampler", init_process_group=False)
    assert first[0] == [[[0, 2], [4, 6]]] and second[0] == [[[1, 3], [5, 7]]]


class KnowsItsLength(DataLoader[int]):
    """A loader that takes the coordinate itself."""

    def set_data_parallel(self, rank: int, size: int) -> None:
        assert isinstance(self.dataset, Stream)
        self.dataset.set_data_parallel(rank, size)


def _costs(rank: int, world_size: int) -> tuple[str, Read]:
    class Keeps(Tiny):
        def on_train_end(self) -> None:
            self.kind = type(self.trainer.train_dataloader).__name__

    def build() -> Any:
        stream = Stream(8)
        stream.__class__ = type("SizedStream", (Stream,), {"__len__": lambda self: 4})
        return KnowsItsLength(stream, batch_size=2)

    module = fit(rank, world_size, {}, build, Keeps)
    return module.kind, module.read


def test_a_loader_that_knows_its_part_needs_no_collective() -> None:
    first, second = run_ranks(_costs, 2, init_process_group=False)
    assert first == ("KnowsItsLength", [[[0, 2], [4, 6]]])
    assert second == ("KnowsItsLength", [[[1, 3], [5, 7]]])


@pytest.mark.parametrize("kind", ["own part", "own stream"])
def test_parts_of_unequal_length_neither_hang_nor_count_twice(kind: str) -> None:
    expected = reference(fit_by_hand, [[[0, 1], [0, 1]], [[2, 3]], [[4, 5]]])
    for _, weight in run_ranks(_sharded_by_user, 2, kind, init_process_group=False):
        assert weight == pytest.approx(expected, rel=1e-12)

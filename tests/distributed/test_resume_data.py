"""The place in the data: what resumes exactly, and what is refused."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, TensorDataset

from tests.distributed.case import build_trainer
from tests.harness import reference, run_ranks
from titanplug.errors import ConfigError
from titanplug.strategy import TitanStrategy

ROWS = 24


class Reader(L.LightningModule):
    """Notes which rows it is given; ``fail_at`` raises in that step, once the batch was noted."""

    def __init__(self, fail_at: int = -1) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.fail_at = fail_at
        self.seen: list[Any] = []
        self.draws: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        parts = batch.values() if isinstance(batch, dict) else [batch]
        seen = [part[0].tolist() if isinstance(part, list | tuple) else part.tolist() for part in parts]
        self.seen.append(seen if isinstance(batch, dict) else seen[0])
        self.draws.append(float(torch.rand(())))
        if self.trainer.global_step == self.fail_at:
            raise KeyError("stop")
        return self.weight.sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def rows(count: int = ROWS) -> TensorDataset:
    return TensorDataset(torch.arange(count))


def shuffled(batch_size: int) -> Any:
    return DataLoader(rows(), batch_size=batch_size, shuffle=True)


def fit(
    loaders: Any, *, ckpt_path: Path | None = None, seed: int = 7, fail_at: int = -1, **options: Any
) -> tuple[Reader, L.Trainer]:
    L.seed_everything(seed, verbose=False)
    world_size = options.pop("world_size", 1)
    strategy = TitanStrategy(**options.pop("degrees", {}))
    trainer = build_trainer(world_size, strategy, **options)
    module = Reader(fail_at)
    try:
        trainer.fit(module, loaders, ckpt_path=ckpt_path)
    except KeyError:
        assert fail_at >= 0
    return module, trainer


@pytest.mark.parametrize(
    ("first", "second", "numbers"),
    [
        ((1, 4), (1, 6), ("4 rows", "6 rows", "batch_size=6 on 1 data")),
        ((2, 2), (2, 4), ("4 rows", "8 rows", "batch_size=4 on 2 data")),
        ((2, 2), (1, 2), ("4 rows", "2 rows", "batch_size=2 on 1 data")),
    ],
    ids=["another batch_size", "two ranks, another batch_size", "fewer ranks, same batch_size"],
)
def test_another_global_batch_is_refused(
    first: tuple[int, int], second: tuple[int, int], numbers: tuple[str, ...], tmp_path: Path
) -> None:
    """In the middle of an epoch; at its end it is allowed."""

    def save(rank: int, world_size: int) -> None:
        for name, steps in (("middle", 4), ("end", ROWS // 4)):
            _, trainer = fit(shuffled(first[1]), world_size=world_size, max_steps=steps)
            trainer.save_checkpoint(tmp_path / name)

    def go_on(rank: int, world_size: int) -> tuple[str, list[Any]]:
        with pytest.raises(ConfigError) as caught:
            fit(shuffled(second[1]), world_size=world_size, ckpt_path=tmp_path / "middle")
        options: dict[str, Any] = {"world_size": world_size, "max_epochs": 2}
        module, _ = fit(shuffled(second[1]), ckpt_path=tmp_path / "end", **options)
        return str(caught.value), module.seen

    run_ranks(save, first[0], init_process_group=False)
    results = run_ranks(go_on, second[0], init_process_group=False)
    for message, _ in results:
        assert "after 4 batches" in message
        assert all(number in message for number in numbers)
    assert sorted(row for _, seen in results for batch in seen for row in batch) == [*range(ROWS)]


def test_same_global_batch_on_other_ranks(tmp_path: Path) -> None:
    """Ranks times batch_size is the same: the rest of the epoch is read, each row once."""

    def whole(rank: int, world_size: int) -> list[Any]:
        return fit(shuffled(2), world_size=world_size)[0].seen

    def save(rank: int, world_size: int) -> None:
        fit(shuffled(2), world_size=world_size, max_steps=4)[1].save_checkpoint(tmp_path / "a")

    def go_on(rank: int, world_size: int) -> list[Any]:
        return fit(shuffled(4), world_size=world_size, ckpt_path=tmp_path / "a", seed=8)[0].seen

    wholes = run_ranks(whole, 2, init_process_group=False)
    run_ranks(save, 2, init_process_group=False)
    (rest,) = run_ranks(go_on, 1, init_process_group=False)
    expected = [sorted(a + b) for a, b in zip(*wholes, strict=True)]
    assert list(map(sorted, rest)) == expected[4:]


def test_the_seed_of_the_run_is_kept(tmp_path: Path) -> None:
    """Order and random draws go on as they were, whatever seed the new process has."""

    def run() -> None:
        whole, _ = fit(shuffled(4), max_epochs=2)
        _, trainer = fit(shuffled(4), max_steps=2, max_epochs=2)
        trainer.save_checkpoint(tmp_path / "a")
        rest, trainer = fit(shuffled(4), ckpt_path=tmp_path / "a", seed=8, max_steps=4)
        trainer.save_checkpoint(tmp_path / "b")
        more, _ = fit(shuffled(4), ckpt_path=tmp_path / "b", seed=9, max_epochs=2)
        assert rest.seen + more.seen == whole.seen[2:]
        assert rest.draws + more.draws == whole.draws[2:]

    reference(run)


def test_a_batch_that_failed_is_run_again(tmp_path: Path) -> None:
    def run() -> None:
        from lightning.pytorch.callbacks import OnExceptionCheckpoint

        whole, _ = fit(shuffled(4))
        fit(shuffled(4), fail_at=3, callbacks=[OnExceptionCheckpoint(tmp_path)], enable_checkpointing=True)
        rest, _ = fit(shuffled(4), ckpt_path=tmp_path / "on_exception.ckpt", seed=8)
        assert rest.seen == whole.seen[3:]
        assert rest.draws == whole.draws[3:]

    reference(run)


class OwnBatches(BatchSampler):
    pass


def build_loaders(kind: str) -> Any:
    if kind == "own batch sampler":
        return DataLoader(rows(), batch_sampler=OwnBatches(RandomSampler(rows()), 4, False))
    if kind == "no batching":
        return DataLoader(rows(), batch_size=None, shuffle=True)
    if kind == "workers":
        return DataLoader(rows(), batch_size=4, shuffle=True, num_workers=2)
    return {  # the shorter one starts again within an epoch
        "long": DataLoader(rows(), batch_size=2, shuffle=True),
        "short": DataLoader(rows(10), batch_size=2, shuffle=True),
    }


@pytest.mark.parametrize("kind", ["own batch sampler", "no batching", "workers", "two loaders"])
def test_kinds_of_loaders(kind: str, tmp_path: Path) -> None:
    def run() -> None:
        whole, _ = fit(build_loaders(kind), max_epochs=2)
        per_epoch = len(whole.seen) // 2
        stop = per_epoch + 2  # in the second epoch
        stop = stop if kind != "two loaders" else stop + 5
        _, trainer = fit(build_loaders(kind), max_steps=stop, max_epochs=2)
        trainer.save_checkpoint(tmp_path / "a")
        rest, _ = fit(build_loaders(kind), ckpt_path=tmp_path / "a", max_epochs=2, seed=8)
        assert rest.seen == whole.seen[stop:]

    reference(run)


class Stream(IterableDataset[Any]):
    """Counts up from where it stands; each rank has its own numbers."""

    def __init__(self, has_length: bool) -> None:
        self.at, self.rank, self.size = 0, 0, 1
        if has_length:
            self.__class__ = SizedStream

    def set_data_parallel(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size

    def __iter__(self) -> Iterator[Tensor]:
        while self.at < ROWS:
            self.at += 1
            yield torch.tensor(1000 * self.rank + self.at - 1)


class SizedStream(Stream):
    def __len__(self) -> int:
        return ROWS


class StreamLoader(DataLoader[Any]):
    def state_dict(self) -> dict[str, Any]:
        return {"at": self.dataset.at, "rank": self.dataset.rank}  # type: ignore[attr-defined]

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.dataset.at = state["at"]  # type: ignore[attr-defined]


@pytest.mark.parametrize("has_length", [True, False], ids=["with length", "without length"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_streams_with_a_state(has_length: bool, world_size: int, tmp_path: Path) -> None:
    """Each rank gets its own state back, and no batch is lost to reading ahead."""

    def stream() -> Any:
        return StreamLoader(Stream(has_length), batch_size=2)

    def run(rank: int, world_size: int) -> tuple[Any, Any]:
        _, trainer = fit(stream(), world_size=world_size, max_steps=5)
        trainer.save_checkpoint(tmp_path / "a")
        rest, _ = fit(stream(), world_size=world_size, ckpt_path=tmp_path / "a")
        return rest.seen

    for rank, seen in enumerate(run_ranks(run, world_size, init_process_group=False)):
        assert [row for batch in seen for row in batch] == [1000 * rank + row for row in range(10, ROWS)]


def resume_on(world_size: int, build: Any, path: Path, **options: Any) -> list[Any]:
    def run(rank: int, world_size: int) -> Any:
        return fit(build(), world_size=world_size, ckpt_path=path, seed=8, **options)[0].seen

    return run_ranks(run, world_size, init_process_group=False)


def save_on(world_size: int, build: Any, path: Path, **options: Any) -> list[Any]:
    def run(rank: int, world_size: int) -> Any:
        module, trainer = fit(build(), world_size=world_size, **options)
        trainer.save_checkpoint(path)
        return module.seen

    return run_ranks(run, world_size, init_process_group=False)


class UntoldLoader(StreamLoader):
    """Its state is the same on all ranks, and doesn't tell which of them it is of."""

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.dataset.at}  # type: ignore[attr-defined]


@pytest.mark.parametrize("kind", [StreamLoader, UntoldLoader])
@pytest.mark.parametrize("has_length", [True, False], ids=["with length", "without length"])
@pytest.mark.parametrize(("then", "now"), [(2, 1), (1, 2)])
def test_a_stream_that_cannot_be_dealt_anew_is_refused(
    then: int, now: int, has_length: bool, kind: Any, tmp_path: Path
) -> None:
    """On other data-parallel ranks, with both numbers, on each rank; also where an epoch was over."""

    def stream() -> Any:
        return kind(Stream(has_length), batch_size=2)

    for steps in (5, ROWS // 2):
        save_on(then, stream, tmp_path / "a", max_steps=steps)

        def refused(rank: int, world_size: int) -> str:
            with pytest.raises(ConfigError) as caught:
                fit(stream(), world_size=world_size, ckpt_path=tmp_path / "a", max_epochs=2)
            return str(caught.value)

        for message in run_ranks(refused, now, init_process_group=False):
            assert f"position of {kind.__name__} of " in message
            assert f"on {then} data-parallel ranks, now there are {now}," in message
            assert f"Go on with {then} data-parallel ranks" in message
            assert "no method load_state_dicts" in message


class Dealt(IterableDataset[Any]):
    """Numbers dealt to the ranks in turn; what ranks read together since ``start`` can be added up."""

    def __init__(self) -> None:
        self.start, self.at, self.rank, self.size = 0, 0, 0, 1

    def set_data_parallel(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size

    def __iter__(self) -> Iterator[Tensor]:
        while (number := self.start + self.at * self.size + self.rank) < ROWS:
            self.at += 1
            yield torch.tensor(number)


class SizedDealt(Dealt):
    def __len__(self) -> int:
        return ROWS


class DealtLoader(DataLoader[Any]):
    tells_rank = False

    def state_dict(self) -> dict[str, Any]:
        dataset: Any = self.dataset
        return {"start": dataset.start, "at": dataset.at} | (
            {"rank": dataset.rank} if self.tells_rank else {}
        )

    def load_state_dict(self, state: dict[str, Any]) -> None:
        dataset: Any = self.dataset
        dataset.start, dataset.at = state["start"], state["at"]

    def load_state_dicts(self, states: list[dict[str, Any]]) -> None:
        if self.tells_rank:
            assert [state["rank"] for state in states] == [*range(len(states))]
        self.load_state_dict({"start": states[0]["start"] + sum(state["at"] for state in states), "at": 0})


class TellingLoader(DealtLoader):
    tells_rank = True


@pytest.mark.parametrize("kind", [DealtLoader, TellingLoader])
@pytest.mark.parametrize("dataset", [SizedDealt, Dealt])
@pytest.mark.parametrize(("then", "now"), [(2, 1), (1, 2), (2, 2)])
def test_a_stream_of_the_users_is_dealt_anew(
    then: int, now: int, dataset: Any, kind: Any, tmp_path: Path
) -> None:
    """``load_state_dicts`` gets the states of the ranks that saved: no sample twice, none lost."""

    def stream() -> Any:
        return kind(dataset(), batch_size=2)

    first = save_on(then, stream, tmp_path / "a", max_steps=3)
    rest = resume_on(now, stream, tmp_path / "a")
    read = [row for seen in first for batch in seen for row in batch]
    assert sorted(read) == [*range(6 * then)]
    read += [row for seen in rest for batch in seen for row in batch]
    assert sorted(read) == [*range(ROWS)]

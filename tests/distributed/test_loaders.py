"""Who reads what: data-parallel ranks share the samples, ranks of other axes read the same ones."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    Sampler,
    WeightedRandomSampler,
)

from tests.distributed.case import build_trainer
from tests.distributed.tiny import (
    DP2_TP2,
    Blocks,
    Groups,
    Indices,
    Tiny,
    fit,
    numbered,
)
from tests.harness import run_ranks
from titanplug import TitanStrategy
from titanplug.strategy.loaders import shard_map_loader

Read = list[list[list[int]]]
"""Indices by epoch and batch."""

# ---------------------------------------------------------------- the order of samples


class DrawsOnRankOne(Tiny):
    """One rank draws random numbers of its own between batches."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.global_rank == 1:
            torch.rand(7)
            random.random()
            np.random.rand()


class OwnOrder(Sampler[int]):
    """Draws from Python's, NumPy's and torch's global generators, and never ends its passes alike."""

    def __len__(self) -> int:
        return 8

    def __iter__(self) -> Iterator[int]:
        rest = list(range(8))
        random.shuffle(rest)
        np.random.shuffle(rest)
        for index in torch.randperm(8):
            yield rest[int(index)]


def _own_generator() -> torch.Generator:
    generator = torch.Generator()
    generator.seed()  # another seed on every rank
    return generator


ORDERS: dict[str, Callable[[], Any]] = {
    "shuffled": numbered(8, batch_size=2, shuffle=True),
    "in order": numbered(8, batch_size=2),
    "subclass of a sampler": lambda: DataLoader(Indices(8), batch_size=2, sampler=OwnOrder()),
    "weighted": lambda: DataLoader(Indices(8), batch_size=2, sampler=WeightedRandomSampler(range(1, 9), 8)),
    "weighted, own generator": lambda: DataLoader(
        Indices(8), batch_size=2, sampler=WeightedRandomSampler(range(1, 9), 8, generator=_own_generator())
    ),
    "with replacement": lambda: DataLoader(
        Indices(8), batch_size=2, sampler=RandomSampler(Indices(8), replacement=True, num_samples=8)
    ),
    "several passes": lambda: DataLoader(
        Indices(8), batch_size=2, sampler=RandomSampler(Indices(8), num_samples=16)
    ),
    "a part": lambda: DataLoader(
        Indices(16), batch_size=2, sampler=RandomSampler(Indices(16), num_samples=8)
    ),
    "own generator": lambda: DataLoader(Indices(8), batch_size=2, shuffle=True, generator=_own_generator()),
    "own batches": lambda: DataLoader(Indices(8), batch_sampler=Groups(2, 2, 2, 2)),
    "items are batches": lambda: DataLoader(Blocks(1, 1, 1, 1, 1, 1, 1, 1), batch_size=None, shuffle=True),
    "workers": numbered(8, batch_size=2, shuffle=True, num_workers=1),
}
NOT_WHOLE = {"weighted", "weighted, own generator", "with replacement", "several passes", "a part"}
DEALT = {"own batches", "items are batches"}


def _read_orders(rank: int, world_size: int, degrees: Any, scale: int, spoiled: bool) -> dict[str, Read]:
    """What a rank reads in two epochs; ``scale`` makes one process's batches as large as all ranks'."""
    found = {}
    for name, build in ORDERS.items():
        loader = build()
        if scale > 1 and name not in DEALT:
            inner = loader.batch_sampler
            larger = BatchSampler(inner.sampler, scale * inner.batch_size, False)
            object.__setattr__(loader, "batch_sampler", larger)
        L.seed_everything(7 + (rank if spoiled else 0), verbose=False)
        module = DrawsOnRankOne() if spoiled else Tiny()
        trainer = build_trainer(world_size, TitanStrategy(**degrees), max_epochs=2)
        trainer.fit(module, loader)
        found[name] = module.read
    return found


@pytest.fixture(scope="module")
def orders() -> dict[str, list[dict[str, Read]]]:
    run = {"init_process_group": False}
    return {
        "ranks": run_ranks(_read_orders, 4, DP2_TP2, 1, False, **run),
        "spoiled": run_ranks(_read_orders, 4, DP2_TP2, 1, True, **run),
        "one": run_ranks(_read_orders, 1, {}, 2, False, **run),
    }


@pytest.mark.parametrize("name", ORDERS)
def test_peers_read_the_same_and_data_ranks_share(
    orders: dict[str, list[dict[str, Read]]], name: str
) -> None:
    first, first_peer, second, second_peer = (found[name] for found in orders["ranks"])
    assert first == first_peer and second == second_peer
    assert first != second
    if name not in NOT_WHOLE:
        for one, other in zip(first, second, strict=True):
            assert sorted(itertools.chain(*one, *other)) == list(range(8))


@pytest.mark.parametrize("name", sorted(set(ORDERS) - {"own generator"}))  # its seed is another in each run
def test_all_ranks_together_read_the_batches_of_one_process(
    orders: dict[str, list[dict[str, Read]]], name: str
) -> None:
    first, _, second, _ = (found[name] for found in orders["ranks"])
    for epoch, batches in enumerate(orders["one"][0][name]):
        pairs = list(zip(first[epoch], second[epoch], strict=True))
        if name in DEALT:
            assert batches == [batch for pair in pairs for batch in pair]
        else:
            assert batches == [[one[0], two[0], one[1], two[1]] for one, two in pairs]


@pytest.mark.parametrize("name", ORDERS)
def test_draws_and_seeds_of_one_rank_change_nothing(
    orders: dict[str, list[dict[str, Read]]], name: str
) -> None:
    for rank, spoiled in enumerate(orders["spoiled"]):
        if name == "own generator":
            assert spoiled[name] == orders["spoiled"][rank ^ 1][name]
        else:
            assert spoiled[name] == orders["ranks"][rank][name]


@pytest.mark.parametrize("name", ORDERS)
def test_the_order_changes_between_epochs_where_it_is_random(
    orders: dict[str, list[dict[str, Read]]], name: str
) -> None:
    for found in orders["ranks"]:
        first_epoch, second_epoch = found[name]
        assert (first_epoch == second_epoch) == (name == "in order")
    if name == "in order":
        assert orders["ranks"][0][name][0] == [[0, 2], [4, 6]]


@pytest.mark.parametrize("name", sorted(ORDERS))
def test_the_order_of_an_epoch_depends_on_seed_and_epoch_only(name: str) -> None:
    def order(seed: int, *epochs: int) -> list[Any]:
        loader: Any = shard_map_loader(ORDERS[name](), training=True, seed=seed, rank=0, size=1)
        batches = loader.batch_sampler or loader.sampler
        found = []
        for epoch in epochs:
            batches.set_epoch(epoch)
            found.append(list(batches))
        return found

    first, second = order(1, 0, 1)
    assert order(1, 1, 1, 0) == [second, second, first]
    assert (order(2, 0) == [first]) == (name == "in order")


def _epochs_told(rank: int, world_size: int) -> list[int]:
    groups = Groups(2, 2, 2, 2)
    fit(rank, world_size, {}, lambda: DataLoader(Indices(8), batch_sampler=groups), max_epochs=3)
    return groups.epochs


def test_an_own_batch_sampler_is_told_the_epoch() -> None:
    for epochs in run_ranks(_epochs_told, 2, init_process_group=False):
        assert sorted(set(epochs)) == [0, 1, 2]


class Endless(Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        index = 0
        while True:
            yield index % 8
            index += 1


def _endless(rank: int, world_size: int) -> Read:
    class Sized(DataLoader[int]):
        def __len__(self) -> int:
            raise TypeError("endless")

    def build() -> Any:
        return Sized(Indices(8), batch_size=2, sampler=Endless())

    read: Read = fit(rank, world_size, {}, build, max_steps=5).read
    return read


def test_a_sampler_without_end() -> None:
    first, second = run_ranks(_endless, 2, init_process_group=False)
    assert first[0][:2] == [[0, 2], [4, 6]] and second[0][:2] == [[1, 3], [5, 7]]
    assert len(first[0]) == len(second[0]) == 5


# ---------------------------------------------------------------- random augmentation


class Augmented(Indices):
    """Numbers that the three global generators give while a sample is made."""

    def __getitem__(self, index: int) -> Any:
        return torch.tensor(
            [torch.rand(()).item(), random.random(), np.random.rand(), torch.initial_seed() % 2**40],
            dtype=torch.float64,
        )


class ReadsNoise(DrawsOnRankOne):
    """Also notes what Python's generator gives in a hook, which is not to be touched."""

    def on_train_epoch_start(self) -> None:
        super().on_train_epoch_start()
        self.state = random.getstate()

    def on_train_epoch_end(self) -> None:
        random.setstate(self.state) if self.global_rank == 1 else None
        assert random.getstate() == self.state

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        self.read[-1].append(batch.tolist())
        return self.errors(batch[:, 0]).mean()


def _read_noise(rank: int, world_size: int, num_workers: int, generator: bool) -> Read:
    options: dict[str, Any] = {}
    if generator:
        options["generator"] = torch.Generator().manual_seed(5)

    def build() -> Any:
        # Ranks are not seeded alike.
        torch.manual_seed(100 + rank)
        random.seed(100 + rank)
        np.random.seed(100 + rank)
        return DataLoader(Augmented(8), batch_size=2, shuffle=True, num_workers=num_workers, **options)

    read: Read = fit(rank, world_size, DP2_TP2, build, ReadsNoise, max_epochs=2).read
    return read


@pytest.mark.parametrize("generator", [False, True])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_augmentation_is_equal_on_peers_and_different_over_data_ranks(
    num_workers: int, generator: bool
) -> None:
    first, first_peer, second, second_peer = run_ranks(
        _read_noise, 4, num_workers, generator, init_process_group=False
    )
    assert first == first_peer and second == second_peer
    numbers = torch.tensor([first, second])  # (2 ranks, 2 epochs, 2 batches, 2 samples, 4)
    for kind in range(3):
        assert numbers[..., kind].unique().numel() == numbers[..., kind].numel()
    seeds = numbers[..., 3]
    assert not set(seeds[0].flatten().tolist()) & set(seeds[1].flatten().tolist())

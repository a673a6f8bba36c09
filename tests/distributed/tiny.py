"""A module of one weight that records what it reads, data of several kinds, and a run of both."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler
from torchmetrics import Metric

from tests.distributed.case import build_trainer, whole
from titanplug import ParallelPlan, ReplicateParallel, TitanStrategy

DP2_TP2: dict[str, Any] = {"dp_shard": 2, "tp": 2}
DP4: dict[str, Any] = {"dp_shard": 4}
LEARNING_RATE = 0.1


class Indices(Dataset[int]):
    """Each sample is its index; collated to (B,) int64."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        return int(index)


class ListState(Metric):
    """A metric with a list state that is neither reduced nor put together."""

    rows: list[Tensor]

    def __init__(self) -> None:
        super().__init__()
        self.add_state("rows", default=[], dist_reduce_fx=None)

    def update(self, x: Tensor) -> None:
        self.rows.append(x.double())

    def compute(self) -> Tensor:
        rows = self.rows if isinstance(self.rows, list) else [self.rows]
        return torch.cat([row.reshape(-1) for row in rows])


class Groups(Sampler[list[int]]):
    """A batch sampler of the user's own, with batches of several sizes, a new order each epoch."""

    def __init__(self, *sizes: int, shuffle: bool = True) -> None:
        self.groups = [g.tolist() for g in torch.arange(sum(sizes)).split(list(sizes))]
        self.shuffle = shuffle
        self.epochs: list[int] = []

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)

    def __len__(self) -> int:
        return len(self.groups)

    def __iter__(self) -> Iterator[list[int]]:
        groups = list(self.groups)
        if self.shuffle:
            random.shuffle(groups)
        yield from groups


class Blocks(Dataset[Any]):
    """Each item is a whole batch; to be read with ``batch_size=None``."""

    def __init__(self, *sizes: int) -> None:
        self.blocks: Any = torch.arange(sum(sizes)).split(list(sizes))

    def __len__(self) -> int:
        return len(self.blocks)

    def __getitem__(self, index: int) -> Any:
        return self.blocks[index]


class Stream(IterableDataset[int]):
    """Samples 0, 1, .. of which this rank yields its share, once it knows it."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.coordinate = (0, 1)

    def set_data_parallel(self, rank: int, size: int) -> None:
        self.coordinate = (rank, size)

    def __iter__(self) -> Iterator[int]:
        yield from range(self.coordinate[0], self.length, self.coordinate[1])


def targets_of(x: Tensor) -> Tensor:
    """What the weight is fitted to; no two samples have the same gradient."""
    return torch.sin(x.double()) + 0.1 * x.double()


class Tiny(L.LightningModule):
    """Fits ``w x`` to numbers in float64, by the mean square error over the samples of a batch.

    Attributes:
        read: indices of each batch, by epoch.
    """

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layer = nn.Linear(1, 1, bias=False, dtype=torch.float64)
        self.read: list[list[list[int]]] = []

    def configure_parallel_plan(self) -> ParallelPlan:
        return ParallelPlan(tensor={"layer": ReplicateParallel()})

    def on_train_epoch_start(self) -> None:
        self.read.append([])

    def errors(self, x: Tensor) -> Tensor:
        """(B,) square errors."""
        error: Tensor = self.layer(x.double().unsqueeze(-1) / 8).squeeze(-1) - targets_of(x)
        return error.square()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.read[-1].append(batch.tolist())
        return self.errors(batch).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=LEARNING_RATE)


def fit(
    rank: int,
    world_size: int,
    degrees: dict[str, Any],
    loader: Callable[[], Any],
    module: Callable[[], L.LightningModule] = Tiny,
    evaluate: Callable[[], Any] | None = None,
    **options: Any,
) -> Any:
    """What a rank runs: a training through the Trainer. Returns the module, to be read by the rank."""
    L.seed_everything(7, verbose=False)
    trainer = build_trainer(world_size, TitanStrategy(**degrees), **options)
    built: Any = module()
    trainer.fit(built, loader(), evaluate() if evaluate else None)
    return built


def weight_of(module: Any) -> float:
    return float(whole(module.layer.weight))


def fit_by_hand(steps: Iterable[Iterable[list[int]]]) -> float:
    """The weight after a plain loop: each step is over all samples of its parts, all alike."""
    module = Tiny()
    optimizer = module.configure_optimizers()
    for step in steps:
        x = torch.tensor([index for part in step for index in part])
        optimizer.zero_grad()
        module.errors(x).mean().backward()
        optimizer.step()
    return weight_of(module)


def numbered(length: int, **options: Any) -> Callable[[], DataLoader[int]]:
    return lambda: DataLoader(Indices(length), **options)

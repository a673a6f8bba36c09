"""Which samples each data-parallel rank reads, and how many of them count.

Ranks of the ``batch`` view read different samples; ranks of the other axes read the same ones. The order of
samples is a function of seed and epoch alone, so nothing a rank draws on its own can change it.

- Training: batch ``k`` of all ranks together is batch ``k`` of one process with their summed batch size.
- Evaluation: whole batches are dealt in turn, so the ranks together see exactly the batches of one process
  with the same batch size.

Where the samples do not come out even, some ranks have no share of the last batch. They get a row to run,
so that no rank skips a collective, and its :class:`Share` says that nothing of it counts.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, Sampler


@dataclass(frozen=True)
class Share:
    """What of one batch counts.

    Args:
        local: rows that count on this rank; 0 where the batch is there only to keep ranks in step.
        total: rows that count on all ranks; None where this rank can't know.
    """

    local: int
    total: int | None


class HasShares(Protocol):
    """A loader's part that knows the share of each batch of the running epoch."""

    def share(self, index: int) -> Share | None:
        """Share of batch ``index`` of this epoch; None: all its rows count."""
        ...


class EpochOrder(Sampler[int]):
    """The order of samples in an epoch: the sampler's own, its random draws fixed by seed and epoch."""

    def __init__(self, sampler: Iterable[int], seed: int) -> None:
        self.sampler = sampler
        self.seed = seed
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Called by Lightning before each epoch."""
        self.epoch = epoch
        inner = getattr(self.sampler, "set_epoch", None)
        if callable(inner):
            inner(epoch)

    def __iter__(self) -> Iterator[int]:
        sampler = self.sampler
        # Not a subclass, not with replacement: then the order is that of torch's DistributedSampler.
        if type(sampler) is RandomSampler and not sampler.replacement and sampler.generator is None:
            generator = torch.Generator().manual_seed(self.seed + self.epoch)
            order: list[int] = torch.randperm(len(sampler.data_source), generator=generator).tolist()
            yield from order[: len(sampler)]
            return
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed + self.epoch)
            order = list(sampler)
        yield from order

    def __len__(self) -> int:
        return len(self.sampler)  # type: ignore[arg-type]


class ShardedBatches:
    """A batch sampler that yields this rank's part of each batch of all ranks together.

    Args:
        order: the samples of an epoch; Lightning finds it as ``sampler`` and tells it the epoch.
        batches: what is dealt whole, in turn; None: ``batch_size`` rows a rank are cut from ``order``.
        batch_size: rows a rank.
        drop_last: leave out the last batch where it isn't full on all ranks.
        rank: position in the ``batch`` view.
        size: number of ranks in the view.
    """

    def __init__(
        self,
        order: EpochOrder,
        *,
        batches: Iterable[Any] | None = None,
        batch_size: int = 1,
        drop_last: bool = False,
        rank: int = 0,
        size: int = 1,
    ) -> None:
        self.sampler = order
        self.batches = batches
        self.batch_size = batch_size
        self.drop_last = drop_last
        self.rank = rank
        self.size = size
        self.skip = 0
        """Batches to leave out at the next start, those a resumed epoch has had."""
        self._shares: list[Share] = []

    def share(self, index: int) -> Share | None:
        """Share of the batch with this index in the epoch."""
        return self._shares[index] if index < len(self._shares) else None

    @property
    def global_batch(self) -> tuple[int, str]:
        """What all ranks read together for a batch: a number of rows, or of the user's own batches."""
        if self.batches is not None:
            return self.size, "batches"
        return self.size * self.batch_size, "rows"

    def __len__(self) -> int:
        if self.batches is not None:
            return -(-len(self.batches) // self.size)  # type: ignore[arg-type]
        whole = self.size * self.batch_size
        return len(self.sampler) // whole if self.drop_last else -(-len(self.sampler) // whole)

    def __iter__(self) -> Iterator[Any]:
        skip, self.skip = self.skip, 0
        self._shares = []
        groups = self._cut() if self.batches is None else self._deal(self.batches)
        for index, parts in enumerate(groups):
            mine = parts[self.rank]
            rows = [_num_rows(part) for part in parts]
            self._shares.append(Share(rows[self.rank], sum(rows)))
            if index < skip:
                continue
            if rows[self.rank] == 0:
                stand_in = next(part for part in parts if _num_rows(part))
                mine = stand_in[:1] if isinstance(stand_in, list) else stand_in
            yield mine

    def _cut(self) -> Iterator[list[list[int]]]:
        rows = iter(self.sampler)
        whole = self.size * self.batch_size
        while batch := list(itertools.islice(rows, whole)):
            if self.drop_last and len(batch) < whole:
                return
            yield [batch[rank :: self.size] for rank in range(self.size)]

    def _deal(self, batches: Iterable[Any]) -> Iterator[list[Any]]:
        rest = iter(batches)
        while parts := list(itertools.islice(rest, self.size)):
            yield [*parts, *([[]] * (self.size - len(parts)))]


def _num_rows(part: Any) -> int:
    return len(part) if isinstance(part, list | tuple) else 1


def sharded_batches(loader: Any) -> ShardedBatches | None:
    """The part of a loader that deals batches to ranks, where :func:`shard_map_loader` put one in."""
    for holder in (getattr(loader, "batch_sampler", None), getattr(loader, "sampler", None)):
        # Lightning wraps the batch sampler of a predict loader to record indices.
        for candidate in (holder, getattr(holder, "_batch_sampler", None)):
            if isinstance(candidate, ShardedBatches):
                return candidate
    return None


class LockstepLoader:
    """A loader whose length ranks can't know beforehand, kept in step with the other ranks'.

    Before each batch the ranks agree whether any of them has one. A rank that has run out repeats its
    last batch, of which nothing counts, until all have. Costs one small collective a batch, on the host.

    Args:
        loader: the loader, already limited to this rank's samples.
        group: a process group of the ``batch`` view that can reduce CPU tensors.
    """

    def __init__(self, loader: Any, group: dist.ProcessGroup) -> None:
        self.loader = loader
        self._group = group
        self._num_real: int | None = None

    def share(self, index: int) -> Share | None:
        """Nothing of the batches past this rank's own counts."""
        over = self._num_real is not None and index >= self._num_real
        return Share(0, None) if over else None

    def __getattr__(self, name: str) -> Any:
        if name == "loader":  # while unpickling
            raise AttributeError(name)
        return getattr(self.loader, name)

    def __iter__(self) -> Iterator[Any]:
        self._num_real = None
        batches = iter(self.loader)
        last: Any = None
        for index in itertools.count():
            missing = False
            if self._num_real is None:
                try:
                    last = next(batches)
                except StopIteration:
                    self._num_real, missing = index, index == 0
            has = torch.tensor([self._num_real is None, missing], dtype=torch.int32)
            dist.all_reduce(has, op=dist.ReduceOp.MAX, group=self._group)
            any_has, any_missing = has.tolist()
            if not any_has:
                return
            if any_missing:
                raise RuntimeError(
                    "An iterable data set gave no batch at all on one data-parallel rank and some on "
                    "others, so the empty rank has nothing to keep in step with. Give every rank at least "
                    "one batch."
                )
            yield last


def shard_map_loader(
    loader: DataLoader[Any], *, training: bool, seed: int, rank: int, size: int
) -> ShardedBatches:
    """Let a map-style loader yield this rank's part, in place, whatever class it is.

    Returns:
        The batch sampler that it now has.
    """
    # Lightning wraps the batch sampler of a predict loader to record indices: shard inside of it.
    holder = loader.batch_sampler
    inner = getattr(holder, "_batch_sampler", holder)
    if isinstance(inner, ShardedBatches):
        return inner
    if inner is None:  # batch_size=None: each index is a batch
        order = EpochOrder(loader.sampler, seed)
        sharded = ShardedBatches(order, batches=order, rank=rank, size=size)
        object.__setattr__(loader, "sampler", sharded)
        return sharded
    order = EpochOrder(inner.sampler if type(inner) is BatchSampler else loader.sampler, seed)
    if type(inner) is BatchSampler and training:
        sharded = ShardedBatches(
            order, batch_size=inner.batch_size, drop_last=inner.drop_last, rank=rank, size=size
        )
    elif type(inner) is BatchSampler:
        batches = BatchSampler(order, inner.batch_size, inner.drop_last)
        sharded = ShardedBatches(order, batches=batches, rank=rank, size=size)
    else:
        sharded = ShardedBatches(order, batches=_Seeded(inner, order), rank=rank, size=size)
    if holder is inner:
        # DataLoader refuses a new batch sampler after construction; its iterators read the attribute.
        object.__setattr__(loader, "batch_sampler", sharded)
    else:
        holder._batch_sampler = sharded  # type: ignore[union-attr]
    return sharded


class _Seeded:
    """A user's own batch sampler, its random draws fixed by seed and epoch."""

    def __init__(self, batches: Any, order: EpochOrder) -> None:
        self.batches = batches
        self.order = order

    def __iter__(self) -> Iterator[Any]:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.order.seed + self.order.epoch)
            batches = [list(batch) for batch in self.batches]
        yield from batches

    def __len__(self) -> int:
        return len(self.batches)

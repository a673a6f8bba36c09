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

import copy
import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.utils.data import BatchSampler, DataLoader

from titanplug.parallel.initialise import named_seed
from titanplug.strategy.epoch_order import EpochOrder, FetchSeeds
from titanplug.strategy.read_ahead import has_state


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


class ShardedBatches:
    """A batch sampler that yields this rank's part of each batch of all ranks together.

    Args:
        order: the samples of an epoch; Lightning finds it as ``sampler`` and tells it the epoch.
        batches: what is dealt whole, in turn; None: ``batch_size`` rows a rank are cut from ``order``.
        batch_size: rows a rank.
        drop_last: leave out the last batch where it isn't full on all ranks.
        rank: position in the ``batch`` view.
        size: number of ranks in the view.
        items: each of ``batches`` is one item of the data set, which is a batch of any number of rows.
        fetch_seeds: where samples are made in this process, right after their indices are yielded: their
            random numbers depend on seed, epoch, batch and ``rank`` only.
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
        items: bool = False,
        fetch_seeds: FetchSeeds | None = None,
    ) -> None:
        self.sampler = order
        self.batches = batches
        self.batch_size = batch_size
        self.drop_last = drop_last
        self.rank = rank
        self.size = size
        self.items = items
        self._fetch_seeds = fetch_seeds
        self.skip = 0
        """Batches to leave out at the next start, those a resumed epoch has had."""
        self._shares: list[Share | None] = []

    def share(self, index: int) -> Share | None:
        """Share of the batch with this index in the epoch."""
        if index >= len(self._shares) > 0:
            index %= len(self)  # the shorter of several loaders starts again within an epoch
        return self._shares[index] if index < len(self._shares) else None

    def set_epoch(self, epoch: int) -> None:
        """Where Lightning finds this as a loader's ``sampler``, it tells the epoch here."""
        self.sampler.set_epoch(epoch)

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
            share = self._share(parts)
            # Nearly all are alike: one object for them, or a long epoch would hold millions.
            alike = bool(self._shares) and self._shares[-1] == share
            self._shares.append(self._shares[-1] if alike else share)
            if index < skip:
                continue
            if _is_empty(mine):
                stand_in = next(part for part in parts if not _is_empty(part))
                mine = stand_in if self.items else list(stand_in)[:1]
            if self._fetch_seeds is not None:
                order = self.sampler
                self._fetch_seeds.begin(named_seed(order.seed, f"{order.epoch}/{index}/{self.rank}"))
            yield mine

    def _share(self, parts: list[Any]) -> Share | None:
        if self.items:
            # The rows of an item are known when it is there.
            return Share(0, None) if _is_empty(parts[self.rank]) else None
        rows = [0 if part is None else len(part) for part in parts]
        return Share(rows[self.rank], sum(rows))

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
            yield [*parts, *([None] * (self.size - len(parts)))]


def _is_empty(part: Any) -> bool:
    return part is None or (isinstance(part, list) and not part)


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
    last batch, of which nothing counts, until all have; one that has no batch at all takes another rank's.
    Costs one small collective a batch, on the host.

    Args:
        loader: the loader, already limited to this rank's samples.
        group: a process group of the ``batch`` view that can reduce CPU tensors.
    """

    def __init__(self, loader: Any, group: dist.ProcessGroup) -> None:
        self.loader = loader
        self.start = 0
        """Index of the first batch at the next start: the batches that a resumed epoch has had."""
        self._group = group
        self._end: int | None = None
        if has_state(loader):  # Lightning looks for these on the object itself
            self.state_dict, self.load_state_dict = loader.state_dict, loader.load_state_dict

    def share(self, index: int) -> Share | None:
        """Nothing of the batches past this rank's own counts."""
        return Share(0, None) if self._end is not None and index >= self._end else None

    def __getattr__(self, name: str) -> Any:
        if name == "loader":  # while unpickling
            raise AttributeError(name)
        return getattr(self.loader, name)

    def __iter__(self) -> Iterator[Any]:
        start, self.start = self.start, 0
        self._end = None
        batches = iter(self.loader)
        last: Any = None
        for index in itertools.count(start):
            if self._end is None:
                try:
                    last = next(batches)
                except StopIteration:
                    self._end = index
            missing = self._end == start
            state = torch.tensor([self._end is None, missing], dtype=torch.int32)
            dist.all_reduce(state, op=dist.ReduceOp.MAX, group=self._group)
            any_has, any_missing = state.tolist()
            if not any_has:
                return
            if any_missing and index == start:
                firsts: list[Any] = [None] * dist.get_world_size(self._group)
                dist.all_gather_object(firsts, None if missing else [last], group=self._group)
                last = next(first for first in firsts if first is not None)[0] if missing else last
            yield last


def shard_map_loader(
    loader: DataLoader[Any], *, training: bool, seed: int, rank: int, size: int
) -> DataLoader[Any]:
    """A copy of a map-style loader, whatever its class, that yields this rank's part.

    Args:
        loader: the loader of one process; it stays as it is.
        training: cut each batch of all ranks together; else whole batches are dealt.
        seed: of the order, equal on all ranks.
        rank: position in the ``batch`` view.
        size: number of ranks in the view.
    """
    # Seeds of data workers: different over ranks, and others in each epoch.
    workers = torch.Generator()
    loader = copied_loader(loader, workers)
    settings: dict[str, Any] = {"rank": rank, "size": size}
    if loader.num_workers == 0:
        loader.collate_fn = settings["fetch_seeds"] = FetchSeeds(loader.collate_fn)

    def build_order(source: Any) -> EpochOrder:
        order = EpochOrder(source, seed, (workers, named_seed(seed, f"workers of {rank}")))
        order.set_epoch(0)
        return order

    # Lightning wraps the batch sampler of a predict loader to record indices: shard inside of it.
    holder: Any = loader.batch_sampler
    inner = getattr(holder, "_batch_sampler", holder)
    if inner is None:  # batch_size=None: each index is a batch
        order = build_order(loader.sampler)
        object.__setattr__(loader, "sampler", ShardedBatches(order, batches=order, items=True, **settings))
        return loader
    if type(inner) is BatchSampler:
        order = build_order(inner.sampler)
        size_and_end: dict[str, Any] = {"batch_size": inner.batch_size, "drop_last": inner.drop_last}
        if training:
            sharded = ShardedBatches(order, **size_and_end, **settings)
        else:
            sharded = ShardedBatches(order, batches=BatchSampler(order, **size_and_end), **settings)
    else:
        order = build_order(inner)
        sharded = ShardedBatches(order, batches=order, **settings)
    if holder is not inner:
        wrapper = copy.copy(holder)
        wrapper._batch_sampler = sharded
        holder = wrapper
    else:
        holder = sharded
    # DataLoader refuses a new batch sampler after construction; its iterators read the attribute.
    object.__setattr__(loader, "batch_sampler", holder)
    return loader


def copied_loader(loader: DataLoader[Any], workers: torch.Generator) -> DataLoader[Any]:
    """A shallow copy of a loader that takes the seeds of its workers from ``workers``."""
    copied = copy.copy(loader)
    object.__setattr__(copied, "_iterator", None)  # that of persistent workers belongs to the original
    copied.generator = workers
    return copied

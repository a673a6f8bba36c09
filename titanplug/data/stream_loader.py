"""The loader of a stream of packed rows: its position can be saved on each data-parallel rank."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

import torch
from torch.utils.data import DataLoader, default_collate
from typing_extensions import override

from titanplug.data.packing import Row
from titanplug.data.stream import PackedStream, StreamPosition
from titanplug.errors import ConfigError


class StreamDataLoader(DataLoader[Any]):
    """The loader of a ``PackedStream``; its position can be saved on each data-parallel rank.

    An epoch is a number of batches, and Lightning knows it: it reads one batch ahead only where a
    loader has no length. The next epoch goes on where the last one stopped. Workers may read ahead;
    the position is that of the batch handed out last.

    Args:
        dataset: the stream.
        batch_size: rows of this rank in a batch.
        batches_per_epoch: length of an epoch.
        num_workers: processes that read and tokenize, each a share of its own.
        pin_memory: as in ``DataLoader``.
        seed: of the seeds of workers.
    """

    dataset: PackedStream

    def __init__(
        self,
        dataset: PackedStream,
        batch_size: int,
        batches_per_epoch: int,
        num_workers: int = 0,
        pin_memory: bool = False,
        seed: int = 0,
    ) -> None:
        self.batches_per_epoch = batches_per_epoch
        self._positions: dict[int, StreamPosition] = {}
        self._next_worker = 0
        self._num_batches = 0  # of the running epoch
        self._resume_batch = 0  # where the next epoch starts
        super().__init__(
            dataset,
            batch_size=batch_size,
            num_workers=num_workers,
            pin_memory=pin_memory,
            collate_fn=_collate_with_position,
            generator=torch.Generator().manual_seed(seed),
        )

    def set_data_parallel(self, rank: int, size: int) -> None:
        """Tell the data-parallel coordinate of the stream.

        Every rank has the same number of batches, so that nothing has to keep ranks in step.
        """
        self.dataset.set_data_parallel(rank, size)

    @override
    def __len__(self) -> int:
        return self.batches_per_epoch

    @override
    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        self._num_batches, self._resume_batch = self._resume_batch, 0
        self.dataset.seek(self._positions, self._next_worker)  # before workers get their copies
        for batch, position in islice(super().__iter__(), self.batches_per_epoch - self._num_batches):
            self._positions[self._next_worker] = position
            self._next_worker = (self._next_worker + 1) % self._num_readers
            self._num_batches += 1
            yield batch

    def state_dict(self) -> dict[str, Any]:
        """The position of this data-parallel rank, in plain containers."""
        return {
            "data_parallel": list(self.dataset.data_parallel),
            "num_workers": self._num_readers,
            "next_worker": self._next_worker,
            "num_batches": self._num_batches,
            "positions": {worker: list(p) for worker, p in self._positions.items()},
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on where ``state_dict`` was taken; takes effect on the next iteration.

        Raises:
            ConfigError: it was taken on another data-parallel rank, or with another number of ranks
                or workers: a share belongs to one of each.
        """
        rank, size = self.dataset.data_parallel
        saved_rank, saved_size = state_dict["data_parallel"]
        problems = []
        if saved_size != size:
            problems.append(
                f"The stream's position was saved on {saved_size} data-parallel ranks, now there "
                f"are {size}: each rank reads a share of its own. Use {saved_size} data-parallel "
                "ranks, or start a new run from the saved weights."
            )
        elif saved_rank != rank:
            problems.append(
                f"The stream's position of data-parallel rank {saved_rank} was given to rank "
                f"{rank}: each rank reads a share of its own. Save and load the loader's state on "
                "each rank."
            )
        if state_dict["num_workers"] != self._num_readers:
            problems.append(
                f"The stream's position was saved with {state_dict['num_workers']} readers a "
                f"rank, now there are {self._num_readers}: each reads a share of its own. Set "
                f"num_workers to {state_dict['num_workers']}."
            )
        if problems:
            raise ConfigError(problems)
        self._positions = {
            int(worker): StreamPosition(*position) for worker, position in state_dict["positions"].items()
        }
        self._next_worker = state_dict["next_worker"]
        self._num_batches = self._resume_batch = state_dict["num_batches"] % self.batches_per_epoch

    @property
    def _num_readers(self) -> int:
        return max(1, self.num_workers)


def _collate_with_position(
    rows: list[tuple[Row, StreamPosition]],
) -> tuple[Row, StreamPosition]:
    return default_collate([row for row, _ in rows]), rows[-1][1]

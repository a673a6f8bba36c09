"""The loader of a stream of packed rows: its position can be saved, and goes on in any layout."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

import torch
from torch.utils.data import DataLoader, default_collate
from typing_extensions import override

from titanplug.data.packing import Row
from titanplug.data.row_order import RowOrder, RowReader
from titanplug.data.stream import PackedStream, StreamPosition
from titanplug.errors import ConfigError


class StreamDataLoader(DataLoader[Any]):
    """The loader of a ``PackedStream``; its position can be saved and goes on in any layout.

    The rows that all data-parallel ranks read are one sequence. The layout in which a run begins
    decides its order: there, each rank and worker reads a share of its own. The order is part of the
    state, so after a resume with other ranks, workers or rows a batch the sequence goes on, no row
    twice and none left out. Readers that then meet in a share each tokenize it and leave out the
    rows of the others.

    An epoch is a number of batches, and Lightning knows it: it reads one batch ahead only where a
    loader has no length. The next epoch goes on where the last one stopped. Workers may read ahead;
    the position is that of the batch handed out last.

    Args:
        dataset: the stream.
        batch_size: rows of this rank in a batch.
        batches_per_epoch: length of an epoch.
        num_workers: processes that read and tokenize.
        pin_memory: as in ``DataLoader``.
        seed: of the seeds of workers.
        num_shares: shares that the documents of each worker's batches are dealt into, instead of one
            for each data-parallel rank. Runs with the same number of them, of workers and of rows in
            a batch of all ranks read the same rows, however many ranks they have.
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
        num_shares: int | None = None,
    ) -> None:
        self.batches_per_epoch = batches_per_epoch
        self.num_shares = num_shares
        self._order: RowOrder | None = None  # of a run that is resumed
        self._num_rows = 0  # of all ranks, handed out
        self._positions: dict[int, StreamPosition] = {}  # by share
        self._num_batches = 0  # of the running epoch
        self._resume_batch = 0  # where the next epoch starts
        super().__init__(
            dataset,
            batch_size=batch_size,
            num_workers=num_workers,
            pin_memory=pin_memory,
            collate_fn=_collate_with_positions,
            generator=torch.Generator().manual_seed(seed),
        )

    def set_data_parallel(self, rank: int, size: int) -> None:
        """Tell the data-parallel coordinate of the stream.

        Every rank has the same number of batches, so that nothing has to keep ranks in step.

        Raises:
            ConfigError: the rank is out of range, or ``num_shares`` does not divide a batch.
        """
        self.dataset.set_data_parallel(rank, size)
        self._build_order()

    @override
    def __len__(self) -> int:
        return self.batches_per_epoch

    @override
    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        self._num_batches, self._resume_batch = self._resume_batch, 0
        self._order = self._build_order()
        reader = self._build_reader(self._order)
        self._warn_of_rereading(reader)
        self.dataset.seek(reader, self._positions)  # before workers get their copies
        for batch, positions in islice(super().__iter__(), self.batches_per_epoch - self._num_batches):
            # A new one: copies of this loader have the old one.
            self._positions = {**self._positions, **positions}
            self._num_rows += reader.size * reader.rows
            self._num_batches += 1
            yield batch

    def state_dict(self) -> dict[str, Any]:
        """The position in plain containers: on each data-parallel rank that of the shares it reads."""
        order = self._build_order()
        shares = sorted(self._positions.keys() & self._build_reader(order).find_shares())
        return {
            "data_parallel": list(self.dataset.data_parallel),
            "order": list(order),
            "seq_len": self.dataset.row_format.seq_len,
            "num_rows": self._num_rows,
            "num_batches": self._num_batches,
            "positions": [list(self._positions[share]) for share in shares],
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on where ``state_dict`` was taken; takes effect on the next iteration.

        The state of any data-parallel rank will do. Where it doesn't tell the position in a share
        that this rank now reads, the share is read from its beginning, with a warning.
        """
        self.load_state_dicts([state_dict])

    def load_state_dicts(self, state_dicts: Sequence[dict[str, Any]]) -> None:
        """Go on where the states were taken, with any number of ranks, workers and rows a batch.

        Args:
            state_dicts: of all data-parallel ranks that there were.

        Raises:
            ConfigError: they weren't taken after the same batch, or of rows of another length.
        """
        first = state_dicts[0]
        same = ("order", "num_rows", "num_batches", "seq_len")
        for state in state_dicts[1:]:
            if [state[key] for key in same] != [first[key] for key in same]:
                raise ConfigError(
                    f"The stream's position was saved after {first['num_rows']} rows on data-parallel "
                    f"rank {first['data_parallel'][0]}, and after {state['num_rows']} on rank "
                    f"{state['data_parallel'][0]}: the states are of different moments or runs. Give "
                    "those that were taken together."
                )
        seq_len = self.dataset.row_format.seq_len
        if first["seq_len"] != seq_len:
            raise ConfigError(
                f"The stream's position was saved with seq_len={first['seq_len']}, now it is "
                f"{seq_len}: a run goes on with rows of the same length. Use that one, or start a new "
                "run from the saved weights."
            )
        self._order = RowOrder(*first["order"])
        self._num_rows = first["num_rows"]
        self._positions = {}
        for position in (StreamPosition(*fields) for state in state_dicts for fields in state["positions"]):
            found = self._positions.get(position.share)
            consumed = self._order.count_rows(position.share, self._num_rows)
            if position.row <= consumed and (found is None or position.row > found.row):
                self._positions[position.share] = position
        self._num_batches = self._resume_batch = first["num_batches"] % self.batches_per_epoch

    def begin_epoch(self) -> None:
        """Let the next iteration be a whole epoch: a limit on batches ended the one before."""
        self._num_batches = self._resume_batch = 0

    def _build_order(self) -> RowOrder:
        if self._order is not None:
            return self._order
        _, size = self.dataset.data_parallel
        ranks = size if self.num_shares is None else self.num_shares
        if ranks < 1:
            raise ConfigError(f"num_shares={ranks}: at least 1 is needed. Give 1 or more.")
        rows, rest = divmod(size * self._rows, ranks)
        if rest:
            raise ConfigError(
                f"num_shares={ranks}: a batch of all data-parallel ranks has {size * self._rows} rows "
                f"(batch_size={self._rows} on {size} ranks), and has as many of each share. Choose "
                "num_shares so that it divides them."
            )
        return RowOrder(ranks, max(1, self.num_workers), rows)

    def _build_reader(self, order: RowOrder) -> RowReader:
        rank, size = self.dataset.data_parallel
        return RowReader(order, self._num_rows, rank, size, self._rows)

    @property
    def _rows(self) -> int:
        return self.batch_size or 1

    def _warn_of_rereading(self, reader: RowReader) -> None:
        missing = sorted(reader.find_shares() - self._positions.keys())
        rows = [reader.order.count_rows(share, reader.start) for share in missing]
        if any(rows):
            warnings.warn(
                f"The state of the stream's loader tells no position in {sum(map(bool, rows))} of the "
                f"{reader.order.num_shares} shares, so {sum(rows)} rows are read again to leave them out. "
                "What follows is exact; to be faster, load the states of all data-parallel ranks with "
                "load_state_dicts, as TitanStrategy does.",
                stacklevel=3,
            )


def _collate_with_positions(
    rows: list[tuple[Row, StreamPosition]],
) -> tuple[Row, dict[int, StreamPosition]]:
    positions = {position.share: position for _, position in rows}  # the last of each share
    return default_collate([row for row, _ in rows]), positions

"""The order of a run's rows, which stays the same when the number of ranks changes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import NamedTuple


class Segment(NamedTuple):
    """Rows that stand one after the other both in the run and in a share.

    Attributes:
        share: the share.
        start: the first row, counted in the share.
        num_rows: how many.
    """

    share: int
    start: int
    num_rows: int


class RowOrder(NamedTuple):
    """All rows of a run as one sequence without end, cut from shares of the documents.

    Block b of the sequence holds ``rows`` rows of each of ``ranks`` shares; the next block holds rows
    of the next ones, until each of a rank's ``readers`` shares has had its turn. With as many ranks,
    readers and rows a batch, block b is batch b of all ranks and each reader reads one share alone.

    Attributes:
        ranks: data-parallel ranks.
        readers: shares a rank.
        rows: rows in a batch on each rank.
    """

    ranks: int
    readers: int
    rows: int

    @property
    def num_shares(self) -> int:
        """Shares that the documents are dealt into."""
        return self.ranks * self.readers

    @property
    def block(self) -> int:
        """Rows of all ranks in a block."""
        return self.ranks * self.rows

    def cut(self, start: int, stop: int) -> Iterator[Segment]:
        """Where the rows in ``range(start, stop)`` of the sequence are."""
        while start < stop:
            block, place = divmod(start, self.block)
            rank, row = divmod(place, self.rows)
            turn, reader = divmod(block, self.readers)
            num_rows = min(self.rows - row, stop - start)
            yield Segment(rank * self.readers + reader, turn * self.rows + row, num_rows)
            start += num_rows

    def count_rows(self, share: int, stop: int) -> int:
        """Rows of a share among the first ``stop`` ones of the sequence."""
        rank, reader = divmod(share, self.readers)
        blocks, rest = divmod(stop, self.block)
        turns, next_reader = divmod(blocks, self.readers)
        begun = min(max(rest - rank * self.rows, 0), self.rows) if reader == next_reader else 0
        return (turns + (reader < next_reader)) * self.rows + begun


class RowReader(NamedTuple):
    """What a data-parallel rank reads of the sequence: of every batch of all ranks, its part.

    Attributes:
        order: of the rows.
        start: row of the sequence that the first batch begins with.
        rank: in ``range(size)``.
        size: data-parallel ranks.
        rows: rows in a batch on each rank.
    """

    order: RowOrder
    start: int
    rank: int
    size: int
    rows: int

    def cut(self, batch: int) -> Iterator[Segment]:
        """Where the rows of a batch are, counted from ``start``."""
        first = self.start + (batch * self.size + self.rank) * self.rows
        return self.order.cut(first, first + self.rows)

    def find_shares(self) -> set[int]:
        """The shares that this rank reads, now or later."""
        whole = self.order.block * self.order.readers  # then the shares repeat
        num_batches = whole // math.gcd(whole, self.size * self.rows)
        found: set[int] = set()
        for segment in itertools.chain.from_iterable(map(self.cut, range(num_batches))):
            found.add(segment.share)
            if len(found) == self.order.num_shares:
                break
        return found

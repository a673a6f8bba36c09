"""Rows packed on the fly from documents that are too many to hold: each rank reads its own share.

Legend: S sequence.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np
from torch.utils.data import IterableDataset, get_worker_info
from typing_extensions import override

from titanplug.data.packing import Row, RowFormat
from titanplug.data.row_order import RowOrder, RowReader
from titanplug.data.tokenizers import Encoded, Tokenizer
from titanplug.data.tokens import build_block
from titanplug.errors import ConfigError, TitanplugError

SourcePosition: TypeAlias = dict[str, Any]


class DocumentSource(Protocol):
    """Documents that can be read in shares, from any position on."""

    def read(
        self, share: int, num_shares: int, epoch: int, position: SourcePosition | None
    ) -> Iterator[tuple[str, SourcePosition]]:
        """Read a share once.

        Args:
            share: in ``range(num_shares)``. The shares are disjoint and together hold everything.
            num_shares: readers.
            epoch: how often the source has been read before; may change the order.
            position: where to start, None for the beginning.

        Yields:
            A document, and the position that makes ``read`` start with this document. Positions are
            plain containers.
        """
        ...


class StreamPosition(NamedTuple):
    """Where the next row of a share begins.

    Attributes:
        share: the share.
        row: rows of the share before it.
        epoch: times that the share has been read to its end.
        document: position of a document in the source.
        offset: the row's first token in this document, its special tokens included.
    """

    share: int
    row: int
    epoch: int
    document: SourcePosition | None
    offset: int


@dataclass
class _Block:
    """A document that rows are being cut from; ``offset`` is the first token not yet cut off."""

    epoch: int
    document: SourcePosition
    tokens: Encoded
    offset: int

    def __len__(self) -> int:
        return len(self.tokens.ids) - self.offset


class PackedStream(IterableDataset[tuple[Row, StreamPosition]]):
    """Rows without end: after the last document the source is read again, as its next epoch.

    So no data-parallel rank runs out of rows before the others. Every combination of a rank and a
    worker of its loader reads a share of its own, unless :meth:`seek` says otherwise.

    Args:
        source: the documents.
        tokenizer: ready to encode.
        row_format: of the rows.
    """

    def __init__(self, source: DocumentSource, tokenizer: Tokenizer, row_format: RowFormat) -> None:
        self.source = source
        self.tokenizer = tokenizer
        self.row_format = row_format
        self.data_parallel = (0, 1)
        self._reader: RowReader | None = None
        self._positions: dict[int, StreamPosition] = {}

    def set_data_parallel(self, rank: int, size: int) -> None:
        """Tell the data-parallel coordinate; ranks with the same one read the same rows.

        Args:
            rank: in ``range(size)``.
            size: number of data-parallel ranks.

        Raises:
            ConfigError: the rank is out of range.
        """
        if not 0 <= rank < size:
            raise ConfigError(
                f"set_data_parallel(rank={rank}, size={size}): the rank is at least 0 and below "
                "the size. Give the coordinate in the data-parallel view of the mesh."
            )
        self.data_parallel = (rank, size)

    def seek(self, reader: RowReader, positions: Mapping[int, StreamPosition]) -> None:
        """Choose what the next iteration reads, on all workers together.

        Args:
            reader: the rows. They are handed out batch by batch, each worker in turn.
            positions: by share, not behind the first row to read. A share that is missing is read
                from its beginning, and the rows before are left out.
        """
        self._reader = reader
        self._positions = dict(positions)

    @override
    def __iter__(self) -> Iterator[tuple[Row, StreamPosition]]:
        """Yields each row with the position of the row after it in the same share."""
        info = get_worker_info()
        worker, num_workers = (0, 1) if info is None else (info.id, info.num_workers)
        rank, size = self.data_parallel
        whole_shares = RowReader(RowOrder(size, num_workers, 1), 0, rank, size, 1)
        return self._read_rows(self._reader or whole_shares, self._positions, worker, num_workers)

    def _read_rows(
        self, reader: RowReader, positions: Mapping[int, StreamPosition], worker: int, num_workers: int
    ) -> Iterator[tuple[Row, StreamPosition]]:
        opened: dict[int, _Share] = {}
        for batch in itertools.count(worker, num_workers):
            for share, start, num_rows in reader.cut(batch):
                if share not in opened:
                    position = positions.get(share, StreamPosition(share, 0, 0, None, 0))
                    opened[share] = _Share(self, reader.order.num_shares, position)
                yield from opened[share].read(start, num_rows)


class _Share:
    """The rows of a share, from a position on."""

    def __init__(self, stream: PackedStream, num_shares: int, position: StreamPosition) -> None:
        self._start = position.row
        self._rows = self._read_rows(stream, num_shares, position)

    def read(self, start: int, num_rows: int) -> Iterator[tuple[Row, StreamPosition]]:
        """Rows, each with the position of the row after it; those before ``start`` are left out."""
        self._start = start
        return itertools.islice(self._rows, num_rows)

    def _read_rows(
        self, stream: PackedStream, num_shares: int, position: StreamPosition
    ) -> Iterator[tuple[Row, StreamPosition]]:
        share, number = position.share, position.row
        build_row, seq_len = stream.row_format.build_row, stream.row_format.seq_len
        blocks: deque[_Block] = deque()
        num_tokens = 0
        for block in _read_blocks(stream.source, stream.tokenizer, num_shares, position):
            blocks.append(block)
            num_tokens += len(block)
            while num_tokens > seq_len:  # S inputs and the last label
                row = build_row(*_take_window(blocks, seq_len + 1)) if number >= self._start else None
                _drop_tokens(blocks, seq_len)
                num_tokens -= seq_len
                number += 1
                if row is not None:
                    first = blocks[0]
                    yield row, StreamPosition(share, number, first.epoch, first.document, first.offset)


def _read_blocks(
    source: DocumentSource, tokenizer: Tokenizer, num_shares: int, position: StreamPosition
) -> Iterator[_Block]:
    share, _, epoch, start, offset = position
    while True:
        found = False
        for text, document in source.read(share, num_shares, epoch, start):
            if text:
                found = True
                tokens = build_block(tokenizer.encode_documents([text])[0], tokenizer)
                yield _Block(epoch, document, tokens, offset)
            offset = 0
        if not found:
            raise TitanplugError(
                f"Share {share} of {num_shares} of the stream holds no text: each "
                "data-parallel rank and each worker needs a document at least. Use fewer of "
                "them, or more data."
            )
        epoch, start = epoch + 1, None


def _take_window(blocks: deque[_Block], length: int) -> Encoded:
    """The first tokens of a queue of blocks, which holds that many."""
    parts = []
    for block in blocks:
        part = slice(block.offset, block.offset + length)
        parts.append(Encoded(block.tokens.ids[part], block.tokens.num_bytes[part]))
        length -= len(parts[-1].ids)
        if length == 0:
            break
    return Encoded(*(np.concatenate(arrays) for arrays in zip(*parts, strict=True)))


def _drop_tokens(blocks: deque[_Block], length: int) -> None:
    """Cut tokens off the front; fewer than there are."""
    while length >= len(blocks[0]):
        length -= len(blocks.popleft())
    blocks[0].offset += length

"""Rows packed on the fly from documents that are too many to hold: each rank reads its own share.

Legend: S sequence.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np
from torch.utils.data import IterableDataset, get_worker_info
from typing_extensions import override

from titanplug.data.packing import Row, RowFormat
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
        epoch: times that the share has been read to its end.
        document: position of a document in the source.
        offset: the row's first token in this document, its special tokens included.
    """

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
    worker of its loader reads a share of its own.

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
        self._positions: dict[int, StreamPosition] = {}
        self._first_worker = 0

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

    def seek(self, positions: dict[int, StreamPosition], first_worker: int) -> None:
        """Choose where the next iteration starts.

        Args:
            positions: by worker; a worker that is missing starts at the beginning.
            first_worker: takes the place of worker 0, the next one that of worker 1, and so on,
                since a loader always asks worker 0 first.
        """
        self._positions = dict(positions)
        self._first_worker = first_worker

    @override
    def __iter__(self) -> Iterator[tuple[Row, StreamPosition]]:
        """Yields each row with the position of the row after it in the same share."""
        info = get_worker_info()
        worker_id, num_workers = (0, 1) if info is None else (info.id, info.num_workers)
        worker = (worker_id + self._first_worker) % num_workers
        rank, size = self.data_parallel
        position = self._positions.get(worker, StreamPosition(0, None, 0))
        return self._read_rows(rank * num_workers + worker, size * num_workers, position)

    def _read_rows(
        self, share: int, num_shares: int, position: StreamPosition
    ) -> Iterator[tuple[Row, StreamPosition]]:
        seq_len = self.row_format.seq_len
        blocks: deque[_Block] = deque()
        num_tokens = 0
        for block in self._read_blocks(share, num_shares, position):
            blocks.append(block)
            num_tokens += len(block)
            while num_tokens > seq_len:  # S inputs and the last label
                row = self.row_format.build_row(*_take_window(blocks, seq_len + 1))
                _drop_tokens(blocks, seq_len)
                num_tokens -= seq_len
                yield row, StreamPosition(blocks[0].epoch, blocks[0].document, blocks[0].offset)

    def _read_blocks(self, share: int, num_shares: int, position: StreamPosition) -> Iterator[_Block]:
        epoch, start, offset = position
        while True:
            found = False
            for text, document in self.source.read(share, num_shares, epoch, start):
                if text:
                    found = True
                    tokens = build_block(self.tokenizer.encode_documents([text])[0], self.tokenizer)
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

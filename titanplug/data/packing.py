"""Rows of one length cut from an array of tokens: what a model sees.

Targets are shifted here, before anything shards a sequence, so that no later cut can lose one.
Legend: B batch, S sequence.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset
from typing_extensions import override

from titanplug.data.tokenizers import IntArray, Tokenizer
from titanplug.data.tokens import Tokens

IGNORED_LABEL = -100

Row: TypeAlias = dict[str, Tensor]


@dataclass(frozen=True)
class RowFormat:
    """How tokens become a row.

    Attributes:
        seq_len: S, tokens a row.
        start_id: the token in front of each document.
        eos_id: the token after each document; also fills up a row.
        document_ids: whether rows tell which document a token belongs to, for attention within
            documents. The token in front of a document belongs to it.
        ignore_border_labels: whether the token after an eos, which follows from nothing in the row,
            is no target.
    """

    seq_len: int
    start_id: int
    eos_id: int
    document_ids: bool = False
    ignore_border_labels: bool = False

    def build_row(self, ids: IntArray, num_bytes: IntArray) -> Row:
        """A row from the tokens of a window.

        Args:
            ids: (n + 1,) tokens, 1 <= n <= S. Each but the last is an input, each but the first a
                target.
            num_bytes: (n + 1,) bytes that they stand for.

        Returns:
            ``input_ids`` (S,) int64 and ``labels`` (S,) int64, filled up with eos and -100;
            ``target_bytes`` () int64, UTF-8 bytes that the labels other than -100 stand for; if
            asked for ``document_ids`` (S,) int64, from 0 up in each row.
        """
        n = len(ids) - 1
        inputs = np.full(self.seq_len, self.eos_id, dtype=np.int64)
        labels = np.full(self.seq_len, IGNORED_LABEL, dtype=np.int64)
        inputs[:n] = ids[:-1]
        labels[:n] = ids[1:]
        if self.ignore_border_labels:
            labels[inputs == self.eos_id] = IGNORED_LABEL
        target_bytes = num_bytes[1:][labels[:n] != IGNORED_LABEL].sum(dtype=np.int64)
        row = {
            "input_ids": torch.from_numpy(inputs),
            "labels": torch.from_numpy(labels),
            "target_bytes": torch.tensor(int(target_bytes)),
        }
        if self.document_ids:
            starts = inputs == self.start_id
            starts[0] = False
            row["document_ids"] = torch.from_numpy(np.cumsum(starts, dtype=np.int64))
        return row


def build_row_format(
    tokenizer: Tokenizer, seq_len: int, *, document_ids: bool, ignore_border_labels: bool
) -> RowFormat:
    """The row format for a tokenizer's special tokens."""
    return RowFormat(
        seq_len=seq_len,
        start_id=tokenizer.start_id,
        eos_id=tokenizer.eos_id,
        document_ids=document_ids,
        ignore_border_labels=ignore_border_labels,
    )


class PackedDataset(Dataset[Row]):
    """The rows of a split: row i has the inputs [i S, i S + S) and as labels the tokens after them.

    Each token but the very first is a target of exactly one row.

    Args:
        tokens: the split.
        row_format: of the rows.
        drop_last: leave out the last row where tokens for a full one are missing (training),
            instead of filling it up with ignored labels (evaluation).
    """

    def __init__(self, tokens: Tokens, row_format: RowFormat, *, drop_last: bool) -> None:
        self.tokens = tokens
        self.row_format = row_format
        num_targets = len(tokens) - 1
        full_rows, rest = divmod(num_targets, row_format.seq_len)
        self._num_rows = full_rows if drop_last or rest == 0 else full_rows + 1

    def __len__(self) -> int:
        return self._num_rows

    @override
    def __getitem__(self, index: int) -> Row:
        if not 0 <= index < self._num_rows:
            raise IndexError(f"row {index} of {self._num_rows}")
        begin = index * self.row_format.seq_len
        window = slice(begin, begin + self.row_format.seq_len + 1)
        return self.row_format.build_row(self.tokens.ids[window], self.tokens.num_bytes[window])

"""What stays sharded over the sequence, without any process group: a collective would fail on it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from titanplug.parallel.collectives import AxisGroup
from titanplug.parallel.sequence import SequenceShards
from titanplug.parallel.sequence_output import ShardedSequence

B, V = 2, 5
NO_GROUP: Any = "no such group"  # a collective would fail on it
SHARDS = SequenceShards.of(7, AxisGroup(NO_GROUP, size=2, rank=1), zigzag=True)  # tokens 2, 3, 4 and 5


def _build(sequence_dim: int = 1) -> tuple[Tensor, ShardedSequence]:
    shape = (B, 7, V) if sequence_dim else (7, B, V)
    whole = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    return whole, ShardedSequence(SHARDS.shard(whole, sequence_dim), SHARDS, sequence_dim=sequence_dim)


def test_looks_like_the_whole_tensor() -> None:
    _, x = _build()
    assert x.shape == (B, 7, V) and x.size(1) == 7 and x.ndim == x.dim() == 3
    assert len(x) == B and x.numel() == B * 7 * V and x.is_contiguous()
    assert x.dtype == torch.float32 and x.device == torch.device("cpu") and not x.requires_grad
    assert "shape=(2, 7, 5)" in repr(x) and "part 1 of 2" in repr(x)


KEEPS: dict[str, Callable[[Any], Any]] = {
    "view": lambda x: x.view(-1, V),
    "reshape": lambda x: x.reshape(B * 7, V),
    "torch.reshape": lambda x: torch.reshape(x, (14, -1)),
    "flatten": lambda x: x.flatten(0, 1),
    "flatten after": lambda x: x.unsqueeze(-1).flatten(2),
    "split again": lambda x: x.flatten(0, 1).view(B, 7, V),
    "unflatten": lambda x: x.flatten(0, 1).unflatten(0, (B, -1)),
    "shift": lambda x: x[:, :-1],
    "shift, ellipsis": lambda x: x[..., 1:, :].contiguous(),
    "merged slice": lambda x: x[:, 2:4].reshape(-1, V),
    "columns": lambda x: x[..., 1:],
    "a column": lambda x: x[:, 1:, 2],
    "sample": lambda x: x[0],
    "samples": lambda x: x[1:, 2:],
    "casts": lambda x: x.float().to(torch.bfloat16).double().half(),
    "arithmetic": lambda x: -(1 - 2 * x / 3 + x).detach().clone(),
    "in place": lambda x: x.mul_(3).add_(1),
    "softmax": lambda x: x.flatten(0, 1).softmax(1),
    "argmax": lambda x: x.argmax(dim=2),
    "argmax, kept": lambda x: x.argmax(-1, keepdim=True),
    "topk": lambda x: x.topk(2, -1).indices,
}


@pytest.mark.parametrize("name", KEEPS)
def test_stays_sharded(name: str) -> None:
    whole, x = _build()
    result, expected = KEEPS[name](x), KEEPS[name](whole)
    assert isinstance(result, ShardedSequence)
    assert result.shape == expected.shape and result.dtype == expected.dtype
    mine = result.take(expected)
    counts = result.counts()
    where = (slice(None),) * result.sequence_dim + (counts,)
    torch.testing.assert_close(result.local[where], mine[where])


def test_sequence_first() -> None:
    whole, x = _build(0)
    for change in (lambda t: t[1:].float(), lambda t: t * 2, lambda t: t.argmax(-1), lambda t: t[:, 0]):
        result, expected = change(x), change(whole)
        assert isinstance(result, ShardedSequence) and result.shape == expected.shape
        counts = result.counts()
        torch.testing.assert_close(result.local[counts], result.take(expected)[counts])


def test_refuses_what_has_not_the_tokens_of_a_rank() -> None:
    with pytest.raises(ValueError, match="4 tokens"):
        ShardedSequence(torch.zeros(B, 7, V), SHARDS)

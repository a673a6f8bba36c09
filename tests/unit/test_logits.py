"""What stays sharded, without any process group: a collective would fail on this group's name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from titanplug.parallel.collectives import AxisGroup
from titanplug.parallel.logits import ShardedLogits
from titanplug.parallel.sharded_tensor import gather_shards

B, S, V = 2, 3, 7
NO_GROUP: Any = "no such group"
GROUP = AxisGroup(NO_GROUP, size=2, rank=1)  # its block: columns 4, 5 and 6


def build_logits() -> ShardedLogits:
    return ShardedLogits(torch.arange(B * S * 3.0).view(B, S, 3), V, GROUP)


@pytest.mark.parametrize(
    ("total", "size", "blocks"),
    [
        (8, 2, [(0, 4), (4, 4)]),
        (7, 2, [(0, 4), (4, 3)]),
        (5, 4, [(0, 2), (2, 2), (4, 1), (5, 0)]),
        (2, 4, [(0, 1), (1, 1), (2, 0), (2, 0)]),
        (9, 4, [(0, 3), (3, 3), (6, 3), (9, 0)]),
    ],
)
def test_blocks_are_those_of_chunk(total: int, size: int, blocks: list[tuple[int, int]]) -> None:
    assert [AxisGroup(NO_GROUP, size, rank).block(total) for rank in range(size)] == blocks
    chunks = [len(chunk) for chunk in torch.arange(total).chunk(size)]
    assert [width for _, width in blocks if width] == chunks


def test_looks_like_the_whole_tensor() -> None:
    logits = build_logits()
    assert isinstance(logits, Tensor)
    assert logits.shape == (B, S, V) and logits.size(-1) == V and logits.size() == (B, S, V)
    assert logits.ndim == logits.dim() == 3
    assert len(logits) == B and logits.numel() == B * S * V
    assert logits.dtype == torch.float32 and logits.is_floating_point()
    assert logits.device == torch.device("cpu") and not logits.is_cuda
    assert "shape=(2, 3, 7)" in repr(logits) and "block 1 of 2" in repr(logits)


KEEPS: dict[str, Callable[[Any], Any]] = {
    "view": lambda x: x.view(-1, V),
    "view, shape as a tuple": lambda x: x.view((B * S, V)),
    "reshape": lambda x: x.reshape(S, B, -1),
    "torch.reshape": lambda x: torch.reshape(x, (-1, V)),
    "flatten": lambda x: x.flatten(0, 1),
    "flatten, negative": lambda x: x.flatten(end_dim=-2),
    "torch.flatten": lambda x: torch.flatten(x, 0, 1),
    "shift": lambda x: x[:, :-1],
    "shift, all dims": lambda x: x[:, :-1, :],
    "shift, ellipsis": lambda x: x[..., :-1, :].contiguous(),
    "last position": lambda x: x[:, -1],
    "row": lambda x: x[0],
    "float": lambda x: x.float(),
    "bfloat16": lambda x: x.bfloat16(),
    "to": lambda x: x.to(torch.float64),
    "divided": lambda x: x / 2,
    "divided by a number on the device": lambda x: x / torch.tensor(2.0),
    "multiplied": lambda x: x * 0.5,
    "from the right": lambda x: 0.5 * x,
    "clone, detach": lambda x: x.clone().detach(),
    "in place": lambda x: x.mul_(3),
}


@pytest.mark.parametrize("name", KEEPS)
def test_stays_sharded(name: str) -> None:
    change = KEEPS[name]
    whole = torch.zeros(B, S, V)
    whole[..., 4:] = build_logits().local
    result, expected = change(build_logits()), change(whole)
    assert isinstance(result, ShardedLogits)
    assert result.shape == expected.shape and result.dtype == expected.dtype
    torch.testing.assert_close(result.local, expected[..., 4:])


def test_gathers_nothing_where_there_is_nothing() -> None:
    value = {"loss": torch.tensor(1.0), "names": ["a"], "none": None}
    assert gather_shards(value) == value

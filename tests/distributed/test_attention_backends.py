"""Attention on a sharded sequence equals that on the whole one: every backend, mask, order and length."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.harness import reference, run_ranks
from titanplug.attention import TokenMask, dot_product_attention
from titanplug.errors import ConfigError
from titanplug.parallel.active_sequence import ActiveSequence, sequence_active
from titanplug.parallel.collectives import AxisGroup
from titanplug.parallel.sequence import SequenceShards

BACKENDS = ("all_gather", "ring", "ulysses", "torch")
HEADS = ((8, 4), (4, 4))
LENGTHS = (16, 13)


def document_ids(length: int) -> Tensor:
    index = torch.arange(length)
    return torch.stack([index // 5, (index > 3).long()])


MASKS: dict[str, Callable[[Tensor], TokenMask]] = {
    "causal": lambda ids: TokenMask(),
    "full": lambda ids: TokenMask(causal=False),
    "window": lambda ids: TokenMask(window=5),
    "documents": lambda ids: TokenMask(document_ids=ids),
    "full documents": lambda ids: TokenMask(causal=False, document_ids=ids),
    "documents and window": lambda ids: TokenMask(window=3, document_ids=ids),
}
CAN: dict[str, tuple[str, ...]] = {
    "causal": BACKENDS,
    "full": BACKENDS,
    **dict.fromkeys(
        ("window", "documents", "full documents", "documents and window"), ("all_gather", "ulysses")
    ),
}


def inputs(length: int, heads: int, kv_heads: int, value_size: int = 8) -> list[Tensor]:
    """Queries, keys, values, and the gradient of the output."""
    generator = torch.Generator().manual_seed(0)
    shapes = (heads, 8), (kv_heads, 8), (kv_heads, value_size), (heads, value_size)
    return [torch.randn(2, n, length, k, generator=generator, dtype=torch.float64) for n, k in shapes]


def attend_whole(mask: str, length: int, heads: int, kv_heads: int, value_size: int = 8) -> list[Tensor]:
    *given, grad = inputs(length, heads, kv_heads, value_size)
    for x in given:
        x.requires_grad_()
    query, key, value = given
    out = dot_product_attention(query, key, value, MASKS[mask](document_ids(length)))
    return [out.detach(), *torch.autograd.grad(out, given, grad)]


def attend_on_shards(
    group: AxisGroup, backend: str, zigzag: bool, mask: str, length: int, *sizes: int
) -> list[Tensor]:
    shards = SequenceShards.of(length, group, zigzag=zigzag)
    *given, grad = [shards.shard(x, 2) for x in inputs(length, *sizes)]
    grad = grad * (shards.positions(grad.device) < length).view(1, 1, -1, 1)
    query, key, value = (x.requires_grad_() for x in given)
    ids = shards.shard(document_ids(length), 1)
    with sequence_active(ActiveSequence(shards, backend)):
        out = dot_product_attention(query, key, value, MASKS[mask](ids))
    results = out.detach(), *torch.autograd.grad(out, (query, key, value), grad)
    return [shards.gather(x, 2) for x in results]


def _world(rank: int, world_size: int) -> AxisGroup:
    assert dist.group.WORLD is not None
    return AxisGroup(dist.group.WORLD, world_size, rank)


def _run_all(rank: int, world_size: int, cases: list[tuple[Any, ...]]) -> list[list[Tensor]]:
    return [attend_on_shards(_world(rank, world_size), *case) for case in cases]


@pytest.mark.parametrize("world_size", [2, 4])
def test_every_backend_and_mask(world_size: int) -> None:
    cases = [
        (backend, zigzag, mask, length, *heads)
        for mask, able in CAN.items()
        for backend in able
        for zigzag in (True, False)
        for length in LENGTHS
        for heads in HEADS
        if not (mask == "full" and length == 13 and backend in ("ring", "torch"))  # refused: see below
    ]
    assert len(cases) == 120
    found = run_ranks(_run_all, world_size, cases)
    for rank in range(world_size):
        for case, results in zip(cases, found[rank], strict=True):
            for result, expected in zip(results, _expected(*case[2:]), strict=True):
                error = float((result - expected).abs().max() / expected.abs().max())
                assert error < 1e-13, (case, error)


_known: dict[tuple[Any, ...], list[Tensor]] = {}


def _expected(*case: Any) -> list[Tensor]:
    if case not in _known:
        _known[case] = reference(attend_whole, *case)
    return _known[case]


@pytest.mark.parametrize("backend", BACKENDS[:3])
def test_values_of_another_size_than_keys(backend: str) -> None:
    case = ("causal", 16, 4, 2, 6)
    expected = reference(attend_whole, *case)
    for results in run_ranks(_run_all, 2, [(backend, True, *case)]):
        for result, wanted in zip(results[0], expected, strict=True):
            torch.testing.assert_close(result, wanted, rtol=1e-12, atol=1e-13)


def _mask_tensors(rank: int, world_size: int) -> list[Tensor]:
    shards = SequenceShards.of(13, _world(rank, world_size), zigzag=True)
    *given, _ = inputs(13, 8, 4)
    query, key, value = (shards.shard(x, 2) for x in given)
    rows = shards.positions(query.device).clamp(max=12)
    seen, added = _whole_masks()
    results = []
    for mask in (seen, added):
        with sequence_active(ActiveSequence(shards, "all_gather")):
            out = dot_product_attention(query, key, value, mask[..., rows, :])
        results.append(shards.gather(out, 2))
    return results


def _whole_masks() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    seen = torch.rand(13, 13, generator=generator) < 0.5
    return seen | torch.eye(13, dtype=torch.bool), torch.randn(2, 8, 13, 13, generator=generator).double()


def test_mask_tensors_by_all_gather() -> None:
    *given, _ = inputs(13, 8, 4)
    query, key, value = given
    for results in run_ranks(_mask_tensors, 2):
        for result, mask in zip(results, _whole_masks(), strict=True):
            torch.testing.assert_close(
                result, dot_product_attention(query, key, value, mask), rtol=1e-12, atol=1e-13
            )


def _refusals(rank: int, world_size: int) -> dict[str, str]:
    shards = SequenceShards.of(13, _world(rank, world_size), zigzag=True)
    query, key, value, _ = (shards.shard(x, 2) for x in inputs(13, 3, 1))
    ids = shards.shard(document_ids(13), 1)
    tries: dict[str, tuple[str, Callable[[], object]]] = {
        "window": ("ring", lambda: dot_product_attention(query, key, value, TokenMask(window=3))),
        "documents": ("torch", lambda: dot_product_attention(query, key, value, TokenMask(document_ids=ids))),
        "padding": ("ring", lambda: dot_product_attention(query, key, value, TokenMask(causal=False))),
        "dropout": ("all_gather", lambda: dot_product_attention(query, key, value, dropout_p=0.1)),
        "heads": ("ulysses", lambda: dot_product_attention(query, key, value)),
        "mask": ("ulysses", lambda: dot_product_attention(query, key, value, torch.ones(8, 13))),
        "local mask": ("all_gather", lambda: dot_product_attention(query, key, value, torch.ones(8, 8))),
        "cross": ("all_gather", lambda: dot_product_attention(query, key[:, :, :5], value[:, :, :5])),
    }
    messages = {}
    for name, (backend, attempt) in tries.items():
        with sequence_active(ActiveSequence(shards, backend)), pytest.raises(ConfigError) as error:
            attempt()
        messages[name] = str(error.value)
    return messages


def test_what_a_backend_cannot_do_names_those_that_can() -> None:
    words = {
        "window": "can't do a sliding window. Use cp_backend='all_gather' or 'ulysses'",
        "documents": "can't do document ids. Use cp_backend='all_gather' or 'ulysses'",
        "padding": "padded and not causal. Use cp_backend='all_gather' or 'ulysses'",
        "dropout": "can't do attention dropout. Use cp_backend='ulysses'",
        "heads": "on 3 heads and 1 key-value heads",
        "mask": "can't do a mask tensor. Use cp_backend='all_gather'",
        "local mask": "its rows are this rank's 8 tokens and its columns the 13",
        "cross": "Cross attention, a cache",
    }
    for messages in run_ranks(_refusals, 2):
        for name, text in words.items():
            assert text in messages[name], messages[name]


def _dropped(rank: int, world_size: int) -> list[Tensor]:
    shards = SequenceShards.of(16, _world(rank, world_size), zigzag=False)
    query, key = torch.zeros(2, 1, 4, shards.local_length, 8)
    value = torch.ones(1, 4, shards.local_length, 8)
    torch.manual_seed(0)
    with sequence_active(ActiveSequence(shards, "ulysses")):
        outs = [dot_product_attention(query, key, value, dropout_p=0.5) for _ in range(2)]
    return [*(shards.gather(out, 2) for out in outs), torch.rand(3)]


def test_attention_dropout_differs_by_head_and_leaves_generators_alike() -> None:
    ranks = run_ranks(_dropped, 2)
    first, second, drawn = ranks[0]
    assert torch.equal(drawn, ranks[1][2])
    assert not torch.equal(first, second)
    heads = first[0, :, :, 0]  # two on each rank
    assert all(not torch.equal(heads[i], heads[j]) for i in range(4) for j in range(i))


# ---------------------------------------------------------------- compiled


def _compiled(rank: int, world_size: int, backend: str, mask: str) -> float:
    """Largest relative difference of the gradients of a compiled function, without graph breaks."""
    shards = SequenceShards.of(16, _world(rank, world_size), zigzag=backend != "ulysses")
    *given, grad = [shards.shard(x, 2) for x in inputs(16, 8, 4)]
    query, key, value = (x.requires_grad_() for x in given)
    results = []
    compiled = torch.compile(dot_product_attention, fullgraph=True, backend="aot_eager")
    for attention in (dot_product_attention, compiled):
        with sequence_active(ActiveSequence(shards, backend)):
            rule = MASKS[mask](shards.shard(document_ids(16), 1))
            out = attention(query, key, value, rule)
        results.append([out.detach(), *torch.autograd.grad(out, (query, key, value), grad)])
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("mask", ["causal", "documents and window"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_in_a_compiled_graph(backend: str, mask: str) -> None:
    if backend in CAN[mask]:
        assert max(run_ranks(_compiled, 2, backend, mask)) < 1e-13

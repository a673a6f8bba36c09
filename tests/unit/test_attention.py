"""Attention, its masks, rotary positions and norms, each against its definition."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from titanplug.attention import DotProductAttention, TokenMask, dot_product_attention
from titanplug.attention.backends import BACKENDS
from titanplug.errors import ConfigError
from titanplug.models import RopeScaling, TransformerConfig
from titanplug.models.attention import Attention, SequenceContext
from titanplug.models.layers import RMSNorm
from titanplug.models.rotary import Rotary, apply_rotary
from titanplug.validation import CONTEXT_BACKENDS


def max_error(a: Tensor, b: Tensor) -> float:
    return (a - b).abs().max().item()


def naive_attention(query: Tensor, key: Tensor, value: Tensor, seen: Tensor) -> Tensor:
    groups = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(groups, dim=1) for x in (key, value))
    scores = query @ key.transpose(-1, -2) / math.sqrt(query.shape[-1])
    return scores.masked_fill(~seen, float("-inf")).softmax(-1) @ value


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("window", [None, 1, 5, 12, 99])
@pytest.mark.parametrize("documents", [False, True])
def test_attention_equals_its_definition(kv_heads: int, window: int | None, documents: bool) -> None:
    torch.manual_seed(0)
    query = torch.randn(2, 4, 12, 8, dtype=torch.float64)
    key, value = torch.randn(2, 2, kv_heads, 12, 8, dtype=torch.float64)
    ids = torch.tensor([[0] * 5 + [1] * 7, [3] * 11 + [0]]) if documents else None
    seen = torch.zeros(2, 1, 12, 12, dtype=torch.bool)
    for b in range(2):
        for i in range(12):
            for j in range(i + 1):
                near = window is None or i - j < window
                seen[b, 0, i, j] = near and (ids is None or bool(ids[b, i] == ids[b, j]))
    mask = TokenMask(window=window, document_ids=ids)
    assert mask.is_plain(12) == (ids is None and window in (None, 12, 99))
    expected = naive_attention(query, key, value, seen)
    assert max_error(dot_product_attention(query, key, value, mask), expected) < 1e-14
    given = TokenMask(document_ids=ids)
    assert max_error(DotProductAttention(window)(query, key, value, given), expected) < 1e-14
    assert max_error(dot_product_attention(query, key, value, seen), expected) < 1e-14
    if ids is None:
        assert max_error(DotProductAttention(window)(query, key, value), expected) < 1e-14


@pytest.mark.parametrize("documents", [False, True])
def test_attention_without_causality(documents: bool) -> None:
    torch.manual_seed(0)
    query, key, value = torch.randn(3, 2, 4, 12, 8, dtype=torch.float64)
    ids = torch.tensor([[0] * 5 + [1] * 7, [3] * 11 + [0]]) if documents else None
    seen = torch.ones(2, 1, 12, 12, dtype=torch.bool)
    if ids is not None:
        seen = (ids[:, :, None] == ids[:, None, :])[:, None]
    mask = TokenMask(causal=False, document_ids=ids)
    expected = naive_attention(query, key, value, seen)
    assert max_error(dot_product_attention(query, key, value, mask), expected) < 1e-14


def test_wrong_masks_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"window=4 with causal=False"):
        TokenMask(causal=False, window=4)
    with pytest.raises(ConfigError, match=r"window=0"):
        TokenMask(window=0)
    with pytest.raises(ConfigError, match=r"document_ids has shape \(3,\)"):
        TokenMask(document_ids=torch.zeros(3))


def test_layers_share_one_mask_and_one_table() -> None:
    ids, heads = torch.zeros(2, 6, dtype=torch.long), torch.zeros(2, 6, 4, 8)
    context = SequenceContext(Rotary(8, 1e4), positions=ids, document_ids=ids)
    block = (0, 6), (0, 6), heads.device, heads.dtype
    first, second = (context.mask.with_window(3).bias(*block) for _ in range(2))
    assert first is second
    assert first is not context.mask.with_window(4).bias(*block)
    assert context.mask.bias(*block) is context.mask.bias(*block)
    assert context.rotary_tables(heads) is context.rotary_tables(heads)


def test_mask_has_the_dtype_of_the_query() -> None:
    mask = TokenMask(window=2).bias((0, 4), (0, 4), torch.device("cpu"), torch.bfloat16)
    assert (mask.dtype, mask.shape) == (torch.bfloat16, (1, 1, 4, 4))


def test_halves_of_the_heads_add_up() -> None:
    """Under tensor parallel each rank holds a part of the heads and of the rows of ``wo``."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "vocab_size": 9,
        "dim": 32,
        "num_layers": 1,
        "hidden_dim": 8,
        "init_std": 0.2,
    }
    config = TransformerConfig(**sizes, num_heads=4, num_kv_heads=2, qkv_bias=True, qk_norm=True)
    whole = Attention(config, 0.2).double()
    x = torch.randn(2, 10, 32, dtype=torch.float64)
    context = SequenceContext(Rotary(8, 1e4))
    total = torch.zeros_like(x)
    for rank in range(2):
        half = Attention(config, 0.2).double()
        for name, parameter in whole.named_parameters():
            dim = 1 if name.startswith("wo") else 0
            part = parameter if "norm" in name else parameter.chunk(2, dim)[rank]
            owner, _, leaf = name.rpartition(".")
            setattr(half.get_submodule(owner), leaf, nn.Parameter(part.detach().clone()))
        total += half(x, context)
    assert max_error(total, whole(x, context)) < 1e-14


# --- rotary positions ---


def test_half_types_are_turned_in_float32() -> None:
    rotary = Rotary(8, 1e4)
    heads = torch.randn(2, 5, 4, 8).bfloat16()
    tables = SequenceContext(rotary).rotary_tables(heads)
    turned = apply_rotary(heads, tables)
    assert (tables[0].dtype, turned.dtype) == (torch.float32, torch.bfloat16)
    assert torch.equal(turned, apply_rotary(heads.float(), tables).bfloat16())


def test_tables_are_kept_and_grow() -> None:
    rotary, cpu = Rotary(8, 1e4), torch.device("cpu")
    long = rotary.tables(9, cpu, torch.float32)
    short = rotary.tables(4, cpu, torch.float32)
    assert short[0].data_ptr() == long[0].data_ptr()
    assert torch.equal(short[1], Rotary(8, 1e4).tables(4, cpu, torch.float32)[1])
    assert len(rotary.tables(12, cpu, torch.float32)[0]) == 12
    assert rotary.tables(4, cpu, torch.float64)[0].dtype == torch.float64


def test_scaling_keeps_fast_frequencies_and_stretches_slow_ones() -> None:
    one = torch.ones(1, dtype=torch.long)
    tables = [
        Rotary(16, 500.0, scaling).tables_at(one, torch.float64)
        for scaling in (None, RopeScaling(8.0, 1.0, 4.0, 32))
    ]
    plain, scaled = (torch.atan2(sin, cos).flatten() for cos, sin in tables)
    turns = 32 * plain / (2 * math.pi)
    keep = ((turns - 1) / 3).clamp(0, 1)
    assert 0 < ((keep > 0) & (keep < 1)).sum() < (keep == 0).sum() < 8
    assert keep[0] == 1
    assert max_error(scaled, plain * (keep + (1 - keep) / 8)) < 1e-15


# --- norms ---


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_norm_rounds_once(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    norm, x = RMSNorm(32, 1e-5), torch.randn(50, 32).to(dtype)
    nn.init.normal_(norm.weight)
    norm.to(dtype)
    exact = x.double() * torch.rsqrt(x.double().pow(2).mean(-1, keepdim=True) + 1e-5)
    exact = exact * norm.weight.double()
    assert norm(x).dtype == dtype
    error = (norm(x).double() - exact).abs() / exact.abs()
    assert error.max() <= torch.finfo(dtype).eps / 2 + 1e-6


def test_every_backend_that_may_be_asked_for_is_there() -> None:
    assert tuple(BACKENDS) == CONTEXT_BACKENDS

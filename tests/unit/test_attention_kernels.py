"""Blocks of attention by plain products, and softmaxes put together from parts, against torch's own."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from titanplug.attention import kernels
from titanplug.attention.kernels import SoftmaxParts, attend, attend_backward


def inputs(dtype: torch.dtype = torch.float64, kv_heads: int = 2, keys: int = 12) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = (4, 12), (kv_heads, keys), (kv_heads, keys), (4, 12)
    return [torch.randn(2, n, s, 8, generator=generator, dtype=torch.float64).to(dtype) for n, s in shapes]


def bias(keys: int = 12) -> Tensor:
    hidden = torch.rand(2, 1, 12, keys, generator=torch.Generator().manual_seed(1)) < 0.4
    hidden[..., 0] = False
    return torch.zeros(hidden.shape, dtype=torch.float64).masked_fill(hidden, float("-inf"))


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("kind", ["full", "causal", "bias", "longer"])
def test_plain_products_equal_the_kernel(kv_heads: int, kind: str) -> None:
    keys = 20 if kind == "longer" else 12
    query, key, value, grad = inputs(kv_heads=kv_heads, keys=keys)
    given = {"causal": kind == "causal", "bias": bias() if kind == "bias" else None}
    out, lse = attend(query, key, value, 0.3, **given)
    plain = kernels.attend_plain(query, key, value, 0.3, **given)
    torch.testing.assert_close(plain, (out, lse), rtol=1e-13, atol=1e-13)
    expected = attend_backward(grad, query, key, value, out, lse, 0.3, **given)
    found = kernels.attend_plain_backward(grad, query, key, value, out, lse, 0.3, **given)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("per_head", [False, True])
def test_masks_by_fused_kernels_without_repeated_keys(per_head: bool) -> None:
    """What masks on CUDA take."""
    query, key, value, _ = inputs()
    mask = bias().expand(2, 4, 12, 12) * 1.0 if per_head else bias()
    out, _ = attend(query, key, value, 0.3, bias=mask)
    fused = kernels._attend_fused(query, key, value, mask, 0.3)
    torch.testing.assert_close(fused, out, rtol=1e-13, atol=1e-13)


def test_half_types_are_added_up_in_float32() -> None:
    query, key, value, grad = inputs(torch.bfloat16)
    out, lse = kernels.attend_plain(query, key, value, 0.3, causal=True)
    assert (out.dtype, lse.dtype) == (torch.bfloat16, torch.float32)
    exact = kernels.attend_plain(query.double(), key.double(), value.double(), 0.3, causal=True)
    torch.testing.assert_close(out.double(), exact[0], rtol=2**-8, atol=1e-4)
    torch.testing.assert_close(lse.double(), exact[1], rtol=1e-5, atol=1e-5)
    grads = kernels.attend_plain_backward(grad, query, key, value, out, lse, 0.3, causal=True)
    assert {x.dtype for x in grads} == {torch.bfloat16}


def test_parts_are_put_together() -> None:
    query, key, value, _ = inputs(keys=24)
    whole, whole_lse = attend(query, key, value, 0.3)
    parts = SoftmaxParts(query)
    for start in (0, 8, 16):
        keys = slice(start, start + 8)
        parts.add((0, 12), *attend(query, key[:, :, keys], value[:, :, keys], 0.3))
    out, lse = parts.result()
    torch.testing.assert_close((out, lse), (whole, whole_lse), rtol=1e-13, atol=1e-13)


def test_a_stretch_inside_of_another_sees_more_keys() -> None:
    query, key, value, _ = inputs(keys=24)
    early, late = slice(0, 12), slice(12, 24)
    parts = SoftmaxParts(query)
    parts.add((0, 12), *attend(query, key[:, :, early], value[:, :, early], 0.3))
    parts.add((6, 12), *attend(query[:, :, 6:], key[:, :, late], value[:, :, late], 0.3))
    out, _ = parts.result()
    torch.testing.assert_close(out[:, :, 6:], attend(query[:, :, 6:], key, value, 0.3)[0])
    first, _ = attend(query[:, :, :6], key[:, :, early], value[:, :, early], 0.3)
    torch.testing.assert_close(out[:, :, :6], first)

"""Attention of some queries to some keys, with the log-sum-exp by which parts of a softmax are put together.

The output over all keys is the average of those over parts of the keys, weighed by ``exp(log-sum-exp)``
(Milakov and Gimelshein 2018, "Online normalizer calculation for softmax"; Dao et al. 2022,
"FlashAttention"). The backward of a part takes the output and the log-sum-exp of the whole row.

Kernels by device: the flash kernel of the CPU (any dtype and mask), the flash kernel of CUDA (half types,
plain and causal), ``scaled_dot_product_attention`` for masks on CUDA, and plain products for the rest.

Shapes: query (B, H, Sq, K), key and value (B, Hkv, Sk, K), output as query, log-sum-exp (B, H, Sq). Each
key-value head serves H / Hkv query heads, and is never repeated.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from titanplug.compat import flash_attention_backward_cuda, flash_attention_cuda

_HALF = (torch.bfloat16, torch.float16)
_FLASH_HEAD_SIZE = 256
"""The largest of CUDA's flash kernel."""


@dataclass(frozen=True)
class Block:
    """Which part of the scores a kernel computes.

    Args:
        queries: start and stop, along Sq.
        keys: start and stop, along Sk.
        causal: query i sees keys 0 to i of the block, which is square.
        bias: (1 or B, 1 or H, queries, keys), added to the scores; None: every key is seen.
    """

    queries: tuple[int, int]
    keys: tuple[int, int]
    causal: bool = False
    bias: Tensor | None = None


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """In which parts are put together: float32, or float64 for float64."""
    return torch.promote_types(dtype, torch.float32)


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    *,
    causal: bool = False,
    bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp of one block."""
    if _has_cpu_flash(query, value):
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, 0.0, causal, attn_mask=bias, scale=scale
        )
        return out, lse
    if bias is None and _has_cuda_flash(query, value):
        return flash_attention_cuda(query, key, value, causal, scale)
    if bias is not None and query.is_cuda:
        return _attend_fused(query, key, value, bias, scale), query.new_empty(0)
    return attend_plain(query, key, value, scale, causal=causal, bias=bias)


def attend_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    scale: float,
    *,
    causal: bool = False,
    bias: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value; ``out`` and ``lse`` are those over all keys of each query."""
    if _has_cpu_flash(query, value):
        grads: tuple[Tensor, Tensor, Tensor] = (
            torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                grad, query, key, value, out, lse, 0.0, causal, attn_mask=bias, scale=scale
            )
        )
        return grads
    if bias is None and _has_cuda_flash(query, value):
        return flash_attention_backward_cuda(grad, query, key, value, out, lse, causal, scale)
    if bias is not None and query.is_cuda:
        query, key, value = (x.detach().requires_grad_() for x in (query, key, value))
        with torch.enable_grad():
            again = _attend_fused(query, key, value, bias, scale)
        dq, dk, dv = torch.autograd.grad(again, (query, key, value), grad)
        return dq, dk, dv
    return attend_plain_backward(grad, query, key, value, out, lse, scale, causal=causal, bias=bias)


def _has_cpu_flash(query: Tensor, value: Tensor) -> bool:
    return query.device.type == "cpu" and query.shape[-1] == value.shape[-1]


def _has_cuda_flash(query: Tensor, value: Tensor) -> bool:
    size = query.shape[-1]
    return (
        query.is_cuda
        and query.dtype in _HALF
        and size == value.shape[-1]
        and size <= _FLASH_HEAD_SIZE
        and not size % 8
    )


def _attend_fused(query: Tensor, key: Tensor, value: Tensor, bias: Tensor, scale: float) -> Tensor:
    """Under a mask, one call for each query head of a key-value head: the fused kernels would repeat keys."""
    parts = [
        F.scaled_dot_product_attention(heads, key, value, attn_mask=_of_heads(bias, i, key), scale=scale)
        for i, heads in enumerate(_by_key_head(query, key).unbind(2))
    ]
    return parts[0] if len(parts) == 1 else torch.stack(parts, 2).flatten(1, 2)


def _of_heads(bias: Tensor, i: int, key: Tensor) -> Tensor:
    return bias if bias.shape[1] == 1 else _by_key_head(bias, key)[:, :, i]


def _by_key_head(x: Tensor, key: Tensor) -> Tensor:
    """(B, H, ..) to (B, Hkv, H / Hkv, ..)."""
    return x.reshape(len(x), key.shape[1], -1, *x.shape[2:])


def attend_plain(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    *,
    causal: bool = False,
    bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """:func:`attend` by products of matrices, for what no kernel does."""
    scores = _scores(query, key, scale, causal, bias)
    lse = scores.logsumexp(-1)  # (B, Hkv, G, Sq)
    weights = (scores - lse.unsqueeze(-1)).exp()
    out = weights @ value.unsqueeze(2).to(weights.dtype)
    return out.flatten(1, 2).to(query.dtype), lse.flatten(1, 2)


def attend_plain_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    scale: float,
    *,
    causal: bool = False,
    bias: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """:func:`attend_backward` by products of matrices."""
    scores = _scores(query, key, scale, causal, bias)
    dtype = scores.dtype
    weights = (scores - _by_key_head(lse, key).unsqueeze(-1)).exp()  # (B, Hkv, G, Sq, Sk)
    grads, outs = _by_key_head(grad, key).to(dtype), _by_key_head(out, key).to(dtype)
    of_weights = grads @ value.unsqueeze(2).to(dtype).mT - (grads * outs).sum(-1, keepdim=True)
    of_scores = weights * of_weights * scale
    dq = of_scores @ key.unsqueeze(2).to(dtype)
    dk = (of_scores.mT @ _by_key_head(query, key).to(dtype)).sum(2)
    dv = (weights.mT @ grads).sum(2)
    return dq.flatten(1, 2).to(query.dtype), dk.to(key.dtype), dv.to(value.dtype)


def _scores(query: Tensor, key: Tensor, scale: float, causal: bool, bias: Tensor | None) -> Tensor:
    """(B, Hkv, H / Hkv, Sq, Sk)."""
    dtype = accumulation_dtype(query.dtype)
    scores = _by_key_head(query, key).to(dtype) @ key.unsqueeze(2).to(dtype).mT * scale
    if causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(hidden, float("-inf"))
    if bias is not None:
        per_head = bias.unsqueeze(2) if bias.shape[1] == 1 else _by_key_head(bias, key)
        scores = scores + per_head
    return scores


class SoftmaxParts:
    """Output (B, H, S_local, K) and log-sum-exp (B, H, S_local) of a rank's queries, put together from parts.

    Args:
        query: (B, H, S_local, K), of whose dtype the output is.
    """

    def __init__(self, query: Tensor) -> None:
        self._dtype = query.dtype
        self._parts: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}

    def add(self, rows: tuple[int, int], out: Tensor, lse: Tensor) -> None:
        """The queries ``rows`` have seen more keys.

        Parts of one stretch of queries are put together; a stretch inside of one that was added before is
        written into it.
        """
        dtype = accumulation_dtype(out.dtype)
        for (start, stop), (known, known_lse) in self._parts.items():
            if start <= rows[0] and rows[1] <= stop:
                inside = slice(rows[0] - start, rows[1] - start)
                into, into_lse = known[:, :, inside], known_lse[:, :, inside]
                total = torch.logaddexp(into_lse, lse)
                into.mul_((into_lse - total).exp().unsqueeze(-1))
                into.add_(out.to(dtype) * (lse - total).exp().unsqueeze(-1))
                into_lse.copy_(total)
                return
        self._parts[rows] = out.to(dtype), lse

    def result(self) -> tuple[Tensor, Tensor]:
        """Output, in the dtype of the queries, and log-sum-exp."""
        parts = [self._parts[rows] for rows in sorted(self._parts)]
        if len(parts) == 1:
            out, lse = parts[0]
            return out.to(self._dtype), lse
        out = torch.cat([out.to(self._dtype) for out, _ in parts], 2)
        return out, torch.cat([lse for _, lse in parts], 2)

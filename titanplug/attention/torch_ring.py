"""torch's own context-parallel ring, as one more backend: its algorithm and messages with our kernels."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from titanplug.attention.blockwise import Blockwise
from titanplug.attention.kernels import attend, attend_backward
from titanplug.attention.mask import TokenMask
from titanplug.compat import torch_ring_attention
from titanplug.parallel.sequence import SequenceShards

_SEQUENCE_DIM = 2


class TorchRing(Blockwise):
    """The backend. Sequences that aren't causal can't be in zigzag order with it."""

    name = "torch"
    can = frozenset()

    @override
    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        rule: TokenMask | Tensor,
        shards: SequenceShards,
        scale: float,
    ) -> tuple[Tensor, Tensor]:
        """N - 1 messages of keys and values."""
        assert isinstance(rule, TokenMask)

        def compute(query: Tensor, key: Tensor, value: Tensor, is_causal: bool, **_: Any) -> Any:
            return attend(query, key, value, scale, causal=is_causal)

        with self._ring(query, rule, shards) as (forward, _):
            out, lse, *_ = forward(
                shards.group.group,
                _SEQUENCE_DIM,
                compute,
                query=query,
                key=key,
                value=value,
                is_causal=rule.causal,
            )
        return out, lse

    @override
    def backward(
        self,
        grad: Tensor,
        saved: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
        rule: TokenMask | Tensor,
        shards: SequenceShards,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """N - 1 messages of keys and values, and n of their gradients."""
        assert isinstance(rule, TokenMask)
        query, key, value, out, lse = saved

        def compute(is_causal: bool, grad_out: Tensor, logsumexp: Tensor, **given: Any) -> Any:
            q, k, v, o = (given[name] for name in ("query", "key", "value", "out"))
            return attend_backward(grad_out, q, k, v, o, logsumexp, scale, causal=is_causal)

        with self._ring(query, rule, shards) as (_, backward):
            dq, dk, dv, *_ = backward(
                shards.group.group,
                _SEQUENCE_DIM,
                compute,
                grad_out=grad,
                grad_out_name="grad_out",
                query=query,
                key=key,
                value=value,
                out=out,
                logsumexp=lse,
                is_causal=rule.causal,
            )
        return dq, dk, dv

    @staticmethod
    def _ring(query: Tensor, rule: TokenMask, shards: SequenceShards) -> Any:
        # Where every query sees every key the order of the sequence makes no difference.
        zigzag = shards.zigzag and rule.causal
        return torch_ring_attention(zigzag=zigzag, float32=query.dtype != torch.float64)

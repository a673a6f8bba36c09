"""Keys and values go around the ranks while each computes (Liu et al. 2023, "Ring Attention").

In zigzag order (Brandon et al. 2023, "Striped Attention", in chunks) every rank computes half of what came,
at every step but its own. Parts are put together by their log-sum-exps in float32, or float64 for float64.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from titanplug.attention.blockwise import Blockwise
from titanplug.attention.kernels import Block, SoftmaxParts, accumulation_dtype, attend, attend_backward
from titanplug.attention.mask import TokenMask
from titanplug.parallel.collectives import AxisGroup
from titanplug.parallel.sequence import SequenceShards


class Ring(Blockwise):
    """The backend."""

    name = "ring"
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
        group, sizes = shards.group, [key.shape[-1], value.shape[-1]]
        parts = SoftmaxParts(query)
        both = torch.cat([key, value], -1)
        for step in range(group.size):
            coming = _Passing(both, group) if step < group.size - 1 else None
            keys, values = both.split(sizes, -1)
            block = _block(rule.causal, shards, step)
            if block is not None:
                rows, columns = slice(*block.queries), slice(*block.keys)
                out, lse = attend(
                    query[:, :, rows], keys[:, :, columns], values[:, :, columns], scale, causal=block.causal
                )
                parts.add(block.queries, out, lse)
            if coming is not None:
                both = coming.arrived()
        return parts.result()

    @override
    def backward(
        self,
        grad: Tensor,
        saved: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
        rule: TokenMask | Tensor,
        shards: SequenceShards,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """N - 1 messages of keys and values, and n of their gradients, which travel with them."""
        assert isinstance(rule, TokenMask)
        query, key, value, out, lse = saved
        group, sizes = shards.group, [key.shape[-1], value.shape[-1]]
        dtype = accumulation_dtype(query.dtype)
        dq = torch.zeros_like(query, dtype=dtype)
        both = torch.cat([key, value], -1)
        of_both = torch.zeros_like(both, dtype=dtype)
        returning: _Passing | None = None
        for step in range(group.size):
            coming = _Passing(both, group) if step < group.size - 1 else None
            keys, values = both.split(sizes, -1)
            block = _block(rule.causal, shards, step)
            grads: tuple[Tensor, Tensor, Tensor] | None = None
            if block is not None:
                rows, columns = slice(*block.queries), slice(*block.keys)
                grads = attend_backward(
                    grad[:, :, rows],
                    query[:, :, rows],
                    keys[:, :, columns],
                    values[:, :, columns],
                    out[:, :, rows],
                    lse[:, :, rows],
                    scale,
                    causal=block.causal,
                )
                dq[:, :, rows] += grads[0]
            if returning is not None:  # as late as possible: it travels while this rank computes
                of_both = returning.arrived()
            if block is not None and grads is not None:
                of_both[:, :, slice(*block.keys)] += torch.cat(grads[1:], -1)
            returning = _Passing(of_both, group)
            if coming is not None:
                both = coming.arrived()
        assert returning is not None
        dk, dv = returning.arrived().split(sizes, -1)
        return dq.to(query.dtype), dk.to(key.dtype), dv.to(value.dtype)


def _block(causal: bool, shards: SequenceShards, step: int) -> Block | None:
    """What a rank computes with what comes at ``step``, from the rank ``step`` before it; local indices."""
    rank, size, length = shards.group.rank, shards.group.size, shards.local_length
    source = (rank - step) % size
    whole, half = (0, length), length // 2
    if not causal:
        return Block(whole, whole)
    if step == 0:
        return Block(whole, whole, causal=True)
    if not shards.zigzag:
        return Block(whole, whole) if source < rank else None
    if source < rank:
        return Block(whole, (0, half))  # its late chunk is later than both of ours
    return Block((half, length), whole)  # both of its chunks lie between ours


class _Passing:
    """A tensor on its way to the next rank, and another on its way here from the one before."""

    def __init__(self, x: Tensor, group: AxisGroup) -> None:
        self._sent = x.contiguous()
        self._received = torch.empty_like(self._sent)
        to, source = (group.rank + 1) % group.size, (group.rank - 1) % group.size
        self._works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, self._sent, group=group.group, group_peer=to),
                dist.P2POp(dist.irecv, self._received, group=group.group, group_peer=source),
            ]
        )

    def arrived(self) -> Tensor:
        """Wait, and return what came."""
        for work in self._works:
            work.wait()
        return self._received

"""Each rank gathers the keys and values of all (Llama 3, 2024, section 3.3.2).

Any mask is possible, since the rows of scores are whole. The gathered keys and values are freed after the
forward and gathered again in backward, so that what a layer keeps falls with the number of ranks.
"""

from __future__ import annotations

import torch
from torch import Tensor
from typing_extensions import override

from titanplug.attention.blockwise import Blockwise
from titanplug.attention.kernels import Block, SoftmaxParts, accumulation_dtype, attend, attend_backward
from titanplug.attention.mask import TokenMask
from titanplug.parallel.sequence import SequenceShards


class AllGather(Blockwise):
    """The backend."""

    name = "all_gather"
    can = frozenset({"window", "documents", "mask", "padding"})

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
        """One all-gather of keys and values."""
        keys, values = _gathered(key, value, shards)
        parts = SoftmaxParts(query)
        for block in _blocks(rule, shards, query):
            rows, columns = slice(*block.queries), slice(*block.keys)
            out, lse = attend(
                query[:, :, rows],
                keys[:, :, columns],
                values[:, :, columns],
                scale,
                causal=block.causal,
                bias=block.bias,
            )
            parts.add(block.queries, out, lse)
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
        """One all-gather of keys and values, and one reduce-scatter of their gradients."""
        query, key, value, out, lse = saved
        keys, values = _gathered(key, value, shards)
        dtype = accumulation_dtype(query.dtype)
        dq = torch.zeros_like(query, dtype=dtype)
        both = torch.zeros(
            (*keys.shape[:-1], keys.shape[-1] + values.shape[-1]), dtype=dtype, device=key.device
        )
        dk, dv = both.split([keys.shape[-1], values.shape[-1]], -1)
        for block in _blocks(rule, shards, query):
            rows, columns = slice(*block.queries), slice(*block.keys)
            of_query, of_key, of_value = attend_backward(
                grad[:, :, rows],
                query[:, :, rows],
                keys[:, :, columns],
                values[:, :, columns],
                out[:, :, rows],
                lse[:, :, rows] if lse.numel() else lse,
                scale,
                causal=block.causal,
                bias=block.bias,
            )
            dq[:, :, rows] += of_query
            dk[:, :, columns] += of_key
            dv[:, :, columns] += of_value
        both = shards.scatter_padded_sum(both.to(key.dtype), 2)
        dk, dv = both.split([keys.shape[-1], values.shape[-1]], -1)
        return dq.to(query.dtype), dk, dv


def _gathered(key: Tensor, value: Tensor, shards: SequenceShards) -> tuple[Tensor, Tensor]:
    """Keys and values of the whole padded sequence, (B, Hkv, S', K) and (B, Hkv, S', V)."""
    both = shards.gather_padded(torch.cat([key, value], -1), 2)
    keys, values = both.split([key.shape[-1], value.shape[-1]], -1)
    return keys, values


def _blocks(rule: TokenMask | Tensor, shards: SequenceShards, query: Tensor) -> list[Block]:
    """The blocks of scores of this rank; query rows are this rank's, keys those of the whole sequence."""
    whole = (0, shards.local_length)
    if isinstance(rule, Tensor):
        return [Block(whole, (0, shards.length), bias=_as_bias(rule, query.dtype))]
    if not rule.causal and rule.document_ids is None:
        return [Block(whole, (0, shards.length))]
    blocks: list[Block] = []
    row = 0
    for start, width in shards.chunks_of(shards.group.rank):
        rows, stretch = (row, row + width), (start, start + width)
        row += width
        if rule.causal and rule.is_plain(shards.length):
            blocks.append(Block(rows, stretch, causal=True))
            if start:
                blocks.append(Block(rows, (0, start)))
            continue
        keys = (rule.first_key(start), start + width) if rule.causal else (0, shards.length)
        blocks.append(Block(rows, keys, bias=rule.bias(stretch, keys, query.device, query.dtype)))
    return blocks


def _as_bias(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """An additive mask of four dims from a boolean or additive one that broadcasts to (B, H, Sq, Sk)."""
    mask = mask.view(*[1] * (4 - mask.ndim), *mask.shape)
    if mask.dtype == torch.bool:
        return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, float("-inf"))
    return mask.to(dtype)

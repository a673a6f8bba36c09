"""Sequence against heads: each rank computes some of the heads on the whole sequence.

Paper: Jacobs et al. 2023, "DeepSpeed Ulysses". Two exchanges a layer in each direction.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from titanplug.attention.mask import TokenMask
from titanplug.errors import ConfigError
from titanplug.parallel.collectives import exchange
from titanplug.parallel.random_draws import draws_of_rank
from titanplug.parallel.sequence import SequenceShards


class Ulysses:
    """The backend."""

    name: ClassVar[str] = "ulysses"
    can: ClassVar[frozenset[str]] = frozenset({"window", "documents", "padding", "dropout"})

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        rule: TokenMask | Tensor,
        shards: SequenceShards,
        scale: float,
        dropout_p: float,
    ) -> Tensor:
        """See :class:`titanplug.attention.backends.Backend`."""
        assert isinstance(rule, TokenMask)
        size = shards.group.size
        if query.shape[1] % size or key.shape[1] % size:
            raise ConfigError(
                f"cp_backend='ulysses' with cp={size} on {query.shape[1]} heads and {key.shape[1]} key-value "
                "heads of a rank: each rank computes whole heads, so cp must divide both (after tp). Use "
                "cp_backend='all_gather' or 'ring', or a smaller cp."
            )
        queries, keys, values = _to_heads([query, key, value], shards)
        stop = shards.length if not rule.causal else shards.padded
        plain = rule.is_plain(shards.length)
        whole = (0, shards.padded)
        bias = None if plain else rule.bias(whole, (0, stop), query.device, query.dtype)
        with draws_of_rank(shards.group, query.device) if dropout_p else nullcontext():
            out = F.scaled_dot_product_attention(
                queries,
                keys[:, :, :stop],
                values[:, :, :stop],
                attn_mask=bias,
                dropout_p=dropout_p,
                is_causal=plain and rule.causal,
                scale=scale,
                enable_gqa=queries.shape[1] != keys.shape[1],
            )
        return _to_sequence(out, shards)


def _to_heads(tensors: list[Tensor], shards: SequenceShards) -> list[Tensor]:
    """Each (B, H, S_local, K) to (B, H / n, S', K), in one exchange where they have one K."""
    if len({x.shape[-1] for x in tensors}) > 1:
        return [_to_heads([x], shards)[0] for x in tensors]
    size = shards.group.size
    # (B, n, heads of one rank, S_local, K)
    by_rank = torch.cat([x.reshape(len(x), size, -1, *x.shape[2:]) for x in tensors], 2)
    gathered = exchange(by_rank.movedim(1, 0).contiguous(), shards.group)
    whole = shards.in_order(gathered, 2)
    return list(whole.split([x.shape[1] // size for x in tensors], 1))


def _to_sequence(x: Tensor, shards: SequenceShards) -> Tensor:
    """(B, H / n, S', K) to (B, H, S_local, K)."""
    ranks: Any = [
        [x.narrow(2, start, width) for start, width in shards.chunks_of(rank)]
        for rank in range(shards.group.size)
    ]
    by_rank = torch.stack([chunks[0] if len(chunks) == 1 else torch.cat(chunks, 2) for chunks in ranks])
    return exchange(by_rank, shards.group).movedim(0, 1).flatten(1, 2)

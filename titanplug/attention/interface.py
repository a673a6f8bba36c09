"""The attention that models call in place of ``scaled_dot_product_attention``.

Where nothing is sharded it is that function. Where a model runs on a part of the sequence (context parallel),
the tokens of all ranks are attended to, by the backend of the run, with the same result.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from titanplug.attention.backends import require_backend
from titanplug.attention.mask import TokenMask
from titanplug.errors import ConfigError
from titanplug.parallel.active_sequence import ActiveSequence, active_sequence, is_ambiguous


def dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: TokenMask | Tensor | None = None,
    *,
    dropout_p: float = 0.0,
    scale: float | None = None,
) -> Tensor:
    """Softmax attention; each key-value head serves H / Hkv query heads, without copies of it.

    Args:
        query: (B, H, S, K).
        key: (B, Hkv, S, K).
        value: (B, Hkv, S, V).
        mask: which tokens a token sees; None: causal; or a tensor that broadcasts to (B, H, S, S), boolean
            or added to the scores, under context parallel with the rows of this rank and the columns of the
            whole sequence.
        dropout_p: probability of a weight to be dropped; 0 in evaluation is the caller's.
        scale: of the scores; None: 1 / sqrt(K).

    Returns:
        (B, H, S, V).

    Raises:
        ConfigError: the run's backend of context parallel can't honour this; or keys of another length than
            the queries under context parallel.
    """
    mask = TokenMask() if mask is None else mask
    active = active_sequence(query.shape[2])
    if active is not None:
        return _on_shards(query, key, value, mask, active, dropout_p, scale)
    if isinstance(mask, Tensor):
        bias, causal = mask, False
    elif mask.is_plain(key.shape[2]):
        bias, causal = None, mask.causal
    else:
        bias = mask.bias((0, query.shape[2]), (0, key.shape[2]), query.device, query.dtype)
        causal = False
    return F.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=bias,
        dropout_p=dropout_p,
        is_causal=causal,
        scale=scale,
        enable_gqa=query.shape[1] != key.shape[1],
    )


def token_positions(length: int, device: torch.device | None = None) -> Tensor:
    """Where in the whole sequence each of ``length`` tokens stands that a model sees.

    Returns:
        (length,) int64: ``torch.arange(length)`` where nothing is sharded, else this rank's part of it.
    """
    active = active_sequence(length)
    if active is None:
        return torch.arange(length, device=device)
    return active.shards.positions(torch.device("cpu") if device is None else device)


class DotProductAttention(nn.Module):
    """:func:`dot_product_attention` as a module, so that it has a name and can be replaced.

    Args:
        window: a token sees this many tokens, itself included; None: all before it.
        dropout_p: probability of a weight to be dropped in training.
        scale: of the scores; None: 1 / sqrt(K).
    """

    def __init__(
        self, window: int | None = None, *, dropout_p: float = 0.0, scale: float | None = None
    ) -> None:
        super().__init__()
        self.window, self.dropout_p, self.scale = window, dropout_p, scale

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, mask: TokenMask | Tensor | None = None
    ) -> Tensor:
        """(B, H, S, K), (B, Hkv, S, K), (B, Hkv, S, V) -> (B, H, S, V)."""
        if self.window is not None and not isinstance(mask, Tensor):
            mask = TokenMask(window=self.window) if mask is None else mask.with_window(self.window)
        dropout_p = self.dropout_p if self.training else 0.0
        return dot_product_attention(query, key, value, mask, dropout_p=dropout_p, scale=self.scale)

    def extra_repr(self) -> str:
        """Shown by ``print(model)``."""
        own = {"window": self.window, "dropout_p": self.dropout_p or None, "scale": self.scale}
        return ", ".join(f"{name}={value}" for name, value in own.items() if value is not None)


def _on_shards(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: TokenMask | Tensor,
    active: ActiveSequence,
    dropout_p: float,
    scale: float | None,
) -> Tensor:
    shards = active.shards
    active.num_attentions += 1
    lengths = query.shape[2], key.shape[2]
    if lengths != (shards.local_length,) * 2:
        raise ConfigError(
            f"Attention of {lengths[0]} queries to {lengths[1]} keys under cp={shards.group.size}: this rank "
            f"holds {shards.local_length} tokens of the sequence, and so many queries and keys are expected. "
            "Cross attention, a cache and sequences made inside of the model can't be sharded. Use cp=1."
        )
    sees_all = not isinstance(mask, TokenMask) or not mask.causal
    if sees_all and not torch.compiler.is_compiling() and is_ambiguous(lengths[0]):
        raise ConfigError(
            "Activations are computed again in backward for attention that isn't causal, and the step ran on "
            f"sequences of two lengths of which a rank holds {lengths[0]} tokens: which one is meant isn't "
            "known. Pad them to one length, or don't checkpoint activations."
        )
    if isinstance(mask, Tensor) and mask.shape[-2:] != (shards.local_length, shards.length):
        raise ConfigError(
            f"A mask of shape {tuple(mask.shape)} under cp={shards.group.size}: its rows are this rank's "
            f"{shards.local_length} tokens and its columns the {shards.length} of the whole sequence. Say "
            "the rule instead: titanplug.attention.TokenMask(causal=..., window=..., document_ids=...)."
        )
    backend = require_backend(active.backend, mask, shards, dropout_p)
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    active.in_attention = True
    try:
        return backend(query, key, value, mask, shards, scale, dropout_p)
    finally:
        active.in_attention = False

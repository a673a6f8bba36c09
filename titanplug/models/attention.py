"""Grouped-query attention (Ainslie et al. 2023), and the one place where scores are computed."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from titanplug.errors import ConfigError
from titanplug.models.config import TransformerConfig
from titanplug.models.layers import Linear, RMSNorm
from titanplug.models.rotary import Rotary, Tables, apply_rotary, rotary_dtype


class SequenceContext:
    """What the layers of one forward pass know about their tokens besides the hidden states.

    It is made once per forward pass and keeps what the layers share. A class of its own, neither
    tensors nor a dataclass: FSDP casts the floating-point tensors that it finds among the arguments
    of a block, and would round the rotary tables.

    Args:
        rotary: gives the rotary tables.
        positions: (B, S) whole numbers, or None for 0 to S - 1.
        document_ids: (B, S) whole numbers; a token sees tokens of its own document only. None: each
            row is one document.

    Raises:
        ConfigError: positions or document ids that are not (B, S).
    """

    def __init__(
        self, rotary: Rotary, positions: Tensor | None = None, document_ids: Tensor | None = None
    ) -> None:
        given = {"positions": positions, "document_ids": document_ids}
        problems = [
            f"{name} has shape {tuple(value.shape)}. It must be (batch, sequence), one number a "
            "token. Expand it to the shape of input_ids."
            for name, value in given.items()
            if value is not None and value.dim() != 2
        ]
        if problems:
            raise ConfigError(problems)
        self.rotary = rotary
        self.positions = positions
        self.document_ids = document_ids
        self._tables: dict[torch.dtype, Tables] = {}
        self._masks: dict[tuple[int | None, torch.dtype], Tensor] = {}

    def rotary_tables(self, heads: Tensor) -> Tables:
        """Cosine and sine for ``heads``, which are (B, S, H, K).

        Returns:
            Two tensors, each (S, 1, K/2), or (B, S, 1, K/2) where positions were given.
        """
        dtype = rotary_dtype(heads.dtype)
        if self.positions is None:
            return self.rotary.tables(heads.shape[1], heads.device, dtype)
        if torch.compiler.is_compiling():
            return self.rotary.tables_at(self.positions, dtype)
        if dtype not in self._tables:
            self._tables[dtype] = self.rotary.tables_at(self.positions, dtype)
        return self._tables[dtype]

    def attention_mask(self, query: Tensor, window: int | None) -> Tensor | None:
        """The mask of ``query``, (B, H, S, K); None where plain causal attention is meant.

        Returns:
            (1 or B, 1, S, S), 0 where a token sees another and -inf where not, in the dtype of
            ``query``: each layer would turn a boolean mask into a new one and keep it for backward.
        """
        length = query.shape[-2]
        if window is not None and window >= length:
            window = None
        if window is None and self.document_ids is None:
            return None
        if torch.compiler.is_compiling():
            return build_mask(length, window, self.document_ids, query.device, query.dtype)
        key = (window, query.dtype)
        if key not in self._masks:
            self._masks[key] = build_mask(length, window, self.document_ids, query.device, query.dtype)
        return self._masks[key]


def build_mask(
    length: int,
    window: int | None,
    document_ids: Tensor | None,
    device: torch.device,
    dtype: torch.dtype,
) -> Tensor:
    """An additive mask, causal, within a sliding window and within documents, (1 or B, 1, S, S).

    Args:
        length: S.
        window: a token sees this many tokens, itself included; None: no limit.
        document_ids: (B, S), or None for one document.
        device: where the mask is made.
        dtype: of the mask.
    """
    index = torch.arange(length, device=device)
    distance = index[:, None] - index  # (S, S), query minus key
    seen = distance >= 0
    if window is not None:
        seen = seen & (distance < window)
    if document_ids is not None:
        seen = seen & (document_ids[:, :, None] == document_ids[:, None, :])  # (B, S, S)
    mask = torch.zeros(seen.shape, device=device, dtype=dtype).masked_fill_(~seen, float("-inf"))
    return mask.view(-1, 1, length, length)


def causal_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None) -> Tensor:
    """Softmax attention; each key-value head serves H / Hkv query heads, without copies of it.

    Args:
        query: (B, H, S, K).
        key: (B, Hkv, S, K).
        value: (B, Hkv, S, K).
        mask: additive, broadcastable to (B, H, S, S), causal in itself; None: plain causal.

    Returns:
        (B, H, S, K).
    """
    return F.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        is_causal=mask is None,
        enable_gqa=query.shape[1] != key.shape[1],
    )


class CausalAttention(nn.Module):
    """The seam at which another attention is put in: every score of a layer is computed here.

    Context parallel replaces this module by one that sees the keys of other ranks.

    Args:
        window: a token sees this many tokens, itself included; None: all before it.
    """

    def __init__(self, window: int | None = None) -> None:
        super().__init__()
        self.window = window

    def forward(self, query: Tensor, key: Tensor, value: Tensor, context: SequenceContext) -> Tensor:
        """(B, H, S, K), (B, Hkv, S, K), (B, Hkv, S, K) -> (B, H, S, K)."""
        return causal_attention(query, key, value, context.attention_mask(query, self.window))

    def extra_repr(self) -> str:
        """Shown by ``print(model)``."""
        return "" if self.window is None else f"window={self.window}"


class Attention(nn.Module):
    """Grouped-query attention with rotary positions.

    Under tensor parallel a rank holds a part of the heads, so their number is read off the tensors.

    Args:
        config: the model's.
        output_std: standard deviation of the initial weight of ``wo``.
    """

    def __init__(self, config: TransformerConfig, output_std: float) -> None:
        super().__init__()
        self.head_size = config.head_size
        dim, std, bias = config.dim, config.init_std, config.qkv_bias
        q_width = config.num_heads * config.head_size
        kv_width = config.kv_heads * config.head_size
        self.wq = Linear(dim, q_width, bias=bias, init_std=std)
        self.wk = Linear(dim, kv_width, bias=bias, init_std=std)
        self.wv = Linear(dim, kv_width, bias=bias, init_std=std)
        self.wo = Linear(q_width, dim, init_std=output_std)
        self.q_norm = RMSNorm(config.head_size, config.norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(config.head_size, config.norm_eps) if config.qk_norm else None
        self.core = CausalAttention(config.sliding_window)

    def forward(self, x: Tensor, context: SequenceContext) -> Tensor:
        """(B, S, D) -> (B, S, D)."""
        batch, length, _ = x.shape
        query = self.wq(x).view(batch, length, -1, self.head_size)  # (B, S, H, K)
        key = self.wk(x).view(batch, length, -1, self.head_size)  # (B, S, Hkv, K)
        value = self.wv(x).view(batch, length, -1, self.head_size)
        if self.q_norm is not None and self.k_norm is not None:
            query, key = self.q_norm(query), self.k_norm(key)
        tables = context.rotary_tables(query)
        query, key = apply_rotary(query, tables), apply_rotary(key, tables)
        heads = self.core(query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), context)
        mixed: Tensor = self.wo(heads.transpose(1, 2).reshape(batch, length, -1))
        return mixed

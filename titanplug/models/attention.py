"""Grouped-query attention (Ainslie et al. 2023) with rotary positions."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from titanplug.attention import DotProductAttention, TokenMask
from titanplug.errors import ConfigError
from titanplug.models.config import TransformerConfig
from titanplug.models.layers import Linear, RMSNorm
from titanplug.models.rotary import Rotary, Tables, apply_rotary, rotary_dtype
from titanplug.parallel.active_sequence import active_sequence


class SequenceContext:
    """What the layers of one forward pass know about their tokens besides the hidden states.

    It is made once per forward pass and keeps what the layers share. A class of its own, neither
    tensors nor a dataclass: FSDP casts the floating-point tensors that it finds among the arguments
    of a block, and would round the rotary tables.

    Args:
        rotary: gives the rotary tables.
        positions: (B, S) whole numbers, or None for 0 to S - 1 of the whole sequence.
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
        self.mask = TokenMask(document_ids=document_ids)
        self._tables: dict[torch.dtype, Tables] = {}

    def rotary_tables(self, heads: Tensor) -> Tables:
        """Cosine and sine for ``heads``, which are (B, S, H, K).

        Returns:
            Two tensors, each (S, 1, K/2), or (B, S, 1, K/2) where positions were given.
        """
        dtype, length = rotary_dtype(heads.dtype), heads.shape[1]
        positions = self.positions
        if positions is None:
            active = active_sequence(length)
            if active is None:
                return self.rotary.tables(length, heads.device, dtype)
            positions = active.shards.positions(heads.device)
        if torch.compiler.is_compiling():
            return self.rotary.tables_at(positions, dtype)
        if dtype not in self._tables:
            self._tables[dtype] = self.rotary.tables_at(positions, dtype)
        return self._tables[dtype]


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
        self.core = DotProductAttention(config.sliding_window)

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
        heads = self.core(query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), context.mask)
        mixed: Tensor = self.wo(heads.transpose(1, 2).reshape(batch, length, -1))
        return mixed

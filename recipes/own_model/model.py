"""A small GPT in plain torch, whose attention is titanplug's: on one process that is torch's own.

Letters: B batch, S sequence, D model, H heads, K head dim, V vocabulary.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from titanplug.attention import dot_product_attention, token_positions


class Attention(nn.Module):
    """Causal attention. The number of heads is read off the tensors: a rank may hold a part of them."""

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        self.head_dim = dim // num_heads
        self.query = nn.Linear(dim, dim)
        self.key = nn.Linear(dim, dim)
        self.value = nn.Linear(dim, dim)
        self.out = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        """(B, S, D) -> (B, S, D)."""
        batch, length, _ = x.shape
        query, key, value = (
            layer(x).view(batch, length, -1, self.head_dim).transpose(1, 2)  # (B, H, S, K)
            for layer in (self.query, self.key, self.value)
        )
        query, key = rotate(query), rotate(key)
        heads = dot_product_attention(query, key, value)  # causal
        return self.out(heads.transpose(1, 2).reshape(batch, length, -1))


class FeedForward(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.up = nn.Linear(dim, 4 * dim)
        self.down = nn.Linear(4 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        """(B, S, D) -> (B, S, D)."""
        return self.down(F.gelu(self.up(x)))


class Block(nn.Module):
    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(dim)
        self.attention = Attention(dim, num_heads)
        self.norm2 = nn.LayerNorm(dim)
        self.feed_forward = FeedForward(dim)

    def forward(self, x: Tensor) -> Tensor:
        """(B, S, D) -> (B, S, D)."""
        x = x + self.attention(self.norm1(x))
        return x + self.feed_forward(self.norm2(x))


class GPT(nn.Module):
    def __init__(self, vocab_size: int, dim: int, num_layers: int, num_heads: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, dim)
        self.blocks = nn.ModuleList(Block(dim, num_heads) for _ in range(num_layers))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, vocab_size, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """(B, S) -> (B, S, V)."""
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def rotate(heads: Tensor) -> Tensor:
    """Rotary positions on (B, H, S, K)."""
    length, size = heads.shape[-2:]
    position = token_positions(length, heads.device).float()  # in the whole sequence
    frequency = 10_000 ** -torch.linspace(0, 1, size // 2, device=heads.device)
    angle = torch.outer(position, frequency)  # (S, K/2)
    first, second = heads.float().chunk(2, dim=-1)
    turned = (
        first * angle.cos() - second * angle.sin(),
        second * angle.cos() + first * angle.sin(),
    )
    return torch.cat(turned, dim=-1).to(heads.dtype)

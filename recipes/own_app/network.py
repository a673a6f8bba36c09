"""A network of this app's own: residual blocks on points in the plane."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Network(nn.Module):
    """Logits of two classes, (B, 2), of points (B, 2)."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.first = nn.Linear(2, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.last = nn.Linear(width, 2)

    def forward(self, points: Tensor) -> Tensor:
        x = self.first(points)
        for block in self.blocks:
            x = block(x)
        return self.last(x)

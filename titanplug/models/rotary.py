"""Rotary positions (Su et al. 2021, "RoFormer"), in the half-split order of Hugging Face.

Feature ``i`` of a head turns together with feature ``i + K/2``. (The paper pairs neighbours;
weights published for that order must be permuted, those of Hugging Face fit as they are.)
"""

from __future__ import annotations

import math
from typing import TypeAlias

import torch
from torch import Tensor

from titanplug.models.config import RopeScaling

Tables: TypeAlias = tuple[Tensor, Tensor]
"""Cosine and sine of every angle, each (S, 1, K/2) or (B, S, 1, K/2)."""


class Rotary:
    """Cosine and sine tables, computed when asked for and kept per device and dtype.

    They are no buffers: a model built on the meta device has nothing to materialise, a cast to
    bfloat16 does not touch them, and a checkpoint does not hold them.

    Args:
        head_size: K, even.
        theta: base of the wavelengths.
        scaling: stretching of the frequencies, or None.
    """

    def __init__(self, head_size: int, theta: float, scaling: RopeScaling | None = None) -> None:
        self.head_size = head_size
        self.theta = theta
        self.scaling = scaling
        self._cache: dict[tuple[torch.device, torch.dtype], Tables] = {}

    def tables(self, length: int, device: torch.device, dtype: torch.dtype) -> Tables:
        """Tables of the positions 0 to ``length - 1``, each (S, 1, K/2)."""
        if torch.compiler.is_compiling():
            # In a graph the tables fuse into the rotation; a lookup would guard on the cache.
            return self.tables_at(torch.arange(length, device=device), dtype)
        known = self._cache.get((device, dtype))
        if known is None or len(known[0]) < length:
            # Made in inference mode they could never take part in a backward pass later.
            with torch.inference_mode(False):
                known = self.tables_at(torch.arange(length, device=device), dtype)
            if type(known[0]) is Tensor:  # not the fake tensor of a dry run
                self._cache[device, dtype] = known
        return known[0][:length], known[1][:length]

    def tables_at(self, positions: Tensor, dtype: torch.dtype) -> Tables:
        """Tables of given ``positions``, (S) or (B, S), whole numbers; each (..., S, 1, K/2)."""
        frequencies = self._frequencies(positions.device, dtype)  # (K/2)
        angles = positions[..., None, None].to(dtype) * frequencies
        return angles.cos(), angles.sin()

    def _frequencies(self, device: torch.device, dtype: torch.dtype) -> Tensor:
        """Radians per token of each pair of features, (K/2)."""
        exponents = torch.arange(0, self.head_size, 2, device=device, dtype=dtype) / self.head_size
        frequencies = 1.0 / (self.theta**exponents)
        if self.scaling is None:
            return frequencies
        low, high = self.scaling.low_freq_factor, self.scaling.high_freq_factor
        turns = self.scaling.original_max_position / (2 * math.pi / frequencies)
        keep = ((turns - low) / (high - low)).clamp(0, 1)
        return (1 - keep) * frequencies / self.scaling.factor + keep * frequencies


def apply_rotary(heads: Tensor, tables: Tables) -> Tensor:
    """Turns queries or keys by their positions.

    Args:
        heads: (B, S, H, K). Half types are turned in float32 and rounded once.
        tables: as from :class:`Rotary`.
    """
    cos, sin = tables
    first, second = heads.chunk(2, dim=-1)
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return turned.to(heads.dtype)


def rotary_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of the tables for heads of ``dtype``: float32, or float64 for float64."""
    return torch.float64 if dtype == torch.float64 else torch.float32

"""Loss, perplexity and bits per byte from two sums: negative log likelihood, and what it is divided by.

A mean of batch means depends on the batches. Sums do not: they are kept in float64 (counts in int64),
added over batches and ranks, and divided once. Pure functions first, thin torchmetrics classes below.

Letters: B batch, S sequence, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Module
from torchmetrics import Metric

IGNORE_INDEX = -100
"""Label of a position that has no target."""


def token_nll(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Negative log likelihood summed over the targets, and their number.

    Half types are summed in float32. A batch without targets gives 0 and 0, with a graph.

    Args:
        logits: (B, S, V) scores; may be sharded over the vocabulary under tensor parallel.
        labels: (B, S) int64, ``IGNORE_INDEX`` where there is no target.

    Returns:
        The sum in nats, 0-dim and differentiable, and the number of targets, 0-dim int64.
    """
    if logits.dtype in (torch.bfloat16, torch.float16):
        logits = logits.float()
    nll = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORE_INDEX, reduction="sum")
    return nll, (labels != IGNORE_INDEX).sum()


def bits_per_byte(nll: Tensor, num_bytes: Tensor) -> Tensor:
    """Bits that the model needs for one byte of text, whatever its vocabulary.

    Args:
        nll: summed negative log likelihood in nats.
        num_bytes: UTF-8 bytes that the targets stand for.

    Returns:
        ``nll / (ln 2 * num_bytes)``; NaN without bytes.
    """
    return nll / (math.log(2) * num_bytes)


def perplexity(nll: Tensor, num_targets: Tensor) -> Tensor:
    """``exp(nll / num_targets)`` for a summed negative log likelihood in nats; NaN without targets."""
    return torch.exp(nll / num_targets)


class _NllMetric(Metric):
    """Two sums, over batches and over ranks."""

    is_differentiable = False
    higher_is_better = False
    full_state_update = False

    nll: Tensor
    count: Tensor

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.add_state("nll", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("count", torch.zeros((), dtype=torch.int64), dist_reduce_fx="sum")

    def update(self, nll: Tensor, count: Tensor) -> None:
        """Add a batch.

        Args:
            nll: its summed negative log likelihood in nats, as from :func:`token_nll`.
            count: how many of the metric's unit the sum is about (targets or bytes), a whole number.
        """
        self.nll += nll.detach()
        self.count += count

    def _apply(self, fn: Callable[[Tensor], Tensor], *args: Any) -> Module:
        # `module.to(torch.bfloat16)` reaches metrics too; sums only follow the device.
        return super()._apply(lambda value: value.to(fn(value).device), *args)


class MeanLoss(_NllMetric):
    """Mean loss of a target in nats: ``update(nll, num_targets)``.

    Args:
        **kwargs: of :class:`torchmetrics.Metric`.
    """

    def compute(self) -> Tensor:
        """The mean over all targets seen, on all ranks."""
        return self.nll / self.count


class Perplexity(_NllMetric):
    """Perplexity of the targets: ``update(nll, num_targets)``.

    Args:
        **kwargs: of :class:`torchmetrics.Metric`.
    """

    def compute(self) -> Tensor:
        """The perplexity over all targets seen, on all ranks."""
        return perplexity(self.nll, self.count)


class BitsPerByte(_NllMetric):
    """Bits per byte of the text behind the targets: ``update(nll, num_bytes)``.

    Args:
        **kwargs: of :class:`torchmetrics.Metric`.
    """

    def compute(self) -> Tensor:
        """The bits per byte over all text seen, on all ranks."""
        return bits_per_byte(self.nll, self.count)

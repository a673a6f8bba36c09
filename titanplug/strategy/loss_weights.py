"""The weight of each loss in the gradient of an optimizer step.

A ``training_step`` returns a mean: over its samples (a Tensor), or over ``num_targets`` targets (a dict).
The gradient of the step is that of the mean over all samples, or all targets, of all ranks and of the whole
accumulation window. So each loss is multiplied by its share ``n / N`` before backward; gradients are then
only summed. ``N`` is known beforehand, or costs one all-reduce of one number, where the window is a single
batch. In a longer window the later counts are not known yet: losses get ``n / P`` with a provisional divisor
``P``, and gradients are corrected once by ``P / N`` at the end of the window, before clipping.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import Node

from titanplug.errors import ConfigError

# Gradients of this many elements at most are cleaned on the way from an empty loss to the model's output.
_SMALL = 1 << 20


class LossWeights:
    """Counts of the running accumulation window.

    Args:
        group: process group of the ``batch`` view.
        size: number of ranks in it.
        num_copies: ranks that compute the same loss from their parts of a sequence, so that each one's
            gradient is a part of the sum.
    """

    def __init__(self, group: dist.ProcessGroup | None, size: int, num_copies: int = 1) -> None:
        self._group = group
        self._size = size
        self._num_copies = num_copies
        self._counts: list[int | Tensor] = []
        self._totals: list[int | None] = []
        self._provisional = 1.0
        self._is_exact = False

    def reset(self) -> None:
        """Start a new window."""
        self._counts, self._totals = [], []
        self._is_exact = False

    def add(self, num_samples: int, total: int | None, output: Any) -> Any:
        """Count one step's loss.

        Args:
            num_samples: rows of the batch that count, on this rank.
            total: rows that count on all ranks; None where unknown.
            output: what ``training_step`` returned.

        Returns:
            The output, its loss replaced by 0 where it has no targets (a mean over none is 0/0).

        Raises:
            ConfigError: ``num_targets`` is not a single number.
        """
        output, count = counted(num_samples, output)
        self.add_count(count, total)
        return output

    def add_count(self, count: int | Tensor, total: int | None) -> None:
        """Count one step's loss, of which the count is known: samples, or targets as a 0-dim tensor.

        Raises:
            ConfigError: the window has counts of the other kind.
        """
        if self._counts and isinstance(count, Tensor) != isinstance(self._counts[-1], Tensor):
            raise ConfigError(
                "training_step returned `num_targets` for some batches of an accumulation window and not "
                "for others; a mean over samples and a mean over targets can't be added. Return it always "
                "or never."
            )
        self._counts.append(count)
        self._totals.append(None if isinstance(count, Tensor) else total)

    @property
    def count(self) -> int | Tensor:
        """Samples or targets of the latest step, on this rank."""
        return self._counts[-1]

    def scale(self, loss: Tensor, window: int) -> Tensor:
        """The latest step's loss, as it goes into backward.

        Args:
            loss: the loss as Lightning passes it, divided by ``window``.
            window: batches in a full accumulation window.
        """
        count, total = self._counts[-1], self._totals[-1]
        if isinstance(count, int) and total is not None:
            if len(self._counts) == 1:
                self._provisional = float(max(total, 1) * window)
            factor = count * window / (self._provisional * self._num_copies)
            return loss if factor == 1.0 else loss * factor
        if window == 1:
            share = torch.as_tensor(count, dtype=torch.float64, device=loss.device)
            self._provisional, self._is_exact = 1.0, True
            total_share = self._sum(share).clamp_min(1.0) * self._num_copies
            return loss * (share / total_share).to(loss.dtype)
        self._provisional = float(window * self._size)
        divisor = self._size * self._num_copies
        return loss * (torch.as_tensor(count, device=loss.device) / divisor).to(loss.dtype)

    def scale_part(self, loss: Tensor, count: int | Tensor, total: int | None, window: int) -> Tensor:
        """The loss of a microbatch as it goes into backward, before the counts of its batch are known.

        Args:
            loss: a mean over ``count``.
            count: samples, or targets, of the microbatch.
            total: samples of the batch on all ranks; None where unknown.
            window: batches in a full accumulation window.
        """
        divisor = self._divisor(count, total, window) * self._num_copies
        if not isinstance(count, Tensor):
            return loss * (count / divisor)
        return loss * (torch.as_tensor(count, dtype=torch.float64, device=loss.device) / divisor).to(
            loss.dtype
        )

    def add_batch(self, count: int | Tensor, total: int | None, window: int) -> None:
        """Count a batch whose microbatches went through :meth:`scale_part`, on this rank or on another.

        Args:
            count: samples, or targets, of all its microbatches.
            total: as there.
            window: as there.
        """
        self._provisional = self._divisor(count, total, window)
        self._is_exact = False
        self.add_count(count, total)

    def _divisor(self, count: int | Tensor, total: int | None, window: int) -> float:
        if self._counts:
            return self._provisional
        known = total is not None and not isinstance(count, Tensor)
        return float(max(total or 0, 1) if known else self._size) * window

    def correction(self, device: torch.device) -> Tensor | None:
        """Factor for the gradients at the end of the window; None where they are right already."""
        counts, totals = self._counts, self._totals
        if not counts:
            return None
        known = [total for total in totals if total is not None]
        if len(known) == len(totals):
            factor = self._provisional / max(sum(known), 1)
            return None if factor == 1.0 else torch.tensor(factor, dtype=torch.float64, device=device)
        if self._is_exact:
            return None
        own = torch.stack([torch.as_tensor(n, dtype=torch.float64, device=device) for n in counts])
        return self._provisional / self._sum(own.sum()).clamp_min(1.0)

    def _sum(self, value: Tensor) -> Tensor:
        if self._size == 1:
            return value
        total = value.clone()
        dist.all_reduce(total, group=self._group)
        return total


def counted(num_samples: int, output: Any) -> tuple[Any, int | Tensor]:
    """What a step returned, its loss 0 where it has no targets; and what the loss is a mean over.

    Args:
        num_samples: rows of the batch that count, on this rank.
        output: what ``training_step`` returned.

    Raises:
        ConfigError: ``num_targets`` is not a single number.
    """
    targets = output.get("num_targets") if isinstance(output, Mapping) else None
    if targets is None:
        return _without_loss(output) if num_samples == 0 else output, num_samples
    loss = output["loss"]
    count = torch.as_tensor(targets, device=loss.device).detach()
    if count.numel() != 1:
        raise ConfigError(
            f"training_step returned num_targets of shape {tuple(count.shape)}: it is one number, how "
            "many targets the loss is a mean over. Sum it."
        )
    count = count.reshape(())
    if num_samples == 0:
        count = torch.zeros_like(count)
    return {**output, "loss": _zero_if_empty(loss, count)}, count


def _without_loss(output: Any) -> Any:
    loss = output["loss"] if isinstance(output, Mapping) else output
    if not isinstance(loss, Tensor):
        return output
    zero = _zero_if_empty(loss, torch.zeros((), device=loss.device))
    return {**output, "loss": zero} if isinstance(output, Mapping) else zero


def _zero_if_empty(loss: Tensor, count: Tensor) -> Tensor:
    """``loss``, or 0 with a gradient of exactly 0 where ``count`` is 0, without asking the host."""
    empty = count == 0
    _clean_gradients(loss.grad_fn, empty)
    return torch.where(empty, torch.zeros_like(loss), loss)


def _clean_gradients(start: Node | None, empty: Tensor) -> None:
    """Make the small gradients on the way back from an empty loss 0.

    0 times the slope of a division by no targets is NaN, which would reach every weight. Between the loss
    and the model's output lie a few nodes with small gradients; those are set to 0 where the loss is empty.
    """

    def clean(grads: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
        return tuple(None if grad is None else grad.masked_fill(empty.to(grad.device), 0) for grad in grads)

    pending, seen = [start], set()
    while pending:
        node = pending.pop()
        if node is None or node in seen or not _has_small_gradients(node):
            continue
        seen.add(node)
        node.register_prehook(clean)
        pending += [parent for parent, _ in node.next_functions]


def _has_small_gradients(node: Node) -> bool:
    metadata = getattr(node, "_input_metadata", None) or ()
    return all(torch.Size(meta.shape).numel() <= _SMALL for meta in metadata)


def num_rows(batch: Any) -> int:
    """Length of the first dimension of the first tensor in a batch; 1 where there is none."""
    stack = [batch]
    while stack:
        item = stack.pop()
        if isinstance(item, Tensor):
            if item.ndim:
                return item.shape[0]
        elif isinstance(item, Mapping):
            stack += reversed(list(item.values()))
        elif isinstance(item, list | tuple):
            stack += reversed(item)
        elif hasattr(item, "__dataclass_fields__"):
            stack += reversed(list(vars(item).values()))
    return 1

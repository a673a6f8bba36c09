"""Cross entropy of logits whose columns are split over the tensor axis.

Shapes: N targets, V classes, V_local classes on this rank, n ranks of the axis.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from titanplug.parallel.collectives import AxisGroup, all_gather_dim


class _CrossEntropy(torch.autograd.Function):
    """Negative log likelihood (N,) of targets (N,) from this rank's columns (N, V_local).

    Each rank's log-sum-exp and target logit are gathered, two numbers a token; the log-sum-exp of those
    is that of the whole row. Backward is local: softmax minus one-hot on this rank's columns.
    """

    @staticmethod
    def forward(
        ctx: Any,
        local: Tensor,
        target: Tensor,
        num_classes: int,
        group: AxisGroup,
        ignore_index: int,
    ) -> Tensor:
        start, width = group.block(num_classes)
        column = target - start
        mine = (column >= 0) & (column < width) & (target != ignore_index)
        column = column.masked_fill(~mine, 0)
        if width:
            lse = torch.logsumexp(local, -1)
            picked = local.gather(-1, column.unsqueeze(-1)).squeeze(-1).masked_fill(~mine, 0.0)
        else:
            lse = local.new_full(target.shape, float("-inf"))
            picked = torch.zeros_like(lse)
        parts = all_gather_dim(torch.stack([lse, picked]).unsqueeze(0), 0, group)  # (n, 2, N)
        lse = torch.logsumexp(parts[:, 0], 0)
        ignored = target == ignore_index
        ctx.save_for_backward(local, lse, column, mine, ignored)
        return (lse - parts[:, 1].sum(0)).masked_fill(ignored, 0.0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        local, lse, column, mine, ignored = ctx.saved_tensors
        grad = grads[0].masked_fill(ignored, 0.0).unsqueeze(-1)  # (N, 1)
        result = torch.exp(local - lse.unsqueeze(-1)).mul_(grad)
        if local.shape[-1]:
            result.scatter_add_(-1, column.unsqueeze(-1), -grad * mine.unsqueeze(-1))
        return result, None, None, None, None


def sharded_cross_entropy(
    local: Tensor, target: Tensor, num_classes: int, group: AxisGroup, *, ignore_index: int = -100
) -> Tensor:
    """Loss of each target, 0 where ignored, in float32 or better.

    Args:
        local: (N, V_local), this rank's columns of the logits.
        target: (N,) classes from 0 to V - 1, or ``ignore_index``; equal on all ranks of the axis.
        num_classes: V.
        group: the tensor axis.
        ignore_index: target that doesn't count.

    Returns:
        (N,) losses, equal on all ranks.

    Raises:
        RuntimeError: a target is neither a class nor ``ignore_index``; without waiting for a GPU.
    """
    known = (target >= 0) & (target < num_classes) | (target == ignore_index)
    torch._assert_async(
        known.all(),
        f"cross_entropy: a target is neither a class, from 0 to {num_classes - 1}, nor "
        f"ignore_index={ignore_index}. Correct the labels, or pass the ignore_index that they use.",
    )
    half = local.dtype in (torch.bfloat16, torch.float16)
    result: Tensor = _CrossEntropy.apply(  # type: ignore[no-untyped-call]
        local.float() if half else local, target, num_classes, group, ignore_index
    )
    return result

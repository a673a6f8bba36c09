"""One reduction for what Lightning asks its strategy to reduce."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

_OPS = {
    "sum": dist.ReduceOp.SUM,
    "mean": dist.ReduceOp.SUM,
    "avg": dist.ReduceOp.SUM,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
    "product": dist.ReduceOp.PRODUCT,
}


def reduce_tensor(tensor: Tensor, group: dist.ProcessGroup | None, reduce_op: Any) -> Tensor:
    """Reduce a tensor over a group into a new tensor.

    The mean of single numbers, and of integers, is a float64. Rounded down, as Lightning has it, the mean
    of batch sizes 5 and 4 makes an epoch's mean of ones 1.125; and a quotient of two means is exact only
    where both are rounded alike.

    Args:
        tensor: any shape.
        group: the group; None: all processes.
        reduce_op: ``"mean"``, ``"sum"``, ``"max"``, ``"min"``, ``"product"``, or torch's ``ReduceOp``; None
            is the sum.

    Raises:
        ValueError: another operation is asked for.
    """
    name = "sum" if reduce_op is None else str(reduce_op).rpartition(".")[2].lower()
    if name not in _OPS:
        raise ValueError(f"reduce_op={reduce_op!r}: reduce by one of {', '.join(_OPS)}.")
    if not dist.is_initialized() or dist.get_world_size(group) == 1:
        return tensor
    mean = name in ("mean", "avg")
    exact = mean and (tensor.ndim == 0 or not tensor.is_floating_point())
    whole = tensor.to(torch.float64, copy=True) if exact else tensor.clone()
    whole = whole.contiguous()
    dist.all_reduce(whole, op=_OPS[name], group=group)
    return whole / dist.get_world_size(group) if mean else whole


def gather_tensor(tensor: Tensor, group: dist.ProcessGroup | None, sync_grads: bool) -> Tensor:
    """Gather tensors of one shape from all ranks of a group.

    Args:
        tensor: any shape, equal on all ranks.
        group: the group; None: all processes.
        sync_grads: let gradients flow back, those of all ranks added up. (torch's own function does that
            by calls that gloo has for the group of all processes only.)

    Returns:
        One more dimension in front, over the ranks.
    """
    if not dist.is_initialized():
        return tensor
    if sync_grads:
        gathered: Tensor = _Gather.apply(tensor, group)  # type: ignore[no-untyped-call]
        return gathered
    return _gather(tensor.detach(), group)


class _Gather(torch.autograd.Function):
    """Gathers forward; backward adds up what all ranks hand back and keeps this rank's part."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: dist.ProcessGroup | None) -> Tensor:
        ctx.group = group
        return _gather(tensor, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        total = grads[0].contiguous().clone()
        dist.all_reduce(total, group=ctx.group)
        return total[dist.get_rank(ctx.group)], None


def _gather(tensor: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    tensor = tensor.contiguous()
    parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, tensor, group=group)
    return torch.stack(parts)

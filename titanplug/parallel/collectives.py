"""Collectives over one axis that autograd can run through, on plain local tensors.

Each has a forward and a backward rule; together they are the f and g operators of tensor parallel
(Shoeybi et al. 2019, "Megatron-LM") and of sequence parallel (Korthikanti et al. 2022). They call
torch's functional collectives by operator, so that a call costs few Python frames, and a compiler or a
dispatch mode sees them.

Shapes: B batch, S sequence, D features, n ranks of the axis.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

_ops = torch.ops._c10d_functional


@dataclass(frozen=True)
class AxisGroup:
    """The process group of one axis, in the form that the operators take.

    Args:
        name: name of the process group.
        size: number of ranks n.
        rank: this process's position.
    """

    name: str
    size: int
    rank: int

    @classmethod
    def of(cls, mesh: DeviceMesh) -> AxisGroup:
        """The group of a one-dimensional mesh."""
        group = mesh.get_group()
        return cls(group.group_name, dist.get_world_size(group), dist.get_rank(group))

    def block(self, total: int) -> tuple[int, int]:
        """First index and length of this rank's block of ``total``; the last blocks may be short.

        The same rule as ``torch.chunk`` and DTensor's ``Shard``.
        """
        width = -(-total // self.size)
        start = min(self.rank * width, total)
        return start, min(width, total - start)


def all_reduce(x: Tensor, group: AxisGroup) -> Tensor:
    """Sum over the axis."""
    result: Tensor = _ops.wait_tensor(_ops.all_reduce(x.contiguous(), "sum", group.name))
    return result


def all_gather_dim(x: Tensor, dim: int, group: AxisGroup) -> Tensor:
    """Blocks of equal length put together along ``dim``: (.., k, ..) on each rank to (.., n k, ..)."""
    gathered: Tensor = _ops.wait_tensor(
        _ops.all_gather_into_tensor(x.contiguous(), group.size, group.name)
    )
    dim %= x.ndim
    if dim == 0 or all(size == 1 for size in x.shape[:dim]):
        # The blocks already lie one after the other.
        return gathered.view(*x.shape[:dim], group.size * x.shape[dim], *x.shape[dim + 1 :])
    blocks = gathered.view(group.size, *x.shape).movedim(0, dim)
    return blocks.reshape(*x.shape[:dim], group.size * x.shape[dim], *x.shape[dim + 1 :])


def reduce_scatter_dim(x: Tensor, dim: int, group: AxisGroup) -> Tensor:
    """Sum over the axis, of which each rank keeps its block along ``dim``, whose length n divides."""
    dim %= x.ndim
    shape = (*x.shape[:dim], x.shape[dim] // group.size, *x.shape[dim + 1 :])
    blocks = x.view(*x.shape[:dim], group.size, *shape[dim:]) if x.is_contiguous() else None
    if blocks is None:
        blocks = x.reshape(*x.shape[:dim], group.size, *shape[dim:])
    flat = blocks.movedim(dim, 0).contiguous().view(group.size * shape[0], *shape[1:])
    result: Tensor = _ops.wait_tensor(
        _ops.reduce_scatter_tensor(flat, "sum", group.size, group.name)
    )
    return result


class _Gather(torch.autograd.Function):
    """Forward all-gather, backward reduce-scatter: the gradients of the ranks are parts of a sum."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: AxisGroup) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return all_gather_dim(x, dim, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return reduce_scatter_dim(grads[0], ctx.dim, ctx.group), None, None


class _Scatter(torch.autograd.Function):
    """Forward reduce-scatter of partial sums, backward all-gather."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: AxisGroup) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return reduce_scatter_dim(x, dim, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return all_gather_dim(grads[0], ctx.dim, ctx.group), None, None


class _Copy(torch.autograd.Function):
    """Forward identity, backward all-reduce: operator f of Megatron-LM."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: AxisGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return all_reduce(grads[0], ctx.group), None


class _Reduce(torch.autograd.Function):
    """Forward all-reduce, backward identity: operator g of Megatron-LM."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: AxisGroup) -> Tensor:
        return all_reduce(x, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return grads[0], None


class _GatherBlocks(torch.autograd.Function):
    """Forward all-gather of blocks of unequal length, backward this rank's block.

    For results that every rank then uses alike, so that each holds the whole gradient.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, total: int, group: AxisGroup) -> Tensor:
        ctx.dim, ctx.total, ctx.group = dim, total, group
        width = -(-total // group.size)
        missing = width - x.shape[dim]
        if missing:
            pad = x.new_zeros(*x.shape[:dim], missing, *x.shape[dim + 1 :])
            x = torch.cat([x, pad], dim)
        return all_gather_dim(x, dim, group).narrow(dim, 0, total)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        start, length = ctx.group.block(ctx.total)
        return grads[0].narrow(ctx.dim, start, length), None, None, None


def gather_from_shards(x: Tensor, dim: int, group: AxisGroup) -> Tensor:
    """Gather shards whose whole is then used differently on each rank (a sequence, before a layer
    that is split by columns): the gradient is the sum over ranks, scattered.
    """
    result: Tensor = _Gather.apply(x, dim, group)  # type: ignore[no-untyped-call]
    return result


def scatter_sum(x: Tensor, dim: int, group: AxisGroup) -> Tensor:
    """Sum partial results over the axis and keep this rank's shard along ``dim``.

    Raises:
        ValueError: the number of ranks doesn't divide the length along ``dim``.
    """
    if x.shape[dim] % group.size:
        raise ValueError(
            f"A sequence of {x.shape[dim]} on tp={group.size}: sequence parallel splits the sequence over "
            f"tp, so tp must divide it. Pad the batch to a multiple of {group.size}, or use "
            "TitanStrategy(sequence_parallel=False)."
        )
    result: Tensor = _Scatter.apply(x, dim, group)  # type: ignore[no-untyped-call]
    return result


def copy_to_shards(x: Tensor, group: AxisGroup) -> Tensor:
    """The same tensor, whose gradient is the sum of what the ranks' layers give it."""
    result: Tensor = _Copy.apply(x, group)  # type: ignore[no-untyped-call]
    return result


def reduce_sum(x: Tensor, group: AxisGroup) -> Tensor:
    """Sum partial results over the axis; every rank keeps the sum."""
    result: Tensor = _Reduce.apply(x, group)  # type: ignore[no-untyped-call]
    return result


def gather_blocks(x: Tensor, dim: int, total: int, group: AxisGroup) -> Tensor:
    """Gather blocks that make up ``total`` along ``dim``, for use alike on every rank."""
    result: Tensor = _GatherBlocks.apply(  # type: ignore[no-untyped-call]
        x, dim % x.ndim, total, group
    )
    return result

"""Collectives over one axis that autograd can run through, on plain local tensors.

Each has a forward and a backward rule; together they are the f and g operators of tensor parallel
(Shoeybi et al. 2019, "Megatron-LM") and of sequence parallel (Korthikanti et al. 2022). They call
the process group itself, which costs no Python frames.

Shapes: B batch, S sequence, D features, n ranks of the axis.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True)
class AxisGroup:
    """The process group of one axis, in the form that the operators take.

    Args:
        group: the process group.
        size: number of ranks n.
        rank: this process's position.

    Attributes:
        name: of the group, by which a compiled graph finds it.
    """

    group: dist.ProcessGroup
    size: int
    rank: int
    name: str = field(init=False, default="")

    def __post_init__(self) -> None:
        """Look the name up once."""
        object.__setattr__(self, "name", getattr(self.group, "group_name", ""))

    @classmethod
    def of(cls, mesh: DeviceMesh) -> AxisGroup:
        """The group of a one-dimensional mesh."""
        group = mesh.get_group()
        return cls(group, dist.get_world_size(group), dist.get_rank(group))

    def block(self, total: int) -> tuple[int, int]:
        """First index and length of this rank's block of ``total``; the last blocks may be short.

        The same rule as ``torch.chunk`` and DTensor's ``Shard``.
        """
        width = -(-total // self.size)
        start = min(self.rank * width, total)
        return start, min(width, total - start)


def all_reduce(x: Tensor, group: AxisGroup) -> Tensor:
    """Sum over the axis, as a new tensor."""
    total = x.clone(memory_format=torch.contiguous_format)
    group.group.allreduce([total]).wait()
    return total


def _all_gather(x: Tensor, group: AxisGroup) -> Tensor:
    """(k, ..) on each rank, contiguous, to (n k, ..)."""
    gathered = x.new_empty(group.size * x.shape[0], *x.shape[1:])
    group.group._allgather_base(gathered, x).wait()
    return gathered


def _reduce_scatter(x: Tensor, group: AxisGroup) -> Tensor:
    """(n k, ..) on each rank, contiguous, to this rank's (k, ..) of the sum."""
    block = x.new_empty(x.shape[0] // group.size, *x.shape[1:])
    group.group._reduce_scatter_base(block, x).wait()  # type: ignore[call-arg]
    return block


def all_gather_dim(x: Tensor, dim: int, group: AxisGroup) -> Tensor:
    """Blocks of equal length put together along ``dim``: (.., k, ..) on each rank to (.., n k, ..)."""
    gathered = _all_gather(x.contiguous(), group)
    dim %= x.ndim
    shape = x.shape
    whole = (*shape[:dim], group.size * shape[dim], *shape[dim + 1 :])
    if gathered.shape == whole:
        return gathered
    if shape[:dim].numel() == 1:
        # The blocks already lie one after the other. A result of an autograd function that is a view
        # could not be written into (`x += y`), so this isn't one; nothing else holds its memory.
        result: Tensor = torch.ops.aten._unsafe_view(gathered, whole)
        return result
    return gathered.view(group.size, *shape).movedim(0, dim).reshape(whole)


def reduce_scatter_dim(x: Tensor, dim: int, group: AxisGroup) -> Tensor:
    """Sum over the axis, of which each rank keeps its block along ``dim``, whose length n divides."""
    dim %= x.ndim
    shape = (*x.shape[:dim], x.shape[dim] // group.size, *x.shape[dim + 1 :])
    blocks = x.reshape(*shape[:dim], group.size, *shape[dim:]).movedim(dim, 0).contiguous()
    return _reduce_scatter(blocks.view(group.size * shape[0], *shape[1:]), group)


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
    """Forward all-gather of blocks, short ones padded to the longest; backward this rank's block.

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
        return all_gather_dim(x, dim, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        start, length = ctx.group.block(ctx.total)
        return grads[0].narrow(ctx.dim, start, length), None, None, None


class _Exchange(torch.autograd.Function):
    """Forward and backward all-to-all."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: AxisGroup) -> Tensor:
        ctx.group = group
        return _all_to_all(x, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return _all_to_all(grads[0].contiguous(), ctx.group), None


def _all_to_all(x: Tensor, group: AxisGroup) -> Tensor:
    received = torch.empty_like(x)
    group.group.alltoall_base(received, x, [], []).wait()
    return received


def exchange(x: Tensor, group: AxisGroup) -> Tensor:
    """Send the r-th of n blocks to rank r: (n, ..), contiguous, by receiver to (n, ..) by sender."""
    if torch.compiler.is_compiling():
        compiled: Tensor = _exchange_op(x, group.name)
        return compiled
    received: Tensor = _Exchange.apply(x, group)  # type: ignore[no-untyped-call]
    return received


@torch.library.custom_op("titanplug::exchange", mutates_args=())
def _exchange_op(x: Tensor, group_name: str) -> Tensor:
    """:func:`exchange` in a compiled graph."""
    return _all_to_all(x.contiguous(), named_group(group_name))


@_exchange_op.register_fake
def _(x: Tensor, group_name: str) -> Tensor:
    return x.new_empty(x.shape)


def _keep_group(ctx: Any, inputs: tuple[Tensor, str], output: Tensor) -> None:
    ctx.group_name = inputs[1]


def _exchange_back(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
    return _exchange_op(grad, ctx.group_name), None


_exchange_op.register_autograd(_exchange_back, setup_context=_keep_group)


def named_group(name: str) -> AxisGroup:
    """The group of that name."""
    group = dist.distributed_c10d._resolve_process_group(name)  # type: ignore[arg-type]
    return AxisGroup(group, dist.get_world_size(group), dist.get_rank(group))


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
    # Outside of the function, whose result could otherwise not be written into.
    return result if result.shape[dim] == total else result.narrow(dim, 0, total)

"""Gradients as one thing over all ranks: their weight, their norm, clipping, partial sums.

Parameters may be plain tensors and DTensors on several meshes, in any mix. All work is done on local
shards; what is communicated is one number (the norm) and one flat buffer (partial sums over ``tp``).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from titanplug.parallel.collectives import AxisGroup, all_reduce


def local_tensor(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor, sharing its memory."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def local_gradients(parameters: Iterable[nn.Parameter]) -> list[Tensor]:
    """This rank's parts of the gradients that exist."""
    return [
        grad._local_tensor if isinstance(grad, DTensor) else grad
        for parameter in parameters
        if (grad := parameter.grad) is not None
    ]


@dataclass(frozen=True)
class GradientGroup:
    """Parameters whose gradients ``num_copies`` ranks hold alike."""

    parameters: list[nn.Parameter]
    num_copies: int


def group_by_copies(
    parameters: Iterable[nn.Parameter],
    num_ranks: int,
    num_stages: Mapping[nn.Parameter, int] = MappingProxyType({}),
) -> list[GradientGroup]:
    """Group parameters by the number of ranks that hold the same shard of each.

    Summed over all ranks and divided by this number, every element counts once, whatever the layout.

    Args:
        parameters: of this rank.
        num_ranks: ranks that hold this rank's pipeline stages; all ranks without pipeline.
        num_stages: for parameters that several ranks of the pipeline hold, how many.
    """
    groups: dict[int, list[nn.Parameter]] = {}
    for parameter in parameters:
        shards = 1
        if isinstance(parameter, DTensor):
            shards = math.prod(
                parameter.device_mesh.size(dim)
                for dim, placement in enumerate(parameter.placements)
                if not placement.is_replicate()  # plain and strided shards
            )
        copies = num_ranks * num_stages.get(parameter, 1) // shards
        groups.setdefault(copies, []).append(parameter)
    return [GradientGroup(members, copies) for copies, members in groups.items()]


@torch.no_grad()
def global_gradient_norm(groups: Sequence[GradientGroup], norm_type: float, device: torch.device) -> Tensor:
    """Norm of all gradients together, as one process would compute it; equal on all ranks.

    Args:
        groups: from :func:`group_by_copies`.
        norm_type: p of the p-norm; ``inf`` for the largest absolute value.
        device: where the result lives.

    Returns:
        0-dim float64 tensor; NaN where any gradient is. One all-reduce over all ranks, of one number, or of
        two for ``inf``.
    """
    infinite = math.isinf(norm_type)
    total = torch.zeros((), dtype=torch.float64, device=device)
    for group in groups:
        grads = local_gradients(group.parameters)
        if not grads:
            continue
        if infinite:
            # An empty shard has no largest value.
            norms = torch._foreach_norm([grad for grad in grads if grad.numel()] or [total], norm_type)
            total = torch.maximum(total, torch.stack(norms).double().max())
        else:
            norms = torch._foreach_norm(grads, norm_type)
            powers = torch.stack(norms).double().pow_(norm_type)
            total += powers.sum() / group.num_copies
    several = dist.is_initialized() and dist.get_world_size() > 1
    if infinite:
        return _largest_of_ranks(total) if several else total
    if several:
        dist.all_reduce(total)
    return total.pow_(1.0 / norm_type)


def _largest_of_ranks(value: Tensor) -> Tensor:
    # A backend's maximum may drop NaN, on some ranks and not on others: that there is one is sent beside it.
    pair = torch.stack([value.nan_to_num(nan=0.0, posinf=math.inf), value.isnan().to(value.dtype)])
    dist.all_reduce(pair, op=dist.ReduceOp.MAX)
    return torch.where(pair[1] > 0, math.nan, pair[0])


@torch.no_grad()
def clip_by_norm(parameters: Iterable[nn.Parameter], max_norm: float, norm: Tensor) -> None:
    """Scale gradients so that their global ``norm`` is at most ``max_norm``; the rule of torch."""
    scale_gradients(parameters, torch.clamp(max_norm / (norm + 1e-6), max=1.0))


@torch.no_grad()
def clip_by_value(parameters: Iterable[nn.Parameter], limit: float) -> None:
    """Clamp each element of the gradients to [-limit, limit]."""
    grads = local_gradients(parameters)
    if grads:
        torch._foreach_clamp_min_(grads, -limit)
        torch._foreach_clamp_max_(grads, limit)


@torch.no_grad()
def scale_gradients(parameters: Iterable[nn.Parameter], factor: Tensor) -> None:
    """Multiply gradients by a 0-dim tensor, without reading it on the host."""
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for grad in local_gradients(parameters):
        by_dtype.setdefault(grad.dtype, []).append(grad)
    for dtype, grads in by_dtype.items():
        torch._foreach_mul_(grads, factor.to(dtype))


@torch.no_grad()
def reduce_partial_gradients(parameters: Sequence[nn.Parameter], group: AxisGroup) -> None:
    """Sum gradients of replicated parameters that each rank of ``group`` holds a part of.

    One all-reduce of one flat buffer for each dtype; half types are added up in float32.
    """
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for grad in local_gradients(parameters):
        by_dtype.setdefault(grad.dtype, []).append(grad)
    for grads in by_dtype.values():
        flat = torch.cat([grad.reshape(-1) for grad in grads])
        if flat.itemsize < 4:
            flat = flat.float()
        flat = all_reduce(flat, group)
        parts = flat.split([grad.numel() for grad in grads])
        torch._foreach_copy_(grads, [part.view(grad.shape) for part, grad in zip(parts, grads, strict=True)])

"""Weights that stages on several ranks share, as an embedding and a head: equal values, summed gradients."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from titanplug.mesh import Mesh
from titanplug.parallel.gradients import local_tensor
from titanplug.parallel.pipeline.stages import PipelineStages


def tie_stages(
    root: nn.Module, stages: PipelineStages, mesh: Mesh
) -> list[tuple[nn.Parameter, dist.ProcessGroup]]:
    """Give all holders of a shared weight the values of that which has its name; a collective over all ranks.

    Args:
        root: laid out, its weights with values.
        stages: its stages.
        mesh: the mesh.

    Returns:
        This rank's shared parameters, each with the group of the ranks that hold the same shard of it.
    """
    lines = mesh.device.mesh.flatten(1).T.tolist()  # for each place on the other axes, its ranks of pp
    groups: dict[tuple[int, ...], dist.ProcessGroup] = {}
    found: list[tuple[nn.Parameter, dist.ProcessGroup]] = []
    for tied in stages.tied:
        if tied.ranks not in groups:
            members = [[line[rank] for rank in tied.ranks] for line in lines]
            groups[tied.ranks], _ = dist.new_subgroups_by_enumeration(members)
        if not tied.alias:
            continue
        parameter, group = root.get_parameter(tied.alias), groups[tied.ranks]
        source = dist.get_global_rank(group, tied.ranks.index(tied.source))
        dist.broadcast(local_tensor(parameter.detach()), src=source, group=group)
        found.append((parameter, group))
    return found


@torch.no_grad()
def reduce_tied_gradients(tied: list[tuple[nn.Parameter, dist.ProcessGroup]]) -> None:
    """Sum the gradients that the holders of each shared weight have; once a window, before clipping."""
    for parameter, group in tied:
        if not parameter.requires_grad:
            continue
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        dist.all_reduce(local_tensor(parameter.grad), group=group)

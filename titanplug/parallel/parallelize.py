"""All techniques in their order, on one page.

pipeline stages -> tensor -> context -> (activation checkpointing) -> (compile) -> FSDP2

Those in brackets come with their own issues. The order matters: what isn't this rank's is left out first, so
that nothing is done to it; FSDP must see the final parameters (DTensors of the tensor axis) and the final
forward of each unit; a module is compiled after everything that changes its forward and before the hooks of
FSDP are put around it. Plans are checked against the whole module, before anything is left out.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from titanplug.errors import ConfigError
from titanplug.mesh import Mesh
from titanplug.parallel.collectives import AxisGroup
from titanplug.parallel.context import ContextParallelized, apply_context_parallel
from titanplug.parallel.fsdp import ShardOptions, apply_fsdp, finish_fsdp
from titanplug.parallel.initialise import broadcast_values, materialize
from titanplug.parallel.pipeline.stages import (
    PipelineOptions,
    PipelineStages,
    apply_pipeline_split,
    enter_stages_first,
)
from titanplug.parallel.pipeline.tied import tie_stages
from titanplug.parallel.styles import TensorOptions
from titanplug.parallel.tensor import (
    TensorParallelized,
    apply_tensor_parallel,
    resolve_styles,
    validate_styles,
)
from titanplug.plan import ParallelPlan, modules_matching
from titanplug.validation import ContextOptions


@dataclass
class Parallelized:
    """A module as it is laid out over the mesh.

    Args:
        mesh: the mesh.
        plan: the plan that was followed.
        tensor: what tensor parallel left to do after backward.
        context: which models run on parts of a sequence.
        fsdp_units: the FSDP units, the root last; empty where there is one data-parallel rank.
        pipeline: the pipeline stages of this rank; None without pipeline.
        tied: parameters that ranks of the pipeline share, with the group of their holders.
        options: the switches it was laid out with, by their names.
    """

    mesh: Mesh
    plan: ParallelPlan
    tensor: TensorParallelized = field(default_factory=TensorParallelized)
    context: ContextParallelized = field(default_factory=ContextParallelized)
    fsdp_units: list[FSDPModule] = field(default_factory=list)
    pipeline: PipelineStages | None = None
    tied: list[tuple[nn.Parameter, dist.ProcessGroup]] = field(default_factory=list)
    options: dict[str, Any] = field(default_factory=dict)

    def partial_parameters(self, root: nn.Module) -> list[nn.Parameter]:
        """Parameters whose gradients are parts of a sum over the tensor axis, also those that are frozen."""
        found = [root.get_parameter(name) for name in self.tensor.partial_gradients]
        return list(dict.fromkeys(found))


def parallelize(
    root: nn.Module,
    plan: ParallelPlan,
    mesh: Mesh,
    *,
    device: torch.device,
    seed: int,
    tensor: TensorOptions,
    shard: ShardOptions,
    pipeline: PipelineOptions,
    context: ContextOptions,
) -> Parallelized:
    """Lay ``root`` out over ``mesh``, in place, and give it its initial weights.

    Args:
        root: the module whose call runs the step, as every rank built it: with values, on the meta
            device, or partly so.
        plan: what to do with which modules, names relative to ``root``.
        mesh: the mesh of the run.
        device: this rank's device.
        seed: the run's seed, for weights on the meta device.
        tensor: switches of tensor parallel.
        shard: switches of FSDP.
        pipeline: how to cut into pipeline stages.
        context: switches of context parallel.

    Raises:
        ConfigError: the module is sharded already, the plan doesn't fit it, or weights on the meta device
            can't be filled.
    """
    _require_whole(root)
    dims = mesh.dims
    shards = mesh["fsdp"].size() * dims.dp_replicate > 1
    result = Parallelized(mesh, plan, options=switches(mesh, tensor, shard, pipeline, context))
    styles = resolve_styles(root, plan) if dims.tp > 1 else {}
    if styles:
        validate_styles(root, styles, dims.tp)
    blocks = modules_matching(root, plan.fsdp_units, "fsdp_units") if shards else {}
    broadcast_values(root, device)
    if dims.pp > 1:
        modules = dict(root.named_modules())
        result.pipeline = apply_pipeline_split(root, plan.pipeline, dims.pp, mesh.rank("pp"), pipeline)
        here = {name for name, module in root.named_modules() if modules.get(name) is module}
        styles = {name: style for name, style in styles.items() if name in here}
        blocks = {name: module for name, module in blocks.items() if name in here}
    if dims.tp > 1:
        result.tensor = apply_tensor_parallel(root, styles, mesh["tp"], tensor)
    if dims.cp > 1:
        split = dims.tp if tensor.sequence_parallel else 1  # what tensor parallel cuts a rank's part by
        group = AxisGroup.of(mesh["cp"])
        result.context = apply_context_parallel(root, plan.sequence_dims, group, context, multiple=split)
    if shards:
        result.fsdp_units = apply_fsdp(root, list(blocks.values()), mesh, shard)
    materialize(root, device, seed)
    finish_fsdp(result.fsdp_units)
    if result.pipeline is not None:
        enter_stages_first(result.pipeline)
        result.tied = tie_stages(root, result.pipeline, mesh)
    return result


def switches(
    mesh: Mesh,
    tensor: TensorOptions,
    shard: ShardOptions,
    pipeline: PipelineOptions,
    context: ContextOptions,
) -> dict[str, Any]:
    """The switches that make a difference on ``mesh``, by their names."""
    used: list[Any] = []
    if mesh.dims.pp > 1:
        used.append(pipeline)
    if mesh.dims.tp > 1:
        used.append(tensor)
    if mesh.dims.cp > 1:
        used.append(context)
    if mesh["fsdp"].size() * mesh.dims.dp_replicate > 1:
        used.append(shard)
    return {item.name: getattr(options, item.name) for options in used for item in fields(options)}


def _require_whole(root: nn.Module) -> None:
    """Check that nobody has laid the module out before."""
    wrapped = [
        f"{name or 'the module'} is a {type(module).__name__}"
        for name, module in root.named_modules()
        if isinstance(module, FullyShardedDataParallel | DistributedDataParallel | FSDPModule)
    ]
    sharded = [
        f"{name} is a DTensor" for name, value in root.named_parameters() if isinstance(value, DTensor)
    ]
    if wrapped or sharded:
        raise ConfigError(
            f"{type(root).__name__} is laid out already: {(wrapped + sharded)[0]}. TitanStrategy does that, "
            "by its degrees and the plan. Build plain modules in __init__ and configure_model."
        )

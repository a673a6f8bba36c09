"""Sharded data parallel (FSDP2) and its form with copies (HSDP) by torch's ``fully_shard``.

The root unit is the module whose call runs the step, so that its hooks gather what no other unit holds,
whatever the step calls. Gradients are summed, not averaged: the weight of each rank's loss is put into
the loss (:mod:`titanplug.parallel.gradients`), which stays right where ranks have unequal numbers of
targets.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from titanplug.mesh import Mesh
from titanplug.plan import ParallelPlan, modules_matching


@dataclass(frozen=True)
class ShardOptions:
    """How parameters are gathered and gradients reduced.

    Args:
        param_dtype: type in which parameters are gathered and used; None: as stored.
        reduce_dtype: type in which gradients are reduced; None: as computed.
        reshard_after_forward: free a unit's whole parameters after its forward and gather them again
            for backward, instead of keeping them.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    reshard_after_forward: bool = True


def apply_fsdp(root: nn.Module, plan: ParallelPlan, mesh: Mesh, options: ShardOptions) -> list[FSDPModule]:
    """Shard the parameters of ``root`` over the ``fsdp`` view, in place.

    Returns:
        The units, the root last.

    Raises:
        ConfigError: a pattern of ``plan.fsdp_units`` matches nothing.
    """
    # Inputs are cast by the precision plugin alone, so that a step sees the batch as it was given.
    policy = MixedPrecisionPolicy(options.param_dtype, options.reduce_dtype, cast_forward_inputs=False)
    units: list[FSDPModule] = []
    # Inner modules first: fully_shard takes what no earlier unit holds.
    blocks = reversed(modules_matching(root, plan.fsdp_units, "fsdp_units").values())
    for module in [*blocks, root]:
        fully_shard(
            module,
            mesh=mesh.hsdp,
            mp_policy=policy,
            reshard_after_forward=options.reshard_after_forward and module is not root,
        )
        assert isinstance(module, FSDPModule)
        module.set_gradient_divide_factor(1.0)
        # A plain sum on every backend; else NCCL would be asked for a sum with a factor of one.
        module.set_force_sum_reduction_for_comms(True)
        units.append(module)
    return units


def set_gradient_sync(units: list[FSDPModule], enabled: bool) -> None:
    """Reduce gradients in backward, or only add them up locally (accumulation)."""
    for unit in units:
        unit.set_requires_gradient_sync(enabled, recurse=False)


def free_gathered(units: list[FSDPModule]) -> None:
    """Free the whole parameters that are left gathered after a forward without backward.

    Without it a later change of the shards (a loaded checkpoint) would not reach the next forward.
    """
    for unit in units:
        unit.reshard()

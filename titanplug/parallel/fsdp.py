"""Sharded data parallel (FSDP2) and its form with copies (HSDP) by torch's ``fully_shard``.

The root unit is the module whose call runs the step, so that its hooks gather what no other unit holds,
whatever the step calls. Gradients are summed, not averaged: the weight of each rank's loss is put into
the loss (:mod:`titanplug.parallel.gradients`), which stays right where ranks have unequal numbers of
targets.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from titanplug.mesh import Mesh


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


def apply_fsdp(
    root: nn.Module, blocks: Sequence[nn.Module], mesh: Mesh, options: ShardOptions
) -> list[FSDPModule]:
    """Shard the parameters of ``root`` over the ``fsdp`` view, in place.

    Args:
        root: the module that is sharded.
        blocks: modules of it that are units of their own, outer ones first.
        mesh: the mesh.
        options: the switches.

    Returns:
        The units, the root last.
    """
    # Inputs are cast by the precision plugin alone, so that a step sees the batch as it was given.
    policy = MixedPrecisionPolicy(options.param_dtype, options.reduce_dtype, cast_forward_inputs=False)
    units: list[FSDPModule] = []
    # Inner modules first: fully_shard takes what no earlier unit holds.
    for module in [*reversed(blocks), root]:
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


def finish_fsdp(units: list[FSDPModule]) -> None:
    """Fix the types of all units, when parameters have their values; before the first forward.

    torch looks at the parameters that train at that forward, and leaves a unit whose parameters are all
    frozen without types: unfrozen later, its gradients would not fit under mixed precision.
    """
    if not units:
        return
    root: Any = units[-1]._get_fsdp_state()
    root._lazy_init()
    for unit in units:
        for group in _param_groups(unit):
            if group._orig_dtype is None:
                first = group.fsdp_params[0]
                group._orig_dtype, group._reduce_dtype = first.orig_dtype, first.reduce_dtype


def set_gradient_sync(units: list[FSDPModule], enabled: bool) -> None:
    """Reduce gradients in backward, or only add them up locally (accumulation)."""
    for unit in units:
        unit.set_requires_gradient_sync(enabled, recurse=False)


def free_gathered(units: list[FSDPModule]) -> None:
    """Free the whole parameters that are left gathered after a forward without backward.

    Without it a later change of the shards (a loaded checkpoint) would not reach the next forward.
    """
    for unit in units:
        for group in _param_groups(unit):
            if group.is_unsharded:
                group._to_sharded()  # unit.reshard() would do nothing inside the root's forward


def gather_for_step(units: list[FSDPModule]) -> None:
    """Gather all parameters for a step of several forwards and backwards, as a pipeline runs them.

    Until :func:`finish_step` nothing is freed or reduced; gradients are added up on the whole parameters.
    """
    for unit in units:
        unit.set_requires_gradient_sync(False, recurse=False)
        unit.set_reshard_after_backward(False, recurse=False)
        unit.set_is_last_backward(False)
    handles = [unit.unshard(async_op=True) for unit in units]
    for handle in handles:
        if handle is not None:
            handle.wait()


def finish_step(units: list[FSDPModule], *, reduce: bool) -> None:
    """After the last backward of a step: free the parameters, and reduce the gradients if asked.

    Args:
        units: of :func:`gather_for_step`.
        reduce: False keeps the gradients whole on this rank, for the next step to add to.
    """
    if not units:
        return
    for unit in units:
        unit.set_requires_gradient_sync(reduce, recurse=False)
        unit.set_reshard_after_backward(True, recurse=False)
        unit.set_is_last_backward(True)
    root: Any = units[-1]._get_fsdp_state()
    # What a backward of the root would end with; no single backward is the last of a pipeline's step.
    root._root_post_backward_final_callback()
    set_gradient_sync(units, True)


def register_backward(units: list[FSDPModule], loss: Tensor) -> None:
    """Let a backward that starts at ``loss`` inside the root's forward reduce the gradients of all units.

    Where a step is over before backward, the root's hooks on its output do this.
    """
    state: Any = units[-1]._get_fsdp_state()
    state._register_pre_backward_hook(loss)


@contextmanager
def gathered_when_called(units: list[FSDPModule]) -> Iterator[None]:
    """Inside, gather what the root holds whenever a module that holds a part of it is called.

    The root's forward gathers it once, at its start; a backward or :func:`free_gathered` inside of that
    forward frees it.
    """
    root = units[-1]
    groups = _param_groups(root)

    def gather(module: nn.Module, args: Any) -> None:
        if not all(group.is_unsharded for group in groups):
            root.unshard()

    holders = {parameter._module_info.module for group in groups for parameter in group.fsdp_params}
    handles = [holder.register_forward_pre_hook(gather) for holder in holders if holder is not root]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def follow_frozen(units: list[FSDPModule]) -> None:
    """Freeze and unfreeze the gathered parameters of the root as its own parameters are.

    Other units do so by themselves when they gather.
    """
    for group in _param_groups(units[-1]):
        if group.is_unsharded:
            for parameter in group.fsdp_params:
                parameter._unsharded_param.requires_grad_(parameter.sharded_param.requires_grad)


def _param_groups(unit: FSDPModule) -> list[Any]:
    state: Any = unit._get_fsdp_state()
    groups: list[Any] = state._fsdp_param_groups
    return groups

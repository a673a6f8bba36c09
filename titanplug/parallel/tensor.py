"""Tensor and sequence parallel: parameters are DTensors, the computation is local.

Names, initial weights, clipping and checkpoints see DTensors on the ``tp`` axis. While a module runs, its
parameters are replaced by their local shards, and the few collectives that its style needs are called
explicitly (:mod:`titanplug.parallel.collectives`). That gives the results of DTensor's own styles for a
twentieth of their Python calls.

Gradients of replicated weights that each rank sees only a part of (norms on a shard of the sequence) are
sums over the axis. They are left local in backward and reduced in one collective before clipping
(:func:`titanplug.parallel.gradients.reduce_partial_gradients`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from titanplug.errors import ConfigError
from titanplug.parallel.collectives import AxisGroup
from titanplug.parallel.styles import TensorOptions, install_style
from titanplug.plan import (
    ColwiseParallel,
    ParallelPlan,
    PrepareModuleInput,
    ReplicateParallel,
    RowwiseParallel,
    SequenceParallel,
    Style,
    modules_matching,
)


@dataclass
class TensorParallelized:
    """What tensor parallel did to a module.

    Args:
        partial_gradients: names of the parameters whose gradients must be summed over the axis.
        group: the axis; None without tensor parallel.
    """

    partial_gradients: list[str] = field(default_factory=list)
    group: AxisGroup | None = None


def apply_tensor_parallel(
    root: nn.Module, styles: Mapping[str, Style], mesh: DeviceMesh, options: TensorOptions
) -> TensorParallelized:
    """Distribute the parameters of ``root`` over the axis and let its modules run on shards, in place.

    Args:
        root: the module that the names of ``styles`` are relative to; its parameters must be equal on
            all ranks, or on the meta device.
        styles: from :func:`resolve_styles`, of the modules that this rank has.
        mesh: the one-dimensional mesh of the ``tp`` axis.
        options: the switches.

    Raises:
        ConfigError: modules that share a weight split it in two ways.
    """
    group = AxisGroup.of(mesh)
    result = TensorParallelized(group=group)
    tied: dict[nn.Parameter, nn.Parameter] = {}
    prepared = [name for name, style in styles.items() if isinstance(style, PrepareModuleInput)]
    for name, style in styles.items():
        module = root.get_submodule(name)
        if module is root:
            # The step itself computes with them, so they stay plain tensors.
            if _has_partial_gradients(style, options):
                result.partial_gradients += [key for key, _ in root.named_parameters(recurse=False)]
            continue
        _distribute(module, style, mesh, tied)
        if _has_partial_gradients(style, options):
            names = [f"{name}.{key}" for key, _ in module.named_parameters()]
            result.partial_gradients += names
        if _has_partial_bias(module, style, options):
            result.partial_gradients.append(f"{name}.bias")
        inside = any(name.startswith(f"{outer}.") for outer in prepared)
        install_style(module, style, group, options, prepared=inside)
    return result


def resolve_styles(root: nn.Module, plan: ParallelPlan) -> dict[str, Style]:
    """Style by module name. Where several patterns match a module, the last one in the plan holds.

    Raises:
        ConfigError: a pattern matches nothing.
    """
    styles: dict[str, Style] = {}
    problems: list[str] = []
    for pattern, style in plan.tensor.items():
        try:
            found = modules_matching(root, [pattern], "tensor")
        except ConfigError as error:
            problems += error.problems
            continue
        styles.update(dict.fromkeys(found, style))
    if problems:
        raise ConfigError(problems)
    return styles


def validate_styles(root: nn.Module, styles: dict[str, Style], tp: int) -> None:
    """Check that each style fits its module and that every parameter is under one.

    Raises:
        ConfigError: all problems at once.
    """
    problems: list[str] = []
    for name, style in styles.items():
        problems += _style_problems(name, root.get_submodule(name), style, tp)
    computing = [name for name, style in styles.items() if not isinstance(style, PrepareModuleInput)]
    seen: set[int] = set()
    for owner, module in root.named_modules():
        for key, parameter in module.named_parameters(recurse=False):
            covered = any(owner == name or owner.startswith(f"{name}.") for name in computing)
            if covered:
                seen.add(id(parameter))
            elif id(parameter) not in seen and module is root:
                problems.append(
                    f"{key}: no style of the tensor-parallel plan covers this parameter of the module "
                    'itself. Add a style for the pattern "" to the plan: ReplicateParallel() if every rank '
                    "computes alike with it, with partial_grad=True if on a shard of the sequence."
                )
            elif id(parameter) not in seen:
                problems.append(
                    f"{owner}.{key}: no style of the tensor-parallel plan covers this parameter, so its "
                    "gradient could be silently incomplete. Add a style for its module: "
                    "SequenceParallel() if it works between blocks, ReplicateParallel() if every rank "
                    "computes it alike."
                )
    if problems:
        raise ConfigError(problems)


def _style_problems(name: str, module: nn.Module, style: Style, tp: int) -> list[str]:
    kind = type(module).__name__
    if not name:
        own = [key for key, _ in module.named_parameters(recurse=False)]
        if not own or isinstance(style, ReplicateParallel):
            return []
        return [
            f"{', '.join(own)}: the plan gives {type(style).__name__} to parameters of the module itself, "
            "with which the step computes as they are. Only ReplicateParallel() fits. Change the style."
        ]
    if isinstance(style, ColwiseParallel):
        if not isinstance(module, nn.Linear):
            return [f"{name}: ColwiseParallel is for nn.Linear, and this is {kind}. Change the style."]
        if style.output == "shard" and module.out_features % tp:
            return [_not_divisible(name, "out_features", module.out_features, tp)]
    if isinstance(style, RowwiseParallel):
        if isinstance(module, nn.Embedding):
            if module.max_norm is not None or module.scale_grad_by_freq or module.sparse:
                return [
                    f"{name}: an embedding with max_norm, scale_grad_by_freq or sparse gradients can't be "
                    "split by its vocabulary. Drop the option, or use ReplicateParallel()."
                ]
            return []
        if not isinstance(module, nn.Linear):
            return [
                f"{name}: RowwiseParallel is for nn.Linear and nn.Embedding, and this is {kind}. Change "
                "the style."
            ]
        if module.in_features % tp:
            return [_not_divisible(name, "in_features", module.in_features, tp)]
    return []


def _not_divisible(name: str, what: str, size: int, tp: int) -> str:
    allowed = [n for n in range(1, min(size, 64) + 1) if size % n == 0]
    return (
        f"{name}: {what}={size} with tp={tp}: tp must divide it. Allowed values of tp: "
        f"{', '.join(map(str, allowed))}."
    )


def _has_partial_gradients(style: Style, options: TensorOptions) -> bool:
    if isinstance(style, ReplicateParallel):
        return style.partial_grad
    return isinstance(style, SequenceParallel) and options.sequence_parallel


def _has_partial_bias(module: nn.Module, style: Style, options: TensorOptions) -> bool:
    # Added to this rank's shard of the sequence of the sum.
    sums = isinstance(style, RowwiseParallel) and style.output == "sequence"
    return sums and options.sequence_parallel and getattr(module, "bias", None) is not None


def _placement(key: str, module: nn.Module, style: Style) -> Placement:
    if isinstance(style, ColwiseParallel):
        return Shard(0)
    if isinstance(style, RowwiseParallel):
        if isinstance(module, nn.Embedding):
            return Shard(0)
        return Shard(1) if key == "weight" else Replicate()
    return Replicate()


def _distribute(
    module: nn.Module, style: Style, mesh: DeviceMesh, tied: dict[nn.Parameter, nn.Parameter]
) -> None:
    """Make the parameters DTensors; a parameter met again (tied weights) stays one object."""
    if isinstance(style, PrepareModuleInput):
        return
    whole_subtree = isinstance(style, SequenceParallel | ReplicateParallel)
    for owner in list(module.modules()) if whole_subtree else [module]:
        for key, parameter in list(owner.named_parameters(recurse=False)):
            placement = _placement(key, owner, style)
            if parameter in tied:
                owner._parameters[key] = _same_placement(tied[parameter], placement, key)
                continue
            local = distribute_tensor(parameter.detach(), mesh, [placement], src_data_rank=None)
            new = nn.Parameter(local, requires_grad=parameter.requires_grad)
            tied[parameter] = owner._parameters[key] = new


def _same_placement(parameter: nn.Parameter, placement: Placement, key: str) -> nn.Parameter:
    assert isinstance(parameter, DTensor)
    if parameter.placements != (placement,):
        raise ConfigError(
            f"{key}: a weight that two modules share is {parameter.placements[0]} in one and {placement} "
            "in the other; the styles of both must split it alike (an embedding by RowwiseParallel, a "
            "head by ColwiseParallel). Change the plan."
        )
    return parameter

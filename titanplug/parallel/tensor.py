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

import inspect
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from titanplug.errors import ConfigError
from titanplug.parallel.collectives import (
    AxisGroup,
    copy_to_shards,
    gather_blocks,
    gather_from_shards,
    reduce_sum,
    scatter_sum,
)
from titanplug.parallel.logits import ShardedLogits
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

SEQUENCE_DIM = 1  # (B, S, D)


@dataclass(frozen=True)
class TensorOptions:
    """Switches of tensor parallel.

    Args:
        sequence_parallel: hidden states between blocks are sharded over the sequence.
        loss_parallel: logits stay sharded over the vocabulary up to the loss.
    """

    sequence_parallel: bool = True
    loss_parallel: bool = True


@dataclass
class TensorParallelized:
    """What tensor parallel did to a module.

    Args:
        partial_gradients: names of the parameters whose gradients must be summed over the axis.
        group: the axis; None without tensor parallel.
    """

    partial_gradients: list[str] = field(default_factory=list)
    group: AxisGroup | None = None


def dtensor_like(local: Tensor, spec: Any) -> DTensor:
    """A DTensor over ``local``; past the constructor, whose checks cost more than the rest."""
    result: DTensor = DTensor.__new__(DTensor, local, spec, requires_grad=False)
    return result


class _LocalParameter(torch.autograd.Function):
    """The local shard of a parameter, whose gradient becomes a DTensor like the parameter."""

    @staticmethod
    def forward(ctx: Any, parameter: DTensor) -> Tensor:
        ctx.spec = parameter._spec
        local = parameter._local_tensor
        return local.view_as(local)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> DTensor:
        return dtensor_like(grads[0], ctx.spec)


def local_parameter(parameter: Tensor) -> Tensor:
    """This rank's shard of a parameter, differentiable; plain tensors are returned as they are.

    The shard is a leaf of its own that hands its gradient to the parameter, which saves the many Python
    calls of an autograd function and of DTensor's dispatch for each parameter. A parameter with hooks
    takes part in the graph itself, so that they run.
    """
    if not isinstance(parameter, DTensor):
        return parameter
    local = parameter._local_tensor
    if not parameter.requires_grad or not torch.is_grad_enabled():
        return local
    if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
        hooked: Tensor = _LocalParameter.apply(parameter)  # type: ignore[no-untyped-call]
        return hooked
    leaf: Tensor | None = getattr(parameter, "_titanplug_leaf", None)
    if leaf is None:
        return _local_leaf(parameter)
    if leaf.data_ptr() != local.data_ptr():
        leaf.data = local  # the parameter has moved
    return leaf


def _local_leaf(parameter: DTensor) -> Tensor:
    leaf = parameter._local_tensor.detach().requires_grad_()
    owner = weakref.ref(parameter)

    def hand_over(leaf: Tensor) -> None:
        grad, leaf.grad = leaf.grad, None
        parameter = owner()
        assert parameter is not None and grad is not None
        own = parameter.grad
        if own is None:
            parameter.grad = dtensor_like(grad, parameter._spec)
        else:
            assert isinstance(own, DTensor)
            own._local_tensor.add_(grad)

    leaf.register_post_accumulate_grad_hook(hand_over)
    parameter._titanplug_leaf = leaf  # type: ignore[attr-defined]
    return leaf


class _LocalForward:
    """A module's forward, run on the local shards of the module's own parameters."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.forward: Callable[..., Any] = module.forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        parameters = self.module._parameters
        whole = dict(parameters)
        for name, parameter in whole.items():
            if parameter is not None:
                parameters[name] = local_parameter(parameter)  # type: ignore[assignment]
        try:
            return self.forward(*args, **kwargs)
        finally:
            parameters.update(whole)


@dataclass
class _ColwiseForward:
    local: _LocalForward
    style: ColwiseParallel
    prepared: bool
    options: TensorOptions
    group: AxisGroup
    features: int

    def __call__(self, x: Tensor) -> Tensor:
        entry = self.style.input or ("prepared" if self.prepared else "replicate")
        if entry == "sequence" and self.options.sequence_parallel:
            x = gather_from_shards(x, SEQUENCE_DIM, self.group)
        elif entry != "prepared":
            x = copy_to_shards(x, self.group)
        out: Tensor = self.local(x)
        if self.style.output == "shard":
            return out
        if self.style.output == "logits" and self.options.loss_parallel:
            return ShardedLogits(out, self.features, self.group)
        return gather_blocks(out, -1, self.features, self.group)


@dataclass
class _RowwiseForward:
    module: nn.Linear
    local: _LocalForward
    sequence: bool
    group: AxisGroup

    def __call__(self, x: Tensor) -> Tensor:
        # The bias is added once, to the sum, not by each rank to its part.
        parameters = self.module._parameters
        bias = parameters["bias"]
        parameters["bias"] = None
        try:
            out: Tensor = self.local(x)
        finally:
            parameters["bias"] = bias
        out = _sum(out, self.sequence, self.group)
        return out if bias is None else out + local_parameter(bias)


@dataclass
class _EmbeddingForward:
    module: nn.Embedding
    sequence: bool
    group: AxisGroup

    def __call__(self, ids: Tensor) -> Tensor:
        module = self.module
        start, width = self.group.block(module.num_embeddings)
        local = ids - start
        outside = (local < 0) | (local >= width)
        padding = None
        if module.padding_idx is not None and 0 <= module.padding_idx - start < width:
            padding = module.padding_idx - start
        weight = local_parameter(module.weight)
        rows = torch.nn.functional.embedding(local.masked_fill(outside, 0), weight, padding)
        return _sum(rows.masked_fill(outside.unsqueeze(-1), 0.0), self.sequence, self.group)


def _sum(x: Tensor, sequence: bool, group: AxisGroup) -> Tensor:
    return scatter_sum(x, SEQUENCE_DIM, group) if sequence else reduce_sum(x, group)


@dataclass
class _PrepareInput:
    """Forward pre-hook: gathers one input's sequence, or passes it with its gradient summed."""

    index: int
    name: str
    sequence_parallel: bool
    group: AxisGroup

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if len(args) > self.index:
            x = self._prepare(args[self.index])
            return (*args[: self.index], x, *args[self.index + 1 :]), kwargs
        if self.name not in kwargs:
            raise TypeError(
                f"{type(module).__name__} was called without its input {self.name!r} (argument "
                f"{self.index}), which the plan gathers. Pass it, or change PrepareModuleInput(index=...)."
            )
        return args, {**kwargs, self.name: self._prepare(kwargs[self.name])}

    def _prepare(self, x: Tensor) -> Tensor:
        if self.sequence_parallel:
            return gather_from_shards(x, SEQUENCE_DIM, self.group)
        return copy_to_shards(x, self.group)


def apply_tensor_parallel(
    root: nn.Module, plan: ParallelPlan, mesh: DeviceMesh, options: TensorOptions
) -> TensorParallelized:
    """Distribute the parameters of ``root`` over the axis and let its modules run on shards, in place.

    Args:
        root: the module that the plan's names are relative to; its parameters must be equal on all
            ranks, or on the meta device.
        plan: styles by pattern.
        mesh: the one-dimensional mesh of the ``tp`` axis.
        options: the switches.

    Raises:
        ConfigError: a pattern matches nothing, a style doesn't fit its module, a dimension isn't
            divisible, or a parameter is under no style. All at once.
    """
    group = AxisGroup.of(mesh)
    styles = resolve_styles(root, plan)
    validate_styles(root, styles, group.size)
    result = TensorParallelized(group=group)
    tied: dict[nn.Parameter, nn.Parameter] = {}
    prepared = [name for name, style in styles.items() if isinstance(style, PrepareModuleInput)]
    for name, style in styles.items():
        module = root.get_submodule(name)
        _distribute(module, style, mesh, tied)
        if _has_partial_gradients(style, options):
            names = [f"{name}.{key}" for key, _ in module.named_parameters()]
            result.partial_gradients += names
        if isinstance(style, RowwiseParallel) and options.sequence_parallel:
            if style.output == "sequence" and getattr(module, "bias", None) is not None:
                result.partial_gradients.append(f"{name}.bias")
        inside = any(name.startswith(f"{outer}.") for outer in prepared)
        _install(module, style, group, options, prepared=inside)
    return result


def resolve_styles(root: nn.Module, plan: ParallelPlan) -> dict[str, Style]:
    """Style by module name. Where several patterns match a module, the last one in the plan holds."""
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
    computing = [
        name for name, style in styles.items() if not isinstance(style, PrepareModuleInput)
    ]
    seen: set[int] = set()
    for owner, module in root.named_modules():
        for key, parameter in module.named_parameters(recurse=False):
            covered = any(owner == name or owner.startswith(f"{name}.") for name in computing)
            if covered:
                seen.add(id(parameter))
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
    if isinstance(style, ColwiseParallel):
        if not isinstance(module, nn.Linear):
            return [
                f"{name}: ColwiseParallel is for nn.Linear, and this is {kind}. Change the style."
            ]
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


def _install(
    module: nn.Module, style: Style, group: AxisGroup, options: TensorOptions, *, prepared: bool
) -> None:
    sequence = options.sequence_parallel
    if isinstance(style, PrepareModuleInput):
        parameters = list(inspect.signature(module.forward).parameters)
        hook = _PrepareInput(style.index, parameters[style.index], sequence, group)
        module.register_forward_pre_hook(hook, with_kwargs=True)
        return
    if isinstance(style, ColwiseParallel):
        assert isinstance(module, nn.Linear)
        module.forward = _ColwiseForward(  # type: ignore[method-assign]
            _LocalForward(module), style, prepared, options, group, module.out_features
        )
    elif isinstance(style, RowwiseParallel):
        shards = sequence and style.output == "sequence"
        if isinstance(module, nn.Embedding):
            forward: Any = _EmbeddingForward(module, shards, group)
        else:
            assert isinstance(module, nn.Linear)
            forward = _RowwiseForward(module, _LocalForward(module), shards, group)
        module.forward = forward  # type: ignore[method-assign]
    else:
        for owner in module.modules():
            if next(owner.parameters(recurse=False), None) is not None:
                owner.forward = _LocalForward(owner)  # type: ignore[method-assign]

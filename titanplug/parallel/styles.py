"""What each tensor-parallel style makes of a module's forward.

Shapes: B batch, S sequence, D features; a shard of the sequence is (B, S / n, D).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from titanplug.parallel.collectives import (
    AxisGroup,
    copy_to_shards,
    gather_blocks,
    gather_from_shards,
    reduce_sum,
    scatter_sum,
)
from titanplug.parallel.local_parameter import local_parameter
from titanplug.parallel.logits import ShardedLogits
from titanplug.parallel.random_draws import DrawOnShard
from titanplug.plan import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    Style,
)

SEQUENCE_DIM = 1


@dataclass(frozen=True)
class TensorOptions:
    """Switches of tensor parallel.

    Args:
        sequence_parallel: hidden states between blocks are sharded over the sequence.
        loss_parallel: logits stay sharded over the vocabulary up to the loss.
    """

    sequence_parallel: bool = True
    loss_parallel: bool = True


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


def install_style(
    module: nn.Module, style: Style, group: AxisGroup, options: TensorOptions, *, prepared: bool
) -> None:
    """Put the style's forward, or its hook on the input, around a module, in place.

    Args:
        module: whose parameters are distributed already.
        style: the style.
        group: the tensor axis.
        options: the switches.
        prepared: a module around this one prepares its input.
    """
    sequence = options.sequence_parallel
    if isinstance(style, PrepareModuleInput):
        parameters = list(inspect.signature(module.forward).parameters)
        hook = _PrepareInput(style.index, parameters[style.index], sequence, group)
        module.register_forward_pre_hook(hook, with_kwargs=True)
        return
    forward: Any
    shards = isinstance(style, RowwiseParallel) and sequence and style.output == "sequence"
    if isinstance(style, ColwiseParallel):
        assert isinstance(module, nn.Linear)
        forward = _ColwiseForward(_LocalForward(module), style, prepared, options, group, module.out_features)
    elif isinstance(style, RowwiseParallel) and isinstance(module, nn.Embedding):
        forward = _EmbeddingForward(module, shards, group)
    elif isinstance(style, RowwiseParallel):
        assert isinstance(module, nn.Linear)
        forward = _RowwiseForward(module, _LocalForward(module), shards, group)
    else:
        on_shards = sequence and isinstance(style, SequenceParallel)
        for owner in module.modules():
            if next(owner.parameters(recurse=False), None) is not None:
                owner.forward = _LocalForward(owner)
            elif on_shards and isinstance(owner, _DropoutNd):
                owner.forward = DrawOnShard(owner, group)
        return
    module.forward = forward  # type: ignore[method-assign]

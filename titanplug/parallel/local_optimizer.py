"""Optimizer steps on local shards.

Most optimizers update each element by itself, so a step on the local shards gives what a step on the
DTensors gives. It saves DTensor's dispatch of every operation on every parameter, which takes more Python
calls than the forward and backward of a small model. Between steps the optimizer holds the module's own
parameters, and its state holds DTensors over the same memory, as checkpoints and callbacks expect.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from titanplug.parallel.local_parameter import dtensor_like

_ELEMENTWISE: tuple[type[Optimizer], ...] = (
    torch.optim.SGD,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.Adamax,
    torch.optim.Adagrad,
    torch.optim.Adadelta,
    torch.optim.RMSprop,
    torch.optim.Rprop,
    torch.optim.ASGD,
)


def is_elementwise(optimizer: Optimizer) -> bool:
    """Whether an optimizer is known to update each element by itself.

    Exact classes only: a subclass may look at a whole parameter (its norm, its rows).
    """
    return type(optimizer) in _ELEMENTWISE


def has_shards(optimizer: Optimizer) -> bool:
    """Whether any of an optimizer's parameters is a DTensor."""
    return any(isinstance(p, DTensor) for group in optimizer.param_groups for p in group["params"])


class LocalShards:
    """Lets one optimizer see local shards while it steps.

    Args:
        optimizer: for which :func:`is_elementwise` holds.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self._shards: dict[nn.Parameter, nn.Parameter] = {}
        self._own: list[list[nn.Parameter]] | None = None
        self._own_state: Any = None
        self._own_values: list[Any] = []
        self._local_state: Any = defaultdict(dict)
        self._known: list[int] = []
        """Which tensors the two states were last seen to share."""
        # Ours is the first hook after a step, so that those of others see the module's parameters.
        hook = optimizer.register_step_post_hook(lambda *_: self.exit())
        optimizer._optimizer_step_post_hooks.move_to_end(hook.id, last=False)  # type: ignore[attr-defined]

    def enter(self) -> None:
        """Put shards in the place of parameters, their gradients and their state."""
        optimizer = self.optimizer
        if optimizer.state is not self._own_state or not self._is_unchanged(optimizer.state):
            self._take_over(optimizer.state)
        self._own = []
        for group in optimizer.param_groups:
            own = group["params"]
            self._own.append(own)
            group["params"] = [self._shard(parameter) for parameter in own]
        self._own_state, optimizer.state = optimizer.state, self._local_state

    def exit(self) -> None:
        """Put the parameters back; state that the step has made becomes theirs."""
        if self._own is None:
            return
        optimizer = self.optimizer
        for group, own in zip(optimizer.param_groups, self._own, strict=True):
            group["params"] = own
        self._own = None
        optimizer.state = self._own_state
        for shard in self._shards.values():
            shard.grad = None
        present = [id(value) for value in _values(self._local_state)]
        if present != self._known:
            self._known = present
            for parameter, shard in self._shards.items():
                if shard in self._local_state:
                    optimizer.state[parameter] = _wrapped(self._local_state[shard], parameter)
        self._own_values = _values(optimizer.state)

    def _shard(self, parameter: nn.Parameter) -> nn.Parameter:
        local = parameter._local_tensor if isinstance(parameter, DTensor) else parameter.data
        shard = self._shards.get(parameter)
        if shard is None:
            shard = nn.Parameter(local, requires_grad=parameter.requires_grad)
            self._shards[parameter] = shard
            if parameter in self.optimizer.state:
                self._local_state[shard] = _unwrapped(self.optimizer.state[parameter])
        elif shard.data_ptr() != local.data_ptr() or shard.shape != local.shape:
            shard.data = local  # the parameter has moved
        grad = parameter.grad
        if grad is not None:
            shard.grad = grad._local_tensor if isinstance(grad, DTensor) else grad
        return shard

    def _is_unchanged(self, state: Any) -> bool:
        values = _values(state)
        return len(values) == len(self._own_values) and all(map(operator.is_, values, self._own_values))

    def _take_over(self, state: Any) -> None:
        """Start from a state that was loaded or changed since the last step."""
        self._local_state = defaultdict(dict)
        self._known = []
        for parameter, shard in self._shards.items():
            if parameter in state:
                self._local_state[shard] = _unwrapped(state[parameter])


def _values(state: Any) -> list[Any]:
    return [value for of_parameter in state.values() for value in of_parameter.values()]


def _wrapped(state: dict[str, Any], parameter: nn.Parameter) -> dict[str, Any]:
    if not isinstance(parameter, DTensor):
        return state
    shape = parameter._local_tensor.shape

    def wrap(value: Any) -> Any:
        if isinstance(value, Tensor) and value.shape == shape and value.ndim:
            return dtensor_like(value, parameter._spec)
        return value

    return {key: wrap(value) for key, value in state.items()}


def _unwrapped(state: dict[str, Any]) -> dict[str, Any]:
    return {key: value._local_tensor if isinstance(value, DTensor) else value for key, value in state.items()}

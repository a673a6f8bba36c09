"""A parameter's local shard as a tensor that autograd can run through."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor


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
        parameter = owner()
        assert parameter is not None
        hand_over_gradient(parameter, leaf)

    leaf.register_post_accumulate_grad_hook(hand_over)
    parameter._titanplug_leaf = leaf  # type: ignore[attr-defined]
    return leaf


def graph_leaf(parameter: Tensor) -> Tensor:
    """The tensor that stands for a parameter in autograd's graph: its local leaf, or itself."""
    if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
        return parameter
    leaf: Tensor = getattr(parameter, "_titanplug_leaf", parameter)
    return leaf


def hand_over_gradient(parameter: Tensor, leaf: Tensor) -> None:
    """Add the gradient of a parameter's :func:`graph_leaf` to the parameter's own."""
    if leaf is parameter or leaf.grad is None:
        return
    assert isinstance(parameter, DTensor)
    grad, leaf.grad = leaf.grad, None
    own = parameter.grad
    if own is None:
        parameter.grad = dtensor_like(grad, parameter._spec)
    else:
        assert isinstance(own, DTensor)
        own._local_tensor.add_(grad)

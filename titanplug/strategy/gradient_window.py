"""From the losses of an accumulation window to final gradients: weights, partial sums, norm, clipping."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from titanplug.errors import TitanplugError
from titanplug.parallel.gradients import (
    GradientGroup,
    clip_by_norm,
    clip_by_value,
    global_gradient_norm,
    group_by_copies,
    reduce_partial_gradients,
    scale_gradients,
)
from titanplug.parallel.parallelize import Parallelized
from titanplug.strategy.loaders import Share
from titanplug.strategy.loss_weights import LossWeights


class NonFiniteGradientError(TitanplugError):
    """The global gradient norm is NaN or infinite."""


class GradientWindow:
    """Gradients of one module over an accumulation window.

    Args:
        module: the laid-out module.
        layout: how it is laid out.
        world_size: number of all ranks.
        device: this rank's device.
        norm_type: p of the gradient norm.
        error_if_nonfinite: stop all ranks before a step with a NaN or infinite norm.
    """

    def __init__(
        self,
        module: nn.Module,
        layout: Parallelized,
        world_size: int,
        device: torch.device,
        *,
        norm_type: float,
        error_if_nonfinite: bool,
    ) -> None:
        self._module = module
        self._layout = layout
        self._world_size = world_size
        self._device = device
        self._norm_type = norm_type
        self._error_if_nonfinite = error_if_nonfinite
        loss = layout.mesh["loss"]
        self._weights = LossWeights(loss.get_group(), loss.size())
        self._length = 1
        self._open = False
        self._norm: tuple[int, Tensor] | None = None
        self._partial: list[nn.Parameter] | None = None
        self._groups: dict[int, tuple[int, list[GradientGroup]]] = {}

    @property
    def count(self) -> int | Tensor:
        """What the latest loss is a mean over: samples, or targets on this rank."""
        return self._weights.count

    def add(self, share: Share, output: Any) -> Any:
        """Count a step's loss; see :meth:`LossWeights.add`."""
        return self._weights.add(share.local, share.total, output)

    def scale(self, loss: Tensor, length: int) -> Tensor:
        """The latest loss as it goes into backward; ``length`` batches are in a full window."""
        self._open, self._norm, self._length = True, None, length
        return self._weights.scale(loss, length)

    def finish(self, optimizers: list[Optimizer]) -> None:
        """Make gradients final, once, after the last backward of the window."""
        if not self._open:
            return
        self._open = False
        group = self._layout.tensor.group
        if group is not None and self._layout.tensor.partial_gradients:
            if self._partial is None:
                self._partial = self._layout.partial_parameters(self._module)
            reduce_partial_gradients(self._partial, group)
        factor = self._weights.correction(self._length, self._device)
        if factor is not None:
            scale_gradients([p for opt in optimizers for p in _parameters(opt)], factor)
        self._weights.reset()

    def norm(self, optimizer: Optimizer) -> Tensor:
        """Global norm of the gradients of ``optimizer``, before clipping; a collective, cached."""
        if self._norm is None or self._norm[0] != id(optimizer):
            groups = self._grouped(optimizer)
            self._norm = (
                id(optimizer),
                global_gradient_norm(groups, self._norm_type, self._device),
            )
        return self._norm[1]

    def clip(self, optimizer: Optimizer, limit: float, *, by_value: bool) -> None:
        """Clip by global norm or by value where ``limit`` is above 0, after checking for NaN if asked.

        Raises:
            NonFiniteGradientError: on all ranks alike, before the optimizer's step.
        """
        if self._error_if_nonfinite:
            norm = self.norm(optimizer).item()
            if not math.isfinite(norm):
                raise NonFiniteGradientError(
                    f"The global gradient norm is {norm}: a gradient is NaN or infinite on some rank. All "
                    "ranks stop before the step (error_if_nonfinite=True). Lower the learning rate, or "
                    "look at the batch."
                )
        if limit <= 0:
            return
        if by_value:
            clip_by_value(_parameters(optimizer), limit)
        else:
            clip_by_norm(_parameters(optimizer), limit, self.norm(optimizer))

    def _grouped(self, optimizer: Optimizer) -> list[GradientGroup]:
        parameters = _parameters(optimizer)
        known = self._groups.get(id(optimizer))
        # Callbacks that unfreeze layers add parameters to an optimizer.
        if known is None or known[0] != len(parameters):
            known = (len(parameters), group_by_copies(parameters, self._world_size))
            self._groups[id(optimizer)] = known
        return known[1]


def _parameters(optimizer: Optimizer) -> list[nn.Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]

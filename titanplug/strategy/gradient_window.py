"""From the losses of an accumulation window to final gradients: weights, partial sums, norm, clipping."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from titanplug.errors import TitanplugError
from titanplug.parallel.gradients import (
    GradientGroup,
    clip_by_norm,
    clip_by_value,
    global_gradient_norm,
    group_by_copies,
    local_gradients,
    reduce_partial_gradients,
    scale_gradients,
)
from titanplug.parallel.parallelize import Parallelized
from titanplug.parallel.pipeline.tied import reduce_tied_gradients
from titanplug.strategy.loaders import Share
from titanplug.strategy.loss_weights import LossWeights


class NonFiniteGradientError(TitanplugError):
    """The global gradient norm is NaN or infinite."""


class GradientWindow:
    """Gradients of one module over an accumulation window.

    Args:
        module: the laid-out module.
        layout: how it is laid out.
        device: this rank's device.
        norm_type: p of the gradient norm.
        error_if_nonfinite: stop all ranks before a step with a NaN or infinite norm.
    """

    def __init__(
        self,
        module: nn.Module,
        layout: Parallelized,
        device: torch.device,
        *,
        norm_type: float,
        error_if_nonfinite: bool,
    ) -> None:
        self._module = module
        self._layout = layout
        self._device = device
        self._norm_type = norm_type
        self._error_if_nonfinite = error_if_nonfinite
        batch = layout.mesh["batch"]
        self._weights = LossWeights(batch.get_group(), batch.size(), layout.mesh.dims.cp)
        self._share = Share(1, None)
        self._open = False
        self._norms: dict[int, Tensor] = {}
        self._checked: set[int] = set()
        self._partial: list[nn.Parameter] | None = None
        self._groups: dict[int, tuple[int, list[GradientGroup]]] = {}

    @property
    def count(self) -> int | Tensor:
        """What the latest loss is a mean over: samples, or targets on this rank."""
        return self._weights.count

    def start(self, share: Share) -> None:
        """A step begins, on a batch of which ``share`` counts."""
        self._share = share

    def add(self, share: Share, output: Any) -> Any:
        """Count a step's loss; see :meth:`LossWeights.add`."""
        return self._weights.add(share.local, share.total, output)

    def scale(self, loss: Tensor, length: int) -> Tensor:
        """The latest loss as it goes into backward; ``length`` batches are in a full window."""
        self.open()
        return self._weights.scale(loss, length)

    def open(self) -> None:
        """A backward is about to start; further ones of the window may follow."""
        if not self._open:
            self._reopen()
        self._open = True
        self._norms, self._checked = {}, set()

    def scale_part(self, loss: Tensor, count: int | Tensor, length: int) -> Tensor:
        """The loss of a microbatch as it goes into backward; see :meth:`LossWeights.scale_part`."""
        return self._weights.scale_part(loss, count, self._share.total, length)

    def add_batch(self, count: int | Tensor, length: int) -> None:
        """Count a batch of microbatches; see :meth:`LossWeights.add_batch`."""
        self._weights.add_batch(count, self._share.total, length)

    def scale_alone(self, loss: Tensor) -> Tensor:
        """A loss of manual optimization, which is a mean over the samples of the running step.

        Each of them is a window of its own: how many are added up before a step is the user's choice.
        """
        self._weights.reset()
        self._weights.add(self._share.local, self._share.total, None)
        scaled = self.scale(loss, 1)
        self._weights.reset()
        return scaled

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
        reduce_tied_gradients(self._layout.tied)
        factor = self._weights.correction(self._device)
        if factor is not None:
            scale_gradients([p for opt in optimizers for p in _parameters(opt)], factor)
        self._weights.reset()

    def _reopen(self) -> None:
        """Gradients kept from before are sums already: the next sum over the axis takes one copy of them."""
        group = self._layout.tensor.group
        if self._partial and group is not None and group.rank > 0:
            for grad in local_gradients(self._partial):
                grad.zero_()
        for parameter, holders in self._layout.tied:
            if dist.get_rank(holders) > 0:
                for grad in local_gradients([parameter]):
                    grad.zero_()

    def norm(self, optimizer: Optimizer) -> Tensor:
        """Global norm of the gradients of ``optimizer``, before clipping; a collective, cached."""
        norm = self._norms.get(id(optimizer))
        if norm is None:
            norm = global_gradient_norm(self._grouped(optimizer), self._norm_type, self._device)
            self._norms[id(optimizer)] = norm
        return norm

    def check(self, optimizer: Optimizer) -> None:
        """Check for NaN and infinity if asked, once a step.

        Raises:
            NonFiniteGradientError: on all ranks alike, before the optimizer's step.
        """
        if not self._error_if_nonfinite or id(optimizer) in self._checked:
            return
        self._checked.add(id(optimizer))
        norm = self.norm(optimizer).item()
        if not math.isfinite(norm):
            raise NonFiniteGradientError(
                f"The global gradient norm is {norm}: a gradient is NaN or infinite on some rank. All "
                "ranks stop before the step (error_if_nonfinite=True). Lower the learning rate, or "
                "look at the batch."
            )

    def clip(self, optimizer: Optimizer, limit: float, *, by_value: bool) -> None:
        """Clip by global norm or by value where ``limit`` is above 0, after :meth:`check`."""
        self.check(optimizer)
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
            dims = self._layout.mesh.dims
            stages = {parameter: dist.get_world_size(holders) for parameter, holders in self._layout.tied}
            known = (len(parameters), group_by_copies(parameters, dims.world_size // dims.pp, stages))
            self._groups[id(optimizer)] = known
        return known[1]


def _parameters(optimizer: Optimizer) -> list[nn.Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]

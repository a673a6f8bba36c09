"""What pipeline parallel asks of Lightning's loop, and of the module."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.loops.optimization.automatic import Closure, ClosureResult, _AutomaticOptimization
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch.optim import Optimizer
from typing_extensions import override

from titanplug.errors import ConfigError


class _PipelineClosure(Closure):
    """Zeroes gradients before the step, which runs forwards and backwards; Lightning does so after it."""

    @override
    @torch.enable_grad()
    def closure(self, *args: Any, **kwargs: Any) -> ClosureResult:
        if self._zero_grad_fn is not None:
            self._zero_grad_fn()
        output = self._step_fn()
        if self._backward_fn is not None and output.closure_loss is not None:
            self._backward_fn(output.closure_loss)  # its hooks; the gradients are there
        return output


class _PipelineOptimization(_AutomaticOptimization):
    @override
    def _make_closure(self, kwargs: OrderedDict[str, Any], optimizer: Optimizer, batch_idx: int) -> Closure:
        closure = super()._make_closure(kwargs, optimizer, batch_idx)
        return _PipelineClosure(closure._step_fn, closure._backward_fn, closure._zero_grad_fn)


def install_pipeline_loop(trainer: Trainer) -> None:
    """Let the Trainer's steps run a schedule."""
    loop = trainer.fit_loop.epoch_loop
    if not isinstance(loop.automatic_optimization, _PipelineOptimization):
        replaced = _PipelineOptimization(trainer)
        replaced.__dict__.update(loop.automatic_optimization.__dict__)  # its progress
        loop.automatic_optimization = replaced


def validate_pipeline_module(module: LightningModule) -> None:
    """Check what can be seen of a module before it runs.

    Raises:
        ConfigError: it can't be trained by a pipeline schedule; all reasons at once.
    """
    problems = []
    if not module.automatic_optimization:
        problems.append(
            f"{type(module).__name__} has automatic_optimization=False. Under pp the schedule decides when "
            "forwards and backwards run, so a step can't call backward and optimizers itself. Use automatic "
            "optimization, or pp=1."
        )
    if is_overridden("backward", module):
        problems.append(
            f"{type(module).__name__} overrides `backward`. Under pp the schedule runs the backward of each "
            "stage and microbatch by itself. Remove it (scale the loss in training_step, use hooks on "
            "parameters), or use pp=1."
        )
    if problems:
        raise ConfigError(problems)

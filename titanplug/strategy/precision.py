"""Lightning's precisions, with gradients clipped as one thing over all ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch.plugins.precision import HalfPrecision, MixedPrecision, Precision
from lightning.pytorch.utilities import GradClipAlgorithmType
from torch.optim import Optimizer

from titanplug.errors import ConfigError
from titanplug.parallel.fsdp import ShardOptions
from titanplug.validation import PRECISIONS, validate_precision

if TYPE_CHECKING:
    from titanplug.strategy.strategy import TitanStrategy


class _GlobalGradients(Precision):
    """Leaves clipping to the strategy, which knows what other ranks hold."""

    strategy: TitanStrategy

    def _wrap_closure(self, model: Any, optimizer: Any, closure: Callable[[], Any]) -> Any:
        def finished() -> Any:
            result = closure()
            self.strategy.finish_gradients()  # a closure of manual optimization runs backward itself
            return result

        result = super()._wrap_closure(model, optimizer, finished)
        self.strategy.before_update(optimizer)
        return result

    def clip_gradients(
        self,
        optimizer: Optimizer,
        clip_val: int | float = 0.0,
        gradient_clip_algorithm: GradClipAlgorithmType = GradClipAlgorithmType.NORM,
    ) -> None:
        """Clip by one global norm, or by value; 0 clips nothing."""
        by_value = gradient_clip_algorithm == GradClipAlgorithmType.VALUE
        self.strategy.clip_gradients(optimizer, float(clip_val), by_value=by_value)


class FullPrecision(_GlobalGradients):
    """32-true: everything in float32."""


class Bf16Mixed(_GlobalGradients, MixedPrecision):
    """bf16-mixed: float32 master weights and gradient reduction, autocast to bfloat16."""


class Bf16True(_GlobalGradients, HalfPrecision):
    """bf16-true: weights and activations in bfloat16; gradients are reduced in float32."""


def build_precision(plugin: Precision | None, strategy: TitanStrategy) -> Precision:
    """The titanplug form of one of Lightning's precision plugins.

    Raises:
        ConfigError: the plugin is none of those that are supported.
    """
    if isinstance(plugin, _GlobalGradients):
        built: Any = plugin
    elif plugin is None or type(plugin) is Precision:
        built = FullPrecision()
    elif type(plugin) is MixedPrecision and plugin.precision == "bf16-mixed":
        built = Bf16Mixed("bf16-mixed", plugin.device)
    elif type(plugin) is HalfPrecision and plugin.precision == "bf16-true":
        built = Bf16True("bf16-true")
    else:
        raise ConfigError(
            validate_precision(plugin.precision)
            or f"plugins={type(plugin).__name__}: TitanStrategy takes the precisions "
            f"{', '.join(PRECISIONS)} by name. Use Trainer(precision=...)."
        )
    built.strategy = strategy
    return built  # type: ignore[no-any-return]


def shard_options(plugin: Precision, *, reshard_after_forward: bool) -> ShardOptions:
    """Types in which FSDP gathers parameters and reduces gradients, for a precision."""
    if isinstance(plugin, Bf16Mixed):
        return ShardOptions(torch.bfloat16, torch.float32, reshard_after_forward)
    if isinstance(plugin, Bf16True):
        return ShardOptions(None, torch.float32, reshard_after_forward)
    return ShardOptions(None, None, reshard_after_forward)

"""4D parallelism for an ordinary LightningModule.

``import titanplug`` imports neither torch nor Lightning: the names below load on first use, and the
strategy's name is registered as soon as Lightning itself is imported, so that
``Trainer(strategy="titan")`` works whichever comes first.
"""

from __future__ import annotations

from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any

from titanplug.checkpoint.plain_lightning import load_directories_in
from titanplug.compat import on_import

if TYPE_CHECKING:
    from titanplug.checkpoint.latest import latest_checkpoint
    from titanplug.checkpoint.weights import consolidate
    from titanplug.mesh import ParallelDims
    from titanplug.plan import (
        ColwiseParallel,
        ParallelPlan,
        PipelineOrder,
        PrepareModuleInput,
        ReplicateParallel,
        RowwiseParallel,
        SequenceParallel,
    )
    from titanplug.strategy import TitanStrategy

__version__ = "0.1.0"

__all__ = [
    "ColwiseParallel",
    "ParallelDims",
    "ParallelPlan",
    "PipelineOrder",
    "PrepareModuleInput",
    "ReplicateParallel",
    "RowwiseParallel",
    "SequenceParallel",
    "TitanStrategy",
    "__version__",
    "consolidate",
    "latest_checkpoint",
]

_HOMES = {
    "ParallelDims": "titanplug.mesh",
    "TitanStrategy": "titanplug.strategy",
    "consolidate": "titanplug.checkpoint.weights",
    "latest_checkpoint": "titanplug.checkpoint.latest",
    **dict.fromkeys(
        (
            "ColwiseParallel",
            "ParallelPlan",
            "PipelineOrder",
            "PrepareModuleInput",
            "ReplicateParallel",
            "RowwiseParallel",
            "SequenceParallel",
        ),
        "titanplug.plan",
    ),
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_HOMES[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def _build_strategy(**settings: Any) -> TitanStrategy:
    # A function, not the class: registering it must not import the strategy.
    from titanplug.strategy import TitanStrategy

    return TitanStrategy(**settings)


def _register_strategy() -> None:
    from lightning.pytorch.strategies import StrategyRegistry

    StrategyRegistry.register(
        "titan",
        _build_strategy,
        description="titanplug.TitanStrategy with its defaults: shards over all processes",
        override=True,
    )


on_import("lightning.pytorch.strategies", _register_strategy)
for _module in ("lightning.pytorch.core.saving", "lightning.fabric.plugins.io.torch_io"):
    on_import(_module, partial(load_directories_in, _module))

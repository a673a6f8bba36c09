"""Lightning's model summary, of the whole model, where a rank holds a part of the modules only."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelSummary
from lightning.pytorch.utilities.model_summary import summarize

_TOTALS = ("total_parameters", "trainable_parameters", "model_size", "total_training_modes", "total_flops")


def show_whole_summary(trainer: Trainer, module: LightningModule) -> None:
    """Let the Trainer's summaries show the module as it is now, before modules are left out."""
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, ModelSummary) and callback._max_depth:
            whole = summarize(module, max_depth=callback._max_depth)
            data: Any = whole._get_summary_data()
            shown = SimpleNamespace(_get_summary_data=lambda data=data: data)
            shown.__dict__.update({name: getattr(whole, name) for name in _TOTALS})
            callback.__dict__["_summary"] = lambda trainer, module, shown=shown: shown

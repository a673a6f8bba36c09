"""The last line of a run."""

from __future__ import annotations

import os
import time
from pathlib import Path

import lightning as L
from lightning.pytorch.callbacks import Callback
from typing_extensions import override

from titanplug.callbacks.console import say
from titanplug.callbacks.ranks import logged_value


class RunSummary(Callback):
    """Ends a run with one line: steps, time, the value it is judged by, and where everything is.

    Args:
        run_dir: folder of the run.
        key: logged name of the value to tell, without ``val_`` or ``test_``.
        label: its unit.
    """

    def __init__(self, run_dir: str, key: str = "bits_per_byte", label: str = "bits per byte") -> None:
        self.run_dir = Path(run_dir)
        self.key = key
        self.label = label
        self._start_s = 0.0

    @override
    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._start_s = time.perf_counter()

    @override
    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        # After the end of all other callbacks, whose files are there now.
        if stage == "fit":
            seconds = time.perf_counter() - self._start_s
            self._tell(trainer, f"Trained {trainer.global_step} steps in {seconds:.0f} s", "val")
        elif stage == "test":
            self._tell(trainer, "Tested", "test")

    def _tell(self, trainer: L.Trainer, done: str, stage: str) -> None:
        value = logged_value(trainer, f"{stage}_{self.key}")
        if not trainer.is_global_zero:
            return
        name = {"val": "validation", "test": "test"}[stage]
        judged = "" if value is None else f", {name} {value:.4f} {self.label}"
        found = ", ".join(self._find(trainer))
        folder = os.path.relpath(self.run_dir)
        say(f"{done}{judged}. Everything is in {folder}" + (f" ({found})." if found else "."))

    def _find(self, trainer: L.Trainer) -> list[str]:
        """What lies in the folder, relative to it: the best checkpoint first."""
        checkpoint = trainer.checkpoint_callback
        best = Path(getattr(checkpoint, "best_model_path", None) or "")
        found = [best] if best.name and best.is_relative_to(self.run_dir) else []
        found += [self.run_dir / name for name in ("loss_curve.png", "tensorboard", "csv")]
        return [str(path.relative_to(self.run_dir)) for path in found if path.exists()]

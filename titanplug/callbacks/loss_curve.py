"""Draws the losses of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Callback
from typing_extensions import override

from titanplug.callbacks.ranks import is_log_step, logged_value
from titanplug.report.loss_curve import Curve, draw_loss_curve, write_table


class LossCurve(Callback):
    """Writes a picture of training and validation, and the values as a table beside it.

    Values are read on log steps and after each validation; they are part of the checkpoint, so that a
    resumed run draws the whole curve. Files are written at the end, also where a run fails.

    Args:
        path: of the picture (.png); the table gets the same name with .csv.
        train_key: logged name of the training loss, in nats per target.
        val_key: logged name of the value that validation is judged by.
        val_label: how its axis is called.
    """

    def __init__(
        self,
        path: str,
        train_key: str = "train_loss",
        val_key: str = "val_bits_per_byte",
        val_label: str = "bits per byte",
    ) -> None:
        self.path = Path(path)
        self.train_key = train_key
        self.val_key = val_key
        self.train = Curve("training loss", "nats per token")
        self.val = Curve("validation", val_label)
        self._step = 0

    @override
    def on_train_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        stepped = trainer.global_step > self._step
        self._step = trainer.global_step
        if stepped and is_log_step(trainer, self._step):
            self.train.add(self._step, logged_value(trainer, self.train_key))

    @override
    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if not trainer.sanity_checking and trainer.state.fn == "fit":
            self.val.add(trainer.global_step, logged_value(trainer, self.val_key))

    @override
    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._write(trainer)

    @override
    def on_exception(
        self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException
    ) -> None:
        self._write(trainer)

    def _write(self, trainer: L.Trainer) -> None:
        curves = [curve for curve in (self.train, self.val) if curve.steps]
        if not trainer.is_global_zero or trainer.fast_dev_run or not curves:  # type: ignore[attr-defined]
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_table(curves, self.path.with_suffix(".csv"))
        draw_loss_curve(curves, self.path, title=" / ".join(self.path.parent.parts[-2:]))

    @override
    def state_dict(self) -> dict[str, Any]:
        return {
            name: {"steps": list(curve.steps), "values": list(curve.values)}
            for name, curve in (("train", self.train), ("val", self.val))
        }

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for name, curve in (("train", self.train), ("val", self.val)):
            curve.steps = list(state_dict[name]["steps"])
            curve.values = list(state_dict[name]["values"])

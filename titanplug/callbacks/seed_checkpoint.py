"""A checkpoint of the very start, from which other layouts begin alike."""

from __future__ import annotations

from pathlib import Path

import lightning as L
from lightning.pytorch.callbacks import Callback
from typing_extensions import override


class SeedCheckpoint(Callback):
    """Saves a checkpoint before the first step.

    Another run that gets it as ``ckpt_path`` begins with the same weights, random numbers and order of the
    data, in whatever layout, so that losses can be compared step by step. (Under ``TitanStrategy`` equal
    seeds give equal weights in every layout too; this is for weights that something else draws, and for a
    comparison with code that draws them differently.)

    Args:
        path: of the checkpoint.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = path

    @override
    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.global_step == 0 and trainer.ckpt_path is None:
            trainer.save_checkpoint(self.path)

"""Logs the norm of all gradients."""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from torch.optim import Optimizer
from typing_extensions import override

from titanplug.callbacks.ranks import is_log_step


class GradientNorm(Callback):
    """Logs ``grad_norm``, the norm over all ranks before clipping, on the steps that are logged.

    Under titanplug's strategy it is the number that clipping uses, so it costs no second pass.
    """

    @override
    def on_before_optimizer_step(
        self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Optimizer
    ) -> None:
        if not is_log_step(trainer, trainer.global_step + 1):
            return
        compute: Any = getattr(trainer.strategy, "compute_gradient_norm", None)
        if compute is not None:
            norm = compute(optimizer)
        else:
            grads = [p.grad for p in pl_module.parameters() if p.grad is not None]
            norm = torch.nn.utils.get_total_norm(grads)
        pl_module.log("grad_norm", norm)

"""Pre-training of a causal language model: an ordinary LightningModule that knows nothing of layouts.

Letters: B batch, S sequence, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from functools import partial
from typing import Any, Literal, TypeAlias

import lightning as L
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor
from torch.optim import AdamW, Optimizer

from titanplug.errors import ConfigError
from titanplug.metrics import BitsPerByte, MeanLoss, token_nll
from titanplug.models import Transformer, TransformerConfig
from titanplug.modules.schedules import Schedule

Batch: TypeAlias = Mapping[str, Tensor]
"""input_ids (B, S) int64; labels (B, S) int64, already shifted, -100 where there is no target; optional
target_bytes (B,) int64, the UTF-8 bytes that the labels stand for, positions and document_ids (B, S)."""

OptimizerFactory: TypeAlias = Callable[[list[dict[str, Any]]], Optimizer]
"""Builds an optimizer from parameter groups."""

DEFAULT_OPTIMIZER: OptimizerFactory = partial(AdamW, lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1)


class LanguageModel(L.LightningModule):
    """Trains a :class:`titanplug.models.Transformer` to predict the next token.

    Every target weighs the same, however unevenly the targets lie over ranks and accumulated batches.
    Logs ``train_loss``, ``val_loss`` and ``test_loss`` in nats per target, and ``val_bits_per_byte`` and
    ``test_bits_per_byte`` where the batches have ``target_bytes``.

    Args:
        config: the model; a mapping of its fields does too, as stored in a checkpoint.
        optimizer: builds the optimizer from two parameter groups, matrices and the rest (norms, biases);
            the second has ``weight_decay`` 0.
        schedule: builds the learning-rate schedule; None keeps the rate.

    Raises:
        ConfigError: a configuration that makes no model.
    """

    model: Transformer | None

    def __init__(
        self,
        config: TransformerConfig | Mapping[str, Any],
        optimizer: OptimizerFactory = DEFAULT_OPTIMIZER,
        schedule: Schedule | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(config, TransformerConfig):
            config = TransformerConfig.from_fields(config)
        self.config = config
        self.optimizer = optimizer
        self.schedule = schedule
        self.model = None
        self.val_loss, self.test_loss = MeanLoss(), MeanLoss()
        self.val_bits_per_byte, self.test_bits_per_byte = BitsPerByte(), BitsPerByte()
        # Plain containers only: a checkpoint is loaded without unpickling classes. It has weights of its own:
        # where the first ones came from may be gone by then.
        self.save_hyperparameters({"config": asdict(replace(self.config, init_from=None))})

    def configure_model(self) -> None:
        """Build the Transformer, once."""
        if self.model is None:
            self.model = Transformer(self.config)

    def forward(self, batch: Batch) -> Tensor:
        """Logits, (B, S, V)."""
        assert self.model is not None, "configure_model runs first"
        logits: Tensor = self.model(batch["input_ids"], batch.get("positions"), batch.get("document_ids"))
        return logits

    def training_step(self, batch: Batch, batch_idx: int) -> dict[str, Tensor]:
        """Mean loss over the targets, and their number, by which ranks and windows are weighed."""
        nll, num_targets = token_nll(self.forward(batch), batch["labels"])
        loss = nll / num_targets.clamp(min=1)  # without targets 0, not 0/0
        self.log("train_loss", loss.detach())
        return {"loss": loss, "num_targets": num_targets}

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """Add a batch to the sums behind ``val_loss`` and ``val_bits_per_byte``."""
        self._evaluate("val", batch)

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        """Add a batch to the sums behind ``test_loss`` and ``test_bits_per_byte``."""
        self._evaluate("test", batch)

    def predict_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """The most likely next token after each token, (B, S) int64."""
        return self.forward(batch).argmax(-1)

    def _evaluate(self, stage: Literal["val", "test"], batch: Batch) -> None:
        nll, num_targets = token_nll(self.forward(batch), batch["labels"])
        loss = getattr(self, f"{stage}_loss")
        loss.update(nll, num_targets)
        self.log(f"{stage}_loss", loss, on_step=False, on_epoch=True, prog_bar=True)
        if "target_bytes" in batch:
            bits = getattr(self, f"{stage}_bits_per_byte")
            bits.update(nll, batch["target_bytes"].sum())
            self.log(f"{stage}_bits_per_byte", bits, on_step=False, on_epoch=True, prog_bar=True)

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """The optimizer over two groups, and the schedule over the steps of the whole run.

        Raises:
            ConfigError: a schedule for a run without end.
        """
        parameters = [p for p in self.parameters() if p.requires_grad]
        groups: list[dict[str, Any]] = [
            {"params": [p for p in parameters if p.dim() >= 2]},
            {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
        ]
        # Both groups always: pipeline stages may have parameters of one kind only.
        optimizer = self.optimizer(groups)
        if self.schedule is None:
            return optimizer
        num_steps = self.trainer.estimated_stepping_batches
        if not math.isfinite(num_steps):
            raise ConfigError(
                "The learning-rate schedule spans the whole run, and this one has no end (max_steps and "
                "max_epochs are -1). Set trainer.max_steps or trainer.max_epochs, or use schedule=None."
            )
        scheduler = self.schedule(optimizer, int(num_steps))
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
        }

"""Ranks agree on what is logged: different keys are an error, decisions from values are the same."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from torch import Tensor
from torchmetrics import SumMetric

from tests.distributed.case import build_trainer
from tests.distributed.tiny import DP2_TP2, Tiny, fit, numbered
from tests.harness import run_ranks
from titanplug import TitanStrategy
from titanplug.errors import TitanplugError

# ---------------------------------------------------------------- keys that differ


class Differs(Tiny):
    """Logs another key on rank 1: in a step or a hook, for the step or for the epoch."""

    def __init__(self, where: str, what: str) -> None:
        super().__init__()
        self.where, self.what = where, what
        self.extra = SumMetric()

    def _log_here(self, where: str) -> None:
        if self.where != where:
            return
        options: dict[str, Any] = {"on_step": self.what == "step", "on_epoch": self.what == "epoch"}
        if self.what == "shown":
            options = {"on_step": True, "on_epoch": False, "prog_bar": True}
        if self.what == "metric":
            self.extra.update(1.0)
            if self.global_rank == 1:
                self.log("extra", self.extra, on_step=False, on_epoch=True)
            return
        self.log("a" if self.global_rank == 0 else "b", float(self.global_rank), **options)

    def _log_on_one(self, where: str) -> None:
        if self.where == f"{where}, one rank" and self.global_rank == 1:
            step = self.what == "step"
            self.log("extra", 1.0, on_step=step, on_epoch=not step)

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        self._log_here("training_step")
        self._log_on_one("training_step")
        return super().training_step(batch, batch_idx)

    def on_train_batch_end(self, *_: Any) -> None:
        self._log_here("on_train_batch_end")
        self._log_on_one("on_train_batch_end")

    def on_train_epoch_end(self) -> None:
        self._log_here("on_train_epoch_end")
        self._log_on_one("on_train_epoch_end")

    def validation_step(self, batch: Tensor, batch_idx: int, dataloader_idx: int) -> None:
        if dataloader_idx == 0:  # told before the values of the second loader
            self._log_here("validation_step")
            self._log_on_one("validation_step")

    def on_validation_epoch_end(self) -> None:
        self._log_here("on_validation_epoch_end")
        self._log_on_one("on_validation_epoch_end")


STEPS = ("training_step", "on_train_batch_end", "validation_step")
EPOCHS = ("on_train_epoch_end", "on_validation_epoch_end")
DIFFERENCES = [
    *[(where, what) for where in STEPS for what in ("step", "epoch", "shown", "metric")],
    *[(where, "epoch") for where in EPOCHS],
    *[(f"{where}, one rank", what) for where in STEPS for what in ("step", "epoch")],
    *[(f"{where}, one rank", "epoch") for where in EPOCHS],
]


def _messages(rank: int, world_size: int) -> list[str]:
    messages = []
    loader = numbered(4, batch_size=1)
    for where, what in DIFFERENCES:
        try:
            fit(rank, world_size, {}, loader, partial(Differs, where, what), lambda: [loader(), loader()])
            messages.append("no error")
        except TitanplugError as error:
            messages.append(str(error))
    return messages


@pytest.fixture(scope="module")
def messages() -> list[dict[tuple[str, str], str]]:
    found = run_ranks(_messages, 2, init_process_group=False)
    return [dict(zip(DIFFERENCES, texts, strict=True)) for texts in found]


@pytest.mark.parametrize(("where", "what"), DIFFERENCES)
def test_different_keys_are_an_error_on_every_rank(
    messages: list[dict[tuple[str, str], str]], where: str, what: str
) -> None:
    first, second = (found[where, what] for found in messages)
    assert first == second
    hook = where.removesuffix(", one rank")
    if what == "metric" or "one rank" in where:
        assert f"rank 1 logged {hook}.extra" in first and "rank 0 logged nothing" in first
    else:
        assert f"rank 0 logged {hook}.a" in first and f"rank 1 logged {hook}.b" in first


def test_a_value_of_rank_zero_alone_may_say_so() -> None:
    class OnRankZero(Tiny):
        def training_step(self, batch: Tensor, batch_idx: int) -> Any:
            if self.global_rank == 0:
                self.log("mine", 5.0, rank_zero_only=True, prog_bar=True)
            return super().training_step(batch, batch_idx)

    def run(rank: int, world_size: int) -> Any:
        module = fit(rank, world_size, {}, numbered(4, batch_size=1), OnRankZero)
        return dict(module.trainer.callback_metrics)

    first, second = run_ranks(run, 2, init_process_group=False)
    assert float(first["mine"]) == 5.0 and second == {}


@pytest.mark.parametrize("value", ["text", {"a": {"b": 1.0}}, torch.zeros(2)])
def test_what_is_no_number_is_refused_by_lightning(value: Any) -> None:
    class Wrong(Tiny):
        def training_step(self, batch: Tensor, batch_idx: int) -> Any:
            self.log("wrong", value)
            raise AssertionError("the line above raises")

    def run(rank: int, world_size: int) -> None:
        with pytest.raises((ValueError, L.pytorch.utilities.exceptions.MisconfigurationException)):
            fit(rank, world_size, {}, numbered(4, batch_size=1), Wrong)

    run_ranks(run, 2, init_process_group=False)


# ---------------------------------------------------------------- decisions


class Monitored(Tiny):
    """A value that gets worse from the fourth epoch on, if all ranks count; on each rank alone it doesn't."""

    def __init__(self, key: str) -> None:
        super().__init__()
        self.key = key

    def _value(self, batch: Tensor) -> Tensor:
        epoch = self.current_epoch
        sign = 1.0 if self.trainer.strategy.dp_rank == 0 else -1.0  # type: ignore[attr-defined]
        return torch.tensor(abs(epoch - 2.0) + 100.0 * sign * (1 + epoch % 3))

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        if self.key in ("train", "step"):
            on_step = self.key == "step"
            self.log(self.key, self._value(batch), on_step=on_step, on_epoch=not on_step)
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        if self.key == "val":
            self.log("val", self._value(batch))


def _decide(rank: int, world_size: int, key: str, folder: Path) -> Any:
    L.seed_everything(7, verbose=False)
    stopping = EarlyStopping(key, patience=1, mode="min", check_on_train_epoch_end=key != "val")
    saving = ModelCheckpoint(
        folder, f"{{epoch}}-{{{key}:.0f}}", monitor=key, save_on_train_epoch_end=key != "val"
    )
    trainer = build_trainer(
        world_size,
        TitanStrategy(**DP2_TP2),
        enable_checkpointing=True,
        callbacks=[stopping, saving],
        max_epochs=9,
        log_every_n_steps=50,
    )
    loader = numbered(4, batch_size=2)
    trainer.fit(Monitored(key), loader(), loader())
    return (
        trainer.current_epoch,
        saving.best_model_path,
        float(saving.best_model_score),  # type: ignore[arg-type]  # there is one
        stopping.stopped_epoch,
    )


@pytest.mark.parametrize("key", ["val", "train", "step"])
def test_stopping_and_saving_agree_on_every_rank(key: str, tmp_path: Path) -> None:
    found = run_ranks(_decide, 4, key, tmp_path, init_process_group=False)
    # Scores by epoch are 2, 1, 0, 1: the third is the best, and with patience 1 the fourth the last.
    assert found == [(4, str(tmp_path / f"epoch=2-{key}=0.ckpt"), 0.0, 3)] * 4


class Plateau(Tiny):
    """A schedule that reads a value of each step, which is another one on each rank."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        sign = 1.0 if self.global_rank == 0 else -1.0
        self.log("level", batch_idx + 100.0 * sign * (-1) ** batch_idx, on_step=True, on_epoch=False)
        return super().training_step(batch, batch_idx)

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {
                "scheduler": schedule,
                "interval": "step",
                "monitor": "level",
                "reduce_on_plateau": True,
            },
        }


def test_a_schedule_that_monitors_a_step_agrees_on_every_rank() -> None:
    def run(rank: int, world_size: int) -> float:
        module = fit(rank, world_size, {}, numbered(8, batch_size=1), Plateau, log_every_n_steps=50)
        return float(module.optimizers().param_groups[0]["lr"])

    # The common value rises at each of the four steps: three reductions.
    assert run_ranks(run, 2, init_process_group=False) == [0.1 / 8, 0.1 / 8]

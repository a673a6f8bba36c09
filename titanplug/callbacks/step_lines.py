"""One readable line for every logged step."""

from __future__ import annotations

import time
from typing import Any

import lightning as L
import psutil
import torch
from lightning.pytorch.callbacks import Callback
from torch.optim import Optimizer
from typing_extensions import override

from titanplug.callbacks.console import say
from titanplug.callbacks.ranks import (
    counts_samples,
    gather_from_ranks,
    is_log_step,
    logged_value,
)

GIB = 2**30


class StepLines(Callback):
    """Prints step, loss, gradient norm, learning rate, tokens/s, memory and time on log steps.

    Logs ``lr``, ``tokens_per_s`` and ``memory_gib`` to the loggers. Where a progress bar runs, it gets these
    values and no lines are printed. Time spent in validation does not count.

    - tokens/s: of the whole job; ranks that read the same samples count once.
    - memory: of the rank that needs most; peak of the device, or resident memory on the processor.

    Values are read, and ranks meet, on log steps only. The mean of tokens/s without the first line, which has
    the warm-up in it, and the peak of memory are left for the status of the run.

    Args:
        tokens_key: entry of the batch whose elements are the tokens. A batch without it has none.
    """

    def __init__(self, tokens_key: str = "input_ids") -> None:
        self.tokens_key = tokens_key
        self._tokens = 0
        self._step = 0
        self._rates: list[tuple[float, float]] = []  # tokens and seconds of each line
        self._peak_gib = 0.0
        self._learning_rate = 0.0
        self._start_s = self._mark_s = self._pause_s = 0.0

    @override
    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._tokens, self._step = 0, trainer.global_step
        self._rates, self._peak_gib = [], 0.0
        self._start_s = self._mark_s = time.perf_counter()

    @override
    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._pause_s = time.perf_counter()

    @override
    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        now = time.perf_counter()
        self._mark_s += now - self._pause_s
        if trainer.sanity_checking or not trainer.is_global_zero or _bar_runs(trainer):
            return
        values = [
            f"{name} {float(value):.4f}"
            for name, value in sorted(trainer.callback_metrics.items())
            if name.startswith("val_")
        ]
        say(f"{_step_of(trainer)} | validation: {', '.join(values)} | {now - self._pause_s:.1f} s")

    @override
    def on_before_optimizer_step(
        self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Optimizer
    ) -> None:
        # The scheduler moves on before the batch ends.
        self._learning_rate = float(optimizer.param_groups[0]["lr"])

    @override
    def on_train_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        tokens = batch.get(self.tokens_key) if isinstance(batch, dict) else None
        self._tokens += 0 if tokens is None else tokens.numel()
        stepped = trainer.global_step > self._step
        self._step = trainer.global_step
        if not stepped or not is_log_step(trainer, self._step):
            return
        # Reading them waits for the device, so it comes before the clock.
        losses = {
            name: value
            for name, key in (("loss", "train_loss"), ("grad norm", "grad_norm"))
            if (value := logged_value(trainer, key)) is not None
        }
        now = time.perf_counter()
        counted = self._tokens if counts_samples(trainer) else 0
        everyone = gather_from_ranks(trainer, counted, _memory_gib(trainer))
        tokens_of_all, seconds = sum(row[0] for row in everyone), max(now - self._mark_s, 1e-9)
        rates = {
            "lr": self._learning_rate,
            "tokens_per_s": tokens_of_all / seconds,
            "memory_gib": max(row[1] for row in everyone),
        }
        self._rates.append((tokens_of_all, seconds))
        self._peak_gib = max(self._peak_gib, rates["memory_gib"])
        self._tokens, self._mark_s = 0, now
        if not trainer.is_global_zero:
            return
        bar = _bar_runs(trainer)
        # Known on this rank alone, and the same for the whole job.
        pl_module.log_dict(rates, prog_bar=bar, rank_zero_only=True)
        if bar:
            pl_module.log_dict(losses, prog_bar=True, logger=False, rank_zero_only=True)
        else:
            parts = [_step_of(trainer), *(f"{name} {value:.4f}" for name, value in losses.items())]
            parts += [f"lr {rates['lr']:.2e}", f"{rates['tokens_per_s']:,.0f} tokens/s"]
            parts += [f"{rates['memory_gib']:.2f} GiB", f"{now - self._start_s:.1f} s"]
            say(" | ".join(parts))

    def results(self) -> dict[str, float | None]:
        """What the run's status tells of speed and memory."""
        steady = self._rates[1:] or self._rates
        seconds = sum(row[1] for row in steady)
        return {
            "tokens_per_s": sum(row[0] for row in steady) / seconds if seconds else None,
            "memory_gib": self._peak_gib or None,
        }


def _step_of(trainer: L.Trainer) -> str:
    if trainer.max_steps > 0:
        width = len(str(trainer.max_steps))
        return f"step {trainer.global_step:{width}d}/{trainer.max_steps}"
    return f"step {trainer.global_step}"


def _bar_runs(trainer: L.Trainer) -> bool:
    bar: Any = trainer.progress_bar_callback
    return bar is not None and bool(bar.is_enabled)


def _memory_gib(trainer: L.Trainer) -> float:
    device = trainer.strategy.root_device
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / GIB
    return float(psutil.Process().memory_info().rss) / GIB

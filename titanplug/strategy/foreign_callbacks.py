"""Callbacks of Lightning that don't know of ranks with the same samples, nor of directories."""

from __future__ import annotations

from typing import Any

from lightning.fabric.utilities.throughput import Throughput
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint, ThroughputMonitor
from typing_extensions import override


class SharedThroughput(Throughput):
    """Throughput where several ranks read the same samples, and each computes a part of the work on them.

    Lightning takes the batch of one rank times the number of ranks for that of all, so every rate of it, that
    of a device and the utilisation too, is too high by the number of ranks that share their samples.

    Args:
        num_copies: ranks that read the same samples.
        **options: of ``Throughput``.
    """

    def __init__(self, num_copies: int, **options: Any) -> None:
        super().__init__(**options)
        self._num_copies = num_copies

    @override
    def compute(self) -> dict[str, int | float]:
        return {
            name: value / self._num_copies if name.endswith(("_per_sec", "mfu")) else value
            for name, value in super().compute().items()
        }


def adapt_callbacks(trainer: Trainer, data_ranks: int) -> None:
    """Make Lightning's callbacks right under the strategy, in each run, before its first batch.

    On a layout with copies a rate of all ranks becomes the sum over ranks that read different samples, that
    of a device the mean over all ranks. Links to checkpoints change at once, when their target is there.

    Args:
        trainer: the Trainer.
        data_ranks: number of ranks that read different samples.
    """
    num_copies = trainer.world_size // data_ranks
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, ThroughputMonitor) and num_copies > 1:
            _share_rates(callback, num_copies)
        if isinstance(callback, ModelCheckpoint):
            callback._link_checkpoint = _link_checkpoint  # type: ignore[method-assign]


def _share_rates(callback: ThroughputMonitor, num_copies: int) -> None:
    for stage, found in callback._throughputs.items():
        if not isinstance(found, SharedThroughput):
            callback._throughputs[stage] = SharedThroughput(
                num_copies,
                available_flops=found.available_flops,
                world_size=found.world_size,
                window_size=found._time.maxlen,
                separator=found.separator,
            )


def _link_checkpoint(trainer: Trainer, filepath: str, linkpath: str) -> None:
    strategy: Any = trainer.strategy
    strategy.link_checkpoint(filepath, linkpath)

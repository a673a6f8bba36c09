"""Callbacks of Lightning that take every rank for one that reads other samples."""

from __future__ import annotations

from typing import Any

from lightning.fabric.utilities.throughput import Throughput
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ThroughputMonitor
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
    """Make what Lightning's callbacks tell of all ranks right on a layout with copies.

    Called in each run, when callbacks have been set up and before the first batch. A rate of all ranks
    becomes the sum over ranks that read different samples, that of a device the mean over all ranks.

    Args:
        trainer: the Trainer.
        data_ranks: number of ranks that read different samples.
    """
    num_copies = trainer.world_size // data_ranks
    if num_copies == 1:
        return
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, ThroughputMonitor):
            for stage, found in callback._throughputs.items():
                if not isinstance(found, SharedThroughput):
                    callback._throughputs[stage] = SharedThroughput(
                        num_copies,
                        available_flops=found.available_flops,
                        world_size=found.world_size,
                        window_size=found._time.maxlen,
                        separator=found.separator,
                    )

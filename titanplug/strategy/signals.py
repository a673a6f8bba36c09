"""Ending a run on SIGTERM together, without a collective in every step.

Stock Lightning broadcasts a tensor and reads it on the host before every training batch, only to learn
whether rank 0 got the signal. Here a signal sets a flag. Ranks agree through the process group's key-value
store, which costs nothing until it is used:

1. a rank that got the signal writes a note; the others look for one once a second at most;
2. every rank that knows counts itself;
3. when all know, the first to see it names the optimizer step after the next as the last.

Ranks are never more than one optimizer step apart, since each step needs them all, so each of them reads
that number before it gets there. Evaluation has no state worth keeping and ends at once.
"""

from __future__ import annotations

import signal
import time
from types import FrameType
from typing import Any

import torch.distributed as dist
from lightning.pytorch import Trainer
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import SIGTERMException

_LOOK_EVERY_S = 1.0


class GracefulStop:
    """Stops the training of all ranks after the same optimizer step once any of them gets SIGTERM.

    Args:
        trainer: the Trainer, whose own handling is replaced.
        prefix: distinguishes the runs of one process group.
    """

    def __init__(self, trainer: Trainer, prefix: str) -> None:
        self._trainer = trainer
        self._prefix = f"titanplug/stop/{prefix}"
        self._signalled = False
        self._announced = False
        self._last_look = time.monotonic()
        loop: Any = trainer.fit_loop.epoch_loop
        loop._broadcast_sigterm_tensor = self.check
        connector: Any = trainer._signal_connector
        connector._sigterm_notifier_fn = self._notice

    def _notice(self, signum: int, _: FrameType | None) -> None:
        launcher: Any = self._trainer.strategy.launcher
        if not self._signalled and launcher is not None:
            launcher.kill(signal.Signals(signum))
        self._signalled = True
        if self._trainer.world_size == 1:
            self._trainer._signal_connector.received_sigterm = True  # read after every batch
        if self._trainer.state.fn != TrainerFn.FITTING:
            raise SIGTERMException

    def check(self) -> None:
        """Called before every training batch where there are several ranks.

        Raises:
            SIGTERMException: this is the agreed place to stop, on every rank.
        """
        if not self._signalled:
            now = time.monotonic()
            if now - self._last_look < _LOOK_EVERY_S:
                return
            self._last_look = now
        loop = self._trainer.fit_loop.epoch_loop
        if loop.batch_progress.current.ready % self._trainer.accumulate_grad_batches:
            return  # inside an accumulation window ranks may drift apart
        if self._should_stop(self._trainer.global_step):
            self._trainer._signal_connector.received_sigterm = True
            raise SIGTERMException

    def _should_stop(self, step: int) -> bool:
        store = dist.distributed_c10d._get_default_store()
        noted, known, last = (f"{self._prefix}/{key}" for key in ("noted", "known", "last"))
        if not self._signalled and not store.check([noted]):
            return False
        self._signalled = True  # from now on look before every step
        if not self._announced:
            self._announced = True
            store.set(noted, "1")
            store.add(known, 1)
        if store.add(known, 0) < dist.get_world_size():
            return False
        # Only the first proposal counts: a rank that is a step ahead can't move the end.
        agreed = int(store.compare_set(last, "", str(step + 2)))
        return step >= agreed

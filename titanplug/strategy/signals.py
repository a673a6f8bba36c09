"""Preemption: a signal ends the training of all ranks after the same step, with a checkpoint.

Schedulers send SIGTERM or SIGUSR1 some time before they take the machine away. Stock Lightning broadcasts a
tensor and reads it on the host before every training batch, only to learn whether rank 0 got the signal.
Here a signal sets a flag. Ranks agree through the process group's key-value store, which costs nothing
until it is used:

1. a rank that got the signal writes a note; the others look for one once a second at most;
2. every rank that knows counts itself;
3. when all know, the first to see it names the optimizer step after the next as the last.

Ranks are never more than one optimizer step apart, since each step needs them all, so each of them reads
that number before it gets there. There all of them save, outside of the signal handler, and end with exit
code :data:`~titanplug.launch.EXIT_PREEMPTED`; further signals change nothing. A validation inside of training
runs to its end first: half of one can't be continued. Evaluation alone has no state worth keeping and ends
at once, with 128 + the signal's number.
"""

from __future__ import annotations

import itertools
import os
import signal
import sys
import threading
import time
from types import FrameType
from typing import Any

import torch.distributed as dist
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import SIGTERMException

from titanplug.launch import EXIT_PREEMPTED

PREEMPTED_NAME = "preempted.ckpt"
"""Name of the checkpoint, in the folder of the Trainer's first checkpoint callback."""

_LOOK_EVERY_S = 1.0
_runs = itertools.count()


class Preempted(SIGTERMException):
    """Ends this process after a signal.

    Args:
        text: what happened and how to go on.
        code: exit code of the process.
    """

    def __init__(self, text: str, code: int) -> None:
        self.text = text
        super().__init__(code)


class GracefulStop:
    """Stops the training of all ranks after the same optimizer step once any of them gets a signal.

    SIGUSR1 is left to a handler of the user's own. Where Lightning's requeueing is on (``SLURMEnvironment``),
    its signal has all ranks save and requeue as Lightning does, at the agreed step instead of in the handler.

    Args:
        trainer: the Trainer, whose own handling is replaced.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        # All ranks start the same runs, and what one leaves in the store isn't for the next.
        self._prefix = f"titanplug/stop/{next(_runs)}"
        self._signum: int | None = None
        self._requeues = False
        self._announced = False
        self._last_look = time.monotonic()
        loop: Any = trainer.fit_loop.epoch_loop
        loop._broadcast_sigterm_tensor = self.check
        loop.__dict__.pop("advance", None)
        if trainer.world_size == 1:
            loop.advance = self._advance  # Lightning asks only where there are several ranks
        connector: Any = trainer._signal_connector
        connector.register_signal_handlers = self._register
        connector._sigterm_notifier_fn = self._notice
        connector._slurm_sigusr_handler_fn = self._notice_requeue
        self._connector = connector

    # ---------------------------------------------------------------- on a signal

    def _register(self) -> None:
        type(self._connector).register_signal_handlers(self._connector)
        on_main_thread = threading.current_thread() is threading.main_thread()
        if on_main_thread and signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL:
            signal.signal(signal.SIGUSR1, self._notice)

    def _notice(self, signum: int, _: FrameType | None) -> None:
        if self._signum is None:
            self._signum = signum
        if self._trainer.state.fn != TrainerFn.FITTING:
            launcher: Any = self._trainer.strategy.launcher
            if launcher is not None:
                launcher.kill(signal.Signals(signum))
            raise Preempted(f"Ended by {signal.Signals(signum).name}.", self._code(128 + signum))

    def _notice_requeue(self, signum: int, frame: FrameType | None) -> None:
        self._requeues = self._requeues or self._signum is None
        self._notice(signum, frame)

    # ---------------------------------------------------------------- between steps

    def _advance(self, data_fetcher: Any) -> None:
        loop = self._trainer.fit_loop.epoch_loop
        if not loop.restarting:
            self.check()
        type(loop).advance(loop, data_fetcher)

    def check(self) -> None:
        """Called before every training batch.

        Raises:
            Preempted: this is the agreed place to stop, on every rank; all have saved.
        """
        if self._signum is None:
            now = time.monotonic()
            if self._trainer.world_size == 1 or now - self._last_look < _LOOK_EVERY_S:
                return
            self._last_look = now
        loop = self._trainer.fit_loop.epoch_loop
        if loop.batch_progress.current.ready % self._trainer.accumulate_grad_batches:
            return  # inside an accumulation window ranks may drift apart, and its gradients aren't saved
        if self._trainer.world_size == 1 or self._should_stop(self._trainer.global_step):
            self._stop()

    def _should_stop(self, step: int) -> bool:
        store = dist.distributed_c10d._get_default_store()
        noted, known, last = (f"{self._prefix}/{key}" for key in ("noted", "known", "last"))
        if self._signum is None and not store.check([noted]):
            return False
        if not self._announced:
            self._announced = True
            store.add(f"{self._prefix}/requeue", int(self._requeues))
            signum = store.compare_set(noted, "", str(self._signum or int(signal.SIGTERM)))
            self._signum = int(signum)  # the first one is everybody's; from now on look before every step
            store.add(known, 1)
        if store.add(known, 0) < dist.get_world_size():
            return False
        # Only the first proposal counts: a rank that is a step ahead can't move the end.
        agreed = int(store.compare_set(last, "", str(step + 2)))
        if step < agreed:
            return False
        self._requeues = store.add(f"{self._prefix}/requeue", 0) > 0  # all have said so before the proposal
        return True

    def _stop(self) -> None:
        trainer, signum = self._trainer, int(self._signum or signal.SIGTERM)
        name = signal.Signals(signum).name
        for number in (signal.SIGTERM, signal.SIGUSR1):  # nothing interrupts the save
            self._connector._register_signal(number, signal.SIG_IGN)
        path = self._save_and_requeue(signum) if self._requeues else _save(trainer)
        # Also from here on: torchrun sends SIGTERM to all ranks when the first one has ended.
        self._connector._original_handlers |= {signal.SIGTERM: signal.SIG_IGN, signal.SIGUSR1: signal.SIG_IGN}
        self._connector.received_sigterm = True
        if path is None:
            raise Preempted(
                f"Ended by {name} at step {trainer.global_step}. Nothing was saved: this Trainer writes no "
                "checkpoints.",
                self._code(128 + signum),
            )
        raise Preempted(
            f"Preempted by {name}: saved {os.path.relpath(path)} at step {trainer.global_step}. Run the same "
            "command to go on, with resume=auto or fit(ckpt_path=latest_checkpoint(folder)). "
            f"Exit code {EXIT_PREEMPTED}.",
            self._code(EXIT_PREEMPTED),
        )

    def _save_and_requeue(self, signum: int) -> str:
        """Lightning's own: save where its Slurm jobs look for a checkpoint; rank 0 requeues the job."""
        trainer: Any = self._trainer
        path: str = trainer._checkpoint_connector.hpc_save_path(trainer.default_root_dir)
        type(self._connector)._slurm_sigusr_handler_fn(self._connector, signum, None)
        trainer.strategy.finish_saving()
        return path

    def _code(self, code: int) -> int:
        """Ranks that this script has started end with 0: who started them tells what happened."""
        launcher = self._trainer.strategy.launcher
        return 0 if getattr(launcher, "is_child", False) else code


def preempted_path(trainer: Trainer) -> str | None:
    """Where a checkpoint goes when a signal ends the training; None where the Trainer writes none."""
    callbacks: list[Any] = trainer.checkpoint_callbacks
    ordered = sorted(callbacks, key=lambda callback: not isinstance(callback, ModelCheckpoint))
    folders = [callback.dirpath for callback in ordered if getattr(callback, "dirpath", None)]
    if not folders or trainer.fast_dev_run:  # type: ignore[attr-defined]
        return None
    return os.path.join(folders[0], PREEMPTED_NAME)


def _save(trainer: Trainer) -> str | None:
    """Write a checkpoint, to the end, with all ranks; its path, or None where the Trainer writes none."""
    path = preempted_path(trainer)
    if path is not None:
        strategy: Any = trainer.strategy
        path = str(strategy.broadcast(path))
        trainer.save_checkpoint(path)
        strategy.finish_saving()
    return path


def tell_preempted(exception: Preempted, trainer: Trainer) -> None:
    """Print how a run was ended by a signal; the last thing of it, on rank 0, when all ranks are there."""
    if trainer.state.fn == TrainerFn.FITTING:
        trainer.strategy.barrier("preempted")  # what ends first has the others ended too
    if trainer.is_global_zero:
        print(f"\n{exception.text}", file=sys.stderr, flush=True)

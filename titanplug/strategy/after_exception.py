"""Saving a checkpoint when a run ends by an exception, without waiting for ranks that never come.

Callbacks save in their ``on_exception``. Saving is a collective, and where one rank alone has failed the
others are somewhere else: it would hang. So ranks count themselves in the process group's key-value store
first, and save only when all of them stand at the same batch.
"""

from __future__ import annotations

import sys
import time
import warnings
from typing import Any

import torch.distributed as dist
from lightning.pytorch import Trainer

from titanplug.strategy.launcher import is_consequence

WAIT_S = 10.0
"""How long a rank waits for the others."""

_POLL_S = 0.05


class AfterException:
    """Decides for one rank whether it may still take part in collectives."""

    def __init__(self) -> None:
        self.is_alone = False
        """Whether this rank has found that the others are gone, so that no collective may be tried."""
        self._num_meetings = 0

    def may_save(self, trainer: Trainer) -> bool:
        """Whether a checkpoint can be written: always, unless the run was cut off by an exception.

        Then all ranks have to ask, at the same batch. Warns where they don't.
        """
        error = sys.exception()
        if not trainer.interrupted or error is None or trainer.world_size == 1:
            return True
        self._num_meetings += 1
        progress: Any = trainer.fit_loop.epoch_loop.batch_progress.total
        place = f"{trainer.global_step}/{progress.ready}/{progress.processed}"
        name = f"titanplug/exception/{self._num_meetings}/{place}"
        # After Ctrl-C ranks stop anywhere, maybe in the middle of an optimizer's step.
        hopeless = isinstance(error, KeyboardInterrupt) or is_consequence(error)
        self.is_alone = self.is_alone or hopeless or not _all_arrive(name, WAIT_S)
        if self.is_alone:
            warnings.warn(
                f"No checkpoint was saved on this {type(error).__name__}: that needs all ranks, and they "
                "did not stop at the same place. (SIGTERM stops them together.)",
                stacklevel=2,
            )
        return not self.is_alone


def _all_arrive(name: str, wait_s: float) -> bool:
    """Whether all ranks call this with the same name within the time; they all get the same answer."""
    store = dist.distributed_c10d._get_default_store()
    world_size = dist.get_world_size()
    deadline = time.monotonic() + wait_s
    arrived = store.add(f"{name}/arrived", 1)
    while arrived < world_size and time.monotonic() < deadline:
        time.sleep(_POLL_S)
        arrived = store.add(f"{name}/arrived", 0)
    # The first to decide decides for all: one that comes late must not go ahead alone.
    opinion = "yes" if arrived >= world_size else "no"
    return bool(store.compare_set(f"{name}/decision", "", opinion) == b"yes")

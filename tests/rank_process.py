"""What happens inside a rank that ``tests.harness`` has forked, and what it leaves behind for the parent."""

from __future__ import annotations

import faulthandler
import os
import pickle
import random
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

LINGER_S = 10.0
"""How long a rank that has returned stays for the others, who may still be connecting to it."""

RANK_VARIABLES = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "NODE_RANK",
    "GROUP_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
    "TORCHELASTIC_RUN_ID",
)

# What a rank reports when a peer has gone: a consequence, never the cause.
PEER_LOST = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "Socket closed",
)


class RankFailure(RuntimeError):
    """A rank ended without a result, or with an error that cannot be carried to the test."""


@dataclass(frozen=True)
class Outcome:
    """How a rank ended: its result, or its error, the traceback, and when it was raised."""

    result: Any = None
    error: BaseException | None = None
    traceback: str = ""
    time_s: float = 0.0

    @property
    def peer_lost(self) -> bool:
        return any(text in str(self.error) for text in PEER_LOST)


def rank_main(run_rank: Callable[[int], Any], rank: int, num_ranks: int, folder: Path) -> None:
    # A group of its own, so that the whole rank, with its data workers, can be ended by number.
    os.setpgid(0, 0)
    with open(folder / f"{rank}.stack", "w") as stack:
        faulthandler.register(signal.SIGUSR1, file=stack, all_threads=False)
        _prepare_process()
        try:
            outcome = Outcome(result=run_rank(rank))
            payload = pickle.dumps(outcome)
        except BaseException as error:
            text = traceback.format_exc()
            outcome = Outcome(error=error, traceback=text, time_s=time.monotonic())
            payload = _pickle_error(outcome)
        partial = folder / f"{rank}.partial"
        partial.write_bytes(payload)
        partial.rename(folder / f"{rank}.outcome")
        if outcome.error is None:
            _linger(num_ranks, folder)
        faulthandler.unregister(signal.SIGUSR1)


def _linger(num_ranks: int, folder: Path) -> None:
    until = time.monotonic() + LINGER_S
    while len(list(folder.glob("*.outcome"))) < num_ranks and time.monotonic() < until:
        time.sleep(0.005)


def _prepare_process() -> None:
    for name in RANK_VARIABLES:
        os.environ.pop(name, None)
    os.environ.update(OMP_NUM_THREADS="1", MKL_NUM_THREADS="1")
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # no look-up of the host's name
    torch.set_num_threads(1)
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


def tell_lightning(rank: int) -> None:
    """Lightning read its rank when the test process imported it; a Trainer sets it only later."""
    module = sys.modules.get("lightning_utilities.core.rank_zero")
    if module is not None:
        module.rank_zero_only.rank = rank


def _pickle_error(outcome: Outcome) -> bytes:
    try:
        payload = pickle.dumps(outcome)
        pickle.loads(payload)
    except Exception:
        substitute = RankFailure(f"{type(outcome.error).__name__}: {outcome.error}")
        payload = pickle.dumps(Outcome(None, substitute, outcome.traceback, outcome.time_s))
    return payload


def read_outcome(folder: Path, rank: int) -> Outcome | None:
    path = folder / f"{rank}.outcome"
    if not path.exists():
        return None
    outcome = pickle.loads(path.read_bytes())
    assert isinstance(outcome, Outcome)
    return outcome

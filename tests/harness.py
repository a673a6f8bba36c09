"""Run a function on several ranks, forked from the warm test process.

Sixteen ranks start in about a second this way, where sixteen new interpreters take twenty: what the
test module has imported at its top (torch, lightning) is there in each rank already.

Rules that keep forking safe:

- The test process computes on one thread (set below, before any work), so no thread pool is lost.
- The test process never initialises CUDA, and where torch was built for CUDA it never runs a
  backward before forking: autograd's device threads do not survive a fork. Reference values are
  computed with :func:`reference`, in a process of their own. (A CPU build has no such threads.)
- Functions may be closures and arguments may be anything, since nothing is pickled on the way in.
  Results are pickled on the way out: return plain tensors, numbers and containers.
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import random
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.rank_process import Outcome, RankFailure, rank_main, read_outcome, tell_lightning

torch.set_num_threads(1)
for _noisy in ("torch.distributed.pipelining.schedules", "torch.distributed.tensor._redistribute"):
    logging.getLogger(_noisy).setLevel(logging.ERROR)

GRACE_S = 2.0
"""How long the other ranks may still run after one has failed."""


class RankTimeout(TimeoutError):
    """The ranks did not end in time."""


def run_ranks(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout_s: float = 110.0,
    init_process_group: bool = True,
) -> list[Any]:
    """Call ``fn(rank, world_size, *args)`` on every rank.

    Each rank is a fork of this process with one compute thread, with Python's, NumPy's and torch's
    generators seeded with 0, and with the environment that torchrun gives, so that
    ``Trainer(devices=world_size, accelerator="cpu")`` attaches to it.

    Args:
        fn: what a rank does.
        world_size: number of ranks.
        *args: passed on.
        timeout_s: time for all ranks together, in seconds.
        init_process_group: True gives the ranks a gloo process group over a file; False leaves that
            to ``fn`` (a Trainer, ``dist.init_process_group()``), which meets at MASTER_ADDR and
            MASTER_PORT.

    Returns:
        What each rank returned, by rank.

    Raises:
        RankTimeout: the time is up; the message tells where each rank stood.
        RankFailure: a rank died, or raised an error that cannot be pickled.
        BaseException: the first error of a rank itself, with its traceback as a note. Errors that
            only tell that a peer has gone come last.
    """
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        common = {
            "WORLD_SIZE": str(world_size),
            "LOCAL_WORLD_SIZE": str(world_size),
            "NODE_RANK": "0",
            "GROUP_RANK": "0",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(_free_port()),
            "TORCHELASTIC_RUN_ID": Path(folder).name,
        }

        def run_rank(rank: int) -> Any:
            os.environ.update(common, RANK=str(rank), LOCAL_RANK=str(rank))
            tell_lightning(rank)
            if init_process_group:
                dist.init_process_group(
                    "gloo",
                    init_method=f"file://{folder}/store",
                    rank=rank,
                    world_size=world_size,
                    # Longer than ours, which tells where the ranks stand.
                    timeout=timedelta(seconds=timeout_s + 60),
                )
            return fn(rank, world_size, *args)

        return _run_forked(run_rank, world_size, Path(folder), timeout_s)


def reference(fn: Callable[..., Any], *args: Any, timeout_s: float = 110.0) -> Any:
    """Call ``fn(*args)`` in one forked process without process group, and return its result.

    What a distributed run is compared with is computed here, so that the test process stays clean
    (generators, thread pools, autograd). Errors are raised as by :func:`run_ranks`.
    """
    with tempfile.TemporaryDirectory(prefix="reference-") as folder:
        return _run_forked(lambda _: fn(*args), 1, Path(folder), timeout_s)[0]


def _run_forked(run_rank: Callable[[int], Any], num_ranks: int, folder: Path, timeout_s: float) -> list[Any]:
    context = multiprocessing.get_context("fork")
    deadline = time.monotonic() + timeout_s
    processes: list[BaseProcess] = [
        context.Process(target=rank_main, args=(run_rank, rank, num_ranks, folder), name=f"rank-{rank}")
        for rank in range(num_ranks)
    ]
    sys.stdout.flush()
    sys.stderr.flush()
    started: list[BaseProcess] = []
    try:
        for process in processes:
            process.start()
            started.append(process)
        timed_out = _wait(processes, folder, deadline)
        stacks = _stacks(processes, folder) if timed_out else ""
    finally:
        ended_by_us = {rank for rank, process in enumerate(started) if _end(process)}
    outcomes = [read_outcome(folder, rank) for rank in range(num_ranks)]
    _raise_first_error(processes, outcomes, ended_by_us)
    if timed_out:
        raise RankTimeout(f"The {num_ranks} ranks did not end within {timeout_s:g} s.\n{stacks}")
    return [outcome.result for outcome in outcomes if outcome is not None]


def _wait(processes: list[BaseProcess], folder: Path, deadline: float) -> bool:
    """Wait for all ranks, or for a failure and the time of grace after it; True when time is up."""
    running = list(processes)
    failed = False
    while running:
        remaining_s = deadline - time.monotonic()
        if remaining_s <= 0:
            return not failed
        wait([process.sentinel for process in running], timeout=remaining_s)
        for process in [process for process in running if not process.is_alive()]:
            running.remove(process)
            outcome = read_outcome(folder, processes.index(process))
            if not failed and (outcome is None or outcome.error is not None):
                failed = True
                deadline = min(deadline, time.monotonic() + GRACE_S)
    return False


def _stacks(processes: list[BaseProcess], folder: Path) -> str:
    """Ask each rank that still runs where it stands."""
    parts = []
    for rank, process in enumerate(processes):
        if not process.is_alive() or process.pid is None:
            parts.append(f"rank {rank}: had ended")
            continue
        if read_outcome(folder, rank) is not None:
            parts.append(f"rank {rank}: had returned")
            continue
        stack = folder / f"{rank}.stack"
        until = time.monotonic() + 1.0
        # A rank that has not come as far as to open its file would be ended by the signal.
        if stack.exists():
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGUSR1)
            while not stack.stat().st_size and time.monotonic() < until:
                time.sleep(0.01)
        text = stack.read_text() if stack.exists() else "(had not started)"
        parts.append(f"rank {rank}: still running\n{text}")
    return "\n".join(parts)


def _end(process: BaseProcess) -> bool:
    """Reap a rank and what it started; True when it had to be ended."""
    assert process.pid is not None
    alive = process.is_alive()
    if alive:
        process.kill()
    # Its group may hold data workers even where the rank itself has ended.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.join()
    return alive


def _raise_first_error(
    processes: list[BaseProcess], outcomes: list[Outcome | None], ended_by_us: set[int]
) -> None:
    """Raise the error that explains the others: a rank's own, then a death, then a lost peer."""
    world_size = len(processes)
    errors = [
        (outcome.peer_lost, outcome.time_s, rank, outcome)
        for rank, outcome in enumerate(outcomes)
        if outcome is not None and outcome.error is not None
    ]
    deaths = [
        f"rank {rank} of {world_size} ended with exit code {process.exitcode} and no result"
        for rank, process in enumerate(processes)
        if outcomes[rank] is None and rank not in ended_by_us
    ]
    first = min(errors, key=lambda entry: entry[:3], default=None)
    if deaths and (first is None or first[0]):
        raise RankFailure("; ".join(deaths) + _signal_hint(processes))
    if first is not None:
        _, _, rank, outcome = first
        assert outcome.error is not None
        outcome.error.add_note(f"Raised on rank {rank} of {world_size}:\n{outcome.traceback}")
        if outcome.peer_lost:
            returned = [f"rank {rank}" for rank, other in enumerate(outcomes) if _returned(other)]
            outcome.error.add_note(f"{', '.join(returned) or 'no rank'} had returned")
        raise outcome.error


def _returned(outcome: Outcome | None) -> bool:
    return outcome is not None and outcome.error is None


def _signal_hint(processes: list[BaseProcess]) -> str:
    names = {
        signal.Signals(-process.exitcode).name
        for process in processes
        if process.exitcode is not None and process.exitcode < 0
    } - {"SIGKILL"}
    return f" ({', '.join(sorted(names))})" if names else ""


def _free_port() -> int:
    """A port below the range that the system gives to outgoing connections, so nothing takes it."""
    candidates = random.SystemRandom()
    while True:
        port = candidates.randrange(20_000, 32_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port

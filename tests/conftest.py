"""Settings and fixtures of all tests; distributed tests use ``tests.harness``."""

from __future__ import annotations

import os

# Before torch: one thread a process, no pool of compile workers that would outlive a test.
os.environ.update(OMP_NUM_THREADS="1", MKL_NUM_THREADS="1", TORCHINDUCTOR_COMPILE_THREADS="1")
# Tests use no hub.
os.environ.update(HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1", TRANSFORMERS_OFFLINE="1")

import ctypes
import gc
import multiprocessing
import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch

import tests.harness  # noqa: F401  (one compute thread from here on)

LEFT_BEHIND_GRACE_S = 2.0
# Helpers of the standard library and of torch that live as long as the test process.
LONG_LIVED = ("multiprocessing.resource_tracker", "multiprocessing.forkserver", "torch_shm_manager")
PR_SET_CHILD_SUBREAPER = 36


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="run the slow tests too")
    parser.addoption(
        "--slow-budget-s",
        type=float,
        default=0.0,
        metavar="SECONDS",
        help="run slow tests too, after the others, as long as the session is younger than this",
    )


def pytest_configure(config: pytest.Config) -> None:
    if sys.platform == "linux":
        # Processes whose parent has ended become children of this one, so that none goes unseen.
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    config.stash[SESSION_START] = time.monotonic()


SESSION_START = pytest.StashKey[float]()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=_order)


def _order(item: pytest.Item) -> tuple[bool, ...]:
    """Slow tests last, for the budget; on a CUDA build forks come before anything runs autograd."""
    slow = item.get_closest_marker("slow") is not None
    if torch.version.cuda is None:
        return (slow,)
    gpu = item.get_closest_marker("gpu") is not None
    module = getattr(item, "module", None)
    forks = hasattr(module, "run_ranks") or hasattr(module, "reference")
    return gpu, not forks, slow


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") is not None and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    if item.get_closest_marker("slow") is not None and not item.config.getoption("--slow"):
        budget_s = item.config.getoption("--slow-budget-s")
        if budget_s <= 0:
            pytest.skip("slow: run with --slow")
        if time.monotonic() - item.config.stash[SESSION_START] > budget_s:
            pytest.skip(f"slow: the budget of {budget_s:g} s is spent")


@pytest.fixture
def seed() -> int:
    """Seeds Python, NumPy and torch; the value is the seed."""
    value = 1234
    random.seed(value)
    np.random.seed(value)
    torch.manual_seed(value)
    return value


@pytest.fixture
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder as working directory, for code that writes relative to it."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(autouse=True)
def _no_process_left_behind() -> Iterator[None]:
    before = {process.pid for process in _running_children()}
    yield
    left = _wait_for_end(before)
    if left:
        commands = [f"{process.pid}: {_command(process)}" for process in left]
        for process in left:
            process.kill()
        psutil.wait_procs(left, timeout=5)
        pytest.fail("The test left processes behind:\n" + "\n".join(commands), pytrace=False)


def _wait_for_end(before: set[int]) -> list[psutil.Process]:
    deadline = time.monotonic() + LEFT_BEHIND_GRACE_S
    while left := [process for process in _running_children() if process.pid not in before]:
        if time.monotonic() > deadline:
            break
        gc.collect()  # data loaders end their workers when they go
        time.sleep(0.02)
    return left


def _running_children() -> list[psutil.Process]:
    """Descendants that run; those that have ended are reaped."""
    multiprocessing.active_children()
    running = []
    for process in psutil.Process().children(recursive=True):
        try:
            if process.status() == psutil.STATUS_ZOMBIE:
                if process.ppid() == os.getpid():
                    process.wait(timeout=0)
            elif not any(name in _command(process) for name in LONG_LIVED):
                running.append(process)
        except (psutil.NoSuchProcess, psutil.TimeoutExpired):
            continue
    return running


def _command(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline()) or process.name()
    except psutil.Error:
        return "(has ended)"

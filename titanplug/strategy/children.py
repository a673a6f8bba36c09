"""The processes that a script has started for its other ranks: watched, ended together, waited for."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

import torch.distributed as dist

from titanplug.errors import TitanplugError
from titanplug.rank_errors import ERROR_DIR_VARIABLE, first_error

GRACE_S = 5.0
"""How long other ranks may still run after one has failed."""

PARENT_VARIABLE = "TITANPLUG_PARENT_PID"
_PR_SET_PDEATHSIG = 1
_POLL_S = 0.1
_TAIL_BYTES = 16_384


class RankError(TitanplugError):
    """Another rank failed; the message is its error."""


class Children:
    """Starts processes and makes sure that they and this one end together.

    Where this process ends by an error, the others are ended first, so that its own error is the last
    on stderr. Where another fails, this one reports that one's error.

    Args:
        commands: by global rank.
        environments: by global rank.
        cwd: working directory.
        world_size: number of all ranks, for messages.
        folder: for the errors of ranks, a new one; removed at the end.
    """

    def __init__(
        self,
        commands: Mapping[int, Sequence[str]],
        environments: Mapping[int, Mapping[str, str]],
        cwd: str | None,
        world_size: int,
        folder: Path | None = None,
    ) -> None:
        self._world_size = world_size
        self._error_dir = folder or new_folder()
        own = {ERROR_DIR_VARIABLE: str(self._error_dir), PARENT_VARIABLE: str(os.getpid())}
        os.environ[ERROR_DIR_VARIABLE] = own[ERROR_DIR_VARIABLE]
        self._processes = {
            rank: subprocess.Popen(
                command, env={**environments[rank], **own}, cwd=cwd, stderr=subprocess.PIPE
            )
            for rank, command in commands.items()
        }
        self._tails = {rank: bytearray() for rank in commands}
        self._pumps = [threading.Thread(target=self._pump, args=(rank,), daemon=True) for rank in commands]
        self._died: dict[int, int] = {}
        self.ended = threading.Event()
        """Set once nobody has to watch any more."""
        for thread in [*self._pumps, threading.Thread(target=self._watch, daemon=True)]:
            thread.start()
        self._print_error = sys.excepthook
        sys.excepthook = self._on_uncaught
        atexit.register(self._at_exit)

    def send_signal(self, signum: int) -> None:
        """Pass a signal on."""
        for process in self._processes.values():
            if process.poll() is None:
                process.send_signal(signum)

    def end(self, grace_s: float = GRACE_S) -> None:
        """Wait for the processes to end, and end those that don't."""
        self.ended.set()
        self._wait(grace_s)
        self._note_deaths()
        for process in self._processes.values():
            if process.poll() is None:
                process.kill()  # SIGTERM doesn't end a rank that is stuck in a collective
        self._wait(None)

    def close(self, has_failed: bool) -> RankError | None:
        """End with the job that they run, of several in this process.

        Args:
            has_failed: whether it has failed on this rank; else the others are left to end by themselves.

        Returns:
            What another rank has failed with after this one was done.
        """
        if has_failed and not self.ended.is_set():
            self.end()
        self._leave_group()
        self._wait(None)
        self.ended.set()
        self._note_deaths()
        if sys.excepthook == self._on_uncaught:
            sys.excepthook = self._print_error
        atexit.unregister(self._at_exit)
        cause = self.find_cause() if self._died and not has_failed else None
        shutil.rmtree(self._error_dir, ignore_errors=True)
        return cause

    def find_cause(self) -> RankError | None:
        """The error of the rank that failed first, once :meth:`end` has run; None if it was this one."""
        report = first_error(self._error_dir)
        if report is not None and not report.is_consequence:
            is_own = report.rank not in self._processes
            return None if is_own else RankError(self._failed(report.rank, f"\n{report.text}"))
        for rank, code in self._died.items():
            if (self._error_dir / f"rank{rank}.json").exists():
                continue  # it lost another rank
            if code < 0:
                name = signal.Signals(-code).name
                hint = " The system may have run out of memory." if name == "SIGKILL" else ""
                return RankError(self._failed(rank, f" It was ended by {name}.{hint}"))
            text = bytes(self._tails[rank]).decode(errors="replace").strip()
            start = max(0, text.rfind("Traceback (most recent call last)"))
            text = re.sub(r"^\[rank\d+\]: ?", "", text[start:], flags=re.MULTILINE)  # torch's prefix
            return RankError(self._failed(rank, f" Exit code {code}.\n{text}"))
        return None

    def _failed(self, rank: int, how: str) -> str:
        return f"rank {rank} of {self._world_size} failed:{how}"

    def _note_deaths(self) -> None:
        for rank, process in self._processes.items():
            if process.poll() not in (None, 0):
                self._died.setdefault(rank, process.returncode)

    def _wait(self, timeout_s: float | None) -> None:
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        for process in self._processes.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                left = None if deadline is None else max(0.0, deadline - time.monotonic())
                process.wait(left)
        if all(process.poll() is not None for process in self._processes.values()):
            for pump in self._pumps:
                pump.join(1.0)  # what they wrote last; a process of theirs may hold the pipe open

    def _pump(self, rank: int) -> None:
        """Pass on what a process writes to stderr, and keep the end of it."""
        stream = self._processes[rank].stderr
        assert stream is not None
        tail = self._tails[rank]
        while chunk := os.read(stream.fileno(), 65_536):
            with contextlib.suppress(OSError):
                os.write(2, chunk)
            tail += chunk
            del tail[:-_TAIL_BYTES]

    def _watch(self) -> None:
        """Where this process hangs because another died, end it with that one's error."""
        while not self.ended.wait(_POLL_S):
            self._note_deaths()
            # The main thread most often gets an error of its own now, and reports.
            if self._died and not self.ended.wait(2 * GRACE_S):
                self._exit_with_cause()

    def _exit_with_cause(self) -> None:
        self.end(0.0)
        cause = self.find_cause() or "a rank failed; its output is above"
        print(f"\n{cause}", file=sys.stderr, flush=True)
        sys.stdout.flush()
        shutil.rmtree(self._error_dir, ignore_errors=True)
        os._exit(1)

    def _on_uncaught(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        if not self.ended.is_set():
            self.end()
        self._print_error(kind, error, trace)

    def _at_exit(self) -> None:
        if not self.ended.is_set():
            self._leave_group()
            self._wait(None)
            self.ended.set()
            self._note_deaths()
            if self._died:
                self._exit_with_cause()
        shutil.rmtree(self._error_dir, ignore_errors=True)

    def _leave_group(self) -> None:
        if dist.is_initialized():
            with contextlib.suppress(Exception):
                dist.destroy_process_group()  # whoever still waits for this rank learns that


def new_folder() -> Path:
    """A folder for what this process and its ranks tell each other."""
    return Path(tempfile.mkdtemp(prefix="titanplug-"))


def end_with_parent() -> None:
    """In a process that :class:`Children` has started: let the system end it with its parent (Linux)."""
    parent = os.environ.pop(PARENT_VARIABLE, None)
    if parent is None or sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != int(parent):  # it has ended already
        os._exit(1)

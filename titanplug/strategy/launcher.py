"""Starts the other processes of a script on this machine and ends them together.

Lightning's own launcher starts the script once more for each further device. When a rank fails, the others
lose their connection and report that, or hang. Here each rank leaves its error in a file, and the process
that the user started ends with the error of the rank that failed first, last on stderr.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from lightning.fabric.plugins import ClusterEnvironment
from lightning.pytorch.strategies.launchers.subprocess_script import _SubprocessScriptLauncher
from lightning.pytorch.utilities.rank_zero import rank_zero_only

from titanplug.errors import TitanplugError

ERROR_DIR_VARIABLE = "TITANPLUG_ERROR_DIR"
_GRACE_S = 5.0
_POLL_S = 0.2
_CONSEQUENCES = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "Timed out")


class RankError(TitanplugError):
    """Another rank failed; the message is its error."""


def record_error(rank: int, error: BaseException) -> None:
    """Leave this rank's error where the launching process finds it, if it asked for that."""
    folder = os.environ.get(ERROR_DIR_VARIABLE)
    if not folder or not Path(folder).is_dir():
        return
    text = "".join(traceback.format_exception(error))
    report = {"time": time.time(), "rank": rank, "text": text}
    path = Path(folder) / f"rank{rank}.json"
    aside = path.with_suffix(".writing")
    aside.write_text(json.dumps(report))
    os.replace(aside, path)


def first_error(folder: Path) -> tuple[int, str] | None:
    """Rank and text of the first error in ``folder`` that isn't the loss of another rank."""
    reports = [json.loads(path.read_text()) for path in folder.glob("rank*.json")]
    if not reports:
        return None
    cause = min(
        reports,
        key=lambda report: (any(sign in report["text"] for sign in _CONSEQUENCES), report["time"]),
    )
    return cause["rank"], cause["text"].rstrip()


class ScriptLauncher(_SubprocessScriptLauncher):
    """Runs the script on all devices of this machine; ends all ranks when one fails."""

    def __init__(
        self, cluster_environment: ClusterEnvironment, num_processes: int, num_nodes: int
    ) -> None:
        super().__init__(cluster_environment, num_processes, num_nodes)
        self._errors: Path | None = None
        self._stop_watching = threading.Event()

    def launch(self, function: Callable[..., Any], *args: Any, trainer: Any = None, **kwargs: Any) -> Any:
        """Start the other processes once, then run ``function`` in this one.

        Raises:
            RankError: another rank failed first.
        """
        if self.procs:
            # A later call (test after fit): the processes run the same script and come along.
            return self._run(function, args, kwargs)
        self.cluster_environment.validate_settings(
            num_devices=self.num_processes, num_nodes=self.num_nodes
        )
        started_here = not self.cluster_environment.creates_processes_externally
        if started_here and self.num_processes > 1:
            self._errors = Path(tempfile.mkdtemp(prefix="titanplug-"))
            os.environ[ERROR_DIR_VARIABLE] = str(self._errors)
            self._call_children_scripts()
            threading.Thread(target=self._watch, daemon=True, name="titanplug-watch").start()
        _limit_threads(self.num_processes)
        return self._run(function, args, kwargs)

    def _run(self, function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        try:
            return function(*args, **kwargs)
        except Exception as error:
            if self.procs:
                record_error(rank_zero_only.rank, error)
                self._stop_watching.set()
                self._raise_cause(error)
            raise

    def _raise_cause(self, error: Exception) -> None:
        """End the other processes; raise the error of another rank where that came first."""
        deadline = time.monotonic() + _GRACE_S
        while time.monotonic() < deadline and any(proc.poll() is None for proc in self.procs):
            time.sleep(_POLL_S)
        self._end_children()
        cause = self._take_first_error()
        if cause is not None and cause[0] != rank_zero_only.rank:
            raise RankError(f"rank {cause[0]} failed:\n{cause[1]}") from None

    def _watch(self) -> None:
        """Where this process hangs because a child died, end it with that child's error."""
        while not self._stop_watching.wait(_POLL_S):
            failed = [proc for proc in self.procs if proc.poll() not in (None, 0)]
            if not failed:
                if all(proc.poll() == 0 for proc in self.procs):
                    return
                continue
            # The main thread most often gets an error of its own now and reports.
            if self._stop_watching.wait(2 * _GRACE_S):
                return
            self._end_children()
            cause = self._take_first_error()
            text = cause[1] if cause else f"a rank ended with exit code {failed[0].returncode}"
            rank = cause[0] if cause else self.procs.index(failed[0]) + 1
            print(f"\nrank {rank} failed:\n{text}", file=sys.stderr, flush=True)
            os._exit(1)

    def _end_children(self) -> None:
        for proc in self.procs:
            if proc.poll() is None:
                # SIGTERM doesn't end a rank that is stuck in a collective.
                proc.send_signal(signal.SIGKILL)
        for proc in self.procs:
            proc.wait()

    def _take_first_error(self) -> tuple[int, str] | None:
        if self._errors is None:
            return None
        cause = first_error(self._errors)
        shutil.rmtree(self._errors, ignore_errors=True)
        return cause

    def kill(self, signum: Any) -> None:
        """Pass a signal on to the other processes."""
        for proc in self.procs:
            if proc.poll() is None:
                proc.send_signal(signum)


def _limit_threads(num_processes: int) -> None:
    # Ranks on one machine share its cores; torch would give each of them all.
    if num_processes > 1 and "OMP_NUM_THREADS" not in os.environ:
        import torch

        threads = max(1, len(os.sched_getaffinity(0)) // num_processes)
        torch.set_num_threads(threads)
        os.environ["OMP_NUM_THREADS"] = str(threads)



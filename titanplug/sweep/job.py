"""One job of a sweep: its folder, its command, and the process that runs it."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from titanplug.config import SWEEP_VARIABLE
from titanplug.launch import RANK_VARIABLES, end_with_parent

CONSOLE_FILE = "console.log"
"""What a job's processes print."""
RETURN_FILE = ".hydra/returned.json"
"""What a job's function has returned, or its error."""

_OWN_ERROR = "titanplug: "
_OF_THE_SWEEP = (*RANK_VARIABLES, SWEEP_VARIABLE)
"""Variables that a job must not inherit."""


@dataclass
class Job:
    """A job and how it stands.

    Args:
        number: in the sweep, from 0.
        overrides: as given on a command line, of this job.
        folder: its own.
        config: what Hydra has composed, with the node ``hydra``.
        processes: ranks that it starts.
        state: as in ``status.json``; empty: not started.
        attempt: how often it was started.
        error: what it has failed with.
        value: what it has returned.
        begun_s: monotonic time of the last start, in seconds.
    """

    number: int
    overrides: tuple[str, ...]
    folder: Path
    config: Any
    processes: int = 1
    state: str = ""
    attempt: int = 0
    error: str | None = None
    value: Any = None
    begun_s: float = field(default=0.0, repr=False)

    def read_return(self) -> None:
        """Take over what the job's function has returned or raised."""
        with contextlib.suppress(OSError, json.JSONDecodeError):
            told = json.loads((self.folder / RETURN_FILE).read_text())
            self.value, self.error = told["value"], told["error"]


class JobProcess:
    """Runs the command of a job; what it prints goes to a file.

    Args:
        command: with all arguments.
        folder: of the job.
        environment: added to this process's, without what tells a process its rank.
    """

    def __init__(self, command: Sequence[str], folder: Path, environment: Mapping[str, str]) -> None:
        kept = {name: value for name, value in os.environ.items() if name not in _OF_THE_SWEEP}
        with (folder / CONSOLE_FILE).open("ab") as console:
            # A session of its own: Ctrl-C reaches the sweep only, which decides what becomes of its jobs.
            self._process = subprocess.Popen(
                command,
                env={**kept, "PYTHONUNBUFFERED": "1", **environment},
                stdin=subprocess.DEVNULL,
                stdout=console,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=end_with_parent,
            )
        self._kill_at_s: float | None = None

    def poll(self) -> int | None:
        """The exit code, or None while it runs; ends it when its grace has run out."""
        if self._kill_at_s is not None and time.monotonic() > self._kill_at_s:
            self.kill()
        return self._process.poll()

    def stop(self, signum: int, grace_s: float | None) -> None:
        """Ask it to end.

        Args:
            signum: the signal that asks.
            grace_s: seconds until it is killed; None: never.
        """
        if self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(signum)
            if grace_s is not None and self._kill_at_s is None:
                self._kill_at_s = time.monotonic() + grace_s

    def kill(self) -> None:
        """End it with all processes that it has started."""
        found: list[psutil.Process] = []
        with contextlib.suppress(psutil.NoSuchProcess):
            own = psutil.Process(self._process.pid)
            found = [own, *own.children(recursive=True)]
        for process in found:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self._process.wait()


def last_lines(folder: Path, number: int = 12) -> str:
    """The end of what a job has printed; of titanplug's own error all and no more."""
    with contextlib.suppress(OSError), (folder / CONSOLE_FILE).open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - 8192))
        lines = file.read().decode(errors="replace").strip().splitlines()
        own = [index for index, line in enumerate(lines) if line.startswith(_OWN_ERROR)]
        if own:
            return "\n".join(lines[own[-1] :]).removeprefix(_OWN_ERROR)
        return "\n".join(lines[-number:])
    return ""

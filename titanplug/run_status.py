"""``status.json``: how a run stands, in its folder, from its start to its end, however it ends.

The process that starts the ranks writes it; rank 0 leaves what it has measured in ``results.json`` for it.
Imports neither torch nor Lightning.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from datetime import datetime
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil

from titanplug.config.layout import degrees, world_size
from titanplug.errors import TitanplugError

STATUS_FILE = "status.json"
RESULTS_FILE = "results.json"
ATTEMPT_VARIABLE = "TITANPLUG_ATTEMPT"
"""Environment variable in which a sweep tells a job how often it has been started."""

_PACKAGES = {"titanplug": "titanplug", "torch": "torch", "lightning": "lightning", "hydra": "hydra-core"}


@dataclass(frozen=True)
class Status:
    """How a run stands.

    Args:
        state: running, finished, failed, refused (its configuration can't run), preempted (it has saved and
            can go on), interrupted or timeout.
        name: of the configuration.
        overrides: as given on the command line.
        layout: degrees of the axes, ``world_size``, ``num_nodes`` and ``pp_schedule``; None: unknown.
        precision: Lightning's name.
        versions: of packages, by name.
        git_commit: of the working directory, with ``+dirty`` where it has changes.
        host: name of the machine that started it.
        pid: process there that started it.
        pid_started: when that process started, in seconds since the epoch.
        attempt: how often it was started.
        started: when, as ISO time with zone.
        ended: the same.
        seconds: from start to end.
        steps: optimizer steps.
        tokens_per_s: of all ranks, mean over the run without its first step line.
        memory_gib: peak of the rank that needs most.
        metrics: final values.
        best: ``monitor``, ``value`` and ``checkpoint`` of the best checkpoint.
        objective: what the run returns to a sweeper.
        exit_code: of the process that started it.
        error: what it has failed with.
    """

    state: str
    name: str | None = None
    overrides: Sequence[str] = ()
    layout: Mapping[str, Any] | None = None
    precision: str | None = None
    versions: Mapping[str, str] = field(default_factory=dict)
    git_commit: str | None = None
    host: str = ""
    pid: int = 0
    pid_started: float = 0.0
    attempt: int = 1
    started: str | None = None
    ended: str | None = None
    seconds: float | None = None
    steps: int | None = None
    tokens_per_s: float | None = None
    memory_gib: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    best: Mapping[str, Any] | None = None
    objective: float | None = None
    exit_code: int | None = None
    error: str | None = None

    @property
    def is_alive(self) -> bool | None:
        """Whether it still runs; None where only another machine can tell."""
        if self.state != "running":
            return False
        if self.host != socket.gethostname():
            return None
        try:
            process = psutil.Process(self.pid)
            is_same = abs(process.create_time() - self.pid_started) < 1.0
            return is_same and process.status() != psutil.STATUS_ZOMBIE
        except psutil.Error:
            return False


class RunStatus:
    """Keeps the status of one run in its folder.

    Args:
        folder: of the run.
        status: how it stands.
    """

    def __init__(self, folder: Path, status: Status) -> None:
        self._folder = folder
        self._status = status
        self._begun_s = time.monotonic()
        write_status(folder, status)

    @classmethod
    def begin(
        cls,
        folder: Path,
        overrides: Sequence[str],
        config: Mapping[str, Any] | None = None,
        attempt: int | None = None,
    ) -> RunStatus:
        """Write that a run starts.

        Args:
            folder: of the run; there.
            overrides: as given on the command line.
            config: the resolved configuration, where it is known.
            attempt: how often it was started; None: as the sweep says, else once.
        """
        own = psutil.Process()
        (folder / RESULTS_FILE).unlink(missing_ok=True)
        return cls(
            folder,
            Status(
                state="running",
                name=None if config is None else config["name"],
                overrides=list(overrides),
                layout=None if config is None else _layout(config),
                precision=None if config is None else config["trainer"]["precision"],
                versions=_versions(),
                git_commit=_git_commit(Path.cwd()),
                host=socket.gethostname(),
                pid=own.pid,
                pid_started=own.create_time(),
                attempt=int(os.environ.get(ATTEMPT_VARIABLE, 1)) if attempt is None else attempt,
                started=_now(),
            ),
        )

    def finish(self, state: str, exit_code: int | None = None, error: str | None = None) -> None:
        """Write how it has ended, with what rank 0 has left."""
        seconds = time.monotonic() - self._begun_s
        ended = replace(
            self._status, state=state, ended=_now(), seconds=seconds, exit_code=exit_code, error=error
        )
        self._status = replace(ended, **_take_results(self._folder))
        write_status(self._folder, self._status)


def one_line(error: BaseException) -> str:
    """What an error is, where its whole text stands elsewhere: of a rank's error the last line."""
    if not isinstance(error, TitanplugError):
        return "".join(traceback.format_exception_only(error)).strip()
    first, *rest = str(error).splitlines()
    return f"{first} {rest[-1].strip()}" if rest and first.endswith("failed:") else str(error)


def end_for(folder: Path, state: str, exit_code: int | None, error: str | None) -> None:
    """Write how a run has ended that couldn't do so itself.

    Args:
        folder: of the run, which has a status.
        state: how.
        exit_code: of its process.
        error: what is known of the reason.
    """
    status = read_status(folder)
    assert status is not None and status.started is not None
    seconds = (datetime.now().astimezone() - datetime.fromisoformat(status.started)).total_seconds()
    ended = replace(status, state=state, ended=_now(), seconds=seconds, exit_code=exit_code, error=error)
    write_status(folder, replace(ended, **_take_results(folder)))


def read_status(folder: Path) -> Status | None:
    """The status in a folder; None where there is none, or none that can be read."""
    with contextlib.suppress(OSError, ValueError, TypeError, AttributeError):
        values = _numbers_from_json(json.loads((folder / STATUS_FILE).read_text()))
        known = {item.name for item in fields(Status)}
        return Status(**{name: value for name, value in values.items() if name in known})
    return None


def write_status(folder: Path, status: Status) -> None:
    """Write it, whole or not at all."""
    _write_json(folder / STATUS_FILE, asdict(status))


def write_results(folder: Path, **measured: Any) -> None:
    """Rank 0: leave values for the fields of :class:`Status` of these names."""
    _write_json(folder / RESULTS_FILE, measured)


def _take_results(folder: Path) -> dict[str, Any]:
    path = folder / RESULTS_FILE
    with contextlib.suppress(OSError, ValueError):
        values: dict[str, Any] = _numbers_from_json(json.loads(path.read_text()))
        path.unlink()
        return values
    return {}


def _layout(config: Mapping[str, Any]) -> dict[str, Any]:
    found = degrees(config)
    schedule = config["parallelism"].get("pp_schedule") if found["pp"] > 1 else None
    num_nodes = config["trainer"]["num_nodes"]
    return {**found, "world_size": world_size(config), "num_nodes": num_nodes, "pp_schedule": schedule}


@cache
def _versions() -> dict[str, str]:
    found = {"python": ".".join(map(str, sys.version_info[:3]))}
    for name, package in _PACKAGES.items():
        with contextlib.suppress(PackageNotFoundError):
            found[name] = version(package)
    return found


@cache
def _git_commit(folder: Path) -> str | None:
    def git(*arguments: str) -> str:
        done = subprocess.run(
            ["git", *arguments], cwd=folder, capture_output=True, text=True, timeout=5, check=True
        )
        return done.stdout.strip()

    try:
        commit = git("rev-parse", "HEAD")
        return f"{commit}+dirty" if git("status", "--porcelain", "--untracked-files=no") else commit
    except (OSError, subprocess.SubprocessError):
        return None


def _now() -> str:
    return datetime.now().astimezone().isoformat(timespec="milliseconds")


def _write_json(path: Path, value: Any) -> None:
    aside = path.with_suffix(".writing")
    aside.write_text(json.dumps(_numbers_to_json(value), indent=2, allow_nan=False) + "\n")
    os.replace(aside, path)


def _numbers_to_json(value: Any) -> Any:
    """NaN and infinities as texts, which JSON has."""
    if isinstance(value, Mapping):
        return {key: _numbers_to_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_numbers_to_json(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _numbers_from_json(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _numbers_from_json(item) for key, item in value.items()}
    return float(value) if value in ("nan", "inf", "-inf") else value

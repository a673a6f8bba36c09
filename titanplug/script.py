"""The script that is running: what starts it again, also from a worker that runs its jobs."""

from __future__ import annotations

import json
import os
import sys

SCRIPT_VARIABLE = "TITANPLUG_SCRIPT"
"""Environment variable with the script whose jobs a launcher's workers run, which they don't know."""

_WORKERS = ("joblib.", "loky.", "multiprocessing.", "submitit.")
"""Modules that run jobs in the place of the script."""


def remember_script() -> None:
    """Let workers that a launcher starts from this process know which script they work for."""
    if not is_worker():
        os.environ[SCRIPT_VARIABLE] = json.dumps(_own_command())


def script_command() -> list[str]:
    """What starts this script, without its arguments: interpreter, and path or ``-m`` and module."""
    if is_worker() and SCRIPT_VARIABLE in os.environ:
        command: list[str] = json.loads(os.environ[SCRIPT_VARIABLE])
        return command
    return _own_command()


def _own_command() -> list[str]:
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    if spec is not None:
        return [sys.executable, "-m", spec.name]
    return [sys.executable, _absolute(sys.argv[0])]


def _absolute(path: str) -> str:
    """A path as it was given at the start, which Hydra may have changed the working directory since."""
    if "hydra" in sys.modules:
        from hydra.core.hydra_config import HydraConfig
        from hydra.utils import to_absolute_path

        if HydraConfig.initialized():
            return to_absolute_path(path)
    return os.path.abspath(path)


def is_worker() -> bool:
    """Whether this process runs jobs of a script for a launcher."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    return spec is not None and spec.name.startswith(_WORKERS)

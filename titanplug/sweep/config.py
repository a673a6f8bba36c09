"""Schema of ``hydra/launcher=titanplug``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass
class SweepConfig:
    """How the jobs of a sweep are run; see :class:`titanplug.sweep.launcher.Sweep`.

    Args:
        slots: processes that may run at the same time; null: one job after the other.
        gpus: ids of GPUs that jobs share out between them, one for each process; null: as they are.
        processes: ranks that a job starts.
        timeout_s: seconds until a job is ended; null: never.
        grace_s: seconds that a job has to end by itself.
        retries: how often a job that failed is started again.
        stop_on_failure: start no further job once one has failed.
        resume: go on with the newest sweep of the same overrides, without its finished jobs.
    """

    _target_: str = "hydra_plugins.titanplug_launcher.TitanplugLauncher"
    slots: int | None = None
    gpus: list[Any] | None = None
    processes: int = "${oc.select:trainer.devices,1}"  # type: ignore[assignment]
    timeout_s: float | None = None
    grace_s: float = 60.0
    retries: int = 0
    stop_on_failure: bool = False
    resume: bool = False

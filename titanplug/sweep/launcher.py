"""Hydra's launcher of a sweep: jobs in processes of their own, one after the other or several at a time.

A job is the sweep's own command with the job's overrides in the place of the sweep's, in the job's folder. So
it is a run like any other: what it prints, leaves and returns is what it would alone, and nothing of it stays
in this process.
"""

from __future__ import annotations

import contextlib
import json
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

from hydra._internal.utils import get_args_parser
from hydra.core.hydra_config import HydraConfig
from hydra.core.singleton import Singleton
from hydra.core.utils import JobReturn, JobStatus, configure_log, filter_overrides, setup_globals
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf, open_dict

from titanplug.errors import ConfigError
from titanplug.launch import EXIT_PREEMPTED, num_cores
from titanplug.run_status import ATTEMPT_VARIABLE, RunStatus, end_for, read_status
from titanplug.script import script_command
from titanplug.sweep.errors import JobFailed, SweepStopped
from titanplug.sweep.job import CONSOLE_FILE, RETURN_FILE, Job, JobProcess, last_lines
from titanplug.sweep.slots import Slots

SWEEP_FILE = "sweep.json"
"""What a sweep is, in its folder."""

_NOT_OF_A_JOB = (
    "hydra.mode",
    "hydra.sweep",  # and hydra.sweeper
    "hydra/sweeper",
    "hydra.launcher",
    "hydra/launcher",
    "hydra.run.dir",
    "hydra.job.num",
    "hydra.job.id",
)
_POLL_S = 0.1


class JobKind(Protocol):
    """What a task function may tell the launcher of its jobs, as its attribute ``jobs``."""

    def command(self) -> Sequence[str]:
        """What starts a job, without overrides."""

    def check(self, config: DictConfig, folder: Path) -> None:
        """Look at a job's configuration before any job starts; ConfigError where it can't run."""

    def going_on(self, folder: Path) -> Sequence[str]:
        """Overrides with which a job that was cut off goes on in its folder."""

    def begun(self, folder: Path) -> None:
        """Take the folder of the sweep; ConfigError where there can't be one."""

    def ended(self, jobs: Sequence[Job]) -> None:
        """Take jobs that have ended."""


class Sweep:
    """Runs the jobs of a sweep.

    Args:
        slots: processes that may run at the same time; None: one job after the other.
        gpus: ids of GPUs that jobs share out between them, one for each process; None: as they are.
        processes: ranks that a job starts, of each job's own configuration.
        timeout_s: seconds until a job is ended; None: never.
        grace_s: seconds that a job has to end by itself.
        retries: how often a job that failed is started again; it goes on from its last checkpoint.
        stop_on_failure: start no further job once one has failed.
        resume: go on with the newest sweep of the same overrides, in its folder: jobs that have finished are
            not run again.

    Raises:
        ConfigError: a number is out of range.
    """

    def __init__(
        self,
        slots: int | None = None,
        gpus: Sequence[int | str] | None = None,
        processes: int = 1,
        timeout_s: float | None = None,
        grace_s: float = 60.0,
        retries: int = 0,
        stop_on_failure: bool = False,
        resume: bool = False,
    ) -> None:
        for name, value in (("timeout_s", timeout_s), ("grace_s", grace_s), ("retries", retries)):
            if value is not None and value < 0:
                raise ConfigError(f"hydra.launcher.{name}={value}: it can't be negative. Give 0 or more.")
        self.slots = Slots(slots, gpus)
        self.timeout_s = timeout_s
        self.grace_s = grace_s
        self.retries = retries
        self.stop_on_failure = stop_on_failure
        self.resume = resume
        self._folder: Path | None = None

    def setup(self, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Take what Hydra has read."""
        self.context = hydra_context
        self.config = config
        self.kind: JobKind | None = getattr(task_function, "jobs", None)

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Run jobs and wait for them.

        Returns:
            For each its value, or its error, which Hydra raises where the value is asked for.

        Raises:
            ConfigError: the sweep can't start.
            SweepStopped: by a signal; no process of a job is left.
        """
        setup_globals()
        configure_log(self.config.hydra.hydra_logging, self.config.hydra.verbose)
        if self._folder is None:
            self._folder = self._open_folder()
        with _hydra_config_kept():
            jobs = [
                self._plan(initial_job_idx + i, overrides, self._folder)
                for i, overrides in enumerate(job_overrides)
            ]
            _require_own_folders(jobs)
            for job in jobs:
                self._look_at(job)
        board = Board(jobs, self._folder, self.config.hydra.overrides.task)
        try:
            _Run(self, jobs, board).wait()
        finally:
            if self.kind is not None:
                self.kind.ended(jobs)
        return [_job_return(job) for job in jobs]

    # ------------------------------------------------------------------------ before they start

    def _open_folder(self) -> Path:
        """The folder of the sweep: a new one, or that of the sweep that goes on."""
        sweep = self.config.hydra.sweep
        fresh = Path(str(sweep.dir)).absolute()
        own = {"overrides": list(self.config.hydra.overrides.task)}
        if self.resume:
            earlier = _newest_like(own, fresh)
            if earlier is None:
                print(f"Nothing to resume: no earlier sweep of these overrides beside {fresh}.", flush=True)
            else:
                _discard(fresh, earlier)
                with open_dict(sweep):
                    sweep.dir = str(earlier)
                fresh = earlier
        elif (fresh / SWEEP_FILE).exists():
            raise ConfigError(
                f"hydra.sweep.dir={fresh} holds another sweep, whose jobs would be overwritten. Give another "
                "folder, or hydra.launcher.resume=true to go on with it."
            )
        fresh.mkdir(parents=True, exist_ok=True)
        (fresh / SWEEP_FILE).write_text(json.dumps(own, indent=2) + "\n")
        if self.kind is not None:
            self.kind.begun(fresh)
        return fresh

    def _plan(self, number: int, overrides: Sequence[str], sweep: Path) -> Job:
        config = self.context.config_loader.load_sweep_config(self.config, list(overrides))
        with open_dict(config):
            config.hydra.job.num = number
            config.hydra.job.id = str(number)
        HydraConfig.instance().set_config(config)
        folder = sweep / str(config.hydra.sweep.subdir)
        processes = OmegaConf.select(config, "hydra.launcher.processes")
        return Job(number, tuple(config.hydra.overrides.task), folder, config, int(processes or 1))

    def _look_at(self, job: Job) -> None:
        """Skip what has finished, refuse what can't run."""
        earlier = read_status(job.folder)
        if earlier is not None and tuple(earlier.overrides) != job.overrides:
            raise ConfigError(
                f"{job.folder} holds another job ({' '.join(earlier.overrides)}), not "
                f"{' '.join(job.overrides)}. Give the sweep another hydra.sweep.dir."
            )
        if earlier is not None and earlier.is_alive is not False:
            raise ConfigError(
                f"{job.folder}: this job is running (process {earlier.pid} of {earlier.host}). Wait for it, "
                "or end it first; where that machine is gone, remove the folder's status.json."
            )
        if earlier is not None and earlier.state == "finished":
            job.read_return()
            job.state, job.attempt = "finished", 0
            return
        problem = self.slots.check(job.processes)
        if self.kind is not None and problem is None:
            HydraConfig.instance().set_config(job.config)  # values may refer to it
            config = job.config.copy()
            with open_dict(config):
                del config["hydra"]
            try:
                self.kind.check(config, job.folder)
            except ConfigError as error:
                problem = str(error)
        if problem is not None:
            job.state, job.error = "refused", problem
            self.status_of(job).finish("refused", exit_code=2, error=problem)

    def status_of(self, job: Job) -> RunStatus:
        """Begin the status of a job."""
        job.folder.mkdir(parents=True, exist_ok=True)
        return RunStatus.begin(job.folder, overrides=job.overrides, attempt=max(1, job.attempt))

    def command(self, job: Job) -> list[str]:
        """What runs a job."""
        own = script_command() if self.kind is None else self.kind.command()
        flags = get_args_parser().parse_args(sys.argv[1:])
        names = ("config_path", "config_name", "config_dir")
        given = ((f"--{name.replace('_', '-')}", getattr(flags, name)) for name in names)
        command = [*own, *(part for flag, value in given if value is not None for part in (flag, value))]
        goes_on = job.attempt > 1 or self.resume
        hydra = job.config.hydra
        return [
            *command,
            *job.overrides,
            *(self.kind.going_on(job.folder) if self.kind is not None and goes_on else ()),
            *(item for item in hydra.overrides.hydra if not item.lstrip("+~").startswith(_NOT_OF_A_JOB)),
            "hydra.mode=RUN",
            f"hydra.run.dir={_quoted(job.folder)}",
            f"hydra.job.num={job.number}",
            f"hydra.job.id={_quoted(job.number)}",
            "+hydra.callbacks.titanplug_sweep._target_=titanplug.sweep.returned.SaveReturn",
            f"+hydra.callbacks.titanplug_sweep.path={_quoted(job.folder / RETURN_FILE)}",
        ]


class _Run:
    """Starts jobs as places become free, and sees to it that all of them end."""

    def __init__(self, launcher: Sweep, jobs: Sequence[Job], board: Board) -> None:
        self._launcher = launcher
        self._slots = launcher.slots
        self._board = board
        self._waiting = [job for job in jobs if not job.state]
        self._running: dict[int, tuple[Job, JobProcess, list[int]]] = {}
        self._signals: list[int] = []
        self._has_saved = False

    def wait(self) -> None:
        with _signals_to(self._on_signal):
            try:
                while self._waiting or self._running:
                    self._start_some()
                    time.sleep(_POLL_S)
                    for job, process, taken in list(self._running.values()):
                        self._look_at(job, process, taken)
            finally:
                for _, process, _ in self._running.values():
                    process.kill()
        if self._signals:
            raise SweepStopped(self._signals[0], self._has_saved)

    def _start_some(self) -> None:
        while self._waiting:
            taken = self._slots.take(self._waiting[0].processes)
            if taken is None:
                return
            self._start(self._waiting.pop(0), taken)

    def _start(self, job: Job, taken: list[int]) -> None:
        job.attempt += 1
        job.begun_s = time.monotonic()
        job.state, job.error = "running", None
        self._launcher.status_of(job)
        (job.folder / RETURN_FILE).unlink(missing_ok=True)
        environment = self._slots.environment(taken, num_cores())
        environment[ATTEMPT_VARIABLE] = str(job.attempt)
        process = JobProcess(self._launcher.command(job), job.folder, environment)
        self._running[job.number] = job, process, taken
        self._board.started(job)

    def _look_at(self, job: Job, process: JobProcess, taken: list[int]) -> None:
        limit_s = self._launcher.timeout_s
        code = process.poll()
        if code is None:
            if limit_s is not None and job.state == "running" and time.monotonic() - job.begun_s > limit_s:
                job.state = "timeout"
                process.stop(signal.SIGTERM, self._launcher.grace_s)
            return
        del self._running[job.number]
        self._slots.give_back(taken)
        self._settle(job, code)
        is_retried = job.state == "failed" and job.attempt <= self._launcher.retries and not self._signals
        self._board.ended(job, is_retried)
        if is_retried:
            self._waiting.insert(0, job)
        elif job.state not in ("finished", "preempted") and self._launcher.stop_on_failure:
            self._waiting.clear()

    def _settle(self, job: Job, code: int) -> None:
        """Read how a job has ended, and write it down where the job couldn't."""
        job.read_return()
        if job.state == "timeout":
            job.error = f"It was ended after {self._launcher.timeout_s} s (hydra.launcher.timeout_s)."
        elif code == 0:
            job.state, job.error = "finished", None
        elif code == EXIT_PREEMPTED:
            job.state, self._has_saved = "preempted", True
        elif self._signals:
            job.state = "interrupted"
        else:
            job.state = "refused" if code == 2 and job.error is None else "failed"
        written = read_status(job.folder)
        if job.state not in ("finished", "preempted") and job.error is None:
            told = None if written is None or written.state == "running" else written.error
            how = f"It was ended by {signal.Signals(-code).name}." if code < 0 else last_lines(job.folder)
            job.error = told or how or f"Exit code {code}; nothing was printed."
        if written is None or written.state != job.state:
            end_for(job.folder, job.state, code, job.error)

    def _on_signal(self, signum: int, _: FrameType | None) -> None:
        """The first asks the jobs to end, another of the same ends them."""
        again = signum in self._signals
        self._signals.append(signum)
        self._waiting.clear()
        # Jobs that get SIGTERM save first, and that takes what it takes.
        grace_s = self._launcher.grace_s if signum == signal.SIGINT else None
        for _job, process, _taken in list(self._running.values()):
            if again:
                process.kill()
            else:
                process.stop(signum, grace_s)


class Board:
    """Tells how a sweep stands, a line for each job that starts or ends.

    Args:
        jobs: of the sweep.
        folder: of the sweep.
        given: overrides of the sweep's own command line.
    """

    def __init__(self, jobs: Sequence[Job], folder: Path, given: Sequence[str]) -> None:
        # What the command line says as it stands is the same for all.
        self._names = {
            job.number: " ".join(item for item in filter_overrides(job.overrides) if item not in given)
            for job in jobs
        }
        self._total = len(jobs)
        skipped = sum(job.state == "finished" for job in jobs)
        self._done = skipped
        if len(jobs) > 1:
            told = f"{len(jobs)} jobs in {_shown(folder)}"
            _say(told + (f"; {skipped} of them have finished before" if skipped else ""))
        for job in jobs:
            if job.state == "refused":
                self.ended(job, is_retried=False)

    def started(self, job: Job) -> None:
        """Tell that a job runs."""
        again = f", attempt {job.attempt}" if job.attempt > 1 else ""
        _say(f"#{job.number} started{again}: {self._names[job.number]}")

    def ended(self, job: Job, is_retried: bool) -> None:
        """Tell how a job has ended."""
        self._done += not is_retried
        count = f"[{self._done}/{self._total}] " if self._total > 1 else ""
        seconds = f" after {time.monotonic() - job.begun_s:.0f} s" if job.begun_s else ""
        value = f" -> {job.value:.6g}" if isinstance(job.value, float) else ""
        _say(f"{count}#{job.number} {job.state}{seconds}: {self._names[job.number]}{value}")
        if job.error is not None:
            lines = job.error.strip().splitlines()
            _say("    " + (lines[-1] if lines[0].endswith(":") else lines[0]))
            if job.state != "refused":
                _say(f"    {_shown(job.folder / CONSOLE_FILE)}" + (", tried again" if is_retried else ""))


class _Failed(JobReturn):
    """A job that has no value. Hydra's own prints all of its overrides where the value is asked for."""

    @property
    def return_value(self) -> Any:
        raise self._return_value

    @return_value.setter
    def return_value(self, value: Any) -> None:
        self._return_value = value


def _job_return(job: Job) -> JobReturn:
    result = JobReturn() if job.state == "finished" else _Failed()
    result.overrides, result.cfg = list(job.overrides), job.config
    result.hydra_cfg = OmegaConf.create({"hydra": job.config.hydra})
    result.working_dir, result.task_name = str(job.folder), str(job.config.hydra.job.name)
    if job.state == "finished":
        result.status, result.return_value = JobStatus.COMPLETED, job.value
    else:
        result.status = JobStatus.FAILED
        told = f"job #{job.number} {job.state or 'was not started'}"
        result.return_value = JobFailed(f"{told}: {job.error}" if job.error else told)
    return result


def _require_own_folders(jobs: Sequence[Job]) -> None:
    seen: dict[Path, Job] = {}
    for job in jobs:
        other = seen.setdefault(job.folder, job)
        if other is not job:
            raise ConfigError(
                f"jobs #{other.number} and #{job.number} would both write into {job.folder}: each needs a "
                "folder of its own. Let hydra.sweep.subdir name it by ${hydra.job.num}."
            )


def _newest_like(sweep: dict[str, Any], fresh: Path) -> Path | None:
    """The folder of the newest sweep of the same overrides: this one, or one beside it."""
    found = []
    for path in {fresh / SWEEP_FILE, *fresh.parent.glob(f"*/{SWEEP_FILE}")}:
        with contextlib.suppress(OSError, json.JSONDecodeError):
            if json.loads(path.read_text()) == sweep:
                found.append((path.stat().st_mtime_ns, path.parent))
    return max(found)[1] if found else None


def _discard(fresh: Path, earlier: Path) -> None:
    """Remove the folder that Hydra has made for a new sweep."""
    if fresh != earlier:
        (fresh / "multirun.yaml").unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            fresh.rmdir()


def _quoted(value: object) -> str:
    """A text as a value of an override."""
    text = str(value).replace("\\", "\\\\").replace("'", "\\'")
    return f"'{text}'"


def _shown(path: Path) -> str:
    with contextlib.suppress(ValueError):
        return str(path.relative_to(Path.cwd()))
    return str(path)


def _say(line: str) -> None:
    print(line, flush=True)


@contextlib.contextmanager
def _hydra_config_kept() -> Iterator[None]:
    state = Singleton.get_state()
    try:
        yield
    finally:
        Singleton.set_state(state)


@contextlib.contextmanager
def _signals_to(handler: Any) -> Iterator[None]:
    names = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
    saved = {name: signal.signal(name, handler) for name in names}
    try:
        yield
    finally:
        for name, old in saved.items():
            signal.signal(name, old)

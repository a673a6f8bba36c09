"""Training from the command line: ``titanplug train`` and ``python -m titanplug.train``.

One process composes and checks the configuration and starts the ranks (or attaches to those that are
there); :func:`train` is what each rank runs.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import yaml
from hydra import main as hydra_main
from hydra.core.hydra_config import HydraConfig
from hydra.core.plugins import Plugins
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from hydra_plugins.titanplug_launcher import TitanplugLauncher
from titanplug import attach, launch, resume
from titanplug.config import find_conf, register_schemas
from titanplug.config.checks import forget_first_weights, resolve_run
from titanplug.config.errors import describe_config_error
from titanplug.errors import ConfigError, TitanplugError
from titanplug.run_status import RunStatus, one_line, write_results
from titanplug.sweep.errors import JobFailed, SweepError, SweepStopped

TASK = "titanplug.train:train"
_SWITCHES = ("-m", "--multirun")
RESUME_FLAG = "--resume"
"""Go on with the last sweep of the same overrides."""


def train(config: dict[str, Any]) -> None:
    """Train as configured, on this rank.

    Args:
        config: plain containers, as :func:`titanplug.config.checks.resolve_run` makes them.
    """
    import lightning as L
    from hydra.utils import instantiate

    if config["ckpt_path"] is not None:
        forget_first_weights(config)
    L.seed_everything(config["seed"], workers=True, verbose=False)
    datamodule = instantiate(config["data"], _convert_="all")
    module = instantiate(config["module"], _convert_="all")
    trainer = build_trainer(config)
    if config["resume"] is not None:  # then its folders are meant to hold something
        warnings.filterwarnings("ignore", message=".* directory .* exists and is not empty")
    run_dir, values = Path(config["paths"]["run_dir"]), {}
    try:
        trainer.fit(module, datamodule=datamodule, ckpt_path=config["ckpt_path"])
        values = dict(trainer.callback_metrics)
        if config["test"]:
            trainer.test(module, datamodule=datamodule, verbose=False)
            values |= trainer.callback_metrics
        if trainer.is_global_zero:
            path = run_dir / resume.METRICS_FILE
            path.write_text(json.dumps(_numbers(values), indent=2) + "\n")
    except BaseException:
        # No metrics: they may have to be gathered, and the other ranks aren't here.
        if trainer.is_global_zero:
            with contextlib.suppress(Exception):
                _leave_results(trainer, config, values)
        raise
    if trainer.is_global_zero:
        _leave_results(trainer, config, values)


def _numbers(values: Mapping[str, Any]) -> dict[str, float]:
    return {name: float(value) for name, value in sorted(values.items())}


def _leave_results(trainer: Any, config: dict[str, Any], values: Mapping[str, Any]) -> None:
    """Let the status of the run tell what was measured, also of one that has failed on the way."""
    run_dir = Path(config["paths"]["run_dir"])
    metrics, best = _numbers(values), None
    saved = trainer.checkpoint_callback
    if getattr(saved, "monitor", None) and saved.best_model_score is not None:
        checkpoint = os.path.relpath(saved.best_model_path, run_dir)
        best = {
            "monitor": saved.monitor,
            "value": float(saved.best_model_score),
            "checkpoint": checkpoint,
        }
    of_callbacks: dict[str, Any] = {}
    for callback in trainer.callbacks:
        if hasattr(callback, "results"):
            of_callbacks |= callback.results()
    write_results(
        run_dir,
        steps=trainer.global_step,
        metrics=metrics,
        best=best,
        objective=metrics.get(config["optimized_metric"]),
        **of_callbacks,
    )


def build_trainer(config: dict[str, Any]) -> Any:
    """The Trainer with strategy, callbacks and loggers.

    Args:
        config: as for :func:`train`.
    """
    from hydra.utils import instantiate

    def build_all(group: str) -> list[Any]:
        nodes = (config[group] or {}).values()
        return [instantiate(node, _convert_="all") for node in nodes if node is not None]

    settings = dict(config["trainer"])
    if settings["enable_progress_bar"] is None:
        settings["enable_progress_bar"] = sys.stdout.isatty()
    return instantiate(
        settings,
        strategy=instantiate(config["parallelism"], _convert_="all"),
        callbacks=build_all("callbacks"),
        logger=build_all("logger"),
        _convert_="all",
    )


def run_job(config: DictConfig, attached: attach.Attached | None, channel: attach.Channel | None) -> Path:
    """Check a composed configuration, decide the folder, and run the ranks.

    Returns:
        The folder.

    Raises:
        ConfigError: the configuration can't run; nothing was started.
        RankError: a rank failed.
        Preempted: a signal has ended the ranks, and they have saved.
    """
    hydra = HydraConfig.get()
    run_dir = Path(hydra.runtime.output_dir)
    resolved = resolve_run(config, run_dir)
    if attached is not None:
        attach.check_world(attached, resolved.devices, resolved.num_nodes)
    elif resolved.num_nodes > 1:
        raise ConfigError(
            f"trainer.num_nodes={resolved.num_nodes}: processes are started on this machine only. Start "
            "the command on every node with torchrun or srun."
        )
    if resolved.config["resume"] is not None:
        earlier, told = resume.find_earlier(resolved.config, run_dir, hydra.mode == RunMode.MULTIRUN)
        print(told, flush=True)
        if earlier is not None and earlier.is_finished:
            if earlier.run_dir != run_dir:
                resume.discard(run_dir)
            return earlier.run_dir
        if earlier is not None:
            resolved = resolve_run(config, earlier.run_dir)
            resume.take_over(earlier, run_dir, resolved.config)
            run_dir = earlier.run_dir
        launch.write_log(run_dir, told)
    config_path = run_dir / resume.CONFIG_FILE
    config_path.write_text(yaml.safe_dump(resolved.config, sort_keys=False))
    with _status_kept(run_dir, list(hydra.overrides.task), resolved.config):
        if channel is not None:
            channel.send_config(resolved.config)
            launch.run_task(TASK, resolved.config, rank=0)
        elif resolved.devices > 1 or hydra.mode == RunMode.MULTIRUN:
            # Each job of a sweep gets fresh processes: nothing leaks from one to the next.
            launch.launch_ranks(TASK, config_path, resolved.devices)
        else:
            launch.run_task(TASK, resolved.config, rank=0)
    return run_dir


@contextlib.contextmanager
def _status_kept(run_dir: Path, overrides: list[str], config: dict[str, Any]) -> Iterator[None]:
    """Write how the run stands, and how it has ended."""
    status = RunStatus.begin(run_dir, overrides, config)
    try:
        yield
    except launch.Preempted:
        status.finish("preempted", launch.EXIT_PREEMPTED)
        raise
    except launch.Interrupted as error:
        status.finish("interrupted", 128 + error.signum, str(error))
        raise
    except SystemExit as error:  # this process is a rank
        code = error.code if isinstance(error.code, int) else 1
        status.finish("preempted" if code == launch.EXIT_PREEMPTED else "interrupted", code)
        raise
    except BaseException as error:
        status.finish("failed", 1, one_line(error))
        raise
    status.finish("finished", 0)


def objective(config: DictConfig, run_dir: Path) -> float | None:
    """The final value that a sweeper looks at, ``optimized_metric``.

    Raises:
        ConfigError: there is none of that name, and a sweeper needs it.
    """
    name = config.optimized_metric
    values = json.loads((run_dir / resume.METRICS_FILE).read_text())
    is_needed = not HydraConfig.get().sweeper._target_.endswith("BasicSweeper")
    if is_needed and values.get(name) is None:
        raise ConfigError(
            f"optimized_metric={name}: the run has no final value of that name, which the sweeper needs. "
            f"Choose one of: {', '.join(values)}."
        )
    value = values.get(name)
    return None if value is None else float(value)


class TrainJobs:
    """What the launcher of a sweep (``titanplug.sweep.launcher.JobKind``) must know of `titanplug train`."""

    def __init__(self) -> None:
        self.folder: Path | None = None
        self.jobs: list[Any] = []

    def command(self) -> list[str]:
        """What starts a job, without overrides."""
        return [sys.executable, "-m", "titanplug.train"]

    def check(self, config: DictConfig, folder: Path) -> None:
        """ConfigError where a job can't run."""
        resolve_run(config, folder)

    def going_on(self, folder: Path) -> list[str]:
        """Overrides with which a job that was cut off goes on from its last checkpoint."""
        from titanplug.checkpoint.latest import latest_checkpoint

        has_stopped = (folder / resume.CONFIG_FILE).exists() and latest_checkpoint(folder) is not None
        return [f"resume='{folder}'"] if has_stopped else []

    def begun(self, folder: Path) -> None:
        """Take the folder of the sweep."""
        self.folder = folder

    def ended(self, jobs: Sequence[Any]) -> None:
        """Take jobs that have ended."""
        self.jobs += jobs

    def tell(self) -> None:
        """Print the table of the sweep."""
        if self.jobs and self.folder is not None:
            from titanplug.report.runs import print_table

            print_table(self.folder)

    def failure(self) -> SweepError:
        """What has become of jobs that didn't finish."""
        failed = [job for job in self.jobs if job.state != "finished"]
        refused = all(job.state == "refused" for job in failed)
        numbers = ", ".join(f"#{job.number}" for job in failed[:8]) + (", ..." if len(failed) > 8 else "")
        return SweepError(
            f"{len(failed)} of {len(self.jobs)} jobs didn't finish: {numbers}. Start the same command with "
            f"{RESUME_FLAG} to run them again, without those that have finished.",
            exit_code=2 if refused else 1,
        )


def compose_and_run(attached: attach.Attached | None) -> None:
    """Let Hydra read the command line, compose, and run the job or jobs.

    Raises:
        HydraException: the configuration can't be composed.
        TitanplugError: as :func:`run_job`.
    """
    channel = None if attached is None else attach.Channel(attached)
    failures: list[BaseException] = []
    stopped: list[TitanplugError] = []
    jobs = TrainJobs()

    begun: list[DictConfig] = []

    def job(config: DictConfig) -> float | None:
        begun.append(config)
        sweeps = HydraConfig.get().mode == RunMode.MULTIRUN
        try:
            if attached is not None and sweeps:
                raise ConfigError(
                    f"--multirun under {attached.launcher}: each job of a sweep needs processes of its "
                    f"own. Start the sweep without {attached.launcher}; titanplug starts each job's."
                )
            # A worker of a launcher may be a task of a job that is there.
            here = attached or attach.find_launcher()
            if here is not None and here.rank > 0:
                launch.run_task(TASK, attach.Channel(here).receive(), here.rank)
                return None
            own = channel or (None if here is None else attach.Channel(here))
            try:
                return objective(config, run_job(config, here, own))
            finally:
                if own is not None:
                    own.send_end()  # the other tasks wait for a configuration
        except (launch.Preempted, launch.Interrupted) as error:
            stopped.append(error)
            raise SystemExit from None  # past Hydra, which would go on with the next job of a sweep
        except Exception as error:
            if sweeps:
                raise
            failures.append(error)  # past Hydra, which would print it in its own way
            return None

    job.jobs = jobs  # type: ignore[attr-defined]
    # Hydra looks into folders for plugins, and finds none in an editable installation.
    Plugins.instance().register(TitanplugLauncher)
    # Errors of composing come out of Hydra as they are; main() says them better.
    os.environ["HYDRA_FULL_ERROR"] = "1"
    try:
        hydra_main(version_base="1.3", config_path=find_conf(), config_name="train")(job)()
        if failures:
            raise failures[0]
    except (ValueError, TypeError) as error:
        if begun or jobs.folder is not None:
            raise
        raise ConfigError(f"Hydra can't read the command line: {error}. An override is KEY=VALUE.") from error
    except JobFailed:
        raise jobs.failure() from None
    except SweepStopped as error:
        code = launch.EXIT_PREEMPTED if error.is_saved else 128 + error.signum
        raise SweepError(f"{error} Go on with {RESUME_FLAG}.", exit_code=code) from None
    except SystemExit:
        if stopped:
            raise stopped[0] from None
        raise
    finally:
        if channel is not None:
            channel.send_end()
        jobs.tell()


def print_help() -> None:
    """Hydra's help, without the groups of the schemas."""
    text = io.StringIO()
    with contextlib.redirect_stdout(text), contextlib.suppress(SystemExit):
        compose_and_run(attached=None)
    lines = text.getvalue().rstrip().splitlines()
    print("\n".join(line for line in lines if not re.match(r"\w+/schema:", line)))


def main() -> None:
    """The command.

    Exit code 0: done; 1: a rank failed; 2: the configuration can't run; 75 (``EXIT_PREEMPTED``): a signal has
    ended it with a checkpoint; 128 + n: signal n has ended it without one.
    """
    register_schemas()
    attached = attach.find_launcher()
    # Hydra takes flags before overrides or after them, not between.
    sys.argv[1:] = sorted(sys.argv[1:], key=lambda item: item not in _SWITCHES)
    try:
        if RESUME_FLAG in sys.argv:
            _resume_sweep()
        if {"-h", "--help"} & set(sys.argv[1:]):
            print_help()
        elif attached is not None and attached.rank > 0:
            launch.run_task(TASK, attach.Channel(attached).receive(), attached.rank)
        else:
            compose_and_run(attached)
    except (HydraException, OmegaConfBaseException) as error:
        _fail(describe_config_error(error), 2, error)
    except ConfigError as error:
        _fail(str(error), 2, error)
    except launch.Preempted:
        sys.exit(launch.EXIT_PREEMPTED)  # rank 0 has told
    except launch.Interrupted as error:
        _fail(str(error), 128 + error.signum, error)
    except SweepError as error:
        _fail(str(error), error.exit_code, error)
    except TitanplugError as error:
        _fail(str(error), 1, error)


def _resume_sweep() -> None:
    """Tell the launcher what the flag has told."""
    if not {"-m", "--multirun", "hydra.mode=MULTIRUN"} & set(sys.argv):
        raise ConfigError(
            f"{RESUME_FLAG} goes on with a sweep, of --multirun. A run goes on with resume=auto."
        )
    sys.argv = [item for item in sys.argv if item != RESUME_FLAG] + ["hydra.launcher.resume=true"]


def _fail(text: str, code: int, error: BaseException) -> NoReturn:
    sys.stdout.flush()
    print(f"titanplug: {text}", file=sys.stderr, flush=True)
    if attach.find_launcher() is not None:
        attach.report_to_torchrun(error)
    sys.exit(code)


if __name__ == "__main__":
    main()

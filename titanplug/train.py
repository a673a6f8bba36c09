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
from pathlib import Path
from typing import Any, NoReturn

import yaml
from hydra import main as hydra_main
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from titanplug import attach, launch, resume
from titanplug.config import find_conf, register_schemas
from titanplug.config.checks import forget_first_weights, resolve_run
from titanplug.config.errors import describe_config_error
from titanplug.errors import ConfigError, TitanplugError

TASK = "titanplug.train:train"


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
    trainer.fit(module, datamodule=datamodule, ckpt_path=config["ckpt_path"])
    values = dict(trainer.callback_metrics)
    if config["test"]:
        trainer.test(module, datamodule=datamodule, verbose=False)
        values |= trainer.callback_metrics
    if trainer.is_global_zero:
        numbers = {name: float(value) for name, value in sorted(values.items())}
        path = Path(config["paths"]["run_dir"]) / resume.METRICS_FILE
        path.write_text(json.dumps(numbers, indent=2) + "\n")


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


def run_job(config: DictConfig, channel: attach.Channel | None, attached: attach.Attached | None) -> None:
    """Check a composed configuration, decide the folder, and run the ranks.

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
            resume.discard(run_dir)
            return
        if earlier is not None:
            resolved = resolve_run(config, earlier.run_dir)
            resume.take_over(earlier, run_dir, resolved.config)
            run_dir = earlier.run_dir
        launch.write_log(run_dir, told)
    config_path = run_dir / resume.CONFIG_FILE
    config_path.write_text(yaml.safe_dump(resolved.config, sort_keys=False))
    if channel is not None:
        channel.send_config(resolved.config)
        launch.run_task(TASK, resolved.config, rank=0)
    elif resolved.devices > 1 or hydra.mode == RunMode.MULTIRUN:
        # Each job of a sweep gets fresh processes: nothing leaks from one to the next.
        launch.launch_ranks(TASK, config_path, resolved.devices)
    else:
        launch.run_task(TASK, resolved.config, rank=0)


def compose_and_run(attached: attach.Attached | None) -> None:
    """Let Hydra read the command line, compose, and run the job or jobs.

    Raises:
        HydraException: the configuration can't be composed.
        TitanplugError: as :func:`run_job`.
    """
    channel = None if attached is None else attach.Channel(attached)
    failures: list[BaseException] = []
    stopped: list[TitanplugError] = []

    def job(config: DictConfig) -> None:
        sweeps = HydraConfig.get().mode == RunMode.MULTIRUN
        try:
            if attached is not None and sweeps:
                raise ConfigError(
                    f"--multirun under {attached.launcher}: each job of a sweep needs processes of its "
                    f"own. Start the sweep without {attached.launcher}; titanplug starts each job's."
                )
            run_job(config, channel, attached)
        except (launch.Preempted, launch.Interrupted) as error:
            stopped.append(error)
            raise SystemExit from None  # past Hydra, which would go on with the next job of a sweep
        except Exception as error:
            if sweeps:
                raise
            failures.append(error)  # past Hydra, which would print it in its own way

    # Errors of composing come out of Hydra as they are; main() says them better.
    os.environ["HYDRA_FULL_ERROR"] = "1"
    try:
        hydra_main(version_base="1.3", config_path=find_conf(), config_name="train")(job)()
        if failures:
            raise failures[0]
    except SystemExit:
        if stopped:
            raise stopped[0] from None
        raise
    finally:
        if channel is not None:
            channel.send_end()


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
    try:
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
    except TitanplugError as error:
        _fail(str(error), 1, error)


def _fail(text: str, code: int, error: BaseException) -> NoReturn:
    sys.stdout.flush()
    print(f"titanplug: {text}", file=sys.stderr, flush=True)
    if attach.find_launcher() is not None:
        attach.report_to_torchrun(error)
    sys.exit(code)


if __name__ == "__main__":
    main()

"""The Hydra job that a script is running: what its other ranks run, and what happens when it ends.

Hydra runs all jobs of a sweep in one process, one after the other. Lightning starts the other ranks of a job
by repeating the script's command line, so that each of them repeats the whole sweep, and composes and draws
random values by itself. Here a rank gets the job's finished configuration and runs that job alone.
"""

from __future__ import annotations

import copy
import inspect
import os
import pickle
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from titanplug.errors import ConfigError
from titanplug.script import is_worker, script_command

if TYPE_CHECKING:
    from omegaconf import DictConfig

_NO_WARNING = ("-W", "ignore:Experimental rerun CLI option")


@dataclass(frozen=True)
class HydraJob:
    """One job of a script.

    Args:
        config: what Hydra composed, with the node ``hydra``.
        given: what the script's function was given, which it may have changed since.
        callbacks: Hydra's callbacks.
    """

    config: DictConfig
    given: DictConfig
    callbacks: list[Any]

    def at_end(self, action: Callable[[Any], None]) -> None:
        """Call ``action`` with Hydra's ``JobReturn`` when the job ends, however it does."""
        from hydra.experimental.callback import Callback

        class AtEnd(Callback):
            def on_job_end(self, config: Any, job_return: Any, **_: Any) -> None:
                callbacks.remove(self)  # they are those of all jobs
                action(job_return)

        callbacks = self.callbacks
        callbacks.append(AtEnd())

    def command(self, rank: int, folder: Path) -> list[str]:
        """What runs this job on another rank.

        Args:
            rank: global rank.
            folder: for the configuration.

        Raises:
            ConfigError: the configuration holds what can't be passed on to another process.
        """
        path = folder / f"rank{rank}.pickle"
        try:
            config = self._config_of(rank)
            # A worker knows the script's own classes by value, and the rank can't take those.
            path.write_bytes(pickle.dumps(_without_schema(config) if is_worker() else config))
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise ConfigError(
                f"The configuration can't be passed on to rank {rank}: {error}. It may hold plain values, "
                "and dataclasses that stand at the top of a module."
            ) from error
        interpreter, *script = script_command()
        return [interpreter, *_NO_WARNING, *script, "--experimental-rerun", str(path)]

    def environment(self) -> dict[str, str]:
        """What a rank needs to find this script, where Hydra has changed the working directory."""
        known = os.environ.get("PYTHONPATH")
        paths = [self.config.hydra.runtime.cwd, *([known] if known else [])]
        return {"PYTHONPATH": os.pathsep.join(paths)}

    def _config_of(self, rank: int) -> DictConfig:
        from omegaconf import OmegaConf, open_dict, read_write

        config = copy.deepcopy(self.config)
        # Resolvers with a cache answer what they have answered here.
        OmegaConf.copy_cache(self.given, config)
        hydra = config.hydra
        with read_write(config), open_dict(config), read_write(hydra), open_dict(hydra):
            for key in config:
                if key != "hydra":
                    _settle(config, key)
            hydra.mode = "RUN"
            for plugin in ("launcher", "sweeper"):  # their schemas may be classes that nobody else can import
                hydra[plugin] = OmegaConf.to_container(hydra[plugin])
            hydra.job.name = f"{hydra.job.name}_rank{rank}"  # names its log file
            _keep_off_console(hydra.job_logging)
        return config


def current_job() -> HydraJob | None:
    """The job that this call is part of; None outside of ``@hydra.main``, and on a rank that was started."""
    if "hydra" not in sys.modules:
        return None
    from hydra.core.utils import run_job

    frame = inspect.currentframe()
    while frame is not None and frame.f_code is not run_job.__code__:
        frame = frame.f_back
    if frame is None or "task_cfg" not in frame.f_locals:
        return None
    found = frame.f_locals
    return HydraJob(found["config"], found["task_cfg"], found["callbacks"].callbacks)


def _settle(parent: Any, key: Any) -> None:
    """Put values in the place of what is resolved at each access; what can't be resolved stays."""
    from omegaconf import DictConfig, ListConfig, OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    if OmegaConf.is_missing(parent, key):
        return
    refers = OmegaConf.is_interpolation(parent, key)
    try:
        value = parent[key]
    except OmegaConfBaseException:
        return
    if isinstance(value, DictConfig | ListConfig):
        # One that is referred to is settled where it stands.
        if not refers:
            for item in list(value) if isinstance(value, DictConfig) else range(len(value)):
                _settle(value, item)
    elif refers:
        parent[key] = value


def _without_schema(config: DictConfig) -> DictConfig:
    """The same values in plain containers, but for the node ``hydra``."""
    from omegaconf import OmegaConf

    values = OmegaConf.to_container(config)
    assert isinstance(values, dict)
    plain = OmegaConf.create({key: value for key, value in values.items() if key != "hydra"})
    plain.hydra = config.hydra
    return plain


def _keep_off_console(logging: Any) -> None:
    """Rank 0 speaks for all; the others write their log files."""
    handlers = logging.get("handlers") or {}
    speakers = [name for name, handler in handlers.items() if handler.get("class") == "logging.StreamHandler"]
    loggers = [logging.get("root"), *(logging.get("loggers") or {}).values()]
    for logger in loggers:
        if logger is not None and logger.get("handlers"):
            logger["handlers"] = [name for name in logger["handlers"] if name not in speakers]

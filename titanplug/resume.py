"""What `resume=auto` does: finds the run that a command goes on with, and its folder.

Decided once, by the process that reads the command line; the ranks get a checkpoint and a folder.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from titanplug.config.layout import data_ranks
from titanplug.errors import ConfigError

CONFIG_FILE = "config.yaml"
METRICS_FILE = "metrics.json"
"""Written at the end of a run."""

_ANYWHERE = ("paths", "resume", "ckpt_path", "logger", "trainer.enable_progress_bar")
"""What a run may change when it goes on: where it reads and writes, and what it tells."""
_LAYOUT = ("parallelism", "trainer.accelerator", "trainer.devices", "trainer.num_nodes")
_LENGTH = (
    "test",
    "trainer.max_steps",
    "trainer.min_steps",
    "trainer.max_epochs",
    "trainer.min_epochs",
    "trainer.max_time",
)


@dataclass(frozen=True)
class EarlierRun:
    """A run that goes on.

    Args:
        run_dir: its folder.
        checkpoint: where it stands.
        step: the checkpoint's optimizer steps.
        is_finished: whether it has come to the end that the new configuration gives it.
    """

    run_dir: Path
    checkpoint: Path
    step: int
    is_finished: bool

    def describe(self) -> str:
        """One line: what happens with it."""
        folder = os.path.relpath(self.run_dir)
        if self.is_finished:
            return (
                f"{folder} is finished; its last checkpoint is of step {self.step}. To train it further, "
                "raise trainer.max_steps; for a new run, resume=null."
            )
        checkpoint = os.path.relpath(self.checkpoint, self.run_dir)
        return f"Continuing {folder} at step {self.step} ({checkpoint})."


def find_earlier(config: Mapping[str, Any], run_dir: Path, sweeps: bool) -> tuple[EarlierRun | None, str]:
    """The run that goes on, as ``config["resume"]`` says, and a line that tells.

    Args:
        config: the resolved configuration.
        run_dir: folder of the new run, if it becomes one.
        sweeps: whether it is one job of a sweep. Such a job goes on with a job of an earlier sweep, and only
            with one whose layout and length are its own: they may be what the sweep is about.

    Raises:
        ConfigError: the folder that was named has nothing to go on with.
    """
    if config["resume"] != "auto":
        named = _named(config, Path(config["resume"]))
        return named, named.describe()
    ignored = _ANYWHERE if sweeps else _ANYWHERE + _LAYOUT + _LENGTH
    wanted = _identity(config, ignored)
    unlike = ""
    for folder in _folders(config, run_dir, sweeps):
        saved = _read_config(folder)
        if saved is None:
            continue
        different = _differences(_identity(saved, ignored), wanted)
        if different:
            newest = os.path.relpath(folder)
            unlike = unlike or f" The newest run of this name, {newest}, has other {different}."
            continue
        earlier = _standing(folder, saved, config)
        if earlier is not None:
            return earlier, earlier.describe()
    return None, f"Nothing to continue: a new run, in {os.path.relpath(run_dir)}.{unlike}"


def take_over(earlier: EarlierRun, fresh: Path, config: dict[str, Any]) -> None:
    """Let a configuration that was resolved for the earlier run's folder go on there.

    Args:
        earlier: the run.
        fresh: the folder that Hydra has made for a new one; what it wrote goes to the earlier run's.
        config: gets the checkpoint. Loggers add to what is there.
    """
    config["ckpt_path"] = str(earlier.checkpoint)
    (earlier.run_dir / METRICS_FILE).unlink(missing_ok=True)
    for node in (config["logger"] or {}).values():
        target = str((node or {}).get("_target_", ""))
        if target.endswith(".TensorBoardLogger"):
            node["purge_step"] = earlier.step + 1  # what came after the checkpoint comes again
        elif target.endswith(".CSVLogger"):
            table = Path(node["save_dir"], str(node["name"]), str(node["version"]), "metrics.csv")
            if table.exists():  # Lightning would remove it
                table.replace(table.with_name(f"metrics_until_step_{earlier.step}.csv"))
    if fresh != earlier.run_dir:
        with contextlib.suppress(FileNotFoundError):
            shutil.copytree(fresh / ".hydra", earlier.run_dir / ".hydra", dirs_exist_ok=True)
        discard(fresh)


def discard(fresh: Path) -> None:
    """Remove the folder that Hydra made for a run that isn't one, if it holds nothing else."""
    shutil.rmtree(fresh / ".hydra", ignore_errors=True)
    with contextlib.suppress(OSError):
        fresh.rmdir()


def _named(config: Mapping[str, Any], folder: Path) -> EarlierRun:
    saved = _read_config(folder)
    earlier = None if saved is None else _standing(folder.resolve(), saved, config)
    if earlier is None:
        missing = f"no {CONFIG_FILE}" if saved is None else "no whole checkpoint"
        raise ConfigError(
            f"resume={folder}: it has {missing}. Give the folder of a run, or auto; a checkpoint alone is "
            "given as ckpt_path, and the run that loads it gets a folder of its own."
        )
    return earlier


def _standing(folder: Path, saved: Mapping[str, Any], config: Mapping[str, Any]) -> EarlierRun | None:
    from titanplug.checkpoint.latest import latest_checkpoint, step_of

    checkpoint = latest_checkpoint(folder)
    if checkpoint is None:
        return None
    step = step_of(checkpoint) or 0
    finished = False
    if (folder / METRICS_FILE).exists():
        lengths = [{key: _select(c, key) for key in _LENGTH} for c in (saved, config)]
        finished = lengths[0] == lengths[1] or (
            0 <= config["trainer"]["max_steps"] <= step and not config["test"]
        )
    return EarlierRun(folder, checkpoint, step, finished)


def _folders(config: Mapping[str, Any], run_dir: Path, sweeps: bool) -> list[Path]:
    """Folders of runs of this name, the one that was started last first."""
    runs = Path(config["paths"]["runs"], config["name"]).absolute()
    pattern = f"multirun_*/*/{CONFIG_FILE}" if sweeps else f"*/{CONFIG_FILE}"
    found = {path.parent for path in runs.glob(pattern)}
    found = {folder for folder in found if not sweeps or folder.parent != run_dir.parent}
    if (run_dir / CONFIG_FILE).exists():  # the user has named one folder for all of them
        found.add(run_dir)
    return sorted(found, key=lambda folder: (folder / CONFIG_FILE).stat().st_mtime_ns, reverse=True)


def _read_config(folder: Path) -> dict[str, Any] | None:
    with contextlib.suppress(OSError, yaml.YAMLError):
        config = yaml.safe_load((folder / CONFIG_FILE).read_text())
        if isinstance(config, dict) and "trainer" in config:
            return config
    return None


def _identity(config: Mapping[str, Any], ignored: tuple[str, ...]) -> dict[str, Any]:
    """What makes two configurations the same run, by dotted keys."""
    run_dir = str(config["paths"]["run_dir"])
    values: dict[str, Any] = {}
    for key, value in _leaves("", config):
        if not any(key == prefix or key.startswith(f"{prefix}.") for prefix in ignored):
            values[key] = value.replace(run_dir, "RUN_DIR") if isinstance(value, str) else value
    size = values.get("data.batch_size")
    if "parallelism" in ignored and isinstance(size, int):
        values["data.batch_size"] = size * data_ranks(config)  # of all ranks together
    return values


def _leaves(prefix: str, node: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for key, value in node.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(f"{prefix}{key}.", value)
        else:
            yield f"{prefix}{key}", value


def _select(config: Mapping[str, Any], key: str) -> Any:
    *groups, last = key.split(".")
    for group in groups:
        config = config.get(group) or {}
    return config.get(last)


def _differences(saved: Mapping[str, Any], wanted: Mapping[str, Any]) -> str:
    absent = object()
    keys = [key for key in {**wanted, **saved} if saved.get(key, absent) != wanted.get(key, absent)]
    shown = ", ".join(keys[:3])
    return f"{shown} and {len(keys) - 3} more keys" if len(keys) > 3 else shown

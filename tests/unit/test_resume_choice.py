"""`resume=auto`: which run a command goes on with, and what is said of it."""

from __future__ import annotations

import copy
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from titanplug import resume
from titanplug.errors import ConfigError

BASE: dict[str, Any] = {
    "name": "mine",
    "seed": 0,
    "resume": "auto",
    "ckpt_path": None,
    "test": False,
    "optim": {"lr": 0.1},
    "data": {"batch_size": 4},
    "parallelism": {"tp": 1, "pp": 1, "cp": 1, "dp_shard": -1},
    "trainer": {"devices": 2, "num_nodes": 1, "accelerator": "cpu", "max_steps": 10, "precision": "32-true"},
    "callbacks": {"save": {"dirpath": "PLACE/checkpoints"}},
    "logger": {"csv": {"save_dir": "PLACE"}},
    "paths": {"runs": "runs"},
}


def configured(folder: str, changes: dict[str, Any] | None = None) -> tuple[dict[str, Any], Path]:
    run_dir = Path("runs/mine", folder).absolute()
    config = yaml.safe_load(yaml.safe_dump(copy.deepcopy(BASE)).replace("PLACE", str(run_dir)))
    config["paths"]["run_dir"] = str(run_dir)
    for key, value in (changes or {}).items():
        *groups, last = key.split(".")
        node = config
        for group in groups:
            node = node[group]
        node[last] = value
    return config, run_dir


def ran(folder: str, age: int, step: int | None = 5, finished: bool = False, **changes: Any) -> Path:
    """A run that was started ``age`` seconds ago."""
    config, run_dir = configured(folder, {key.replace("__", "."): value for key, value in changes.items()})
    run_dir.mkdir(parents=True)
    file = run_dir / "config.yaml"
    file.write_text(yaml.safe_dump(config))
    os.utime(file, (1e9 - age, 1e9 - age))
    if step is not None:
        torch.save({"global_step": step, "optimizer_states": [], "loops": {}}, run_dir / f"{step}.ckpt")
    if finished:
        (run_dir / "metrics.json").touch()
    return run_dir


def find(changes: dict[str, Any] | None = None, sweeps: bool = False) -> tuple[Path | None, str, bool]:
    config, run_dir = configured("multirun_new/0" if sweeps else "new", changes)
    earlier, told = resume.find_earlier(config, run_dir, sweeps)
    return (None, told, False) if earlier is None else (earlier.run_dir, told, earlier.is_finished)


def test_the_newest_run_of_this_configuration_with_a_checkpoint(run_dir: Path) -> None:
    assert find()[:2] == (None, "Nothing to continue: a new run, in runs/mine/new.")
    ran("oldest", 50)
    wanted = ran("older", 40)
    ran("without checkpoint", 30, step=None)
    ran("another", 20, optim__lr=0.2, seed=3)
    (run_dir / "runs/mine/no run").mkdir()
    assert find() == (wanted, "Continuing runs/mine/older at step 5 (5.ckpt).", False)
    found, told, _ = find({"optim.lr": 0.3})
    assert found is None
    assert told.endswith("The newest run of this name, runs/mine/another, has other seed, optim.lr.") or (
        told.endswith("has other optim.lr, seed.")
    )


@pytest.mark.parametrize(
    "changes",
    [
        {"trainer.devices": 1, "data.batch_size": 8},
        {"parallelism.tp": 2, "data.batch_size": 8},
        {"trainer.max_steps": 20, "test": True},
        {"logger": {}},
    ],
)
def test_layout_length_and_loggers_may_change(run_dir: Path, changes: dict[str, Any]) -> None:
    wanted = ran("a", 1)
    assert find(changes)[0] == wanted


@pytest.mark.parametrize(
    "changes",
    [{"trainer.devices": 1}, {"trainer.precision": "bf16-mixed"}, {"callbacks": {}}, {"name": "other"}],
)
def test_what_is_another_run(run_dir: Path, changes: dict[str, Any]) -> None:
    ran("a", 1)
    assert find(changes)[0] is None


def test_a_finished_run_goes_on_only_if_it_is_made_longer(run_dir: Path) -> None:
    wanted = ran("a", 1, step=9, finished=True)
    found, told, finished = find()
    assert (found, finished) == (wanted, True) and "its last checkpoint is of step 9" in told
    assert find({"trainer.max_steps": 8})[2]
    assert not find({"trainer.max_steps": 20})[2] and not find({"test": True})[2]


def test_jobs_of_sweeps_are_apart_from_single_runs(run_dir: Path) -> None:
    ran("single", 1)
    ran("multirun_new/1", 1)  # another job of the same sweep
    assert find(sweeps=True)[0] is None
    wanted = ran("multirun_old/3", 9)
    assert find(sweeps=True)[0] == wanted
    for change in ({"trainer.max_steps": 20}, {"parallelism.tp": 2}):  # it may be about these
        assert find(change, sweeps=True)[0] is None
    assert find()[0] == run_dir / "runs/mine/single"


def test_a_run_that_is_named(run_dir: Path) -> None:
    wanted = ran("a", 1, optim__lr=0.2)
    assert find({"resume": "runs/mine/a"})[0] == wanted
    for name, missing in (("runs/mine/gone", "no config.yaml"), ("runs/mine/b", "no whole checkpoint")):
        if name.endswith("b"):
            ran("b", 1, step=None)
        with pytest.raises(ConfigError, match=missing):
            find({"resume": name})


def test_the_fresh_folder_is_given_up(run_dir: Path) -> None:
    wanted = ran("a", 1, finished=True)
    fresh = run_dir / "runs/mine/new"
    (fresh / ".hydra").mkdir(parents=True)
    (fresh / ".hydra" / "config.yaml").touch()
    config, _ = configured("a", {"trainer.max_steps": 20})
    config["logger"] = {"t": {"_target_": "lightning.pytorch.loggers.TensorBoardLogger"}, "off": None}
    earlier = resume.find_earlier(config, fresh, sweeps=False)[0]
    assert earlier is not None
    resume.take_over(earlier, fresh, config)
    assert not fresh.exists() and (wanted / ".hydra" / "config.yaml").exists()
    assert config["ckpt_path"] == str(wanted / "5.ckpt") and config["logger"]["t"]["purge_step"] == 6
    assert not (wanted / "metrics.json").exists()

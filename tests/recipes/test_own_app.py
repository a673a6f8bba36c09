"""The recipe own_app, copied into an empty folder as its README says."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def run(folder: Path, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "app.py", *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(ROOT / "recipes" / "own_app", tmp_path / "app"))


def values(out: str) -> str:
    (line,) = [line for line in out.splitlines() if "val_loss" in line]
    return line


def test_layouts_of_the_groups_give_the_same(folder: Path) -> None:
    few = "trainer.max_steps=3"
    one = values(run(folder, few))
    assert values(run(folder, few, "trainer.devices=2", "parallelism=tp", "network=small")) == one
    assert values(run(folder, few, "trainer.devices=2", "parallelism=fsdp")) == one


def test_it_learns_and_a_schema_of_its_own_is_checked(folder: Path) -> None:
    out = values(run(folder))
    assert float(out.split("val_accuracy ")[1].split(",")[0]) > 0.95
    done = subprocess.run(
        [sys.executable, "app.py", "optim.amsgrad=perhaps"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode != 0 and "optim.amsgrad" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["basic", "titanplug"])
def test_its_sweeps(folder: Path, launcher: str) -> None:
    run(folder, "-m", "trainer.devices=1,2", "trainer.max_steps=3", f"hydra/launcher={launcher}")
    jobs = [path for path in (folder / "runs").glob("multirun_*/*") if path.is_dir()]
    assert sorted(path.name for path in jobs) == ["0", "1"]

"""The recipe of one's own model: the same numbers in every layout."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RECIPE = ROOT / "recipes" / "own_model"


def validation_loss(folder: Path, *arguments: str) -> float:
    done = subprocess.run(
        [sys.executable, "train.py", "--steps", "6", *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = re.search(r"validation loss after 6 steps: (\S+)", done.stdout)
    assert found is not None, done.stdout
    return float(found[1])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    copied = tmp_path_factory.mktemp("mine")
    for path in RECIPE.iterdir():
        if path.suffix in (".py", ".md"):
            shutil.copy(path, copied)
    return copied


@pytest.fixture(scope="module")
def alone(folder: Path) -> float:
    """The loss on one process."""
    return validation_loss(folder)


@pytest.mark.timeout(240)
@pytest.mark.parametrize("layout", [("--tp", "2"), ("--tp", "1"), ("--pp", "2"), ("--cp", "2")], ids=" ".join)
def test_two_processes_equal_one(folder: Path, alone: float, layout: tuple[str, str]) -> None:
    assert validation_loss(folder, "--devices", "2", *layout) == pytest.approx(alone, abs=2e-5)


def test_the_commands_of_the_readme_are_those_of_the_script() -> None:
    commands = re.findall(r"^python train\.py.*?(?=  |$)", (RECIPE / "README.md").read_text(), re.M)
    documented = (RECIPE / "train.py").read_text().partition('"""')[2].partition('"""')[0]
    assert len(commands) == 6 and all(command in documented for command in commands)

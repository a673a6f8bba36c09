"""The newest whole checkpoint below a folder: what counts as one, and in which order."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch

import titanplug
from titanplug.checkpoint.latest import latest_checkpoint, step_of


class Touch:
    """An object whose pickle would run code."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (Path.touch, (self.path,))


def content(step: int, **more: Any) -> dict[str, Any]:
    return {"global_step": step, "optimizer_states": [], "loops": {}, "state_dict": OrderedDict(), **more}


def directory(path: Path, step: int, time_s: float = 1000.0, **more: Any) -> Path:
    path.mkdir(parents=True)
    torch.save(content(step, **more), path / "meta.pt")
    (path / ".metadata").write_bytes(pickle.dumps({}))
    (path / "checksums").write_bytes(b"")
    os.utime(path / "meta.pt", (time_s, time_s))
    return path


def test_most_steps_first_then_the_youngest(tmp_path: Path) -> None:
    directory(tmp_path / "a" / "late.ckpt", 9, time_s=9000)
    best = directory(tmp_path / "b" / "deep" / "x.ckpt", 10, time_s=10)
    assert latest_checkpoint(tmp_path) == best
    directory(tmp_path / "older", 10, time_s=5)
    assert latest_checkpoint(str(tmp_path)) == best
    younger = directory(tmp_path / "younger", 10, time_s=20)
    assert latest_checkpoint(tmp_path) == younger
    assert latest_checkpoint(best) == best and step_of(best) == 10
    assert titanplug.latest_checkpoint is latest_checkpoint


def test_what_is_not_a_whole_checkpoint(tmp_path: Path) -> None:
    assert latest_checkpoint(tmp_path) is None and latest_checkpoint(tmp_path / "missing") is None
    directory(tmp_path / "no meta", 5)
    (tmp_path / "no meta" / "meta.pt").unlink()
    directory(tmp_path / "no checksums", 5)
    (tmp_path / "no checksums" / "checksums").unlink()
    cut = directory(tmp_path / "cut short", 5) / "meta.pt"
    cut.write_bytes(cut.read_bytes()[:-200])
    directory(tmp_path / ".writing" / "step_5.ckpt", 5)
    directory(tmp_path / "weights", 5)
    torch.save({"global_step": 5, "loops": {}, "state_dict": {}}, tmp_path / "weights" / "meta.pt")
    (tmp_path / "empty.ckpt").touch()
    torch.save(content(5), tmp_path / "not.pt")
    torch.save([5], tmp_path / "list.ckpt")
    os.symlink(tmp_path / "gone", tmp_path / "last.ckpt")
    os.symlink(tmp_path, tmp_path / "circle")
    assert latest_checkpoint(tmp_path) is None
    whole = directory(tmp_path / "whole", 1)
    assert latest_checkpoint(tmp_path) == whole


def test_links_stand_for_what_they_lead_to(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    target = directory(tmp_path / "elsewhere", 3)
    os.symlink("../elsewhere", tmp_path / "run" / "last.ckpt")
    assert latest_checkpoint(tmp_path / "run") == target


def test_files_of_lightning_and_objects_of_any_class(tmp_path: Path) -> None:
    """Tensors are not read, and nothing in a file runs."""
    weights = torch.nn.Linear(3, 3).state_dict()
    file = tmp_path / "epoch=1.ckpt"
    torch.save(content(7, state_dict=weights, hyper_parameters=Touch(tmp_path / "touched")), file)
    assert latest_checkpoint(tmp_path) == file
    folder = directory(tmp_path / "x.ckpt", 8, hyper_parameters=Touch(tmp_path / "touched"), s={1, 2})
    assert latest_checkpoint(tmp_path) == folder
    assert not (tmp_path / "touched").exists()
    torch.load(file, weights_only=False)
    assert (tmp_path / "touched").exists()  # it would have


@pytest.mark.slow
def test_needs_no_lightning() -> None:
    code = "import sys, titanplug; titanplug.latest_checkpoint('.'); assert 'lightning' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)

"""Callbacks that save when a run is cut off: with all ranks, or not at all; never a hang."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from torch import Tensor

from tests.harness import run_ranks
from tests.ported.module import Net, rows, trainer
from titanplug.strategy import after_exception


class Fails(Net):
    def __init__(self, ranks: tuple[int, ...], error: type[BaseException]) -> None:
        super().__init__()
        self.ranks, self.error = ranks, error

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        if self.global_rank in self.ranks and batch_idx == 2:
            raise self.error("own error")
        return super().training_step(batch, batch_idx)


def fit(rank: int, world_size: int, folder: Path, ranks: tuple[int, ...], error: Any) -> str:
    saves = [
        OnExceptionCheckpoint(folder),
        ModelCheckpoint(folder, filename="last step", save_on_exception=True, save_last=True),
    ]
    after_exception.WAIT_S = 1.0
    try:
        trainer(world_size, callbacks=saves, enable_checkpointing=True).fit(Fails(ranks, error), rows(1))
    except error as caught:
        return str(caught)
    except SystemExit as ended:  # what Lightning makes of Ctrl-C
        return f"exit {ended.code}"
    raise AssertionError("went on")


def test_all_ranks_fail_alike(tmp_path: Path) -> None:
    results = run_ranks(fit, 2, tmp_path, (0, 1), ValueError, init_process_group=False)
    assert results == ["own error"] * 2
    names = {"on_exception.ckpt", "last step.ckpt", "last.ckpt"}
    assert {path.name for path in tmp_path.iterdir()} == names
    for name in names:
        meta = torch.load(tmp_path / name / "meta.pt", weights_only=True)
        assert meta["global_step"] == 2


def test_one_rank_fails(tmp_path: Path) -> None:
    """It doesn't wait for the others for long, and they don't try when they hear of it."""

    def run(rank: int, world_size: int) -> None:
        fit(rank, world_size, tmp_path, (1,), ValueError)
        raise RuntimeError("rank 1 is the first to end")

    with pytest.raises(RuntimeError, match="rank 1 is the first to end"):
        run_ranks(run, 2, init_process_group=False)
    assert not list(tmp_path.iterdir())


def test_keyboard_interrupt_saves_nothing(tmp_path: Path) -> None:
    """It stops ranks anywhere, maybe in the middle of an optimizer's step."""
    results = run_ranks(fit, 2, tmp_path, (0, 1), KeyboardInterrupt, init_process_group=False)
    assert results == ["exit 1"] * 2
    assert not list(tmp_path.iterdir())


def test_one_process_saves_on_anything(tmp_path: Path) -> None:
    assert run_ranks(fit, 1, tmp_path, (0,), KeyboardInterrupt, init_process_group=False) == ["exit 1"]
    assert (tmp_path / "on_exception.ckpt").is_dir()

"""Lightning's ModelCheckpoint keeps the same checkpoints on several ranks as on one process."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback, ModelCheckpoint, OnExceptionCheckpoint
from torch import Tensor

from tests.distributed.checkpoint_case import Module, loader, trainer_for
from tests.harness import reference, run_ranks

LAYOUTS: dict[str, tuple[int, dict[str, Any] | None]] = {
    "plain": (1, None),
    "fsdp2": (2, {"dp_shard": 2}),
    "pp2": (2, {"pp": 2}),
}
# 4 epochs of 5 steps; the best are neither the first nor the last.
SCORES = [5.0, 2.0, 4.0, 1.0, 3.0, 6.0, 0.5, 7.0]

Build = Callable[[Path], list[Any]]


class Scored(Module):
    """Logs a score of its own in each validation and step, equal on all ranks."""

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        self.log("score", torch.tensor(SCORES[(self.trainer.global_step // 5 - 1) % len(SCORES)]))

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        self.log("step_score", torch.tensor(SCORES[self.trainer.global_step % len(SCORES)]))
        return super().training_step(batch, batch_idx)


class Fail(Callback):
    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_step == 7:
            raise ValueError("fails on all ranks")


class Uneven(Callback):
    """Ranks whose clocks run apart: an hour has passed on rank 0 in two steps, on rank 1 in all others."""

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        if (trainer.global_step in (3, 11)) == (trainer.global_rank == 0):
            checkpoint: Any = trainer.checkpoint_callback
            checkpoint._last_time_checked -= 3600


def tree(folder: Path) -> dict[str, Any]:
    """What lies in a folder: links with what they lead to, and whether each is whole."""
    found: dict[str, Any] = {}
    for path in sorted(folder.rglob("*.ckpt")):
        where = str(path.relative_to(folder))
        if path.is_symlink():
            found[where] = os.readlink(path)
            assert path.exists(), f"{path} leads nowhere"
        else:
            found[where] = "whole"
            assert path.is_file() or ((path / "meta.pt").is_file() and (path / ".metadata").is_file())
    left = [path for path in folder.rglob(".*") if path.name not in (".metadata",)]
    assert not left, left
    return found


def described(callback: Any, folder: Path) -> dict[str, Any]:
    """What a callback says of its checkpoints, with paths relative to the folder."""
    if not isinstance(callback, ModelCheckpoint):
        return {}

    def name(path: str) -> str:
        return os.path.relpath(path, folder) if path else ""

    return {
        "best": name(callback.best_model_path),
        "last": name(callback.last_model_path),
        "score": None if callback.best_model_score is None else float(callback.best_model_score),
        "kept": {name(path): float(score) for path, score in callback.best_k_models.items()},
    }


def train(
    rank: int, world_size: int, degrees: Any, folder: Path, build: Build, options: dict[str, Any]
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    L.seed_everything(7, verbose=False)
    callbacks = build(folder)
    kept: dict[str, Any] = {"callbacks": callbacks, "enable_checkpointing": True, "max_epochs": 4}
    trainer = trainer_for(world_size, degrees, **{**kept, **options})
    module = Scored()
    try:
        trainer.fit(module, loader(trainer.strategy), loader(trainer.strategy))
    except ValueError:
        assert any(isinstance(callback, Fail) for callback in callbacks)
    said = [described(callback, folder) for callback in callbacks]
    if dist.is_initialized():
        dist.barrier()
    found = tree(folder)
    last = next((entry["last"] for entry in said if entry.get("last")), None)
    if last is not None and not any(getattr(c, "save_weights_only", False) for c in callbacks):
        more = {**options, "max_epochs": -1, "max_steps": trainer.global_step + 1}
        again = trainer_for(world_size, degrees, **more)
        again.fit(Scored(), loader(again.strategy), loader(again.strategy), ckpt_path=folder / last)
        assert again.global_step == trainer.global_step + 1 or trainer.interrupted
    return found, said


def keeps(**options: Any) -> Build:
    return lambda folder: [ModelCheckpoint(folder, filename="{epoch}-{step}", **options)]


def several(folder: Path) -> list[Any]:
    return [
        ModelCheckpoint(folder / "best", monitor="score", save_top_k=2, save_last="link"),
        ModelCheckpoint(
            folder / "best", monitor="step_score", mode="max", filename="high-{step}", every_n_train_steps=3
        ),
        ModelCheckpoint(folder / "often", every_n_train_steps=4, save_top_k=-1, save_last=True),
    ]


CASES: dict[str, tuple[Build, dict[str, Any]]] = {
    "top 2, lowest": (keeps(monitor="score", save_top_k=2, save_last=True), {}),
    "top 2, highest, linked": (keeps(monitor="score", mode="max", save_top_k=2, save_last="link"), {}),
    "all": (keeps(monitor="score", save_top_k=-1), {}),
    "all without a monitor": (keeps(save_top_k=-1, save_last="link"), {}),
    "none but the last": (keeps(save_top_k=0, save_last=True), {}),
    "the latest": (keeps(save_last=True), {}),
    "every third step": (keeps(every_n_train_steps=3, save_top_k=-1, save_last="link"), {}),
    "best of every third step": (keeps(every_n_train_steps=3, monitor="step_score", save_top_k=2), {}),
    "a monitor of the validation": (keeps(every_n_train_steps=3, monitor="score", save_top_k=2), {}),
    "every second epoch": (keeps(every_n_epochs=2, save_top_k=-1), {}),
    "at the end of an epoch": (
        keeps(save_on_train_epoch_end=True, monitor="score", save_top_k=1, save_last="link"),
        {},
    ),
    "validating often": (
        keeps(monitor="score", save_top_k=2, save_last=True),
        {"val_check_interval": 2, "check_val_every_n_epoch": None},
    ),
    "the same name": (
        lambda folder: [
            ModelCheckpoint(folder, filename="x", monitor="score", save_top_k=3, save_last="link")
        ],
        {},
    ),
    "weights only": (keeps(save_weights_only=True, save_last=True), {}),
    "several": (several, {}),
    "on an exception": (
        lambda folder: [
            ModelCheckpoint(folder / "a", save_on_exception=True, save_last=True),
            OnExceptionCheckpoint(folder),
            Fail(),
        ],
        {},
    ),
}
QUICK = ("top 2, lowest", "several")


def check(name: str, layout: str, folder: Path) -> None:
    build, options = CASES[name]
    expected = reference(train, 0, 1, None, folder / "plain", build, options)
    assert expected[0], "nothing was saved"
    world_size, degrees = LAYOUTS[layout]
    results = run_ranks(train, world_size, degrees, folder / layout, build, options, init_process_group=False)
    for result in results:
        assert result == expected


@pytest.mark.parametrize("name", QUICK)
def test_the_same_as_on_one_process(name: str, tmp_path: Path) -> None:
    check(name, "fsdp2", tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in CASES if name not in QUICK])
def test_each_trigger(name: str, tmp_path: Path) -> None:
    check(name, "fsdp2", tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["top 2, highest, linked", "several"])
def test_under_a_pipeline(name: str, tmp_path: Path) -> None:
    check(name, "pp2", tmp_path)


def by_time(folder: Path) -> list[Any]:
    interval = timedelta(hours=1)
    return [ModelCheckpoint(folder, train_time_interval=interval, save_top_k=-1, save_last="link"), Uneven()]


def test_ranks_with_other_clocks_agree_when_it_is_time(tmp_path: Path) -> None:
    """Rank 0's clock decides."""
    results = run_ranks(train, 2, {"dp_shard": 2}, tmp_path, by_time, {}, init_process_group=False)
    assert results[0] == results[1]
    last = "epoch=2-step=12.ckpt"
    assert results[0][0] == {"epoch=0-step=4.ckpt": "whole", last: "whole", "last.ckpt": last}

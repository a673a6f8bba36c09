"""A checkpoint of one layout continues in any other as if nothing had happened."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.distributed.checkpoint_case import (
    LAYOUTS,
    Run,
    assert_continues,
    resume,
    train_and_save,
)
from tests.harness import run_ranks

STEPS = 3


def saved_run(folder: Path, **module: object) -> Run:
    world_size, degrees = LAYOUTS["fsdp2 x tp2"]
    return run_ranks(
        lambda *args: train_and_save(*args, **module),
        world_size,
        degrees,
        folder,
        init_process_group=False,
    )[0]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Run]:
    folder = tmp_path_factory.mktemp("plain")
    return folder, saved_run(folder)


@pytest.fixture(scope="module")
def noisy(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Run]:
    folder = tmp_path_factory.mktemp("noisy")
    return folder, saved_run(folder, noise=True)


def checkpoints(folder: Path) -> list[Path]:
    return [
        folder / "mid" / "epoch=0-step=3.ckpt",
        folder / "last batch" / "epoch=0-step=5.ckpt",
        folder / "epoch end" / "epoch=0-step=5.ckpt",
        folder / "mid" / "epoch=1-step=6.ckpt",
    ]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_layout_continues(layout: str, plain: tuple[Path, Run]) -> None:
    folder, expected = plain
    world_size, degrees = LAYOUTS[layout]
    paths = checkpoints(folder)
    results = run_ranks(resume, world_size, degrees, paths, STEPS, init_process_group=False)
    for runs in results:
        for path, run in zip(paths, runs, strict=True):
            start = int(path.stem.rpartition("=")[2])
            assert_continues(run, expected, start, STEPS, tolerance=1e-10)


@pytest.mark.parametrize("layout", ["fsdp2 x tp2", "replicate2"])
def test_random_draws_continue(layout: str, noisy: tuple[Path, Run]) -> None:
    """Layouts with as many data-parallel ranks draw the same numbers as the uninterrupted run."""
    folder, expected = noisy
    world_size, degrees = LAYOUTS[layout]
    paths = checkpoints(folder)

    def run(*args: object) -> list[Run]:
        return resume(*args, noise=True)  # type: ignore[arg-type]

    runs = run_ranks(run, world_size, degrees, paths, STEPS, init_process_group=False)[0]
    for path, continued in zip(paths, runs, strict=True):
        start = int(path.stem.rpartition("=")[2])
        assert_continues(continued, expected, start, STEPS, tolerance=1e-10)

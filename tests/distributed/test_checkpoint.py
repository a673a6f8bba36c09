"""A checkpoint of one layout continues in any other as if nothing had happened."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest
import torch

from tests.distributed.checkpoint_case import (
    LAYOUTS,
    Run,
    assert_continues,
    resume,
    train_and_save,
)
from tests.harness import reference, run_ranks

STEPS = 3


def saved_run(folder: Path, **module: Any) -> Run:
    world_size, degrees = LAYOUTS["fsdp2 x tp2"]
    runs = run_ranks(
        lambda *args: train_and_save(*args, **module),
        world_size,
        degrees,
        folder,
        init_process_group=False,
    )
    return cast("Run", runs[0])


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Run]:
    folder = tmp_path_factory.mktemp("plain")
    return folder, saved_run(folder)


@pytest.fixture(scope="module")
def noisy(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Run]:
    folder = tmp_path_factory.mktemp("noisy")
    return folder, saved_run(folder, noise=True)


MID_EPOCH = ("mid/epoch=0-step=3.ckpt", "mid/epoch=1-step=6.ckpt")
EPOCH_ENDS = ("last batch/epoch=0-step=5.ckpt", "epoch end/epoch=0-step=5.ckpt")


def check_continues(layout: str, saved: tuple[Path, Run], names: tuple[str, ...], **m: Any) -> None:
    folder, expected = saved
    world_size, degrees = LAYOUTS[layout]
    paths = [folder / name for name in names]
    results = run_ranks(
        lambda *args: resume(*args, **m),
        world_size,
        degrees,
        paths,
        STEPS,
        init_process_group=False,
    )
    for runs in results:
        for path, run in zip(paths, runs, strict=True):
            start = int(path.stem.rpartition("=")[2])
            assert_continues(run, expected, start, STEPS, tolerance=1e-10)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_layout_continues_in_the_middle_of_an_epoch(layout: str, plain: tuple[Path, Run]) -> None:
    check_continues(layout, plain, MID_EPOCH)


@pytest.mark.parametrize("layout", ["1 process", "tp2"])
def test_continues_with_the_next_epoch(layout: str, plain: tuple[Path, Run]) -> None:
    check_continues(layout, plain, EPOCH_ENDS)


@pytest.mark.parametrize("layout", ["fsdp2 x tp2", "replicate2"])
def test_random_draws_continue(layout: str, noisy: tuple[Path, Run]) -> None:
    """Layouts with as many data-parallel ranks draw the same numbers as the uninterrupted run."""
    check_continues(layout, noisy, MID_EPOCH[:1], noise=True)


def test_epochs_are_counted_on(tmp_path: Path) -> None:
    """A run resumed twice, with max_epochs and validation, is that of one piece."""
    expected = reference(train_and_save, 0, 1, {}, tmp_path, True)

    def go_on() -> list[Run]:
        names = ("validated/epoch=0-step=5.ckpt", "last batch/epoch=0-step=5.ckpt")
        runs = []
        for index, name in enumerate(names):
            folder = tmp_path / f"again {index}"
            first = train_and_save(0, 1, {}, folder, True, stop=7, ckpt_path=tmp_path / name)
            again = folder / "mid" / "epoch=1-step=6.ckpt"
            second = train_and_save(0, 1, {}, folder / "more", True, ckpt_path=again)
            runs += [first, second]
        return runs

    for run, steps in zip(reference(go_on), [(5, 7), (6, 10)] * 2, strict=True):
        assert list(run.grads) == list(range(*steps))
        for step in range(*steps):
            assert run.losses[step] == expected.losses[step]
            assert run.epochs[step] == expected.epochs[step]
    assert expected.epochs == {step: step // 5 for step in range(10)}


@pytest.mark.parametrize("accumulate", [1, 2])
def test_saved_after_a_validation_in_the_epoch(accumulate: int, tmp_path: Path) -> None:
    """The default place of ModelCheckpoint: neither the validation nor a batch is run again."""
    options = {"val_check_interval": 2, "accumulate_grad_batches": accumulate}

    def run() -> list[tuple[int, Run]]:
        whole = train_and_save(0, 1, {}, tmp_path, True, options=options)
        runs = [(0, whole)]
        for path in sorted((tmp_path / "validated").iterdir()):
            again = tmp_path / path.stem
            run = train_and_save(0, 1, {}, again, True, ckpt_path=path, options=options)
            runs.append((int(path.stem.rpartition("=")[2]), run))
        return runs

    (_, whole), *resumed = reference(run)
    assert len(resumed) == 4
    for start, continued in resumed:
        assert list(continued.grads) == [step for step in whole.grads if step >= start]
        assert continued.validations == [v for v in whole.validations if v[0] > start]
        for step, grads in continued.grads.items():
            assert all(torch.equal(grad, whole.grads[step][name]) for name, grad in grads.items())
            assert continued.epochs[step] == whole.epochs[step]

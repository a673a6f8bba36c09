"""Saves that are killed anywhere: a whole checkpoint is always there, and ``last`` leads to one."""

from __future__ import annotations

import ctypes
import os
import random
import resource
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tests.harness import reference, run_ranks
from titanplug import latest_checkpoint
from titanplug.checkpoint import directory, files
from titanplug.checkpoint.files import place_of
from titanplug.checkpoint.names import CheckpointNames
from titanplug.checkpoint.ranks import Ranks
from titanplug.checkpoint.storage import ChecksumReader, ChecksumStream
from titanplug.checkpoint.weights import read_checkpoint
from titanplug.errors import CheckpointError
from titanplug.strategy import TitanStrategy

# What changes files: a kill falls before or after any of these calls.
CALLS: list[tuple[Any, str]] = [
    (os, "replace"),
    (os, "fsync"),
    (os, "unlink"),
    (os, "symlink"),
    (os, "rmdir"),
    (os, "mkdir"),
    (shutil, "rmtree"),
    (files, "_exchange"),
    (files.LocalPlace, "open"),
    (ChecksumStream, "write"),
]


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@contextmanager
def at_event(number: int | None, action: Callable[[], None] = kill) -> Iterator[list[int]]:
    """Run ``action`` at the given event of a process; yields the count of events so far."""
    count = [0]

    def counted(call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            happened()
            result = call(*args, **kwargs)
            happened()
            return result

        return wrapped

    def happened() -> None:
        if count[0] == number:
            action()
        count[0] += 1

    with pytest.MonkeyPatch.context() as patch:
        for owner, name in CALLS:
            patch.setattr(owner, name, counted(getattr(owner, name)))
        yield count


def killed_at(number: int, action: Callable[[], None]) -> bool:
    """Run ``action`` in a fork that is killed at an event; False where it ended before."""
    pid = os.fork()
    if pid == 0:
        try:
            with at_event(number):
                action()
            os._exit(0)
        except BaseException:
            sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
            os._exit(1)
    status = os.waitpid(pid, 0)[1]
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0
    return os.WIFSIGNALED(status)


# ---------------------------------------------------------------------------------------
# One save
# ---------------------------------------------------------------------------------------


EMPTY: dict[str, Any] = {"loops": {}, "optimizer_states": []}


def save(path: Path, value: float, **rest: Any) -> None:
    module = nn.Linear(3, 2)
    nn.init.constant_(module.weight, value)
    content = {"state_dict": module.state_dict(), "global_step": int(value), **EMPTY, **rest}
    names = CheckpointNames(module)
    directory.write(directory.take_snapshot(content, path, (0, 1), names, Ranks()), Ranks())


def value_of(path: Path) -> float:
    whole = read_checkpoint(path)
    value = whole["state_dict"]["weight"].unique().item()
    assert value == whole["global_step"]
    return float(value)


def save_and_link(folder: Path, value: int) -> None:
    """What ModelCheckpoint(save_last="link", save_top_k=1) does."""
    previous = latest_checkpoint(folder)
    new = folder / f"step={value}.ckpt"
    save(new, value)
    place_of(folder / "last.ckpt").link_to(new)
    if previous is not None:
        place_of(previous.resolve()).remove()


def save_again(folder: Path, value: int) -> None:
    """What ModelCheckpoint(save_last=True) does."""
    save(folder / "last.ckpt", value)


def count_events(save_next: Callable[[Path, int], None], folder: Path) -> int:
    folder.mkdir()
    for value in (1, 2):
        save_next(folder, value)
    with at_event(None) as count:
        save_next(folder, 3)
        return count[0]


EVENTS = [20, pytest.param(None, marks=pytest.mark.slow)]


@pytest.mark.parametrize("num_events", EVENTS, ids=["some", "all"])
@pytest.mark.parametrize("exchanges", [True, False])
@pytest.mark.parametrize("save_next", [save_and_link, save_again])
def test_killed_at_every_event(
    save_next: Callable[[Path, int], None],
    exchanges: bool,
    num_events: int | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of one process; also on file systems that can't exchange two names as one operation."""
    if not exchanges:
        monkeypatch.setattr(files, "_exchange", lambda *args: False)
    total, lost = count_events(save_next, tmp_path / "whole"), []
    assert total > 20
    # The last ones are those that publish, link and remove.
    numbers = (
        range(total)
        if num_events is None
        else {*range(0, total, total // num_events), *range(total - 30, total)}
    )
    for number in sorted(numbers):
        folder = tmp_path / str(number)
        folder.mkdir()
        for value in (1, 2):
            save_next(folder, value)
        assert killed_at(number, lambda f=folder: save_next(f, 3))  # type: ignore[misc]
        found = latest_checkpoint(folder)
        last = folder / "last.ckpt"
        if found is None or value_of(found) not in (2, 3) or value_of(last) not in (2, 3):
            lost.append(number)
        for path in folder.glob("*.ckpt"):  # what has its name is whole, also what is being removed
            value_of(path)
        save_next(folder, 4)
        assert value_of(last) == 4
        kept = {"last.ckpt", "step=4.ckpt"} if save_next is save_and_link else {"last.ckpt"}
        assert kept <= {path.name for path in folder.iterdir()} <= kept | {"step=2.ckpt", "step=3.ckpt"}
        assert not (folder / ".writing").exists()
        shutil.rmtree(folder)
    assert not lost
    print(f"{len(numbers)} kills of {total}, {len(lost)} checkpoints lost")


def test_what_it_says_of_a_kill_is_true(tmp_path: Path) -> None:
    """The test above does kill between the two renames of a file system without exchange."""
    for value in (1, 2):
        save_again(tmp_path, value)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "_exchange", lambda *args: False)
        total = count_events(save_again, tmp_path / "whole")
        gone = 0
        for number in range(total - 30, total):
            killed_at(number, lambda: save_again(tmp_path, 3))
            gone += not (tmp_path / "last.ckpt").exists()
    assert gone
    assert value_of(tmp_path / "last.ckpt") in (2, 3)


def test_killed_while_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading changes nothing."""
    monkeypatch.setattr(sys.modules[__name__], "CALLS", [*CALLS, (ChecksumReader, "_read_part")])
    path = tmp_path / "last.ckpt"
    save(path, 1.0)

    def content() -> dict[str, bytes]:
        return {str(file): file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()}

    before, number = content(), 0
    while killed_at(number, lambda: value_of(path) and None):  # type: ignore[func-returns-value]
        assert content() == before
        number += 1
    assert number >= 10 and value_of(path) == 1.0


# ---------------------------------------------------------------------------------------
# Two ranks
# ---------------------------------------------------------------------------------------


def save_with_all(rank: int, world_size: int, path: Path, value: float, event: int | None) -> int:
    module = nn.Linear(3, 2)
    nn.init.constant_(module.weight, value)
    content = {"state_dict": module.state_dict(), "global_step": int(value), **EMPTY}
    content["loops"] = {"fit_loop": {"state_dict": {"combined_loader": [{"at": rank}]}}}
    names, ranks = CheckpointNames(module), Ranks()
    with at_event(event) as count:
        snapshot = directory.take_snapshot(content, path, (rank, world_size), names, ranks)
        directory.write(snapshot, ranks)
        return count[0]


@pytest.mark.slow
def test_a_rank_is_killed(tmp_path: Path) -> None:
    """Any of two ranks, at 20 events each (seeded)."""
    path = tmp_path / "last.ckpt"
    counts = run_ranks(save_with_all, 2, path, 1.0, None)
    generator = random.Random(0)
    tried = 0
    for rank, count in enumerate(counts):
        for event in sorted(generator.sample(range(count), min(20, count))):
            value = value_of(path)

            def one_dies(
                own: int, world_size: int, rank: int = rank, event: int = event, value: float = value
            ) -> int:
                return save_with_all(own, world_size, path, value + 1, event if own == rank else None)

            with pytest.raises(Exception, match=r"SIGKILL|signal 9|closed|reset|ended"):
                run_ranks(one_dies, 2)
            tried += 1
            assert value_of(path) in (value, value + 1), (rank, event)
    assert tried >= 20
    print(f"{tried} kills of {sum(counts)}")
    run_ranks(save_with_all, 2, path, 99.0, None)
    assert value_of(path) == 99.0
    assert {entry.name for entry in tmp_path.iterdir()} == {"last.ckpt"}


# ---------------------------------------------------------------------------------------
# A Trainer
# ---------------------------------------------------------------------------------------


class Net(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(4, 4)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.net(batch[0]).square().mean()
        self.log("progress", float(self.global_step))
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def train(folder: Path, ckpt_path: Path | None, in_background: bool) -> int:
    callback = ModelCheckpoint(
        folder,
        save_last="link",
        every_n_train_steps=1,
        save_top_k=2,
        monitor="progress",
        mode="max",
        enable_version_counter=False,  # else the first `last` of a resumed run may be last-v1
    )
    trainer = L.Trainer(
        accelerator="cpu",
        devices=1,
        strategy=TitanStrategy(save_in_background=in_background),
        max_steps=6,
        callbacks=[callback],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Net(), DataLoader(TensorDataset(torch.ones(12, 4)), batch_size=2), ckpt_path=ckpt_path)
    return trainer.global_step


@pytest.mark.slow
@pytest.mark.parametrize("in_background", [False, True])
def test_training_goes_on_after_any_kill(in_background: bool, tmp_path: Path) -> None:
    """Killed at 20 events of a run (seeded), it goes on from what is there."""
    torch.manual_seed(0)

    def count() -> int:
        with at_event(None) as events:
            train(tmp_path / "whole", None, in_background)
            return events[0]

    total = reference(count)
    for event in random.Random(1).sample(range(total // 4, total * 3 // 4), 20):
        folder = tmp_path / str(event)
        killed_at(event, lambda f=folder: train(f, None, in_background))  # type: ignore[misc]
        found = latest_checkpoint(folder)
        assert found is not None
        assert os.path.lexists(folder / "last.ckpt")
        assert read_checkpoint(folder / "last.ckpt")["global_step"] >= 1
        assert reference(lambda f=folder, p=found: train(f, p, in_background)) == 6  # type: ignore[misc]
        assert read_checkpoint(folder / "last.ckpt")["global_step"] == 6
        assert not (folder / ".writing").exists()


# ---------------------------------------------------------------------------------------
# What the system refuses
# ---------------------------------------------------------------------------------------


def test_disk_full(tmp_path: Path) -> None:
    """As the system says it; the previous checkpoint stays."""
    path = tmp_path / "last.ckpt"
    save(path, 1.0)

    def fill() -> str:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
        with pytest.raises(CheckpointError) as caught:
            save(path, 2.0, state=torch.zeros(10_000))
        return str(caught.value)

    message = reference(fill)
    assert f"writing {path} failed on rank 0" in message and "too large" in message
    assert value_of(path) == 1.0
    assert {entry.name for entry in tmp_path.iterdir()} == {"last.ckpt"}


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
def test_read_only_folder(tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    save(path, 1.0)
    for parent in [path, tmp_path, *tmp_path.parents[:2]]:
        parent.chmod(0o755)

    def try_to_save() -> str:
        os.seteuid(65534)
        with pytest.raises(CheckpointError) as caught:
            save(path, 2.0)
        os.seteuid(0)
        return str(caught.value)

    message = reference(try_to_save)
    assert "Permission" in message or "Read-only" in message
    assert value_of(path) == 1.0


def test_exchange_is_one_operation(tmp_path: Path) -> None:
    """Where the system has it, it is used."""
    if sys.platform != "linux" or not hasattr(ctypes.CDLL(None), "renameat2"):
        pytest.skip("this system has no exchange")
    (tmp_path / "a").mkdir()
    (tmp_path / "b").write_text("b")
    assert files._exchange(str(tmp_path / "a"), tmp_path / "b")
    assert (tmp_path / "b").is_dir() and (tmp_path / "a").read_text() == "b"

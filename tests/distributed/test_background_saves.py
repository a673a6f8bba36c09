"""Checkpoints that are written while the training goes on."""

from __future__ import annotations

import itertools
import threading
import time
from pathlib import Path
from typing import Any

import fsspec
import lightning as L
import pytest
import torch
from fsspec.implementations.local import LocalFileSystem
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from tests.distributed.test_checkpoint_files import build, content, save
from tests.harness import run_ranks
from titanplug.checkpoint import background, directory, files
from titanplug.checkpoint.background import HostCopies
from titanplug.checkpoint.files import place_of
from titanplug.checkpoint.weights import read_checkpoint
from titanplug.errors import CheckpointError
from titanplug.strategy import TitanStrategy

LAYOUTS: dict[str, dict[str, Any]] = {
    "fsdp2": {"dp_shard": 2},
    "replicate2": {"dp_replicate": 2, "dp_shard": 1},
}


class Net(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
        self.whole: dict[int, dict[str, Tensor]] = {}

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        hidden = batch[0]
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden.square().mean()

    def on_train_batch_end(self, *args: Any) -> None:
        self.whole[self.global_step] = {
            name: (value.full_tensor() if hasattr(value, "full_tensor") else value).clone()
            for name, value in self.state_dict().items()
        }

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.1)


def build_trainer(folder: Path, devices: int, layout: dict[str, Any], **options: Any) -> L.Trainer:
    settings: dict[str, Any] = {"every_n_train_steps": 1, "save_top_k": -1, "save_last": "link", **options}
    return L.Trainer(
        accelerator="cpu",
        devices=devices,
        strategy=TitanStrategy(save_in_background=True, **layout),
        max_steps=4,
        callbacks=[ModelCheckpoint(folder, filename="{step}", **settings)],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )


def rows() -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.randn(32, 4)), batch_size=4)


def slow_writes(patch: pytest.MonkeyPatch, seconds: float) -> list[tuple[float, float]]:
    """Let each write take a while; returns when they began and ended."""
    times: list[tuple[float, float]] = []
    write = directory.write

    def delayed(*args: Any) -> None:
        begin = time.monotonic()
        time.sleep(seconds)
        write(*args)
        times.append((begin, time.monotonic()))

    patch.setattr(background, "write", delayed)
    return times


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_is_written_is_the_state_of_the_save(layout: str, tmp_path: Path) -> None:
    """The steps that run meanwhile don't reach it; one save at a time; all are there at the end."""

    def train(rank: int, world_size: int) -> dict[int, dict[str, Tensor]]:
        net = Net()
        with pytest.MonkeyPatch.context() as patch:
            times = slow_writes(patch, 0.2)
            trainer = build_trainer(tmp_path, world_size, LAYOUTS[layout])
            trainer.fit(net, rows())
        assert len(times) == 4
        assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(times))
        assert not [t for t in threading.enumerate() if "checkpoint" in t.name]
        return net.whole

    whole = run_ranks(train, 2, init_process_group=False)[0]
    for step in range(1, 5):
        saved = read_checkpoint(tmp_path / f"step={step}.ckpt")
        assert saved["global_step"] == step
        for name, value in whole[step].items():
            assert torch.equal(saved["state_dict"][name], value), (step, name)
        (state,) = saved["optimizer_states"]
        assert all(moments["step"] == step for moments in state["state"].values())
    assert (tmp_path / "last.ckpt").resolve().name == "step=4.ckpt"


def test_nothing_is_removed_or_linked_before_the_next_is_there(tmp_path: Path) -> None:
    seen: list[tuple[set[str], str]] = []

    def train(rank: int, world_size: int) -> list[tuple[set[str], str]]:
        with pytest.MonkeyPatch.context() as patch:
            write = directory.write

            def watched(*args: Any) -> None:
                time.sleep(0.2)  # the training has asked for links and removals by now
                names = {path.name for path in tmp_path.glob("step=*")}
                last = tmp_path / "last.ckpt"
                seen.append((names, last.resolve().name if last.is_symlink() else ""))
                write(*args)

            patch.setattr(background, "write", watched)
            build_trainer(tmp_path, world_size, {}, save_top_k=1).fit(Net(), rows())
        return seen

    (found,) = run_ranks(train, 1, init_process_group=False)
    names = [f"step={step}.ckpt" for step in range(1, 5)]
    assert found == [(set(), ""), *(({name}, name) for name in names[:3])]
    assert {path.name for path in tmp_path.iterdir()} == {"last.ckpt", names[3]}


@pytest.mark.parametrize("rank", [0, 1])
def test_errors_reach_the_user(rank: int, tmp_path: Path) -> None:
    """On all ranks; what was there before stays, and ``last`` with it."""

    def train(own: int, world_size: int) -> str:
        trainer = build_trainer(tmp_path, world_size, {"dp_shard": 2}, save_top_k=1)
        with pytest.MonkeyPatch.context() as patch:
            open_ = files.LocalPlace.open

            def full(self: files.LocalPlace, path: str, mode: str) -> Any:
                if own == rank and mode == "wb" and "step=3" in path:
                    raise OSError("disk full")
                return open_(self, path, mode)

            patch.setattr(files.LocalPlace, "open", full)
            with pytest.raises(CheckpointError) as caught:
                trainer.fit(Net(), rows())
        return str(caught.value)

    for message in run_ranks(train, 2, init_process_group=False):
        assert "step=3.ckpt" in message and f"failed on rank {rank}: OSError: disk full" in message
    assert {path.name for path in tmp_path.iterdir()} == {"last.ckpt", "step=2.ckpt"}
    assert read_checkpoint(tmp_path / "last.ckpt")["global_step"] == 2


def test_loading_waits(tmp_path: Path) -> None:
    def train(rank: int, world_size: int) -> int:
        with pytest.MonkeyPatch.context() as patch:
            slow_writes(patch, 0.3)
            trainer = build_trainer(tmp_path, world_size, {})
            net = Net()
            net.test_step = lambda batch, batch_idx: None  # type: ignore[method-assign]
            trainer.fit(net, rows())
            trainer.save_checkpoint(tmp_path / "by_hand.ckpt")
            assert not (tmp_path / "by_hand.ckpt").exists()
            trainer.strategy.load_checkpoint(tmp_path / "by_hand.ckpt")
        return trainer.global_step

    assert run_ranks(train, 1, init_process_group=False) == [4]


def test_an_exception_of_all_ranks_lets_the_save_end(tmp_path: Path) -> None:
    class Failing(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if batch_idx == 2:
                raise ValueError("own error")
            return super().training_step(batch, batch_idx)

    def train(rank: int, world_size: int) -> None:
        with pytest.MonkeyPatch.context() as patch:
            slow_writes(patch, 0.3)
            with pytest.raises(ValueError, match="own error"):
                build_trainer(tmp_path, world_size, {}).fit(Failing(), rows())

    run_ranks(train, 1, init_process_group=False)
    assert read_checkpoint(tmp_path / "step=2.ckpt")["global_step"] == 2


def test_host_memory_is_used_again() -> None:
    copies = HostCopies()
    tensors = {"a": {"x": torch.ones(3), "y": torch.zeros(2, dtype=torch.int64)}, "b": nn.Linear(2, 2).weight}
    first, _ = copies.take(tensors)
    tensors["a"]["x"].fill_(2.0)  # type: ignore[index]
    assert first["a"]["x"].eq(1.0).all() and not first["b"].requires_grad
    second, _ = copies.take(tensors)
    assert second["a"]["x"].data_ptr() == first["a"]["x"].data_ptr() and second["a"]["x"].eq(2.0).all()
    third, _ = copies.take({"a": {"x": torch.ones(4)}})
    assert third["a"]["x"].shape == (4,) and set(copies._held) == {("a", "x")}


class SharedFiles(LocalFileSystem):  # type: ignore[misc]
    """A file system that Lightning and titanplug take for a remote one."""

    protocol = "shared"
    local_file = False

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return str(super()._strip_protocol(str(path).removeprefix("shared://")))


def test_remote_folders(tmp_path: Path) -> None:
    """Through fsspec, here its file system of this machine; written, replaced, removed and loaded."""

    def train(rank: int, world_size: int) -> None:
        fsspec.register_implementation("shared", SharedFiles)
        url = f"shared://{tmp_path}/remote"
        trainer = L.Trainer(
            accelerator="cpu",
            devices=world_size,
            strategy=TitanStrategy(dp_shard=2, save_in_background=True),
            max_steps=3,
            callbacks=[
                ModelCheckpoint(
                    url, "{step}", every_n_train_steps=1, save_last=True, enable_version_counter=False
                )
            ],
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        net = Net()
        trainer.fit(net, rows())
        more = build_trainer(tmp_path / "more", world_size, {"dp_shard": 2})
        net = Net()
        more.fit(net, rows(), ckpt_path=f"{url}/last.ckpt")
        assert list(net.whole) == [4]

    run_ranks(train, 2, init_process_group=False)
    fsspec.register_implementation("shared", SharedFiles, clobber=True)
    folder = tmp_path / "remote"
    assert {path.name for path in folder.iterdir()} == {"last.ckpt", "step=3.ckpt"}
    for name in ("last.ckpt", "step=3.ckpt"):
        assert read_checkpoint(f"shared://{folder}/{name}")["global_step"] == 3
    (folder / "step=3.ckpt" / "__9_0.distcp").touch()  # of an earlier save with more ranks
    save(content(build()), f"shared://{folder}/step=3.ckpt")
    assert "__9_0.distcp" not in {file.name for file in (folder / "step=3.ckpt").iterdir()}
    (folder / "last.ckpt" / "checksums").unlink()  # a kill while it was put in place
    with pytest.raises(CheckpointError, match="is not a checkpoint"):
        read_checkpoint(f"shared://{folder}/last.ckpt")
    with pytest.raises(CheckpointError, match="has no links"):
        place_of(f"shared://{folder}/x").link_to("y")

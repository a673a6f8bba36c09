"""Checkpoint directories without the strategy: plain Lightning, one plain file, seeds for other layouts."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata

from tests.distributed.checkpoint_case import Module, loader, train_and_save
from tests.harness import reference, run_ranks
from titanplug import consolidate
from titanplug.checkpoint import directory, storage
from titanplug.checkpoint import state as states
from titanplug.checkpoint.names import CheckpointNames
from titanplug.checkpoint.ranks import Ranks
from titanplug.checkpoint.weights import read_hyper_parameters, read_weights, write_weights
from titanplug.errors import CheckpointError


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Tensor]]:
    """A checkpoint of tp2, and its weights."""
    folder = tmp_path_factory.mktemp("saved")
    run = run_ranks(train_and_save, 2, {"tp": 2}, folder, init_process_group=False)[0]
    return folder / "mid" / "epoch=0-step=3.ckpt", run.saved[3].weights


def require_equal(found: Any, expected: dict[str, Tensor]) -> None:
    assert set(found) == set(expected)
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


def test_load_from_checkpoint(saved: tuple[Path, dict[str, Tensor]]) -> None:
    path, weights = saved
    require_equal(Module.load_from_checkpoint(path).state_dict(), weights)
    require_equal(Module.load_from_checkpoint(str(path), map_location="cpu").state_dict(), weights)


@pytest.mark.parametrize("strategy", ["auto", "ddp"])
def test_plain_trainer(strategy: str, saved: tuple[Path, dict[str, Tensor]]) -> None:
    """Tests with it and trains on from it, as from its own file."""
    path, weights = saved

    def run() -> tuple[dict[str, Tensor], int]:
        options: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "accelerator": "cpu"}
        trainer = L.Trainer(devices=1, strategy=strategy, enable_checkpointing=False, max_steps=5, **options)
        lit = Module()
        lit.test_step = lambda batch, batch_idx: None  # type: ignore[method-assign]
        trainer.test(lit, loader(trainer.strategy), ckpt_path=path, verbose=False)
        tested = {name: value.clone() for name, value in lit.state_dict().items()}
        trainer.fit(lit, loader(trainer.strategy), ckpt_path=path)
        return tested, trainer.global_step

    tested, step = reference(run)
    require_equal(tested, weights)
    assert step == 5


def test_other_directories_are_lightnings_own_business(tmp_path: Path) -> None:
    with pytest.raises((IsADirectoryError, OSError)):
        Module.load_from_checkpoint(tmp_path)


def test_plain_state_dict(saved: tuple[Path, dict[str, Tensor]], tmp_path: Path) -> None:
    path, weights = saved
    file = consolidate(path, tmp_path / "weights.pt", weights_only=True)
    require_equal(torch.load(file, weights_only=True), weights)
    require_equal(load_file(consolidate(path, tmp_path / "weights.safetensors")), weights)
    require_equal(read_weights(path), weights)
    whole = consolidate(path, tmp_path / "whole.ckpt")
    require_equal(read_weights(whole), weights)
    with pytest.raises(CheckpointError, match="0 sets of averaged weights"):
        consolidate(path, tmp_path / "x.pt", weights_only=True, average=True)


def test_averaged_weights(tmp_path: Path) -> None:
    """What WeightAverage keeps beside the weights."""
    module = torch.nn.Linear(2, 1)
    average = {name: value.detach() + 1 for name, value in module.named_parameters()}
    content = {"state_dict": module.state_dict(), "parameter_like": {"WeightAverage": average}}
    names, path = CheckpointNames(module), tmp_path / "a.ckpt"
    directory.write(directory.take_snapshot(content, path, (0, 1), names, Ranks()), Ranks())
    require_equal(read_weights(path), module.state_dict())
    require_equal(read_weights(path, average=True), average)
    for name, options in (("w.pt", {"weights_only": True}), ("w.safetensors", {}), ("whole.ckpt", {})):
        file = consolidate(path, tmp_path / name, average=True, **options)  # type: ignore[arg-type]
        found = load_file(file) if file.suffix == ".safetensors" else torch.load(file, weights_only=True)
        require_equal(found.get("state_dict", found), average)


def test_the_command(saved: tuple[Path, dict[str, Tensor]], tmp_path: Path) -> None:
    path, weights = saved
    command = [sys.executable, "-m", "titanplug.cli", "consolidate"]
    done = subprocess.run(
        [*command, path, tmp_path / "w.pt", "--weights"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0 and "w.pt" in done.stdout, done.stderr
    require_equal(torch.load(tmp_path / "w.pt", weights_only=True), weights)
    done = subprocess.run(
        [*command, tmp_path, tmp_path / "x.pt"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2 and "is not a checkpoint" in done.stderr


def test_weights_alone(tmp_path: Path) -> None:
    module = Module()
    write_weights(tmp_path / "seed.ckpt", module.state_dict(), {"a": 1})
    assert read_hyper_parameters(tmp_path / "seed.ckpt") == {"a": 1}
    weights = read_weights(tmp_path / "seed.ckpt")
    require_equal(weights, module.state_dict())
    with pytest.raises(KeyError):
        weights["no such"]
    shared = torch.ones(2)
    write_weights(tmp_path / "tied.ckpt", {"a": shared, "b": torch.zeros(2), "c": shared}, {})
    tied = read_weights(tmp_path / "tied.ckpt")
    require_equal(tied, {"a": shared, "b": torch.zeros(2), "c": shared})
    assert list(tied.rest["shared_weights"].items()) == [("c", "a")] and "c" in tied


@pytest.mark.parametrize("what", ["byte", "cut", "gone", "records", "sums"])
def test_damage_is_found(what: str, saved: tuple[Path, dict[str, Tensor]], tmp_path: Path) -> None:
    """The error names the file and what to do."""
    import shutil

    path = tmp_path / "damaged.ckpt"
    shutil.copytree(saved[0], path)
    data = max(path.glob("*.distcp"), key=lambda file: file.stat().st_size)
    named = data.name
    if what == "byte":
        content = bytearray(data.read_bytes())
        content[len(content) // 2] ^= 1
        data.write_bytes(content)
    elif what == "cut":
        data.write_bytes(data.read_bytes()[:-100])
    elif what == "gone":
        data.unlink()
    else:
        named = {"records": ".metadata", "sums": "checksums"}[what]
        content = bytearray((path / named).read_bytes())
        content[len(content) // 3] ^= 1
        (path / named).write_bytes(content)

    def load(rank: int, world_size: int) -> str:
        with pytest.raises(CheckpointError) as caught:
            train_and_load(path, world_size)
        return str(caught.value)

    for message in run_ranks(load, 2, init_process_group=False):
        assert str(path) in message and "load an earlier one" in message
        assert named in message or what == "sums"
    with pytest.raises(CheckpointError, match="load an earlier one"):
        consolidate(path, tmp_path / "x.pt", weights_only=what != "byte")


def test_any_damage_of_the_checksums_is_found(saved: tuple[Path, dict[str, Tensor]]) -> None:
    content = (saved[0] / "checksums").read_bytes()
    storage.unpack_checksums(content, "")
    for position in range(0, len(content), len(content) // 50):
        altered = bytearray(content)
        altered[position] ^= 1
        with pytest.raises(ValueError):
            storage.unpack_checksums(bytes(altered), "")


def test_states_of_loaders_are_in_the_order_of_ranks() -> None:
    keys = [states.loader_key(rank, 12) for rank in range(12)]
    metadata = Metadata(dict.fromkeys(reversed(keys)))  # type: ignore[arg-type]
    assert states.loader_keys(metadata) == keys


def train_and_load(path: Path, world_size: int) -> None:
    from tests.distributed.checkpoint_case import trainer_for

    trainer = trainer_for(world_size, {"dp_shard": 2}, max_steps=5)
    trainer.fit(Module(), loader(trainer.strategy), ckpt_path=path)

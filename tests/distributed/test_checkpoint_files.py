"""Checkpoints on disk: failures on one rank, interrupted saves, what is refused, and one plain file."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from omegaconf import OmegaConf
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tests.distributed.checkpoint_case import Module, train_and_save, trainer_for
from tests.harness import reference, run_ranks
from titanplug.checkpoint import directory, files, storage
from titanplug.checkpoint import state as states
from titanplug.checkpoint.files import META_FILE, PathOrUrl
from titanplug.checkpoint.names import CheckpointNames
from titanplug.checkpoint.ranks import Ranks
from titanplug.checkpoint.weights import consolidate
from titanplug.errors import CheckpointError

NAMES = CheckpointNames(torch.nn.Module())  # for modules that are whole on a rank


def save(checkpoint: dict[str, Any], path: PathOrUrl, position: tuple[int, int] = (0, 1)) -> None:
    ranks = Ranks()
    directory.write(directory.take_snapshot(checkpoint, path, position, NAMES, ranks), ranks)


def load(
    path: PathOrUrl, module: nn.Module, position: tuple[int, int] = (0, 1), **options: Any
) -> dict[str, Any]:
    return directory.load(path, module, [], position, NAMES, Ranks(), **options)[0]


def build(value: float = 1.0) -> nn.Module:
    module = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 3))
    for parameter in module.parameters():
        nn.init.constant_(parameter, value)
    return module


def build_sharded(rank: int, world_size: int, value: float = 1.0) -> nn.Module:
    module = build(value)
    fully_shard(module, mesh=init_device_mesh("cpu", (world_size,)))
    return module


def content(module: nn.Module, **rest: Any) -> dict[str, Any]:
    return {"state_dict": states.model_state(module), **rest}


def message_of(function: Any, *args: Any) -> str:
    with pytest.raises(CheckpointError) as caught:
        function(*args)
    return str(caught.value)


def entries(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


# ---------------------------------------------------------------------------------------
# Writing
# ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("target", "name", "rank"),
    [
        (storage.ChecksumWriter, "write_data", 1),
        (directory, "pack_meta", 0),
        (files.LocalPlace, "publish", 0),
        (states, "pack", 1),
    ],
)
def test_failure_on_one_rank_is_everybodys(target: Any, name: str, rank: int, tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"

    def save_twice(own_rank: int, world_size: int) -> tuple[str, Tensor]:
        module = build_sharded(own_rank, world_size, 1.0)
        loops = {"loops": {"fit_loop": {"state_dict": {"combined_loader": [{"at": 3}]}}}}
        save(content(module, note=1, **loops), path, (own_rank, world_size))
        for parameter in module.parameters():
            nn.init.constant_(parameter, 2.0)

        def fail(*args: Any) -> None:
            raise OSError("disk full")

        with pytest.MonkeyPatch.context() as patch:
            if own_rank == rank:
                patch.setattr(target, name, fail)
            message = message_of(save, content(module, note=2, **loops), path, (own_rank, world_size))
        rest = load(path, module, (own_rank, world_size))
        assert rest["note"] == 1
        return message, module[0].weight.full_tensor()  # type: ignore[index]

    for message, weight in run_ranks(save_twice, 2):
        assert f"rank {rank}: OSError: disk full" in message and str(path) in message
        assert torch.equal(weight, torch.ones(5, 3))
    assert entries(tmp_path) == {"last.ckpt"}


def test_interrupted_save_is_replaced_and_never_seen(tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"

    class Killed(BaseException):
        pass

    def interrupt(*args: Any) -> None:
        raise Killed

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files.LocalPlace, "publish", interrupt)
        with pytest.raises(Killed):
            save(content(build()), path)
    assert entries(tmp_path) == {".writing"}
    assert entries(tmp_path / ".writing") == {"last.ckpt"}
    stale = tmp_path / ".writing" / "last.ckpt" / "stale"
    stale.touch()

    callback = ModelCheckpoint(tmp_path, save_last=True)
    assert callback._find_last_checkpoints(None) == set()  # type: ignore[arg-type]
    assert "does not exist" in message_of(load, path, build())

    save(content(build()), path)
    assert callback._find_last_checkpoints(None) == {str(path)}  # type: ignore[arg-type]
    assert entries(tmp_path) == {"last.ckpt"}
    assert "stale" not in entries(path)


def test_replaces_a_file_or_a_link(tmp_path: Path) -> None:
    """What plain Lightning has left, and ModelCheckpoint(save_last="link")."""
    older = tmp_path / "epoch=0.ckpt"
    save(content(build(1.0)), older)
    link, file = tmp_path / "last.ckpt", tmp_path / "file.ckpt"
    link.symlink_to(older.name)
    file.write_bytes(b"x")
    for path in (link, file):
        save(content(build(2.0)), path)
        assert path.is_dir() and not path.is_symlink()
    module = build(0.0)
    load(older, module)
    assert module[0].weight.max() == 1.0  # type: ignore[index]


def test_no_other_directory_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "work").mkdir()
    save(content(build()), tmp_path / "work")  # an empty one is nobody's
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "thesis.txt").touch()
    message = message_of(save, content(build()), tmp_path / "own")
    assert "isn't a checkpoint" in message
    assert entries(tmp_path / "own") == {"thesis.txt"}


def test_urls_are_text() -> None:
    message = message_of(save, content(build()), Path("s3://bucket/last.ckpt"))
    assert "s3:/bucket/last.ckpt" in message and "lost a slash" in message
    assert "'no-such-system'" in message_of(save, content(build()), "no-such-system://bucket/last.ckpt")


# ---------------------------------------------------------------------------------------
# Reading
# ---------------------------------------------------------------------------------------


def test_missing_and_incomplete(tmp_path: Path) -> None:
    def try_load(rank: int, world_size: int, path: Path) -> str:
        return message_of(load, path, build())

    for path, found in [(tmp_path / "no.ckpt", "does not exist"), (tmp_path, "is a directory")]:
        for message in run_ranks(try_load, 2, path):
            assert message.startswith(f"{path} is not a checkpoint")
            assert found in message


def test_one_rank_that_sees_no_file(tmp_path: Path) -> None:
    """For example on a node that doesn't mount the folder."""
    path = tmp_path / "a.ckpt"

    def try_load(rank: int, world_size: int) -> str:
        save(content(build()), path)
        return message_of(load, path / ("x" * rank), build())

    for message in run_ranks(try_load, 2):
        assert "rank 1" in message and "does not exist" in message


@pytest.mark.parametrize("in_file", [True, False])
def test_module_that_differs(in_file: bool, tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    if in_file:
        torch.save({"state_dict": build().state_dict()}, path)
    else:
        save(content(build()), path)
    other = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 3, bias=False), nn.Linear(3, 3))
    message = message_of(load, path, other)
    assert "missing: 2.bias, 2.weight" in message
    assert "not in the module: 1.bias" in message
    assert "strict_loading=False" in message
    load(path, other, strict=False)
    assert torch.equal(other[0].weight, torch.ones(5, 3))
    wider = nn.Sequential(nn.Linear(3, 6), nn.Linear(6, 3))
    message = message_of(load, path, wider)
    assert "5" in message and "6" in message


@dataclasses.dataclass
class Thing:
    value: int = 1


@pytest.mark.parametrize("in_file", [True, False])
def test_objects_are_refused_unless_trusted(in_file: bool, tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    if in_file:
        torch.save({"state_dict": build().state_dict(), "hyper_parameters": Thing(2)}, path)
    else:
        with pytest.warns(UserWarning, match=r"weights_only=False.*Thing.*save_hyperparameters"):
            save(content(build(), hyper_parameters=Thing(2)), path)
    message = message_of(load, path, build())
    assert "weights_only=False" in message and "Thing" in message
    rest = load(path, build(), weights_only=False)
    assert rest["hyper_parameters"] == Thing(2)


def test_objects_in_loader_states_are_refused_too(tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    loops = {"fit_loop": {"state_dict": {"combined_loader": [Thing(3)]}}}
    save(content(build(), loops=loops), path)
    assert "weights_only=False" in message_of(load, path, build())
    rest = load(path, build(), weights_only=False)
    assert states.loader_states(rest) == [Thing(3)]


def test_configuration_becomes_plain(tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    config = OmegaConf.create({"lr": 0.1, "layers": [1, "${lr}"], "none": None})
    hparams = {"config": config, "path": tmp_path, "inner": [config.layers], "number": config.lr}
    saved = content(build(), hyper_parameters=hparams, hparams_type=type(config))
    save(saved, path)
    rest = load(path, build())
    plain = {"lr": 0.1, "layers": [1, 0.1], "none": None}
    assert rest["hyper_parameters"] == {
        "config": plain,
        "path": str(tmp_path),
        "inner": [[1, 0.1]],
        "number": 0.1,
    }
    assert type(rest["hyper_parameters"]["config"]) is dict
    assert rest["hparams_type"] == "DictConfig"


def test_metadata_is_read_without_running_code(tmp_path: Path) -> None:
    """torch reads .metadata with pickle; what isn't its own is refused, though the checksums are right."""
    path = tmp_path / "a.ckpt"
    save(content(build()), path)
    forged = b"cos\nsystem\n(S'touch " + str(path).encode() + b"/ran'\ntR."
    (path / ".metadata").write_bytes(forged)
    sums = storage.unpack_checksums((path / "checksums").read_bytes(), "")
    sums["files"][".metadata"] = [len(forged), storage.checksum_of(forged)]
    (path / "checksums").write_bytes(storage.pack_checksums(sums))
    assert "system" in message_of(load, path, build())
    assert not (path / "ran").exists()


# ---------------------------------------------------------------------------------------
# One plain file
# ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("saved")
    degrees = {"tp": 2}
    run = run_ranks(train_and_save, 2, degrees, folder, init_process_group=False)[0]
    return folder / "mid" / "epoch=0-step=3.ckpt", run


def test_consolidated_file_is_lightnings(saved: tuple[Path, Any], tmp_path: Path) -> None:
    path, run = saved
    file = consolidate(path, tmp_path / "new" / "whole.ckpt")
    whole = torch.load(file, weights_only=True)
    expected = run.saved[3]
    assert whole["state_dict"].keys() == Module().state_dict().keys()
    for name, weight in expected.weights.items():
        assert torch.equal(whole["state_dict"][name], weight)
    assert [group["lr"] for group in whole["optimizer_states"][0]["param_groups"]] == expected.rates
    assert entries(file.parent) == {"whole.ckpt"}

    def train_plainly() -> Any:
        trainer = trainer_for(1, None, max_steps=5)
        lit = Module()
        from tests.distributed.checkpoint_case import loader

        trainer.fit(lit, loader(trainer.strategy), ckpt_path=file)
        loaded = Module.load_from_checkpoint(file)
        return lit.run, {name: value.clone() for name, value in loaded.state_dict().items()}

    continued, loaded = reference(train_plainly)
    assert list(continued.grads) == [3, 4]
    assert continued.first.weights.keys() == expected.weights.keys() == loaded.keys()
    for name, weight in expected.weights.items():
        assert torch.equal(continued.first.weights[name], weight)
        assert torch.equal(loaded[name], weight)
    for name, value in expected.optimizer.items():
        assert torch.equal(continued.first.optimizer[name], value), name


def test_consolidating_no_checkpoint(tmp_path: Path) -> None:
    assert "is not a checkpoint" in message_of(consolidate, tmp_path / "x", tmp_path / "y")
    assert META_FILE in message_of(consolidate, tmp_path, tmp_path / "y")
    assert not (tmp_path / "y").exists()

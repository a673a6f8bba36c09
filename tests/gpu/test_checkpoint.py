"""Checkpoints of parameters on a GPU: copied to page-locked memory, written in the background, loaded."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from tests.harness import run_ranks
from titanplug.checkpoint import directory
from titanplug.checkpoint.background import HostCopies, Writer
from titanplug.checkpoint.names import CheckpointNames
from titanplug.checkpoint.ranks import Ranks
from titanplug.checkpoint.state import model_state

pytestmark = pytest.mark.gpu


def save_and_change(rank: int, world_size: int, path: Path) -> None:
    torch.cuda.set_device(0)
    module = nn.Linear(256, 256, device="cuda")
    nn.init.ones_(module.weight)
    fully_shard(module, mesh=init_device_mesh("cuda", (world_size,)))
    names = CheckpointNames(module)
    content = {"state_dict": model_state(module), "global_step": 1}
    writer = Writer(in_background=True)
    writer.write(directory.take_snapshot(content, path, (0, 1), names, Ranks()), Ranks())
    with torch.no_grad():
        module.weight.fill_(2.0)
    writer.wait()
    directory.load(path, module, [], (0, 1), names, Ranks())
    assert isinstance(module.weight, DTensor)
    assert module.weight.full_tensor().eq(1.0).all()


def test_background_save_on_one_gpu(tmp_path: Path) -> None:
    run_ranks(save_and_change, 1, tmp_path / "a.ckpt")


def test_copies_are_page_locked() -> None:
    def copy(rank: int, world_size: int) -> None:
        value = torch.ones(1000, device="cuda")
        copies, is_copied = HostCopies().take({"a": value})
        value.fill_(2.0)
        is_copied()
        assert copies["a"].is_pinned() and copies["a"].eq(1.0).all()

    run_ranks(copy, 1, init_process_group=False)

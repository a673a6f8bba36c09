"""Buffers that ranks update by the samples they see: the first data-parallel rank's count, as under DDP."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from tests.distributed.case import build_trainer
from tests.harness import run_ranks
from titanplug import TitanStrategy
from titanplug.checkpoint.weights import consolidate

NAMES = ("net.1.running_mean", "net.1.running_var", "net.1.num_batches_tracked", "largest", "first_row")


class Convolutions(L.LightningModule):
    """Records its buffers after each training batch, in validation, and what it saves."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.path = path
        self.net = nn.Sequential(
            nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(), nn.Linear(3 * 4, 2)
        )
        self.largest: Tensor
        self.first_row: Tensor
        self.register_buffer("largest", torch.zeros((), dtype=torch.int64))
        self.register_buffer("first_row", torch.zeros(4), persistent=False)
        self.trained: list[dict[str, Tensor]] = []
        self.validated: list[dict[str, Tensor]] = []

    def copies(self) -> dict[str, Tensor]:
        return {name: buffer.clone() for name, buffer in self.named_buffers()}

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        self.largest.copy_((x.max() * 1000).long())
        self.first_row.copy_(x[0, 0, 0])
        return F.cross_entropy(self.net(x), y)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.trained.append(self.copies())
        if batch_idx == 0:
            self.trainer.save_checkpoint(self.path)

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.validated.append(self.copies())
        self.log("val_loss", F.cross_entropy(self.net(batch[0]), batch[1]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def train(rank: int, world_size: int, degrees: dict[str, Any], path: Path) -> Any:
    L.seed_everything(7, verbose=False)
    module = Convolutions(path)
    data = TensorDataset(torch.randn(16, 1, 4, 4), torch.arange(16) % 2)
    loader = DataLoader(data, batch_size=8 // world_size)
    trainer = build_trainer(world_size, TitanStrategy(**degrees))
    trainer.fit(module, loader, loader)
    loss = float(trainer.callback_metrics["val_loss"])
    [values] = trainer.validate(module, loader, verbose=False)
    return module.trained, module.validated, loss, values["val_loss"]


@pytest.mark.parametrize("degrees", [{"dp_shard": 2}, {"dp_replicate": 2, "dp_shard": 1}])
def test_the_first_ranks_buffers_count(degrees: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "saved.ckpt"
    first, second = run_ranks(train, 2, degrees, path, init_process_group=False)
    for name in (*NAMES[:2], "largest"):
        assert not torch.equal(first[0][0][name], second[0][0][name]), f"{name}: nothing to make equal"
    for name in NAMES[:4]:
        for step in range(2):
            saved_or_last = first[0][-1][name]
            for result in (first, second):
                torch.testing.assert_close(result[1][step][name], saved_or_last, rtol=0, atol=0)
    whole = torch.load(consolidate(path, tmp_path / "whole.ckpt"), weights_only=True)["state_dict"]
    for name in NAMES[:4]:
        torch.testing.assert_close(whole[name], first[0][0][name], rtol=0, atol=0)
    assert first[2:] == second[2:]
    assert first[2] == pytest.approx(first[3], rel=1e-6)


def test_a_buffer_that_is_not_saved_is_each_ranks_own(tmp_path: Path) -> None:
    path = tmp_path / "saved.ckpt"
    first, second = run_ranks(train, 2, {"dp_shard": 2}, path, init_process_group=False)
    for result in (first, second):
        torch.testing.assert_close(result[1][0]["first_row"], result[0][-1]["first_row"])
    assert not torch.equal(first[1][0]["first_row"], second[1][0]["first_row"])

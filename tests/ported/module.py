"""A small module and Trainer for the tests of what Lightning asks of a strategy."""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from tests.distributed.case import build_trainer
from titanplug import ColwiseParallel, ParallelPlan, RowwiseParallel, TitanStrategy

TP_PLAN = ParallelPlan(
    tensor={"net.w1": ColwiseParallel(), "net.w2": ColwiseParallel(), "net.w3": RowwiseParallel()}
)


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w2, self.w3 = nn.Linear(8, 16), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.w3(nn.functional.silu(self.w1(x)) * self.w2(x))
        return out


class Net(L.LightningModule):
    """All hooks a run needs."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.net = FeedForward()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.net(x)
        return out

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        loss = self(batch[0]).square().mean()
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("val_loss", self(batch[0]).square().mean())

    def test_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("test_loss", self(batch[0]).square().mean())

    def predict_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        out: Tensor = self(batch[0])
        return out

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def rows(batch_size: int = 2, count: int = 8) -> DataLoader[Any]:
    x = torch.randn(count, 8, generator=torch.Generator().manual_seed(0))
    return DataLoader(TensorDataset(x), batch_size=batch_size)


def trainer(world_size: int = 1, /, precision: Any = "32-true", **options: Any) -> L.Trainer:
    """Options of the strategy and of the Trainer together."""
    own = {"dp_replicate", "dp_shard", "tp", "plan", "meta_init", "sequence_parallel", "timeout_s"}
    degrees = {key: options.pop(key) for key in own & options.keys()}
    return build_trainer(world_size, TitanStrategy(**degrees), precision=precision, **options)

"""Torchmetrics see every sample once, whatever number of updates a rank makes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torchmetrics import CatMetric, MeanMetric, MetricCollection, SumMetric
from torchmetrics.regression import MeanAbsoluteError, MeanSquaredError

from tests.distributed.tiny import DP2_TP2, DP4, ListState, Tiny, fit, numbered
from tests.harness import run_ranks

# ---------------------------------------------------------------- torchmetrics


class Measured(Tiny):
    def __init__(self) -> None:
        super().__init__()
        for stage in ("train", "val"):
            self.add_module(f"{stage}_sum", SumMetric())
            self.add_module(f"{stage}_all", CatMetric())
            self.add_module(f"{stage}_rows", ListState())
            self.add_module(f"{stage}_mean", MeanMetric())
            self.add_module(
                f"{stage}_errors",
                MetricCollection([MeanSquaredError(), MeanAbsoluteError()], prefix=f"{stage}_"),
            )
        self.found: dict[str, Any] = {}

    def _update(self, stage: str, batch: Tensor) -> None:
        def part(name: str) -> Any:
            return getattr(self, f"{stage}_{name}")

        x = batch.double()
        part("sum").update(torch.ones(len(x)))
        part("all").update(x)
        part("rows").update(x)
        part("mean")(x.float())
        part("errors").update(x.float(), torch.zeros(len(x)))
        self.log(f"{stage}_sum", part("sum"), on_step=False, on_epoch=True)
        self.log(f"{stage}_mean", part("mean"), on_step=False, on_epoch=True)
        self.log_dict(part("errors"), on_step=False, on_epoch=True)

    def _compute(self, stage: str) -> None:
        for name in ("all", "rows"):
            metric = getattr(self, f"{stage}_{name}")
            self.found[f"{stage}_{name}"] = sorted(metric.compute().tolist())
            metric.reset()

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        self._update("train", batch)
        return super().training_step(batch, batch_idx)

    def on_train_epoch_end(self) -> None:
        self._compute("train")

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self._update("val", batch)

    def on_validation_epoch_end(self) -> None:
        self._compute("val")


@pytest.mark.parametrize("num_samples", [8, 9, 3])
@pytest.mark.parametrize("layout", ["dp2 x tp2", "dp4"])
def test_metrics_see_every_sample_once(layout: str, num_samples: int) -> None:
    degrees = {"dp2 x tp2": DP2_TP2, "dp4": DP4}[layout]

    def run(rank: int, world_size: int) -> Any:
        loader = numbered(num_samples, batch_size=2)
        module = fit(rank, world_size, degrees, loader, Measured, loader, max_epochs=2)
        return module.found, {k: float(v) for k, v in module.trainer.callback_metrics.items()}

    x = torch.arange(num_samples).double()
    for found, logged in run_ranks(run, 4, init_process_group=False):
        for stage in ("train", "val"):
            assert found[f"{stage}_all"] == found[f"{stage}_rows"] == list(range(num_samples))
            assert logged[f"{stage}_sum"] == num_samples
            assert logged[f"{stage}_mean"] == pytest.approx(float(x.mean()))
            assert logged[f"{stage}_MeanSquaredError"] == pytest.approx(float(x.square().mean()))
            assert logged[f"{stage}_MeanAbsoluteError"] == pytest.approx(float(x.mean()))

"""Lightning's own callbacks: each works, or is refused before training with a word on what to do."""

from __future__ import annotations

import contextlib
import csv
import io
import time
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import callbacks as lc
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities.model_summary import get_human_readable_count
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_avg_fn
from torch.utils.data import DataLoader, TensorDataset

from tests.distributed.case import Case, Module, Rows, build_trainer, whole
from tests.harness import reference, run_ranks
from titanplug import TitanStrategy
from titanplug.errors import ConfigError

ROWS, GLOBAL_BATCH = 32, 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.inner(x).tanh()
        return x


class Net(L.LightningModule):
    """A backbone of two blocks, which are FSDP units, and a head."""

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.backbone = nn.Sequential(nn.Linear(3, 4), Block(), Block())
        self.head = nn.Linear(4, 1)
        self.to(dtype)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = F.mse_loss(self.head(self.backbone(batch[0])), batch[1])
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.1)
        return {
            "optimizer": optimizer,
            "lr_scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5),
        }


def loader_for(world_size: int, dtype: torch.dtype = torch.float64) -> DataLoader[Any]:
    x = torch.randn(ROWS, 3, generator=torch.Generator().manual_seed(0)).to(dtype)
    data = TensorDataset(x, x.sum(dim=1, keepdim=True).sin())
    return DataLoader(data, batch_size=GLOBAL_BATCH // world_size)


def fit(rank: int, world_size: int, build: Any, strategy: Any = "titan", **options: Any) -> dict[str, Tensor]:
    """Train with the callbacks that ``build`` makes; returns the weights."""
    L.seed_everything(7, verbose=False)
    half = "bf16" in str(options.get("precision"))
    dtype = torch.float32 if half else torch.float64
    module = Net(dtype)
    trainer = build_trainer(world_size, strategy, callbacks=build(), **{"max_epochs": 3, **options})
    trainer.fit(module, loader_for(world_size, dtype))
    assert trainer.global_step > 0
    return {name: whole(p) for name, p in module.named_parameters()}


# --------------------------------------------------------------------------------- they change training


def finetuning() -> Any:
    return lc.BackboneFinetuning(
        unfreeze_backbone_at_epoch=1, backbone_initial_lr=0.05, lambda_func=lambda _: 1.0, verbose=False
    )


def accumulation() -> Any:
    return lc.GradientAccumulationScheduler({0: 1, 1: 2, 2: 4})


@pytest.mark.parametrize("build", [finetuning, accumulation])
def test_trains_as_on_one_process(build: Any) -> None:
    plain = reference(fit, 0, 1, list, "auto")
    expected = reference(fit, 0, 1, build, "auto")
    name = "backbone.1.inner.weight"
    assert not torch.allclose(expected[name], plain[name]), "the callback changes nothing"
    for weights in run_ranks(fit, 2, build, init_process_group=False):
        torch.testing.assert_close(weights, expected, rtol=1e-12, atol=1e-14)


def test_unfrozen_units_train_in_mixed_precision() -> None:
    def run(rank: int, world_size: int) -> Any:
        return fit(rank, world_size, finetuning, precision="bf16-mixed")

    expected = reference(fit, 0, 1, finetuning, "auto", timeout_s=100)
    for weights in run_ranks(run, 2, init_process_group=False):
        for name, weight in weights.items():
            assert weight.dtype == torch.float32
            torch.testing.assert_close(weight.double(), expected[name], rtol=0.05, atol=0.02)


# --------------------------------------------------------------------------------- they watch


def watch(rank: int, world_size: int, folder: Path) -> Any:
    timer = lc.Timer()
    watchers = [lc.LearningRateMonitor(), timer, lc.DeviceStatsMonitor(cpu_stats=True)]
    fit(rank, world_size, lambda: watchers, logger=CSVLogger(folder, name=None, version=""))
    return timer.time_elapsed("train")


def test_learning_rates_device_and_time_are_recorded(tmp_path: Path) -> None:
    elapsed = run_ranks(watch, 2, tmp_path, init_process_group=False)
    assert min(elapsed) > 0
    with (tmp_path / "metrics.csv").open() as file:
        lines = list(csv.DictReader(file))
    rates = [float(line["lr-SGD"]) for line in lines if line["lr-SGD"]]
    assert rates == pytest.approx([0.1, 0.05, 0.025])
    assert any(
        key.startswith("DeviceStatsMonitor") and value for line in lines for key, value in line.items()
    )


class SlowRank(lc.Callback):
    def on_train_batch_start(self, *_: Any) -> None:
        time.sleep(0.02 if torch.distributed.get_rank() else 0.0)


def stop_in_time(rank: int, world_size: int) -> tuple[int, float]:
    module = Net()
    timer = lc.Timer(duration={"seconds": 1})
    trainer = build_trainer(world_size, "titan", callbacks=[timer, SlowRank()], max_epochs=-1)
    trainer.fit(module, loader_for(world_size))
    return trainer.global_step, timer.time_elapsed("train")


def test_a_timer_stops_all_ranks_at_the_same_step() -> None:
    (first, elapsed), (second, _) = run_ranks(stop_in_time, 2, init_process_group=False)
    assert first == second > 0
    assert elapsed >= 1


def show(rank: int, world_size: int, kind: Any) -> str:
    text = io.StringIO()
    with contextlib.redirect_stdout(text), contextlib.redirect_stderr(text):
        fit(rank, world_size, kind, enable_progress_bar=True, max_epochs=1)
    return text.getvalue()


@pytest.mark.parametrize("kind", [lc.TQDMProgressBar, lc.RichProgressBar])
def test_a_progress_bar_on_the_first_rank(kind: Any) -> None:
    if kind is lc.RichProgressBar:
        pytest.importorskip("rich")
    first, second = run_ranks(show, 2, kind, init_process_group=False)
    assert "train_loss" in first and "4/4" in first
    assert "train_loss" not in second


def summarise(rank: int, world_size: int, degrees: dict[str, Any]) -> Any:
    summary = lc.ModelSummary(max_depth=2)
    seen: list[Any] = []
    summary.summarize = lambda *args, **kwargs: seen.append(args)  # type: ignore[method-assign]
    case = Case()
    trainer = build_trainer(world_size, TitanStrategy(**degrees), callbacks=[summary], fast_dev_run=True)
    trainer.fit(Module(case), DataLoader(Rows(case), batch_size=2))
    return [(dict(args[0])["Params"], args[1:3]) for args in seen]


@pytest.mark.parametrize("degrees", [{"dp_shard": 2}, {"tp": 2}])
def test_the_summary_counts_whole_parameters(degrees: dict[str, Any]) -> None:
    model = Module(Case()).model
    total = sum(p.numel() for p in model.parameters())
    first, second = run_ranks(summarise, 2, degrees, init_process_group=False)
    assert second == []
    [(column, totals)] = first
    assert totals == (total, total)
    children = [sum(p.numel() for p in child.parameters()) for child in model.children()]
    assert column[1:] == [get_human_readable_count(count) for count in children]


# --------------------------------------------------------------------------------- they can't work


def ema() -> Any:
    return lc.WeightAveraging(avg_fn=get_ema_avg_fn())


REFUSED = {
    "StochasticWeightAveraging": lambda: lc.StochasticWeightAveraging(swa_lrs=0.1),
    "WeightAveraging": ema,
    "EMAWeightAveraging": lc.EMAWeightAveraging,
    "ModelPruning": lambda: lc.ModelPruning("l1_unstructured", amount=0.5),
}


def be_refused(rank: int, world_size: int) -> dict[str, str]:
    texts = {}
    for name, build in REFUSED.items():
        with pytest.raises(ConfigError) as caught:
            fit(rank, world_size, build)
        texts[name] = str(caught.value)
    with pytest.raises(ConfigError) as caught:
        fit(rank, world_size, lambda: [build() for build in REFUSED.values()])
    assert len(caught.value.problems) == len(REFUSED)
    return texts


def test_what_needs_whole_weights_is_refused_before_training() -> None:
    for texts in run_ranks(be_refused, 2, init_process_group=False):
        for name, text in texts.items():
            assert text.startswith(f"callbacks={name} on 2 processes: ") and "consolidated" in text


def test_it_is_left_alone_on_one_process() -> None:
    def run(rank: int, world_size: int) -> Any:
        return fit(rank, world_size, ema), fit(rank, world_size, ema, "auto")

    [(ours, lightnings)] = run_ranks(run, 1, init_process_group=False)
    torch.testing.assert_close(ours, lightnings, rtol=1e-12, atol=1e-14)

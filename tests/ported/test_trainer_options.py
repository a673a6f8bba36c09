"""Options of the Trainer that change how a run goes: with our strategy they do what they do without."""

from __future__ import annotations

import csv
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.fabric.plugins.environments import LightningEnvironment, TorchElasticEnvironment
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from torch import Tensor

from tests.distributed.case import whole
from tests.harness import run_ranks
from tests.ported.module import TP_PLAN, Net, rows, trainer
from titanplug import TitanStrategy

LAYOUTS: list[dict[str, Any]] = [
    {"dp_shard": 2},
    {"tp": 2, "plan": TP_PLAN, "sequence_parallel": False},
]


class Counts(Net):
    """Counts the batches of each kind."""

    def __init__(self) -> None:
        super().__init__()
        self.batches = {"train": 0, "val": 0, "test": 0, "predict": 0}
        self.read: list[float] = []

    def on_train_batch_start(self, batch: list[Tensor], batch_idx: int) -> None:
        self.batches["train"] += 1
        self.read.append(float(batch[0].sum()))

    def on_validation_batch_start(self, *_: Any) -> None:
        self.batches["val"] += 1

    def on_test_batch_start(self, *_: Any) -> None:
        self.batches["test"] += 1

    def on_predict_batch_start(self, *_: Any) -> None:
        self.batches["predict"] += 1


LIMITS: dict[str, tuple[dict[str, Any], dict[str, int]]] = {
    "fast_dev_run": ({"fast_dev_run": True}, {"train": 1, "val": 1, "test": 1, "predict": 1}),
    "fast_dev_run of 2": ({"fast_dev_run": 2}, {"train": 2, "val": 2, "test": 2, "predict": 2}),
    "numbers": (
        {
            "limit_train_batches": 3,
            "limit_val_batches": 2,
            "limit_test_batches": 1,
            "limit_predict_batches": 2,
            "max_epochs": 2,
        },
        {"train": 6, "val": 4, "test": 1, "predict": 2},
    ),
    "shares": (
        {"limit_train_batches": 0.5, "limit_val_batches": 0.25},
        {"train": 2, "val": 1, "test": 4, "predict": 4},
    ),
    "overfit_batches": (
        {"overfit_batches": 1, "max_epochs": 3},
        {"train": 3, "val": 3, "test": 4, "predict": 4},
    ),
}


def count(rank: int, world_size: int, degrees: dict[str, Any]) -> Any:
    result = {}
    for name, (options, _) in LIMITS.items():
        module, own = Counts(), trainer(world_size, **degrees, **options)
        loader = rows(8 // (4 * degrees.get("dp_shard", 1)), count=8)
        own.fit(module, loader, loader)
        own.test(module, loader, verbose=False)
        own.predict(module, loader)
        result[name] = module.batches, module.read
    return result


# the connector's tests of fast_dev_run, limit_*_batches and overfit_batches
@pytest.mark.parametrize("degrees", LAYOUTS)
def test_limits(degrees: dict[str, Any]) -> None:
    for result in run_ranks(count, 2, degrees, init_process_group=False):
        for name, (_, expected) in LIMITS.items():
            assert result[name][0] == expected, name
        assert len(set(result["overfit_batches"][1])) == 1, "the same batch each epoch"


class Slow(Net):
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        time.sleep(0.02 * self.global_rank)
        return super().training_step(batch, batch_idx)


# test_max_time of the Timer: all ranks stop at the same step
def test_max_time() -> None:
    def run(rank: int, world_size: int) -> int:
        own = trainer(world_size, max_time=timedelta(seconds=1), max_epochs=-1)
        own.fit(Slow(), rows())
        return own.global_step

    first, second = run_ranks(run, 2, init_process_group=False)
    assert first == second > 1


# test_trainer_barebones; detect_anomaly and the profiler as in their own tests
def test_ways_to_watch_a_run(tmp_path: Path) -> None:
    ways: dict[str, dict[str, Any]] = {
        "plain": {},
        "anomaly": {"detect_anomaly": True},
        "profiler": {"profiler": "simple", "default_root_dir": tmp_path},
    }

    def run(rank: int, world_size: int) -> Any:
        trainers: dict[str, Any] = {name: trainer(world_size, **options) for name, options in ways.items()}
        bare: dict[str, Any] = {"accelerator": "cpu", "devices": world_size, "max_epochs": 1}
        trainers["barebones"] = L.Trainer(strategy=TitanStrategy(), barebones=True, **bare)
        weights = {}
        for name, own in trainers.items():
            module = Net()
            own.fit(module, rows())
            weights[name] = {key: whole(value) for key, value in module.named_parameters()}
        recorded = trainers["profiler"].profiler.recorded_durations
        assert len(recorded["run_training_batch"]) == 2
        return weights

    for weights in run_ranks(run, 2, init_process_group=False):
        for name in ("barebones", "anomaly", "profiler"):
            torch.testing.assert_close(weights[name], weights["plain"], rtol=0, atol=0, msg=name)


class Diverges(Net):
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        return (super().training_step(batch, batch_idx) * 0).sqrt() * 0  # 0 times an infinite slope


# test_detect_nan...: the operation that made a NaN is named
@pytest.mark.parametrize("degrees", LAYOUTS)
def test_an_anomaly_is_named(degrees: dict[str, Any]) -> None:
    def run(rank: int, world_size: int) -> None:
        trainer(world_size, detect_anomaly=True, **degrees).fit(Diverges(), rows())

    with pytest.raises(RuntimeError, match="SqrtBackward"):
        run_ranks(run, 2, init_process_group=False)


# the loggers' tests under ddp: one rank writes, once
def test_loggers(tmp_path: Path) -> None:
    def run(rank: int, world_size: int) -> None:
        loggers = [
            CSVLogger(tmp_path, name="csv", version=""),
            TensorBoardLogger(str(tmp_path), name="tb", version=""),
        ]
        trainer(world_size, logger=loggers).fit(Net(), rows(), rows())

    run_ranks(run, 2, init_process_group=False)
    with (tmp_path / "csv" / "metrics.csv").open() as file:
        lines = list(csv.DictReader(file))
    assert sum(bool(line["loss"]) for line in lines) == 2
    assert sum(bool(line["val_loss"]) for line in lines) == 1
    assert len(list((tmp_path / "tb").glob("events*"))) == 1


# test_torch_distributed_backend..., tests of the launcher: an environment of the user's is used as it is
def test_own_cluster_environment() -> None:
    class Mine(TorchElasticEnvironment):
        def world_size(self) -> int:
            self.asked = True
            return super().world_size()

    def run(rank: int, world_size: int) -> int:
        mine = Mine()
        own = trainer(world_size, plugins=[mine])
        assert own.strategy.cluster_environment is mine  # type: ignore[attr-defined]
        own.fit(Net(), rows())
        assert mine.asked
        return own.global_step

    assert run_ranks(run, 2, init_process_group=False) == [2, 2]


# test_strategy_choice...: without processes of others' the strategy launches them, on each node
def test_nodes_are_counted() -> None:
    own = trainer(2, num_nodes=3, dp_shard=3, dp_replicate=2, plugins=[LightningEnvironment()])
    assert own.world_size == 6 and own.num_devices == 2
    assert own.strategy.launcher is not None
    assert not own.strategy.cluster_environment.creates_processes_externally  # type: ignore[attr-defined]


# LightningModule.load_state_dict is torch's own, strict unless told otherwise
@pytest.mark.parametrize("strict", [True, False])
def test_load_state_dict(strict: bool) -> None:
    module = Net()
    state = {**module.state_dict(), "more": torch.zeros(1)}
    if strict:
        with pytest.raises(RuntimeError, match="more"):
            module.load_state_dict(state)
    else:
        assert module.load_state_dict(state, strict=False).unexpected_keys == ["more"]


class Scheduled(Net):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "rising"}}

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("rising", float(self.current_epoch + self.global_rank * 10 * self.current_epoch))


# test_reducelronplateau_scheduling: a schedule that follows a logged value, equal on all ranks
def test_a_schedule_follows_a_monitored_value() -> None:
    def run(rank: int, world_size: int) -> float:
        own = trainer(world_size, max_epochs=3)
        own.fit(Scheduled(), rows(), rows())
        return float(own.optimizers[0].param_groups[0]["lr"])

    assert run_ranks(run, 2, init_process_group=False) == [0.25, 0.25]

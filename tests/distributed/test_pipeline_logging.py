"""Under pipeline parallel, what the last stage logs, measures and returns is one process's, on every rank."""

from __future__ import annotations

import copy
import csv
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor
from torchmetrics import CatMetric, MaxMetric, MeanMetric, MetricCollection, MinMetric, SumMetric
from torchmetrics.classification import MulticlassAccuracy, MulticlassConfusionMatrix, MulticlassF1Score
from torchmetrics.wrappers import ClasswiseWrapper, MetricTracker, MinMaxMetric

from tests.distributed.test_logging import Written
from tests.distributed.test_pipeline_evaluation import (
    LAYOUTS,
    NUM_CLASSES,
    PP2,
    Net,
    assert_values,
    samples,
    start,
)
from tests.distributed.tiny import ListState
from tests.harness import reference, run_ranks


def fit(
    world_size: int, degrees: dict[str, Any] | None, module: Net, *, length: int = 10, **options: Any
) -> dict[str, float]:
    """Train on batches of four samples, and validate; the values that callbacks see at the end."""
    dp_size = 1 if degrees is None else world_size // degrees["pp"]
    trainer = start(world_size, degrees, **{"max_epochs": 2, **options})
    trainer.fit(module, samples(length, 4 // dp_size), samples(length, 4 // dp_size))
    assert {key: float(value) for key, value in trainer.logged_metrics.items()}
    return {key: float(value) for key, value in trainer.callback_metrics.items()}


# ---------------------------------------------------------------- self.log


class LogsEverything(Net):
    """Logs from steps and other hooks, with every reduction, before and after the call of the model."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, rows = batch["x"], batch["index"].double()
        self.log("before", rows.mean(), on_step=True, on_epoch=True)
        logits = self.model(x)
        loss = F.cross_entropy(logits, batch["y"])
        self.log("one", 1.0, on_step=True, on_epoch=True)
        self.log("whole_number", 1, on_epoch=True)
        self.log("loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        self.log("seen", len(x), reduce_fx="sum", on_step=True, on_epoch=True)
        self.log("seen_tensor", torch.ones(len(x)).sum(), reduce_fx=torch.sum, on_epoch=True)
        self.log_dict(
            {"largest": rows.max(), "largest_whole": batch["index"].max()},
            reduce_fx="max",
            on_step=True,
            on_epoch=True,
        )
        self.log("smallest", logits.min(), reduce_fx="min", on_step=True, on_epoch=True)
        self.log("sized", loss.detach() * 2, on_step=False, on_epoch=True, batch_size=len(x))
        self.log("bar_only", rows.mean(), prog_bar=True, logger=False)
        self.log("of_index", float(batch_idx))
        return loss

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.log("from_a_hook", 2.0, reduce_fx="max")

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.log("after", batch["index"].double().mean(), on_step=True, on_epoch=True)
        self.log("returned", outputs["loss"], on_step=True, on_epoch=True)

    def on_train_epoch_end(self) -> None:
        self.log("at_the_end", 3.0)

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("val_before", batch["index"].double().mean(), on_step=True, on_epoch=True)
        logits = self.model(batch["x"])
        self.log("val_one", 1.0)
        self.log("val_seen", len(logits), reduce_fx="sum")
        self.log("val_largest", logits.max(), reduce_fx="max", on_step=True, on_epoch=True)
        self.log("val_loss", F.cross_entropy(logits, batch["y"]), prog_bar=True)
        return {"logits": logits, "count": len(logits), "name": "a"}

    def on_validation_batch_end(self, outputs: Any, batch: Any, *args: Any) -> None:
        assert outputs["name"] == "a"
        assert outputs["logits"].shape == (len(batch["x"]), NUM_CLASSES)
        self.log("val_after", outputs["logits"].mean())
        self.log("val_after_seen", float(len(batch["x"])), reduce_fx="sum")

    def on_validation_epoch_end(self) -> None:
        self.log("val_at_the_end", 5.0)


class LogsToo(Callback):
    log: Any  # set by Lightning

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, *_: Any) -> None:
        self.log("of_callback", batch["index"].double().mean(), on_step=False, on_epoch=True)

    def on_validation_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, *_: Any
    ) -> None:
        self.log("val_of_callback", outputs["logits"].sum(), reduce_fx="sum")


# What hooks outside of steps log weighs by the samples of the batch; rows that only fill it are none of them.
@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_logged_value_is_that_of_one_process(layout: str, every: int) -> None:
    def run(rank: int, world_size: int, degrees: dict[str, Any] | None) -> Any:
        written = Written()
        options: dict[str, Any] = {"log_every_n_steps": every, "callbacks": [LogsToo()]}
        values = fit(world_size, degrees, LogsEverything(), logger=written, **options)
        return written.rows, values

    world_size, degrees = LAYOUTS[layout]
    rows, values = reference(run, 0, 1, None)
    for own_rows, own_values in run_ranks(run, world_size, degrees, init_process_group=False):
        assert_values(own_values, values)
        assert [step for step, _ in own_rows] == [step for step, _ in rows]
        for (_, own), (_, wanted) in zip(own_rows, rows, strict=True):
            assert_values(own, wanted)


# Shows the bug of the test above.
def test_csv_files_have_the_values(tmp_path: Path) -> None:
    def run(rank: int, world_size: int, degrees: dict[str, Any] | None, folder: Path) -> None:
        fit(world_size, degrees, LogsEverything(), logger=CSVLogger(folder, name=None, version=""))

    def lines(folder: Path) -> list[dict[str, str]]:
        with (folder / "metrics.csv").open() as file:
            return list(csv.DictReader(file))

    reference(run, 0, 1, None, tmp_path / "one")
    run_ranks(run, 2, PP2, tmp_path / "pp", init_process_group=False)
    wanted = lines(tmp_path / "one")
    for own, line in zip(lines(tmp_path / "pp"), wanted, strict=True):
        assert own.keys() == line.keys()
        for key, value in line.items():
            assert (own[key] == "") == (value == ""), key
            if value:
                assert float(own[key]) == pytest.approx(float(value), rel=1e-6, abs=1e-9), key
    assert any(line["val_loss"] for line in wanted) and any(line["loss_step"] for line in wanted)


# Global rank 0 has not the last stage, where the step runs past the call of the model.
def test_what_only_the_first_rank_logs() -> None:
    class OnlyFirst(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.log("before", 1.0, rank_zero_only=True)
            loss = super().training_step(batch, batch_idx)
            self.log("step", loss, rank_zero_only=True)
            return loss

        def on_train_batch_end(self, *_: Any) -> None:
            self.log("hook", 2.0, rank_zero_only=True)

    def run(rank: int, world_size: int, degrees: dict[str, Any] | None) -> dict[str, float]:
        return fit(world_size, degrees, OnlyFirst(), limit_val_batches=0)

    expected = reference(run, 0, 1, None)
    first, _ = run_ranks(run, 2, PP2, init_process_group=False)
    assert_values(first, expected)


# ---------------------------------------------------------------- what steps return


class Returns(Net):
    """Returns more than a loss."""

    def __init__(self, by_targets: bool) -> None:
        super().__init__()
        self.by_targets = by_targets
        self.seen: list[dict[str, Any]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        logits = self.model(batch["x"])
        if not self.by_targets:
            loss = F.cross_entropy(logits, batch["y"])
            self.log("loss", loss, on_step=True, on_epoch=True)
            return {
                "loss": loss,
                "logits": logits,
                "scalar": logits.mean(),
                "number": 1.5,
                "text": "a",
                "none": None,
            }
        labels = batch["y"].masked_fill(batch["index"] % 3 == 1, -100)
        loss = F.cross_entropy(logits, labels)
        count = (labels != -100).sum()
        self.log("loss", loss)
        return {"loss": loss, "num_targets": count, "rows": batch["index"], "nested": [{"x": batch["x"]}]}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen.append({"batch": batch["index"], **outputs})


@pytest.mark.parametrize("by_targets", [False, True])
@pytest.mark.parametrize("layout", ["pp2 1F1B", "pp2 interleaved"])
def test_hooks_see_what_the_step_returned(layout: str, by_targets: bool) -> None:
    def run(rank: int, world_size: int, degrees: dict[str, Any] | None) -> Any:
        module = Returns(by_targets)
        values = fit(world_size, degrees, module, limit_val_batches=0)
        return module.seen, values

    world_size, degrees = LAYOUTS[layout]
    seen, values = reference(run, 0, 1, None)
    for own, own_values in run_ranks(run, world_size, degrees, init_process_group=False):
        assert_values(own_values, values)
        for row, wanted in zip(own, seen, strict=True):
            assert row.pop("text", None) == wanted.get("text")
            assert row.pop("none", None) is None
            torch.testing.assert_close(row, {k: v for k, v in wanted.items() if k not in ("text", "none")})


# ---------------------------------------------------------------- torchmetrics


class Measured(Net):
    """Torchmetrics of every kind, logged as objects or computed by hand."""

    def __init__(self) -> None:
        super().__init__()
        for stage in ("train", "val"):
            self.add_module(f"{stage}_accuracy", MulticlassAccuracy(NUM_CLASSES, average="micro"))
            self.add_module(f"{stage}_confusion", MulticlassConfusionMatrix(NUM_CLASSES))
            self.add_module(f"{stage}_sum", SumMetric())
            self.add_module(f"{stage}_mean", MeanMetric())
            self.add_module(f"{stage}_max", MaxMetric())
            self.add_module(f"{stage}_min", MinMetric())
            self.add_module(f"{stage}_all", CatMetric())
            self.add_module(f"{stage}_rows", ListState())
            several = [MulticlassAccuracy(NUM_CLASSES), MulticlassF1Score(NUM_CLASSES)]
            self.add_module(f"{stage}_several", MetricCollection(several, prefix=f"{stage}_"))
        self.found: list[Any] = []

    def part(self, stage: str, name: str) -> Any:
        return getattr(self, f"{stage}_{name}")

    def _measure(self, stage: str, logits: Tensor, batch: Any) -> None:
        y, x = batch["y"], batch["index"].double()
        self.part(stage, "accuracy")(logits, y)
        self.log(f"{stage}_acc", self.part(stage, "accuracy"), on_step=False, on_epoch=True)
        for name in ("sum", "mean", "max", "min"):
            self.part(stage, name).update(x)
            self.log(f"{stage}_{name}", self.part(stage, name), on_step=False, on_epoch=True)
        self.part(stage, "confusion").update(logits, y)
        self.part(stage, "all").update(x)
        self.part(stage, "rows").update(x)
        self.part(stage, "several").update(logits, y)
        self.log_dict(self.part(stage, "several"), on_step=False, on_epoch=True)

    def _compute(self, stage: str) -> None:
        for name in ("all", "rows"):
            metric = self.part(stage, name)
            self.found.append(sorted(metric.compute().tolist()))
            metric.reset()
        self.found.append(self.part(stage, "confusion").compute().tolist())
        self.part(stage, "confusion").reset()
        self.log(f"{stage}_by_hand", self.part(stage, "sum").compute())
        self.log(f"{stage}_at_the_end", self.part(stage, "max"))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        logits = self.model(batch["x"])
        self._measure("train", logits, batch)
        return F.cross_entropy(logits, batch["y"])

    def on_train_epoch_end(self) -> None:
        self._compute("train")

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self._measure("val", self.model(batch["x"]), batch)

    def on_validation_epoch_end(self) -> None:
        self._compute("val")


def measure(
    rank: int, world_size: int, degrees: dict[str, Any] | None, build: Any, length: int, fits: int = 1
) -> Any:
    module = build()
    for _ in range(fits):
        values = fit(world_size, degrees, module, length=length)
    return module.found, values


@pytest.mark.parametrize("length", [10, 3])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_metrics_see_every_sample_once(layout: str, length: int) -> None:
    world_size, degrees = LAYOUTS[layout]
    found, values = reference(measure, 0, 1, None, Measured, length)
    for own, own_values in run_ranks(
        measure, world_size, degrees, Measured, length, init_process_group=False
    ):
        assert own == found
        assert_values(own_values, values)


def test_metrics_after_a_second_fit() -> None:
    found, values = reference(measure, 0, 1, None, Measured, 6, 2)
    for own, own_values in run_ranks(measure, 2, PP2, Measured, 6, 2, init_process_group=False):
        assert own == found
        assert_values(own_values, values)


class MeasuredEachStep(Net):
    def __init__(self) -> None:
        super().__init__()
        self.mean, self.largest = MeanMetric(), MaxMetric()
        self.several = MetricCollection([MulticlassAccuracy(NUM_CLASSES), MulticlassF1Score(NUM_CLASSES)])
        self.found: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        logits = self.model(batch["x"])
        for metric, name in ((self.mean, "mean"), (self.largest, "largest")):
            metric(batch["index"].double())
            self.log(name, metric, on_step=True, on_epoch=True)
        self.several(logits, batch["y"])
        self.log_dict(self.several, on_step=True, on_epoch=True)
        return F.cross_entropy(logits, batch["y"])

    def on_train_batch_end(self, *_: Any) -> None:
        values = self.trainer.callback_metrics
        self.found.append({key: float(value) for key, value in values.items() if key.endswith("_step")})


@pytest.mark.parametrize("fits", [1, 2])
def test_metrics_that_are_logged_each_step(fits: int) -> None:
    """The value of a step is that of its whole batch, not of its last microbatch."""
    found, values = reference(measure, 0, 1, None, MeasuredEachStep, 10, fits)
    for own, own_values in run_ranks(measure, 2, PP2, MeasuredEachStep, 10, fits, init_process_group=False):
        for row, wanted in zip(own, found, strict=True):
            assert_values(row, wanted)
        assert_values(own_values, values)


class MeasuredByCopies(Net):
    """A metric that is replaced by a copy of it in each epoch, as some wrappers do."""

    def __init__(self) -> None:
        super().__init__()
        self.total = SumMetric()
        self.found: list[float] = []

    def on_train_epoch_start(self) -> None:
        self.total = self.total.clone()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        logits = self.model(batch["x"])
        self.total(batch["index"].double())
        self.log("total", self.total, on_step=True, on_epoch=True, metric_attribute="total")
        return F.cross_entropy(logits, batch["y"])

    def on_train_batch_end(self, *_: Any) -> None:
        self.found.append(float(self.trainer.callback_metrics["total_step"]))


def test_copies_that_are_logged_each_step() -> None:
    found, values = reference(measure, 0, 1, None, MeasuredByCopies, 10, 2)
    for own, own_values in run_ranks(measure, 2, PP2, MeasuredByCopies, 10, 2, init_process_group=False):
        assert own == found
        assert_values(own_values, values)


class MeasuredInside(Net):
    """Metrics that hold metrics."""

    def __init__(self) -> None:
        super().__init__()
        self.range = MinMaxMetric(MulticlassAccuracy(NUM_CLASSES, average="micro"))
        self.classes = ClasswiseWrapper(MulticlassAccuracy(NUM_CLASSES, average=None))
        self.left, self.right = SumMetric(), SumMetric()
        self.both = self.left + self.right
        self.found: list[Any] = []

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        logits = self.model(batch["x"])
        self.range.update(logits, batch["y"])
        self.classes.update(logits, batch["y"])
        self.left.update(batch["index"].double())
        self.right.update(batch["index"].double() * 2)

    def on_validation_epoch_end(self) -> None:
        for metric in (self.range, self.classes):
            self.log_dict({f"val_{key}": value for key, value in metric.compute().items()})
            metric.reset()
        self.log("val_both", self.both.compute())
        self.left.reset()
        self.right.reset()


# The last stage alone asks for the values of inner metrics: messages of stages must not get out of step.
@pytest.mark.parametrize("layout", LAYOUTS)
def test_metrics_that_hold_metrics(layout: str) -> None:
    world_size, degrees = LAYOUTS[layout]
    _, values = reference(measure, 0, 1, None, MeasuredInside, 10)
    for _, own_values in run_ranks(
        measure, world_size, degrees, MeasuredInside, 10, init_process_group=False, timeout_s=60
    ):
        assert_values(own_values, values)


def test_metrics_can_be_copied_and_pickled() -> None:
    def run(rank: int, world_size: int) -> list[float]:
        module = Measured()
        fit(world_size, PP2, module, length=6)
        copies = [
            module.val_mean.clone(),
            copy.deepcopy(module.val_mean),
            pickle.loads(pickle.dumps(module.val_mean)),
        ]
        for number, metric in enumerate(copies):
            metric.reset()
            metric.update(torch.tensor(float(number + 1)))
        return [float(metric.compute()) for metric in copies]

    assert run_ranks(run, 2, init_process_group=False) == [[1.0, 2.0, 3.0]] * 2


class Tracked(Net):
    """Copies a metric for each epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.tracker = MetricTracker(MeanMetric(), maximize=True)
        self.found: list[Any] = []

    def on_validation_epoch_start(self) -> None:
        self.tracker.increment()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.model(batch["x"])
        self.tracker.update(batch["index"].double())

    def on_validation_epoch_end(self) -> None:
        self.log("val_tracked", self.tracker.compute())


# Copies are as the metrics are: they gather over the same ranks, and ask the last stage for their value.
@pytest.mark.parametrize("degrees", [{"pp": 1, "dp_shard": 2}, PP2], ids=["fsdp2", "pp2"])
def test_metrics_that_are_copied_while_a_run_goes_on(degrees: dict[str, Any]) -> None:
    _, values = reference(measure, 0, 1, None, Tracked, 10)
    for _, own_values in run_ranks(measure, 2, degrees, Tracked, 10, init_process_group=False):
        assert own_values["val_tracked"] == pytest.approx(values["val_tracked"])


class LogsFirst(Net):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[Any] = []

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.log("first", batch["index"].double().mean(), on_step=False, on_epoch=True)

    def on_validation_batch_start(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("val_first", batch["index"].double().mean())


@pytest.mark.parametrize("degrees", [{"pp": 1, "dp_shard": 2}, PP2], ids=["fsdp2", "pp2"])
def test_what_is_logged_before_a_step_weighs_as_its_own_batch(degrees: dict[str, Any]) -> None:
    _, values = reference(measure, 0, 1, None, LogsFirst, 9)
    for _, own_values in run_ranks(measure, 2, degrees, LogsFirst, 9, init_process_group=False):
        for key in ("first", "val_first"):
            assert own_values[key] == pytest.approx(values[key]), key


def test_a_metric_that_the_module_does_not_register() -> None:
    class Hidden(Net):
        """Lightning logs the value of such a metric where it is given the number."""

        def __init__(self) -> None:
            super().__init__()
            self.hidden = [MeanMetric()]

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.model(batch["x"])
            value = self.hidden[0](batch["index"].double())
            self.log("val_rows", value)

    def run(rank: int, world_size: int, degrees: dict[str, Any] | None) -> dict[str, float]:
        return fit(world_size, degrees, Hidden())

    expected = reference(run, 0, 1, None)
    for values in run_ranks(run, 2, PP2, init_process_group=False):
        assert_values(values, expected)

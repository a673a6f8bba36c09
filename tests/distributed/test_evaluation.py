"""Validate, test and predict see every sample once, in any order around training, and change nothing."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import BasePredictionWriter
from torch import Tensor
from torch.utils.data import DataLoader

from tests.distributed import case
from tests.distributed.case import Case, build_model, build_trainer
from tests.distributed.tiny import (
    DP2_TP2,
    DP4,
    Indices,
    Stream,
    Tiny,
    fit_by_hand,
    numbered,
    weight_of,
)
from tests.harness import reference, run_ranks
from titanplug import TitanStrategy

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one process": (1, {}),
    "tp2": (2, {"tp": 2}),
    "dp4": (4, DP4),
    "dp2 x tp2": (4, DP2_TP2),
    "hsdp 2x2": (4, {"dp_replicate": 2, "dp_shard": 2}),
}


class Classifies(Tiny):
    """Is right on the samples that 3 divides: 4 of 10. Its loss depends on the weight."""

    def _evaluate(self, stage: str, batch: Tensor) -> dict[str, Tensor]:
        right = (batch % 3 == 0).double()
        self.log(f"{stage}_accuracy", right.mean())
        self.log(f"{stage}_right", right.sum(), reduce_fx="sum")
        self.log(f"{stage}_loss", self.errors(batch).mean(), batch_size=len(batch))
        return {"right": right}

    def validation_step(self, batch: Tensor, batch_idx: int, dataloader_idx: int = 0) -> Any:
        return self._evaluate("val", batch)

    def test_step(self, batch: Tensor, batch_idx: int, dataloader_idx: int = 0) -> Any:
        return self._evaluate("test", batch)

    def predict_step(self, batch: Tensor, batch_idx: int, dataloader_idx: int = 0) -> Any:
        return {"index": batch, "out": self.errors(batch)}


def _start(world_size: int, degrees: dict[str, Any], **options: Any) -> L.Trainer:
    L.seed_everything(7, verbose=False)
    return build_trainer(world_size, TitanStrategy(**degrees), **options)


def _mean_error(weight: float, length: int) -> float:
    module = Tiny()
    with torch.no_grad():
        module.layer.weight.fill_(weight)
        return float(module.errors(torch.arange(length)).mean())


# ---------------------------------------------------------------- alone, and in any order around fit

ORDERS = {
    "validate": ["validate"],
    "test": ["test"],
    "predict": ["predict"],
    "predict, validate, fit, test, validate, predict": [
        "predict",
        "validate",
        "fit",
        "test",
        "validate",
        "predict",
    ],
    "fit, predict, fit, test": ["fit", "predict", "fit", "test"],
    "test, fit, fit, validate": ["test", "fit", "fit", "validate"],
}


def _in_order(rank: int, world_size: int, degrees: dict[str, Any], size: int, calls: list[str]) -> Any:
    trainer, module = _start(world_size, degrees), Classifies()
    found: list[Any] = []
    for call in calls:
        if call == "fit":
            num_ranks = world_size // degrees.get("tp", 1)
            trainer.fit_loop.max_epochs = trainer.current_epoch + 1
            trainer.fit(module, numbered(8, batch_size=8 // num_ranks)())
            found.append(weight_of(module))
        elif call == "predict":
            found.append(trainer.predict(module, numbered(10, batch_size=size)()))
        else:
            (logged,) = getattr(trainer, call)(module, numbered(10, batch_size=size)(), verbose=False)
            found.append(logged)
    return found


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_all_samples_count_once_in_any_order_of_calls(layout: str, size: int) -> None:
    world_size, degrees = LAYOUTS[layout]
    start = reference(lambda: weight_of(Tiny()))
    trained = [reference(fit_by_hand, [[range(8)]] * n) for n in range(3)]
    assert trained[0] == start

    def run(rank: int, world_size: int) -> dict[str, Any]:
        return {name: _in_order(rank, world_size, degrees, size, calls) for name, calls in ORDERS.items()}

    for rank, found in enumerate(run_ranks(run, world_size, init_process_group=False)):
        for name, calls in ORDERS.items():
            num_fits = 0
            for call, result in zip(calls, found[name], strict=True):
                if call == "fit":
                    num_fits += 1
                    assert result == pytest.approx(trained[num_fits], rel=1e-12), name
                elif call != "predict":
                    stage = {"validate": "val", "test": "test"}[call]
                    assert result[f"{stage}_accuracy"] == pytest.approx(0.4, abs=1e-7), name
                    assert result[f"{stage}_right"] == 4.0, name
                    expected = _mean_error(trained[num_fits], 10)
                    assert result[f"{stage}_loss"] == pytest.approx(expected, rel=1e-6), name
                elif rank == 0:
                    assert torch.cat([row["index"] for row in result]).tolist() == list(range(10))
                    assert [len(row["index"]) for row in result] == [size] * (10 // size) + [1] * (10 % size)


@pytest.mark.parametrize("num_samples", [1, 2, 5])
def test_ranks_without_any_batch(num_samples: int) -> None:
    """One batch on four data ranks: three of them have none."""

    def run(rank: int, world_size: int) -> Any:
        trainer, module = _start(world_size, DP4), Classifies()
        loader = numbered(num_samples, batch_size=2)
        (logged,) = trainer.validate(module, loader(), verbose=False)
        return logged, trainer.predict(module, loader())

    right = len(range(0, num_samples, 3))
    for rank, (logged, predictions) in enumerate(run_ranks(run, 4, init_process_group=False)):
        assert logged["val_accuracy"] == pytest.approx(right / num_samples)
        assert logged["val_right"] == right
        if rank == 0:
            assert torch.cat([row["index"] for row in predictions]).tolist() == list(range(num_samples))


def test_several_loaders() -> None:
    def run(rank: int, world_size: int) -> Any:
        trainer, module = _start(world_size, DP2_TP2), Classifies()
        loaders = [numbered(n, batch_size=2)() for n in (10, 3, 1)]
        logged = trainer.validate(module, loaders, verbose=False)
        predictions = trainer.predict(module, [numbered(n, batch_size=2)() for n in (10, 3, 1)])
        return logged, [[row["index"].tolist() for row in rows] for rows in predictions or []]

    for rank, (logged, predictions) in enumerate(run_ranks(run, 4, init_process_group=False)):
        for index, (length, right) in enumerate([(10, 4), (3, 1), (1, 1)]):
            values = logged[index]
            suffix = f"/dataloader_idx_{index}"
            assert values[f"val_accuracy{suffix}"] == pytest.approx(right / length)
            assert values[f"val_right{suffix}"] == right
            if rank == 0:
                assert list(itertools.chain(*predictions[index])) == list(range(length))


@pytest.mark.parametrize("options", [{"limit_val_batches": 2}, {"limit_val_batches": 0.5}])
def test_limits_are_those_of_each_rank(options: dict[str, Any]) -> None:
    def run(rank: int, world_size: int) -> float:
        trainer, module = _start(world_size, DP2_TP2, **options), Classifies()
        (logged,) = trainer.validate(module, numbered(16, batch_size=2)(), verbose=False)
        return float(logged["val_right"])

    # Two batches on each of two ranks: samples 0 to 7.
    assert run_ranks(run, 4, init_process_group=False) == [3.0] * 4


@pytest.mark.parametrize("length", [10, 2])
def test_streams_of_unequal_length(length: int) -> None:
    def run(rank: int, world_size: int) -> Any:
        trainer, module = _start(world_size, DP4), Classifies()
        (logged,) = trainer.test(module, DataLoader(Stream(length), batch_size=2), verbose=False)
        predictions: Any = trainer.predict(module, DataLoader(Stream(length), batch_size=2))
        return logged, sorted(i for row in predictions for i in row["index"].tolist())

    right = len(range(0, length, 3))
    for rank, (logged, predictions) in enumerate(run_ranks(run, 4, init_process_group=False)):
        assert logged["test_accuracy"] == pytest.approx(right / length)
        assert logged["test_right"] == right
        if rank == 0:
            assert predictions == list(range(length))


# ---------------------------------------------------------------- predictions


class Writes(BasePredictionWriter):
    def __init__(self) -> None:
        super().__init__("batch_and_epoch")
        self.batches: list[list[int]] = []
        self.epoch: list[tuple[list[int], list[int]]] = []

    def write_on_batch_end(
        self, trainer: Any, pl_module: Any, prediction: Any, batch_indices: Any, *_: Any
    ) -> None:
        if batch_indices:
            assert prediction["index"].tolist() == batch_indices
        self.batches.append(list(batch_indices))

    def write_on_epoch_end(self, trainer: Any, pl_module: Any, predictions: Any, batch_indices: Any) -> None:
        for row, indices in zip(predictions, batch_indices[0], strict=True):
            self.epoch.append((row["index"].tolist(), list(indices)))


def test_writers_get_each_sample_on_one_data_rank() -> None:
    def run(rank: int, world_size: int) -> Any:
        writer = Writes()
        trainer = _start(world_size, DP2_TP2, callbacks=[writer])
        result = trainer.predict(Classifies(), numbered(10, batch_size=2)(), return_predictions=False)
        return writer.batches, [indices for _, indices in writer.epoch], result

    found = run_ranks(run, 4, init_process_group=False)
    for kind in (0, 1):
        read = [list(itertools.chain(*item[kind])) for item in found]
        assert read[0] == read[1] and read[2] == read[3]
        assert sorted(read[0] + read[2]) == list(range(10))
    assert all(item[2] is None for item in found)


class Transformed(case.Module):
    """Predicts with the logits that tensor parallel keeps sharded."""

    def test_step(self, batch: Any, batch_idx: int) -> None:
        logits = self.model(batch["input_ids"])
        self.log("loss", F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten()))
        self.log("accuracy", (logits.argmax(-1) == batch["labels"]).double().mean())

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self.model(batch["input_ids"]), [{"shape": self.model(batch["input_ids"]).shape}]


@pytest.mark.parametrize("layout", ["tp2", "dp2 x tp2"])
def test_predictions_of_a_sharded_model_are_those_of_one_process(layout: str) -> None:
    settings = Case(num_rows=5)

    def alone() -> tuple[Tensor, float]:
        rows = case.Rows(settings)
        with torch.no_grad():
            logits = build_model(settings)(rows.tokens[:, :-1])
            return logits, float(F.cross_entropy(logits.flatten(0, 1), rows.labels.flatten()))

    def run(rank: int, world_size: int) -> Any:
        trainer, module = _start(world_size, LAYOUTS[layout][1]), Transformed(settings)
        (logged,) = trainer.test(module, DataLoader(case.Rows(settings), batch_size=2), verbose=False)
        predictions = trainer.predict(module, DataLoader(case.Rows(settings), batch_size=2)) or []
        for logits, (described,) in predictions:
            assert type(logits) is Tensor and tuple(described["shape"]) == tuple(logits.shape)
        return torch.cat([logits for logits, _ in predictions]), logged

    logits, loss = reference(alone)
    found = run_ranks(run, LAYOUTS[layout][0], init_process_group=False)
    torch.testing.assert_close(found[0][0], logits, rtol=1e-12, atol=1e-12)
    for _, logged in found:
        assert logged["loss"] == pytest.approx(loss, rel=1e-6)


# ---------------------------------------------------------------- evaluation changes nothing of training


class Noisy(Classifies):
    """Draws random numbers in training, in evaluation and in hooks around it."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout = torch.nn.Dropout(0.5)
        self.modes: list[bool] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        self.modes.append(self.dropout.training)
        keep = self.dropout(torch.ones(len(batch), dtype=torch.float64))
        return (self.errors(batch) * keep * torch.rand(())).mean()

    def validation_step(self, batch: Tensor, batch_idx: int, dataloader_idx: int = 0) -> Any:
        self.modes.append(not self.dropout.training)
        torch.rand(5)
        torch.manual_seed(batch_idx)
        assert not torch.is_grad_enabled()
        return super().validation_step(batch, batch_idx)

    def on_validation_epoch_end(self) -> None:
        torch.rand(3)


EVALUATIONS: dict[str, dict[str, Any]] = {
    "each epoch": {},
    "sanity check": {"num_sanity_val_steps": 2},
    "inside of a window": {"val_check_interval": 1, "num_sanity_val_steps": -1},
}


@pytest.mark.parametrize("layout", ["one process", "dp4", "dp2 x tp2"])
def test_training_with_and_without_evaluation_is_bitwise_equal(layout: str) -> None:
    world_size, degrees = LAYOUTS[layout]

    def train(world_size: int, evaluate: bool, **options: Any) -> tuple[float, bool]:
        trainer = _start(world_size, degrees, max_epochs=2, accumulate_grad_batches=2, **options)
        module = Noisy()
        training, validation = numbered(12, batch_size=1, shuffle=True), numbered(5, batch_size=2)
        trainer.fit(module, training(), validation() if evaluate else None)
        return weight_of(module), all(module.modes)

    def run(rank: int, world_size: int) -> Any:
        without = train(world_size, False)
        return without, {name: train(world_size, True, **options) for name, options in EVALUATIONS.items()}

    for without, found in run_ranks(run, world_size, init_process_group=False):
        assert without[1]
        for name, result in found.items():
            assert result == without, name


def test_the_first_batches_of_a_sanity_check_do_not_count() -> None:
    def run(rank: int, world_size: int) -> Any:
        trainer, module = _start(world_size, DP4, num_sanity_val_steps=1), Classifies()
        trainer.fit(module, numbered(8, batch_size=2)(), numbered(10, batch_size=1)())
        return float(trainer.callback_metrics["val_right"])

    assert run_ranks(run, 4, init_process_group=False) == [4.0] * 4


def _evaluate_then_train(rank: int, world_size: int, before: Callable[..., Any] | None) -> float:
    """A checkpointed buffer, a gradient or a gathered weight left by evaluation would show here."""
    trainer, module = _start(world_size, {"dp_shard": world_size}), Classifies()
    if before is not None:
        before(trainer, module)
    trainer.fit(module, DataLoader(Indices(8), batch_size=8 // world_size))
    return weight_of(module)


def test_training_after_evaluation_in_one_process_group_is_bitwise_equal() -> None:
    loader = numbered(4, batch_size=1)

    def run(rank: int, world_size: int) -> list[float]:
        return [
            _evaluate_then_train(rank, world_size, before)
            for before in (
                None,
                lambda trainer, module: trainer.validate(module, loader(), verbose=False),
                lambda trainer, module: trainer.predict(module, loader()),
            )
        ]

    for found in run_ranks(run, 2, init_process_group=False):
        assert found == [found[0]] * 3

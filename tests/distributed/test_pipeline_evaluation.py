"""Under pipeline parallel, evaluation gives one process's values on every rank, around training too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import BasePredictionWriter, ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from torchmetrics import MeanMetric
from torchmetrics.classification import MulticlassAccuracy

from tests.distributed.case import build_trainer, whole
from tests.harness import reference, run_ranks
from titanplug import ParallelPlan, TitanStrategy
from titanplug.plan import PipelineOrder

NUM_CLASSES = 3
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "pp2 1F1B": (2, {"pp": 2, "pp_schedule": "1F1B", "pp_microbatches": 2}),
    "pp2 interleaved": (2, {"pp": 2, "pp_schedule": "Interleaved1F1B", "pp_microbatches": 2}),
    "pp2 x fsdp2": (4, {"pp": 2, "dp_shard": 2, "pp_schedule": "1F1B", "pp_microbatches": 2}),
}
PP2 = LAYOUTS["pp2 1F1B"][1]


class Samples(Dataset[dict[str, Any]]):
    """Each row has its index, three numbers and a class that depends on them."""

    def __init__(self, length: int) -> None:
        self.x = torch.randn(length, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        self.y = self.x.argmax(-1)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"index": index, "x": self.x[index], "y": self.y[index]}


def samples(length: int, batch_size: int, **options: Any) -> DataLoader[Any]:
    return DataLoader(Samples(length), batch_size=batch_size, **options)


class Block(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.inner(x).tanh())


class Layers(nn.Module):
    """A first layer, four blocks, a head."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.first = nn.Linear(3, 8)
        self.blocks = nn.ModuleList([Block(dropout) for _ in range(4)])
        self.head = nn.Linear(8, NUM_CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Net(L.LightningModule):
    """Classifies; an ordinary module."""

    def __init__(self, dropout: float = 0.0, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.model = Layers(dropout).to(dtype)
        self.accuracy = MulticlassAccuracy(NUM_CLASSES, average="micro")

    def configure_parallel_plan(self) -> ParallelPlan:
        order = PipelineOrder(("model.first",), "model.blocks", ("model.head",))
        return ParallelPlan(pipeline=order, fsdp_units=["model.blocks.*"])

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        loss = F.cross_entropy(self.model(batch["x"]), batch["y"])
        self.log("train_loss", loss)
        return loss

    def _evaluate(self, stage: str, batch: dict[str, Tensor]) -> Tensor:
        logits = self.model(batch["x"])
        self.accuracy(logits, batch["y"])
        self.log(f"{stage}_loss", F.cross_entropy(logits, batch["y"]), prog_bar=True)
        self.log(f"{stage}_accuracy", self.accuracy, on_step=False, on_epoch=True)
        return logits

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self._evaluate("val", batch)

    def test_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return self._evaluate("test", batch)

    def predict_step(self, batch: dict[str, Tensor], batch_idx: int) -> dict[str, Tensor]:
        return {"index": batch["index"], "logits": self.model(batch["x"])}

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def start(world_size: int, degrees: dict[str, Any] | None, **options: Any) -> L.Trainer:
    """A Trainer of one process (None), or of a layout."""
    L.seed_everything(7, verbose=False)
    strategy: Any = "auto" if degrees is None else TitanStrategy(**degrees)
    return build_trainer(world_size, strategy, **options)


def own_weights(module: L.LightningModule) -> dict[str, Tensor]:
    """The whole weights of the modules that this rank has."""
    return {name: whole(p) for name, p in module.named_parameters()}


def assert_weights(
    results: list[dict[str, Tensor]], expected: dict[str, Tensor], tolerance: float = 1e-12
) -> None:
    """Each rank's own weights are one process's, and every weight is on some rank."""
    for weights in results:
        for name, weight in weights.items():
            torch.testing.assert_close(weight, expected[name], rtol=tolerance, atol=tolerance)
    assert set().union(*results) == set(expected)


def assert_values(values: dict[str, float], expected: dict[str, float]) -> None:
    assert values.keys() == expected.keys()
    for key, value in expected.items():
        assert values[key] == pytest.approx(value, rel=1e-6, abs=1e-9), key


# ---------------------------------------------------------------- alone, and in any order around fit

ORDERS = [
    ["validate"],
    ["test"],
    ["predict"],
    ["predict", "validate", "fit", "test", "validate", "predict"],
    ["fit", "predict", "fit", "test"],
    ["test", "fit", "fit", "validate"],
]


def in_order(
    rank: int, world_size: int, degrees: dict[str, Any] | None, length: int, size: int, calls: list[str]
) -> list[Any]:
    dp_size = 1 if degrees is None else world_size // degrees["pp"]
    trainer, module = start(world_size, degrees), Net()
    found: list[Any] = []
    for call in calls:
        if call == "fit":
            trainer.fit_loop.max_epochs = trainer.current_epoch + 1
            trainer.fit(module, samples(8, 4 // dp_size))
            found.append(None)
        elif call == "predict":
            rows: Any = trainer.predict(module, samples(length, size))
            found.append(joined(rows))
        else:
            (logged,) = getattr(trainer, call)(module, samples(length, size), verbose=False)
            found.append(logged)
        assert module.training
    return [*found, own_weights(module)]


def joined(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """All predictions of a rank; a data rank other than the first may have none."""
    return {
        key: torch.cat([row[key] for row in rows]) if rows else torch.empty(0) for key in ("index", "logits")
    }


def check_orders(layout: str, length: int, size: int, orders: list[list[str]], **options: Any) -> None:
    world_size, degrees = LAYOUTS[layout]

    def run(rank: int, world_size: int, degrees: dict[str, Any] | None) -> list[Any]:
        return [in_order(rank, world_size, degrees, length, size, calls) for calls in orders]

    expected = reference(run, 0, 1, None)
    found = run_ranks(run, world_size, {**degrees, **options}, init_process_group=False)
    for number, calls in enumerate(orders):
        for rank, results in enumerate(found):
            for call, result, wanted in zip(calls, results[number], expected[number], strict=False):
                if call in ("validate", "test"):
                    assert_values(result, wanted)
                elif call == "predict" and rank == 0:
                    assert result["index"].tolist() == list(range(length))
                    torch.testing.assert_close(result["logits"], wanted["logits"], rtol=1e-12, atol=1e-12)
        assert_weights([results[number][-1] for results in found], expected[number][-1])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_all_samples_count_once_in_any_order_of_calls(layout: str) -> None:
    """Ten samples in batches of four: the last batch is smaller."""
    check_orders(layout, 10, 4, ORDERS)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_one_sample(layout: str) -> None:
    """Fewer rows than microbatches, and a data rank without any."""
    check_orders(layout, 1, 4, [["validate", "test", "predict", "fit", "predict", "validate"]])


@pytest.mark.parametrize("layout", ["pp2 1F1B", "pp2 interleaved"])
def test_more_microbatches_than_rows(layout: str) -> None:
    check_orders(layout, 10, 4, [["predict", "validate", "fit", "test", "predict"]], pp_microbatches=6)


def whole_run(rank: int, world_size: int, degrees: dict[str, Any] | None, folder: Path) -> Any:
    dp_size = 1 if degrees is None else world_size // degrees["pp"]
    checkpoint = ModelCheckpoint(folder, monitor="val_loss", filename="{epoch}", save_last=True)
    trainer = start(
        world_size,
        degrees,
        max_epochs=3,
        num_sanity_val_steps=2,
        callbacks=[checkpoint],
        enable_checkpointing=True,
    )
    module = Net()
    found = [*trainer.validate(module, samples(10, 4), verbose=False)]
    trainer.fit(module, samples(12, 4 // dp_size), samples(10, 4))
    found.append({key: float(value) for key, value in trainer.callback_metrics.items()})
    for call, which in (("test", "best"), ("validate", "last")):
        found += getattr(trainer, call)(
            module, samples(10, 4), ckpt_path=which, verbose=False, weights_only=False
        )
    rows: Any = trainer.predict(module, samples(10, 4), ckpt_path="best", weights_only=False)
    return (
        found,
        joined(rows)["logits"],
        Path(checkpoint.best_model_path).name,
        float(checkpoint.best_model_score or 0),
    )


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_whole_run_of_one_trainer(layout: str, tmp_path: Path) -> None:
    world_size, degrees = LAYOUTS[layout]
    values, logits, best, score = reference(whole_run, 0, 1, None, tmp_path / "one")
    found = run_ranks(whole_run, world_size, degrees, tmp_path / "pp", init_process_group=False)
    for rank, (own_values, own_logits, own_best, own_score) in enumerate(found):
        for own, wanted in zip(own_values, values, strict=True):
            assert_values(own, wanted)
        assert own_best == best
        assert own_score == pytest.approx(score, rel=1e-6)
        if rank == 0:
            torch.testing.assert_close(own_logits, logits, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("layout", ["pp2 1F1B", "pp2 x fsdp2"])
def test_several_loaders(layout: str) -> None:
    class Several(Net):
        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            logits = self.model(batch["x"])
            self.log("loss", F.cross_entropy(logits, batch["y"]))
            self.log("seen", len(logits), reduce_fx="sum")

        def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
            return super().predict_step(batch, batch_idx)

    def run(rank: int, world_size: int, degrees: dict[str, Any] | None) -> Any:
        trainer, module = start(world_size, degrees), Several()
        logged = trainer.validate(module, [samples(n, 2) for n in (10, 3, 1)], verbose=False)
        rows: Any = trainer.predict(module, [samples(n, 2) for n in (10, 3, 1)])
        return logged, [[i for row in loader for i in row["index"].tolist()] for loader in rows]

    world_size, degrees = LAYOUTS[layout]
    expected, order = reference(run, 0, 1, None)
    for rank, (logged, indices) in enumerate(run_ranks(run, world_size, degrees, init_process_group=False)):
        for own, wanted in zip(logged, expected, strict=True):
            assert_values(own, wanted)
        if rank == 0:
            assert indices == order == [list(range(n)) for n in (10, 3, 1)]


class Writes(BasePredictionWriter):
    def __init__(self) -> None:
        super().__init__("batch_and_epoch")
        self.batches: list[int] = []
        self.epoch: list[int] = []

    def write_on_batch_end(
        self, trainer: Any, pl_module: Any, prediction: Any, batch_indices: Any, *_: Any
    ) -> None:
        if batch_indices:
            assert prediction["index"].tolist() == list(batch_indices)
        self.batches += batch_indices

    def write_on_epoch_end(self, trainer: Any, pl_module: Any, predictions: Any, batch_indices: Any) -> None:
        for row, indices in zip(predictions, batch_indices[0], strict=True):
            assert not indices or row["index"].tolist() == list(indices)
            self.epoch += indices


@pytest.mark.parametrize("layout", LAYOUTS)
def test_writers_get_each_sample_on_one_data_rank(layout: str) -> None:
    def run(rank: int, world_size: int, degrees: dict[str, Any]) -> Any:
        writer = Writes()
        trainer = start(world_size, degrees, callbacks=[writer])
        assert trainer.predict(Net(), samples(10, 4), return_predictions=False) is None
        return writer.batches, writer.epoch

    world_size, degrees = LAYOUTS[layout]
    found = run_ranks(run, world_size, degrees, init_process_group=False)
    half = world_size // 2
    assert found[:half] == found[half:]  # both stages
    for kind in (0, 1):
        assert sorted(i for item in found[:half] for i in item[kind]) == list(range(10))


# ---------------------------------------------------------------- evaluation changes nothing of training


class Noisy(Net):
    """Draws random numbers in training, in evaluation and in hooks around it."""

    def __init__(self) -> None:
        super().__init__(dropout=0.5)
        self.modes: list[bool] = []
        self.draws: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.modes.append(self.model.training and torch.is_grad_enabled())
        return super().training_step(batch, batch_idx) * torch.rand(())

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.modes.append(not self.model.training and not torch.is_grad_enabled())
        torch.rand(5)
        torch.manual_seed(batch_idx)
        super().validation_step(batch, batch_idx)

    def on_validation_epoch_end(self) -> None:
        torch.rand(3)

    def on_train_batch_end(self, *_: Any) -> None:
        self.draws.append(float(torch.rand(())))


EVALUATIONS: dict[str, dict[str, Any]] = {
    "each epoch": {},
    "sanity check": {"num_sanity_val_steps": 2},
    "inside of a window": {"val_check_interval": 1, "num_sanity_val_steps": -1},
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_training_with_and_without_evaluation_is_bitwise_equal(layout: str) -> None:
    world_size, degrees = LAYOUTS[layout]
    dp_size = world_size // degrees["pp"]

    def train(world_size: int, evaluate: bool, **options: Any) -> Any:
        trainer = start(world_size, degrees, max_epochs=2, accumulate_grad_batches=2, **options)
        module = Noisy()
        training = samples(12, 4 // dp_size, shuffle=True)
        trainer.fit(module, training, samples(5, 2) if evaluate else None)
        assert all(module.modes) and module.training
        return own_weights(module), module.draws

    def run(rank: int, world_size: int) -> Any:
        without = train(world_size, False)
        return without, {name: train(world_size, True, **options) for name, options in EVALUATIONS.items()}

    for (weights, draws), found in run_ranks(run, world_size, init_process_group=False):
        for name, (own, own_draws) in found.items():
            assert own_draws == draws, name
            for key, weight in weights.items():
                assert torch.equal(own[key], weight), f"{key} with evaluation: {name}"


def test_the_batches_of_a_sanity_check_do_not_count() -> None:
    class Counts(Net):
        def __init__(self) -> None:
            super().__init__()
            self.rows = MeanMetric()

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.model(batch["x"])
            self.rows.update(batch["index"].double())
            self.log("seen", float(len(batch["x"])), reduce_fx="sum")
            self.log("rows", self.rows, on_epoch=True)

    def run(rank: int, world_size: int) -> Any:
        trainer, module = start(world_size, PP2, num_sanity_val_steps=1), Counts()
        trainer.fit(module, samples(8, 4), samples(10, 4))
        return float(trainer.callback_metrics["seen"]), float(trainer.callback_metrics["rows"])

    assert run_ranks(run, 2, init_process_group=False) == [(10.0, 4.5)] * 2

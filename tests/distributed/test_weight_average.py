"""The average of the weights is that of one process under every layout, and leaves training alone."""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback, ModelCheckpoint, ThroughputMonitor
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.utils.data import DataLoader

from tests.distributed.case import Case, Rows, build_model, build_trainer, whole
from tests.harness import reference, run_ranks
from titanplug import TitanStrategy
from titanplug.callbacks import WeightAverage
from titanplug.checkpoint.weights import consolidate
from titanplug.parallel.fsdp import free_gathered
from titanplug.parallel.gradients import local_tensor

CASE = Case(num_rows=48, accumulate=2)  # 3 steps an epoch of 6 batches
EPOCHS = 3
PIPELINE: dict[str, Any] = {"pp": 2, "pp_microbatches": 2, "pp_schedule": "1F1B"}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "1 process": (1, {}),
    "fsdp2": (2, {"dp_shard": 2}),
    "tp2": (2, {"tp": 2}),
    "pp2": (2, PIPELINE),
    "fsdp2 x tp2": (4, {"dp_shard": 2, "tp": 2}),
    "pp2 x fsdp2": (4, {**PIPELINE, "dp_shard": 2}),
    "hsdp 2x2": (4, {"dp_replicate": 2, "dp_shard": 2}),
}
AVERAGES: dict[str, dict[str, Any]] = {
    "ema": {"decay": 0.8},
    "equal": {"decay": None, "start_step": 2, "every_n_steps": 2},  # after steps 4, 6, 8
}


class Module(L.LightningModule):
    """The common model with momentum."""

    def __init__(self, case: Case = CASE) -> None:
        super().__init__()
        self.model = build_model(case)

    def _loss(self, batch: dict[str, Tensor]) -> Tensor:
        return F.cross_entropy(self.model(batch["input_ids"]).flatten(0, 1), batch["labels"].flatten())

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return self._loss(batch)

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.log("val_loss", self._loss(batch))

    def predict_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        logits: Tensor = self.model(batch["input_ids"])
        return logits

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.5, momentum=0.9)


# --------------------------------------------------------------------------------------
# By hand
# --------------------------------------------------------------------------------------


def train_by_hand(averages: dict[str, Any], case: Case = CASE, epochs: int = EPOCHS) -> dict[str, Any]:
    """A plain loop on one process. Its weights and their average at the end, losses of the average."""
    model, rows = build_model(case), Rows(case)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    average = build_model(case)
    decay, start, every = averages["decay"], averages.get("start_step", 0), averages.get("every_n_steps", 1)
    num_updates = step = 0
    losses = []
    for _ in range(epochs):
        for index in torch.arange(case.num_rows).split(case.global_batch * case.accumulate):
            optimizer.zero_grad()
            loss_by_hand(model, rows, index).backward()
            optimizer.step()
            step += 1
            if step <= start or (step - start) % every:
                continue
            keep = num_updates / (num_updates + 1) if decay is None else decay if num_updates else 0.0
            with torch.no_grad():
                for mean, weight in zip(average.parameters(), model.parameters(), strict=True):
                    mean.copy_(keep * mean + (1 - keep) * weight)
            num_updates += 1
        evaluated = average if num_updates else model
        with torch.no_grad():
            losses.append(float(loss_by_hand(evaluated, rows, torch.arange(case.num_rows))))
    with torch.no_grad():
        logits = average(rows.tokens[:, :-1])
    weights = {f"model.{name}": whole(p) for name, p in model.named_parameters()}
    means = {f"model.{name}": whole(p) for name, p in average.named_parameters()}
    return {"weights": weights, "average": means, "losses": losses, "logits": logits}


def loss_by_hand(model: Any, rows: Rows, index: Tensor) -> Tensor:
    return F.cross_entropy(model(rows.tokens[index, :-1]).flatten(0, 1), rows.labels[index].flatten())


def assert_close(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    for name, weight in expected.items():
        error = float((found[name] - weight).abs().max() / weight.abs().max())
        assert error < 1e-12, f"{name}: {error:.2e}"


def joined(results: list[Any], key: str, tied: bool = False) -> dict[str, Tensor]:
    """Parameters by name of all ranks, which hold the same numbers where several hold one."""
    merged: dict[str, Tensor] = {}
    for result in results:
        for own, weight in result[key].items():
            # The head of tied embeddings goes by its own name where the embeddings are on another stage.
            name = "model.tok_embeddings.weight" if tied and own == "model.output.weight" else own
            assert name not in merged or torch.equal(merged[name], weight), name
            merged[name] = weight
    return merged


# --------------------------------------------------------------------------------------
# Under a layout
# --------------------------------------------------------------------------------------


class Before(Callback):
    """This rank's shards at the start of each evaluation; stands before the average in the list."""

    def __init__(self) -> None:
        self.seen: list[list[Tensor]] = []
        self.losses: list[float] = []

    def look(self, trainer: Any, pl_module: Any) -> None:
        # Without an average what an evaluation gathered is still there.
        free_gathered([child for child in pl_module.modules() if isinstance(child, FSDPModule)])
        self.seen.append([local_tensor(p).detach().clone() for p in pl_module.parameters()])

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        self.look(trainer, pl_module)

    on_predict_start = on_validation_start


class After(Before):
    """The same when it has ended; stands after the average in the list."""

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        pass

    on_predict_start = on_validation_start

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        self.look(trainer, pl_module)
        self.losses.append(float(trainer.callback_metrics["val_loss"]))

    def on_predict_end(self, trainer: Any, pl_module: Any) -> None:
        self.look(trainer, pl_module)


def loader(strategy: TitanStrategy, world_size: int, case: Case = CASE) -> DataLoader[Any]:
    dims = strategy.parallel_dims.resolve(world_size)
    return DataLoader(Rows(case), batch_size=case.global_batch // dims.size("batch"))


def train(
    rank: int,
    world_size: int,
    degrees: dict[str, Any],
    *callbacks: Callback,
    case: Case = CASE,
    ckpt_path: Path | None = None,
    validate: bool = True,
    **options: Any,
) -> tuple[L.Trainer, Module]:
    L.seed_everything(7, verbose=False)
    strategy = TitanStrategy(**degrees)
    settings: dict[str, Any] = {"max_epochs": EPOCHS, "accumulate_grad_batches": case.accumulate}
    trainer = build_trainer(world_size, strategy, callbacks=list(callbacks), **settings | options)
    module = Module(case)
    data = loader(strategy, world_size, case)
    trainer.fit(module, data, data if validate else None, ckpt_path=ckpt_path)
    return trainer, module


def weights_of(module: Module) -> dict[str, Tensor]:
    return {name: whole(p) for name, p in module.named_parameters()}


def train_and_evaluate(rank: int, world_size: int, degrees: dict[str, Any], averages: dict[str, Any]) -> Any:
    """Evaluations in and after a training that keeps its weights, then one that leaves the average."""
    before, after = Before(), After()
    average = WeightAverage(**averages, use_at_end=False)
    trainer, module = train(rank, world_size, degrees, before, average, after)
    weights = weights_of(module)
    logits: Any = trainer.predict(module, loader(trainer.strategy, world_size))  # type: ignore[arg-type]
    untouched = len(before.seen) == len(after.seen) == EPOCHS + 1 and all(
        torch.equal(a, b)
        for one, other in zip(before.seen, after.seen, strict=True)
        for a, b in zip(one, other, strict=True)
    )
    _, ended = train(rank, world_size, degrees, WeightAverage(**averages))
    return {
        "weights": weights,
        "average": weights_of(ended),
        "losses": after.losses,
        "logits": torch.cat(logits) if rank == 0 else None,
        "untouched": untouched,
    }


@pytest.mark.parametrize(
    ("layout", "averages"),
    [
        *((layout, "ema") for layout in LAYOUTS),
        ("fsdp2", "equal"),
        ("fsdp2 x tp2", "equal"),
        ("pp2", "equal"),
    ],
)
def test_is_that_of_one_process(layout: str, averages: str) -> None:
    world_size, degrees = LAYOUTS[layout]
    expected = reference(train_by_hand, AVERAGES[averages])
    results = run_ranks(train_and_evaluate, world_size, degrees, AVERAGES[averages], init_process_group=False)
    assert_close(joined(results, "weights"), expected["weights"])
    assert_close(joined(results, "average"), expected["average"])
    name = "model.layers.1.attention.wq.weight"
    apart = (expected["weights"][name] - expected["average"][name]).abs().max()
    assert apart > 1e-3, "the average can't be told from the weights"
    for result in results:
        assert result["untouched"]
        # Lightning keeps logged values in the default dtype, float32 here.
        assert result["losses"] == pytest.approx(expected["losses"], rel=1e-6)
    torch.testing.assert_close(results[0]["logits"], expected["logits"], rtol=1e-11, atol=1e-11)


# --------------------------------------------------------------------------------------
# Weights that somebody has gathered
# --------------------------------------------------------------------------------------


class Forward(Module):
    """Can be called outside of a step, which leaves the weights of the root gathered."""

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.model(tokens)
        return logits


class Calls(Callback):
    """Calls the module before everything that the average does, and after."""

    def __init__(self, *hooks: str) -> None:
        self.outputs: list[float] = []
        for hook in hooks:
            setattr(self, hook, self.call)

    @torch.no_grad()
    def call(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        tokens = Rows(CASE).tokens[:2, :-1]
        self.outputs.append(float(pl_module(tokens).square().sum()))


def train_with_calls(rank: int, world_size: int, averages: bool) -> Any:
    L.seed_everything(7, verbose=False)
    strategy, after = TitanStrategy(dp_shard=2), Calls("on_validation_end", "on_train_batch_start")
    callbacks: list[Callback] = [Calls("on_train_batch_end", "on_validation_start"), after]
    if averages:
        callbacks.insert(1, WeightAverage(0.8))
    options: dict[str, Any] = {"max_epochs": 2, "val_check_interval": 2}
    trainer, module = build_trainer(world_size, strategy, callbacks=callbacks, **options), Forward()
    trainer.fit(module, loader(strategy, world_size), loader(strategy, world_size))
    return after.outputs, float(trainer.callback_metrics["val_loss"]), weights_of(module)


def test_weights_that_are_gathered_already_are_not_used_for_others() -> None:
    def run(rank: int, world_size: int) -> Any:
        return train_with_calls(rank, world_size, False), train_with_calls(rank, world_size, True)

    for (outputs, loss, weights), (found, own_loss, average) in run_ranks(run, 2, init_process_group=False):
        assert found == outputs  # training weights, also right after an evaluation
        assert abs(own_loss - loss) > 1e-4  # the evaluation itself used the average
        assert not torch.equal(weights["model.output.weight"], average["model.output.weight"])


# --------------------------------------------------------------------------------------
# Checkpoints
# --------------------------------------------------------------------------------------


def saved_run(rank: int, world_size: int, degrees: dict[str, Any], folder: Path, case: Case) -> Any:
    saves = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=4, save_top_k=-1)
    options: dict[str, Any] = {"case": case, "enable_checkpointing": True}
    _, module = train(rank, world_size, degrees, WeightAverage(0.8), saves, **options)
    return {"average": weights_of(module)}


def resumed_run(rank: int, world_size: int, degrees: dict[str, Any], path: Path, case: Case) -> Any:
    _, module = train(rank, world_size, degrees, WeightAverage(0.8), case=case, ckpt_path=path)
    return {"average": weights_of(module)}


@pytest.mark.parametrize(
    ("written", "read", "tied"),
    [
        ("fsdp2", "fsdp2", False),
        ("fsdp2", "tp2", False),
        ("fsdp2 x tp2", "1 process", False),
        ("1 process", "hsdp 2x2", True),
        ("fsdp2", "pp2", True),
        ("pp2", "pp2", True),
        ("pp2 x fsdp2", "fsdp2", False),
    ],
)
def test_a_resumed_run_continues_exactly(written: str, read: str, tied: bool, tmp_path: Path) -> None:
    case = replace(CASE, tied=tied)
    world_size, degrees = LAYOUTS[written]
    results = run_ranks(saved_run, world_size, degrees, tmp_path, case, init_process_group=False)
    expected = joined(results, "average", tied)
    path = tmp_path / "step=4.ckpt"  # in the middle of an epoch
    world_size, degrees = LAYOUTS[read]
    results = run_ranks(resumed_run, world_size, degrees, path, case, init_process_group=False)
    found = joined(results, "average", tied)
    assert found.keys() == expected.keys()
    assert_close(found, expected)
    if written == read:
        assert all(torch.equal(found[name], weight) for name, weight in expected.items())


def test_a_checkpoint_is_evaluated_by_its_average(tmp_path: Path) -> None:
    """In a process that hasn't trained, from the directory and from the file of it."""
    world_size, degrees = LAYOUTS["fsdp2"]
    expected = reference(train_by_hand, AVERAGES["ema"], CASE, 2)  # 6 steps

    def save(rank: int, world_size: int) -> None:
        last = ModelCheckpoint(tmp_path, save_last=True, save_top_k=0, every_n_epochs=1)
        options: dict[str, Any] = {"max_epochs": 2, "enable_checkpointing": True}
        train(rank, world_size, degrees, WeightAverage(0.8), last, **options)

    def evaluate(rank: int, world_size: int, path: Path, degrees: dict[str, Any]) -> Any:
        strategy = TitanStrategy(**degrees)
        trainer, module = build_trainer(world_size, strategy, callbacks=[WeightAverage(0.8)]), Module()
        data: Any = loader(strategy, world_size)
        logits: Any = trainer.predict(module, data, ckpt_path=path)
        return torch.cat(logits) if rank == 0 else None

    run_ranks(save, world_size, init_process_group=False)
    path = tmp_path / "last.ckpt"
    file = consolidate(path, tmp_path / "file.ckpt")
    for saved, layout in ((path, "tp2"), (file, "fsdp2")):
        world_size, degrees = LAYOUTS[layout]
        [logits, _] = run_ranks(evaluate, world_size, saved, degrees, init_process_group=False)
        torch.testing.assert_close(logits, expected["logits"], rtol=1e-11, atol=1e-11)


# --------------------------------------------------------------------------------------
# Lightning's ThroughputMonitor
# --------------------------------------------------------------------------------------


def monitor(rank: int, world_size: int, degrees: dict[str, Any], folder: Path) -> None:
    strategy, now = TitanStrategy(**degrees), iter(range(1000))
    with pytest.MonkeyPatch.context() as patch:
        clock = SimpleNamespace(perf_counter=lambda: next(now))  # a second for each batch
        patch.setattr("lightning.pytorch.callbacks.throughput_monitor.time", clock)
        watch = ThroughputMonitor(batch_size_fn=lambda batch: len(batch["labels"]), window_size=2)
        logger = CSVLogger(folder, name=None, version="")
        trainer = build_trainer(world_size, strategy, callbacks=[watch], logger=logger)
        trainer.fit(Module(), loader(strategy, world_size))


@pytest.mark.parametrize("degrees", [{"dp_shard": 2, "tp": 2}, {"tp": 2}, {"dp_shard": 2}])
def test_throughput_counts_each_sample_once(degrees: dict[str, Any], tmp_path: Path) -> None:
    world_size = degrees.get("dp_shard", 1) * degrees.get("tp", 1)
    run_ranks(monitor, world_size, degrees, tmp_path, init_process_group=False)
    with (tmp_path / "metrics.csv").open() as file:
        lines = [line for line in csv.DictReader(file) if line["train/samples_per_sec"]]
    assert lines
    for line in lines:
        assert float(line["train/samples_per_sec"]) == CASE.global_batch
        assert float(line["train/device/samples_per_sec"]) == CASE.global_batch / world_size

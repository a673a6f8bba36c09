"""Every logged value is that of all ranks together, and decisions taken from values agree on all ranks."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import Logger
from torch import Tensor

from tests.distributed.case import build_trainer
from tests.distributed.tiny import DP2_TP2, DP4, Tiny, fit, numbered
from tests.harness import run_ranks
from titanplug import TitanStrategy

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one process": (1, {}),
    "dp2": (2, {}),
    "dp3": (3, {}),
    "dp2 x tp2": (4, DP2_TP2),
    "dp4": (4, DP4),
}


class Written(Logger):
    """Keeps what is written, by step."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[tuple[int, dict[str, float]]] = []

    @property
    def name(self) -> str:
        return "written"

    @property
    def version(self) -> str:
        return "0"

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        pass

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        values = {key: value for key, value in metrics.items() if key != "epoch"}
        if values:
            self.rows.append((step or 0, values))

    def of(self, key: str) -> list[float]:
        return [values[key] for _, values in self.rows if key in values]


# ---------------------------------------------------------------- arithmetic


class LogsEverything(Tiny):
    """Logs from steps and other hooks, with every reduction; ``x`` are indices."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.log("one", 1.0, on_step=True, on_epoch=True)
        self.log("whole_number", 1, on_epoch=True)
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log("seen", float(len(batch)), reduce_fx="sum", on_step=True, on_epoch=True)
        self.log_dict(
            {"largest": batch.max(), "largest_float": batch.max().double()},
            reduce_fx="max",
            on_step=True,
            on_epoch=True,
        )
        self.log("smallest", batch.min(), reduce_fx=torch.min, on_step=True, on_epoch=True)
        self.log("mean", batch.double().mean(), on_step=False, on_epoch=True)
        self.log("weighted", batch.double().mean(), on_epoch=True, batch_size=2 * len(batch))
        return loss

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.log("from_a_hook", self.read[-1][-1][0] / 1, reduce_fx="max")

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.log("after", batch.double().mean(), on_step=True, on_epoch=True)

    def on_train_epoch_end(self) -> None:
        strategy: Any = self.trainer.strategy
        self.log("at_the_end", float(strategy.dp_rank), reduce_fx="max")

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val_one", 1.0)
        self.log("val_step", batch.double().mean(), on_step=True, on_epoch=True)
        self.log("val_seen", len(batch), reduce_fx="sum")
        self.log("val_largest", batch.max(), reduce_fx="max")

    def on_validation_batch_end(self, outputs: Any, batch: Any, *args: Any) -> None:
        self.log("val_after", batch.double().mean())
        self.log("val_after_seen", float(len(batch)), reduce_fx="sum")


class LogsToo(Callback):
    log: Any  # set by Lightning

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, *_: Any) -> None:
        self.log("of_callback", batch.double().mean(), on_step=False, on_epoch=True)


def _log_everything(
    rank: int, world_size: int, degrees: dict[str, Any], num_samples: int, batch_size: int, **options: Any
) -> tuple[list[Any], dict[str, float]]:
    written = Written()
    L.seed_everything(7, verbose=False)
    trainer = build_trainer(
        world_size, TitanStrategy(**degrees), logger=written, callbacks=[LogsToo()], **options
    )
    loader = numbered(num_samples, batch_size=batch_size)
    trainer.fit(LogsEverything(), loader(), loader())
    return written.rows, {key: float(value) for key, value in trainer.callback_metrics.items()}


def _expected(num_samples: int, global_batch: int, eval_batch: int) -> tuple[list[Any], dict[str, float]]:
    """By hand: what each step of all samples together logs, and the epoch."""
    steps = [part.double() for part in torch.arange(num_samples).split(global_batch)]
    everything = torch.arange(num_samples).double()
    by_step = [
        {
            "one_step": 1.0,
            "seen_step": float(len(x)),
            "largest_step": float(x.max()),
            "largest_float_step": float(x.max()),
            "smallest_step": float(x.min()),
            "after_step": float(x.mean()),
        }
        for x in steps
    ]
    epoch = {
        "one_epoch": 1.0,
        "whole_number_epoch": 1.0,
        "seen_epoch": float(num_samples),
        "largest_epoch": float(everything.max()),
        "smallest_epoch": float(everything.min()),
        "mean": float(everything.mean()),
        "weighted_epoch": float(everything.mean()),
        "after_epoch": float(everything.mean()),
        "of_callback": float(everything.mean()),
        "val_one": 1.0,
        "val_step_epoch": float(everything.mean()),
        "val_seen": float(num_samples),
        "val_largest": float(everything.max()),
        "val_after": float(everything.mean()),
        "val_after_seen": float(num_samples),
    }
    return by_step, epoch


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_reduction(layout: str) -> None:
    world_size, degrees = LAYOUTS[layout]
    num_ranks = world_size // degrees.get("tp", 1)
    # The last batch holds 1 sample of 9: most ranks have none.
    by_step, epoch = _expected(9, 2 * num_ranks, 2)
    found = run_ranks(_log_everything, world_size, degrees, 9, 2, init_process_group=False)
    for _, values in found:
        for key, value in epoch.items():
            assert values[key] == pytest.approx(value, rel=1e-6), key
        for key in ("one_epoch", "whole_number_epoch", "val_one", "one_step"):
            assert values[key] == 1.0, key
        assert values["at_the_end"] == num_ranks - 1
    rows, _ = found[0]
    steps = [values for _, values in rows if "one_step" in values]
    assert len(steps) == len(by_step)
    for values, wanted in zip(steps, by_step, strict=True):
        for key, value in wanted.items():
            assert values[key] == pytest.approx(value, rel=1e-6), key


def test_a_constant_is_exactly_one_with_five_and_four_samples() -> None:
    for layout in ("dp2", "dp3"):
        world_size, degrees = LAYOUTS[layout]
        found = run_ranks(
            _log_everything, world_size, degrees, 5 * world_size - 1, 5, init_process_group=False
        )
        for _, values in found:
            assert values["one_epoch"] == values["one_step"] == values["val_one"] == 1.0


def test_samples_of_tensor_parallel_ranks_count_once() -> None:
    found = run_ranks(_log_everything, 4, DP2_TP2, 8, 2, init_process_group=False)
    for rows, values in found:
        assert values["seen_epoch"] == values["val_seen"] == 8.0
        assert [row["seen_step"] for _, row in rows if "seen_step" in row] == [4.0, 4.0]


def test_values_of_steps_are_exact_where_only_some_steps_are_written() -> None:
    def run(rank: int, world_size: int, degrees: Any, size: int) -> list[Any]:
        rows, _ = _log_everything(rank, world_size, degrees, 24, size, log_every_n_steps=3)
        return rows

    # Six steps of four samples; written are the third and the sixth.
    (one,) = run_ranks(run, 1, {}, 4, init_process_group=False)
    for rows in run_ranks(run, 4, DP2_TP2, 2, init_process_group=False):
        steps = [(step, row) for step, row in rows if "one_step" in row]
        wanted = [(step, row) for step, row in one if "one_step" in row]
        assert [step for step, _ in steps] == [step for step, _ in wanted] == [2, 5]
        for (_, row), (_, other) in zip(steps, wanted, strict=True):
            assert row.keys() == other.keys()
            for key in set(row) - {"from_a_hook"}:
                assert row[key] == pytest.approx(other[key], rel=1e-6), key


class LogsSeldom(Tiny):
    """Logs on steps that are not written; the value is written later."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        if batch_idx % 2 == 0:
            self.log("seldom", batch.double().mean(), on_step=True, on_epoch=False)
            self.log("shown", batch.double().mean(), on_step=True, on_epoch=False, prog_bar=True)
        return super().training_step(batch, batch_idx)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.read[-1].append([float(self.trainer.callback_metrics["shown"])])  # type: ignore[list-item]


def test_a_value_of_an_earlier_step_is_exact_when_it_is_written() -> None:
    def run(rank: int, world_size: int) -> Any:
        written = Written()
        module = fit(
            rank, world_size, {}, numbered(8, batch_size=1), LogsSeldom, logger=written, log_every_n_steps=4
        )
        return written.of("seldom"), module.read[0][1::2]

    for seldom, shown in run_ranks(run, 2, init_process_group=False):
        assert seldom == [4.5]  # of samples 4 and 5, in the third step
        # What the progress bar shows is exact at every step.
        assert [value[0] for value in shown] == [0.5, 0.5, 4.5, 4.5]


def test_never_writing_steps_is_allowed() -> None:
    def run(rank: int, world_size: int) -> list[float]:
        written = Written()
        fit(rank, world_size, {}, numbered(4, batch_size=1), LogsSeldom, logger=written, log_every_n_steps=0)
        return written.of("seldom")

    assert run_ranks(run, 2, init_process_group=False) == [[], []]


class Manual(Tiny):
    """Returns nothing from its step."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("seen", float(len(batch)), reduce_fx="sum", on_epoch=True, on_step=False)


def test_a_step_that_returns_nothing_logs_too() -> None:
    def run(rank: int, world_size: int) -> float:
        return float(
            fit(rank, world_size, {}, numbered(6, batch_size=1), Manual).trainer.callback_metrics["seen"]
        )

    assert run_ranks(run, 2, init_process_group=False) == [6.0, 6.0]


def test_log_is_lightnings_own_again_afterwards() -> None:
    def run(rank: int, world_size: int) -> list[str]:
        module = fit(rank, world_size, {}, numbered(4), LogsSeldom)
        changed = [name for name in vars(module.trainer._logger_connector) if "end" in name]
        return [*changed, *(name for name in vars(module) if name == "log")]

    assert run_ranks(run, 2, init_process_group=False) == [[], []]


# ---------------------------------------------------------------- the loss by targets


class ByTargets(Tiny):
    """Sample ``i`` has ``i`` targets, so the first has none."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        count = batch.sum()
        loss = (self.errors(batch) * batch).sum() / count
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log("detached", loss.detach(), on_step=True, on_epoch=True)
        self.log("mine", loss.detach() * 1, on_step=False, on_epoch=True, batch_size=int(count))
        return {"loss": loss, "num_targets": count}


def _by_targets(rank: int, world_size: int, degrees: Any, size: int) -> Any:
    written = Written()
    module = fit(rank, world_size, degrees, numbered(12, batch_size=size), ByTargets, logger=written)
    return written.rows, {k: float(v) for k, v in module.trainer.callback_metrics.items()}


@pytest.mark.parametrize("layout", ["dp2", "dp2 x tp2", "dp4"])
def test_the_logged_loss_is_the_mean_over_targets(layout: str) -> None:
    world_size, degrees = LAYOUTS[layout]
    num_ranks = world_size // degrees.get("tp", 1)
    ((expected, epoch),) = run_ranks(_by_targets, 1, {}, num_ranks, init_process_group=False)
    for rows, values in run_ranks(_by_targets, world_size, degrees, 1, init_process_group=False):
        assert len(rows) == len(expected)
        for (_, row), (_, wanted) in zip(rows, expected, strict=True):
            assert row == pytest.approx(wanted, rel=1e-6)
        for key in ("loss_epoch", "detached_epoch", "mine"):
            assert values[key] == pytest.approx(epoch["loss_epoch"], rel=1e-6)


class NoTargets(Tiny):
    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        count = 0 * batch.sum()
        loss = (self.errors(batch) * 0).sum() / count
        self.log("loss", loss, on_step=True, on_epoch=False)
        return {"loss": loss, "num_targets": count}


def test_the_loss_of_a_step_without_targets_is_written_as_zero() -> None:
    def run(rank: int, world_size: int) -> list[float]:
        written = Written()
        fit(rank, world_size, {}, numbered(4, batch_size=1), NoTargets, logger=written)
        return written.of("loss")

    for world_size in (1, 2):
        for losses in run_ranks(run, world_size, init_process_group=False):
            assert set(losses) == {0.0}

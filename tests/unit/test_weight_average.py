"""The average of the weights on one process; see tests/distributed/test_weight_average.py for layouts."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import (
    Callback,
    EMAWeightAveraging,
    ModelCheckpoint,
    StochasticWeightAveraging,
    ThroughputMonitor,
)
from lightning.pytorch.strategies import FSDPStrategy
from torch import Tensor, nn
from torch.utils.data import DataLoader

from titanplug.callbacks import WeightAverage
from titanplug.errors import ConfigError
from titanplug.strategy.foreign_callbacks import adapt_callbacks
from titanplug.strategy.refusals import validate_callbacks

ROWS = 12


class Tiny(L.LightningModule):
    """Trains ``first`` and ``second``; validation and prediction tell what weights they ran with."""

    def __init__(self, dtype: torch.dtype = torch.float64, frozen_until: int = 0) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.tensor([1.0, 2.0], dtype=dtype))
        self.second = nn.Parameter(torch.tensor([-0.5], dtype=dtype))
        self.frozen_until = frozen_until
        self.second.requires_grad_(not frozen_until)
        self.steps: list[dict[str, Tensor]] = []  # weights after each optimizer step
        self.validated: list[dict[str, Tensor]] = []

    def weights(self) -> dict[str, Tensor]:
        return {name: p.detach().clone() for name, p in self.named_parameters()}

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return ((self.first * batch.mean()).sum() + self.second.sum()).square()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.second.requires_grad_(self.trainer.global_step >= self.frozen_until)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.trainer.global_step > len(self.steps):
            self.steps.append(self.weights())

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        if batch_idx == 0:
            self.validated.append(self.weights())

    test_step = validation_step

    def predict_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.first.detach().clone()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05)


class Seeking(DataLoader[Any]):
    """Continues in the middle of an epoch, as titanplug's loaders do and Lightning's don't."""

    def state_dict(self) -> dict[str, Any]:
        return {"last": self.last}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.start = state["last"] + 1

    def __iter__(self) -> Any:
        start, self.start = getattr(self, "start", 0), 0
        for self.last, batch in enumerate(super().__iter__()):
            if self.last >= start:
                yield batch


def data() -> DataLoader[Any]:
    rows = torch.linspace(0.1, 1.2, ROWS, dtype=torch.float64)
    return Seeking(list(rows), batch_size=1)  # type: ignore[arg-type]


def trainer_with(path: Path, *callbacks: Callback, **options: Any) -> L.Trainer:
    quiet: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    saves = any(isinstance(callback, ModelCheckpoint) for callback in callbacks)
    return L.Trainer(
        **{
            "accelerator": "cpu",
            "devices": 1,
            "num_sanity_val_steps": 0,
            "max_epochs": 1,
            **quiet,
            **options,
        },
        callbacks=list(callbacks),
        default_root_dir=path,
        enable_checkpointing=saves,
    )


def averaged(steps: list[dict[str, Tensor]], decay: float | None) -> dict[str, Tensor]:
    """The average by hand."""
    result = dict(steps[0])
    for number, weights in enumerate(steps[1:], start=1):
        keep = number / (number + 1) if decay is None else decay
        result = {name: keep * result[name] + (1 - keep) * weights[name] for name in weights}
    return result


def assert_close(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)


def assert_bitwise(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


# --------------------------------------------------------------------------------------
# The average
# --------------------------------------------------------------------------------------


@pytest.mark.parametrize("decay", [0.9, None])
@pytest.mark.parametrize(
    ("options", "steps"),
    [
        ({}, range(1, 13)),
        ({"start_step": 5}, range(6, 13)),
        ({"every_n_steps": 4}, [4, 8, 12]),
        ({"start_step": 3, "every_n_steps": 4}, [7, 11]),
    ],
)
def test_the_module_holds_the_average_at_the_end(
    tmp_path: Path, decay: float | None, options: dict[str, Any], steps: Any
) -> None:
    module = Tiny()
    trainer_with(tmp_path, WeightAverage(decay, **options)).fit(module, data())
    expected = averaged([module.steps[step - 1] for step in steps], decay)
    assert_close(module.weights(), expected)
    assert not torch.allclose(module.first, module.steps[-1]["first"])


def test_updates_come_after_optimizer_steps_not_batches(tmp_path: Path) -> None:
    module = Tiny()
    trainer_with(tmp_path, WeightAverage(0.9), accumulate_grad_batches=5).fit(module, data())
    assert len(module.steps) == 3  # 5, 5 and 2 batches
    assert_close(module.weights(), averaged(module.steps, 0.9))


class TwoOptimizers(Tiny):
    """Two steps a batch, so that some step numbers never stand at a batch's end."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Tensor, batch_idx: int) -> None:  # type: ignore[override]
        for optimizer in self.optimizers():  # type: ignore[union-attr]
            optimizer.zero_grad()
            self.manual_backward(super().training_step(batch, batch_idx))
            optimizer.step()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.steps.append(self.weights())

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD([p], lr=0.05) for p in self.parameters()]


def test_steps_of_several_optimizers_are_counted(tmp_path: Path) -> None:
    module = TwoOptimizers()
    trainer_with(tmp_path, WeightAverage(0.9, every_n_steps=3), limit_train_batches=6).fit(module, data())
    # Step 3 is over with batch 2, 6 with 3, 9 with 5, 12 with 6.
    assert_close(module.weights(), averaged([module.steps[i] for i in (1, 2, 4, 5)], 0.9))


def test_a_parameter_that_is_unfrozen_later_joins(tmp_path: Path) -> None:
    module = Tiny(frozen_until=4)
    trainer_with(tmp_path, WeightAverage(0.9)).fit(module, data())
    assert torch.equal(module.steps[3]["second"], torch.tensor([-0.5], dtype=torch.float64))
    assert_close(
        module.weights(),
        {
            "first": averaged(module.steps, 0.9)["first"],
            "second": averaged(module.steps[4:], 0.9)["second"],
        },
    )


def test_weights_of_16_bits_are_averaged_in_float32(tmp_path: Path) -> None:
    module, average = Tiny(torch.bfloat16), WeightAverage(0.999)
    trainer_with(tmp_path, average, use_distributed_sampler=False).fit(module, data())
    exact = averaged([{n: w.double() for n, w in step.items()} for step in module.steps], 0.999)
    assert module.first.dtype == torch.bfloat16
    assert torch.equal(module.first, exact["first"].bfloat16())
    assert not torch.equal(module.first, averaged(module.steps, 0.999)["first"])


# --------------------------------------------------------------------------------------
# Evaluation
# --------------------------------------------------------------------------------------


class Around(Callback):
    """Weights right before and after each evaluation, if put around the average in the list."""

    def __init__(self) -> None:
        self.seen: list[dict[str, Tensor]] = []

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        self.seen.append(pl_module.weights())

    on_test_start = on_predict_start = on_validation_start


class After(Around):
    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        pass

    on_test_start = on_predict_start = on_validation_start

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        self.seen.append(pl_module.weights())

    on_test_end = on_predict_end = on_validation_end


def test_evaluation_uses_the_average_and_leaves_no_trace(tmp_path: Path) -> None:
    plain, module, before, after = Tiny(), Tiny(), Around(), After()
    options: dict[str, Any] = {"val_check_interval": 3, "accumulate_grad_batches": 2}
    trainer_with(tmp_path, **options).fit(plain, data(), data())
    average = WeightAverage(None, start_step=1, use_at_end=False)
    trainer = trainer_with(tmp_path, before, average, after, num_sanity_val_steps=2, **options)
    trainer.fit(module, data(), data())
    # After batches 3, 6, 9 and 12: steps 1 (nothing averaged yet), 3, 4 and 6.
    assert_bitwise(module.validated[0], Tiny().weights())  # the sanity check
    assert_bitwise(module.validated[1], plain.steps[0])
    for found, steps in zip(module.validated[2:], (3, 4, 6), strict=True):
        assert_close(found, averaged(plain.steps[1:steps], None))
    assert len(before.seen) == len(after.seen) == 5
    for one, other in zip(before.seen, after.seen, strict=True):
        assert_bitwise(one, other)
    assert_bitwise(module.weights(), plain.weights())

    expected = averaged(plain.steps[1:], None)
    trainer.test(module, data(), verbose=False)
    assert_close(module.validated[-1], expected)
    assert_bitwise(module.weights(), plain.weights())
    assert_close({"first": trainer.predict(module, data())[0]}, {"first": expected["first"]})  # type: ignore
    assert_bitwise(module.weights(), plain.weights())
    stranger = Tiny()
    trainer.validate(stranger, data(), verbose=False)
    assert_bitwise(stranger.validated[0], Tiny().weights())  # it's not of this module


def test_it_can_be_left_out_of_evaluation(tmp_path: Path) -> None:
    module = Tiny()
    trainer_with(tmp_path, WeightAverage(0.5, use_for_evaluation=False)).fit(module, data(), data())
    assert_bitwise(module.validated[0], module.steps[-1])
    assert_close(module.weights(), averaged(module.steps, 0.5))


class Interrupted(Tiny):
    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        raise RuntimeError("in the middle")


def test_an_evaluation_that_fails_leaves_the_training_weights(tmp_path: Path) -> None:
    module = Interrupted()
    with pytest.raises(RuntimeError, match="in the middle"):
        trainer_with(tmp_path, WeightAverage(0.5)).fit(module, data(), data())
    assert_close(module.validated[0], averaged(module.steps, 0.5))
    assert_bitwise(module.weights(), module.steps[-1])


# --------------------------------------------------------------------------------------
# Checkpoints
# --------------------------------------------------------------------------------------


@pytest.mark.parametrize("decay", [0.9, None])
def test_a_resumed_run_continues_exactly(tmp_path: Path, decay: float | None) -> None:
    saves = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=5, save_top_k=-1)
    whole = Tiny()
    options: dict[str, Any] = {"decay": decay, "start_step": 1, "every_n_steps": 2}
    trainer_with(tmp_path, WeightAverage(**options), saves, max_epochs=2).fit(whole, data())
    for step in (5, 15):
        saved = torch.load(tmp_path / f"step={step}.ckpt", weights_only=True)
        assert_bitwise(saved["state_dict"], whole.steps[step - 1])  # not the average
        resumed = Tiny()
        trainer_with(tmp_path, WeightAverage(**options), max_epochs=2).fit(
            resumed, data(), ckpt_path=tmp_path / f"step={step}.ckpt"
        )
        assert_bitwise(resumed.weights(), whole.weights())


def test_the_last_checkpoint_of_a_training_holds_its_weights(tmp_path: Path) -> None:
    module = Tiny()
    saves = ModelCheckpoint(tmp_path, every_n_train_steps=12, save_last=True)
    late = ModelCheckpoint(tmp_path / "late", save_top_k=0, save_last=True, every_n_epochs=5)
    trainer_with(tmp_path, WeightAverage(0.5), saves, late).fit(module, data())
    assert_close(module.weights(), averaged(module.steps, 0.5))
    found = [torch.load(path, weights_only=True) for path in tmp_path.rglob("last.ckpt")]
    assert len(found) == 2
    for saved in found:
        assert_bitwise(saved["state_dict"], module.steps[-1])
        assert_close(saved["parameter_like"]["WeightAverage"], averaged(module.steps, 0.5))


class SavesBy(Callback):
    """Saves a checkpoint in a hook of its own."""

    def __init__(self, hook: str, path: Path) -> None:
        setattr(self, hook, lambda trainer, *_: trainer.save_checkpoint(path))


def test_a_checkpoint_from_the_middle_of_an_evaluation_holds_the_training_weights(tmp_path: Path) -> None:
    module, path = Tiny(), tmp_path / "a.ckpt"
    saves = SavesBy("on_validation_epoch_end", path)
    trainer_with(tmp_path, WeightAverage(0.5), saves).fit(module, data(), data())
    saved = torch.load(path, weights_only=True)
    assert_bitwise(saved["state_dict"], module.steps[-1])
    assert_close(saved["parameter_like"]["WeightAverage"], averaged(module.steps, 0.5))


def test_a_checkpoint_from_before_the_update_gets_it_when_loaded(tmp_path: Path) -> None:
    class Early(Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            if trainer.global_step == 5:
                trainer.save_checkpoint(tmp_path / "a.ckpt")

    whole, resumed = Tiny(), Tiny()
    trainer_with(tmp_path, Early(), WeightAverage(0.9)).fit(whole, data())
    trainer_with(tmp_path, WeightAverage(0.9)).fit(resumed, data(), ckpt_path=tmp_path / "a.ckpt")
    assert_bitwise(resumed.weights(), whole.weights())


def test_a_new_run_begins_anew(tmp_path: Path) -> None:
    first, second = Tiny(), Tiny()
    trainer = trainer_with(tmp_path, WeightAverage(0.5, use_at_end=False))
    trainer.fit(first, data())
    trainer.fit_loop.max_epochs = 2
    trainer.fit(second, data(), data())
    assert len(second.steps) == ROWS
    assert_close(second.validated[0], averaged(second.steps, 0.5))


def test_what_a_checkpoint_holds_is_what_is_tested(tmp_path: Path) -> None:
    """Its average, and where it holds none, its weights; never the average of another run."""
    whole, plain = tmp_path / "whole.ckpt", tmp_path / "plain.ckpt"

    class Saves(Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            if trainer.global_step == 4:
                trainer.save_checkpoint(whole)
                trainer.save_checkpoint(plain, weights_only=True)

    module = Tiny()
    trainer = trainer_with(tmp_path, WeightAverage(0.5, use_at_end=False), Saves())
    trainer.fit(module, data())
    for tester, tested in ((trainer, module), (trainer_with(tmp_path, WeightAverage(0.5)), Tiny())):
        tester.test(tested, data(), ckpt_path=plain, verbose=False)
        assert_bitwise(tested.validated[-1], module.steps[3])
        tester.test(tested, data(), ckpt_path=whole, verbose=False)
        assert_close(tested.validated[-1], averaged(module.steps[:4], 0.5))
        assert_bitwise(tested.weights(), module.steps[3])


def test_an_average_that_is_missing_is_told(tmp_path: Path) -> None:
    module, path = Tiny(), tmp_path / "a.ckpt"
    saves = SavesBy("on_train_epoch_end", path)
    trainer_with(tmp_path, WeightAverage(0.5), saves).fit(module, data())
    saved = torch.load(path, weights_only=True)
    del saved["parameter_like"]
    torch.save(saved, path)
    resumed = Tiny()
    with pytest.warns(UserWarning, match="tells of 12 updates .* doesn't hold these"):
        trainer_with(tmp_path, WeightAverage(0.5), max_epochs=2).fit(resumed, data(), ckpt_path=path)
    assert_close(resumed.weights(), averaged(resumed.steps, 0.5))


# --------------------------------------------------------------------------------------
# Refused
# --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "start"),
    [
        ({"decay": 0}, "decay=0: "),
        ({"decay": 1.0}, "decay=1.0: "),
        ({"decay": float("nan")}, "decay=nan: "),
        ({"start_step": -1}, "start_step=-1: "),
        ({"every_n_steps": 0}, "every_n_steps=0: "),
    ],
)
def test_bad_arguments(options: dict[str, Any], start: str) -> None:
    with pytest.raises(ConfigError) as caught:
        WeightAverage(**options)
    assert str(caught.value).startswith(start)


def test_all_bad_arguments_are_told_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        WeightAverage(decay=2, start_step=-1, every_n_steps=0)
    assert len(caught.value.problems) == 3


def test_strategies_whose_checkpoints_would_lose_it_are_refused() -> None:
    trainer: Any = SimpleNamespace(strategy=FSDPStrategy())
    with pytest.raises(ConfigError, match=r"WeightAverage under FSDPStrategy: .* Use TitanStrategy"):
        WeightAverage().setup(trainer, Tiny(), "fit")


@pytest.mark.parametrize(
    ("callback", "instead"),
    [
        (StochasticWeightAveraging(swa_lrs=0.1), "WeightAverage(decay=None, start_step=...)"),
        (EMAWeightAveraging(), "WeightAverage(decay=0.999)"),
    ],
)
def test_what_is_refused_on_several_ranks_names_it(callback: Callback, instead: str) -> None:
    trainer: Any = SimpleNamespace(world_size=2, callbacks=[callback])
    with pytest.raises(ConfigError, match=re.escape(f"Use titanplug.callbacks.{instead}")):
        validate_callbacks(trainer)


# --------------------------------------------------------------------------------------
# Lightning's ThroughputMonitor
# --------------------------------------------------------------------------------------


@contextlib.contextmanager
def monitored(world_size: int, data_ranks: int, window_size: int = 4) -> Iterator[Any]:
    monitor = ThroughputMonitor(batch_size_fn=len, window_size=window_size)
    trainer: Any = SimpleNamespace(
        world_size=world_size,
        callbacks=[monitor],
        precision_plugin=L.pytorch.plugins.Precision(),
        strategy=SimpleNamespace(root_device=torch.device("cpu")),
        enable_validation=True,
        state=SimpleNamespace(stage="train"),
    )
    monitor.setup(trainer, Tiny(), "fit")
    adapt_callbacks(trainer, data_ranks)
    adapt_callbacks(trainer, data_ranks)  # changes nothing more
    yield monitor


@pytest.mark.parametrize(("world_size", "data_ranks"), [(1, 1), (4, 4), (8, 2), (2, 1)])
def test_throughput_counts_samples_once(world_size: int, data_ranks: int) -> None:
    with monitored(world_size, data_ranks) as monitor:
        assert len(monitor._throughputs) == 2
        for throughput in monitor._throughputs.values():
            throughput.available_flops = 100.0
            for second in range(1, 5):  # a batch of 3 samples of 5 tokens a second
                throughput.update(
                    time=second, batches=second, samples=3 * second, lengths=15 * second, flops=60
                )
            found = throughput.compute()
    share = data_ranks / world_size
    expected = {"batches": 1.0, "samples": 3.0, "items": 15.0, "flops": 60.0}
    for name, rate in expected.items():
        assert found[f"device/{name}_per_sec"] == pytest.approx(rate * share)
        if world_size > 1:
            assert found[f"{name}_per_sec"] == pytest.approx(rate * data_ranks)
    assert found["device/mfu"] == pytest.approx(0.6 * share)
    assert (found["time"], found["batches"], found["samples"], found["lengths"]) == (4, 4, 12, 60)

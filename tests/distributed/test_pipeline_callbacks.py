"""Under pipeline parallel, callbacks, hooks and the Trainer's options do what they do on one process."""

from __future__ import annotations

import contextlib
import io
import os
import time
from pathlib import Path
from typing import Any, ClassVar

import lightning as L
import pytest
import torch
from lightning.pytorch import callbacks as lc
from torch import Tensor
from torch.optim.lr_scheduler import OneCycleLR, ReduceLROnPlateau

from tests.distributed.test_logging import Written
from tests.distributed.test_pipeline_evaluation import (
    LAYOUTS,
    PP2,
    Net,
    assert_values,
    assert_weights,
    own_weights,
    samples,
    start,
)
from tests.harness import reference, run_ranks
from titanplug.callbacks import GradientNorm

LENGTH, BATCH = 14, 4


def fit(world_size: int, degrees: dict[str, Any] | None, module: Net, **options: Any) -> L.Trainer:
    """Train on batches of four samples, the last of two, and validate."""
    dp_size = 1 if degrees is None else world_size // degrees["pp"]
    trainer = start(world_size, degrees, **{"max_epochs": 2, **options})
    trainer.fit(module, samples(LENGTH, BATCH // dp_size), samples(10, 4))
    return trainer


def values_of(trainer: L.Trainer) -> dict[str, float]:
    return {key: float(value) for key, value in trainer.callback_metrics.items()}


# ---------------------------------------------------------------- they decide


class Worsens(Net):
    """Is best after the third epoch, and again better after the sixth."""

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        loss = torch.nn.functional.cross_entropy(self.model(batch["x"]), batch["y"])
        self.log("val_loss", loss + [3, 2, 1, 2, 4, 0, 0][self.current_epoch], prog_bar=True)


def stop_early(rank: int, world_size: int, degrees: dict[str, Any] | None, folder: Path) -> Any:
    checkpoint = lc.ModelCheckpoint(folder, monitor="val_loss", save_top_k=2, filename="{epoch}")
    stop = lc.EarlyStopping("val_loss", patience=2)
    module = Worsens()
    trainer = fit(
        world_size, degrees, module, callbacks=[checkpoint, stop], max_epochs=7, enable_checkpointing=True
    )
    names = sorted(Path(path).name for path in checkpoint.best_k_models)
    decided = stop.stopped_epoch, trainer.current_epoch, Path(checkpoint.best_model_path).name, names
    return decided, float(checkpoint.best_model_score or 0), float(stop.best_score), own_weights(module)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_all_ranks_stop_early_and_keep_the_best_alike(layout: str, tmp_path: Path) -> None:
    world_size, degrees = LAYOUTS[layout]
    decided, *scores, weights = reference(stop_early, 0, 1, None, tmp_path / "one")
    found = run_ranks(stop_early, world_size, degrees, tmp_path / "pp", init_process_group=False)
    assert decided[0] == 4
    for own, *own_scores, _ in found:
        assert own == decided
        assert own_scores == pytest.approx(scores, rel=1e-6)
    assert_weights([result[-1] for result in found], weights)
    for folder in ("one", "pp"):
        assert sorted(path.name for path in (tmp_path / folder).iterdir()) == decided[-1]


def test_a_monitor_of_training_values(tmp_path: Path) -> None:
    """Each step's loss is watched, on steps that aren't logged, too."""

    def run(rank: int, world_size: int, degrees: dict[str, Any] | None, folder: Path) -> Any:
        checkpoint = lc.ModelCheckpoint(
            folder, monitor="train_loss", every_n_train_steps=1, save_top_k=2, filename="{step}"
        )
        options: dict[str, Any] = {"enable_checkpointing": True, "log_every_n_steps": 3}
        fit(world_size, degrees, Net(), callbacks=[checkpoint], limit_val_batches=0, **options)
        return sorted((Path(path).name, float(score)) for path, score in checkpoint.best_k_models.items())

    expected = reference(run, 0, 1, None, tmp_path / "one")
    for found in run_ranks(run, 2, PP2, tmp_path / "pp", init_process_group=False):
        assert [name for name, _ in found] == [name for name, _ in expected]
        assert [score for _, score in found] == pytest.approx([score for _, score in expected], rel=1e-6)


class WithScheduler(Net):
    kind = "plateau"

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        if self.kind == "plateau":
            # Each epoch is counted as no better.
            plateau = ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=10.0)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "val_loss"}}
        scheduler = OneCycleLR(optimizer, 0.2, total_steps=12)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


@pytest.mark.parametrize("kind", ["plateau", "one cycle"])
def test_schedulers_and_the_record_of_their_rates(kind: str) -> None:
    def run(rank: int, world_size: int, degrees: dict[str, Any] | None) -> Any:
        module, written = WithScheduler(), Written()
        module.kind = kind
        monitor = lc.LearningRateMonitor(log_momentum=True)
        fit(world_size, degrees, module, max_epochs=3, callbacks=[monitor], logger=written)
        return written.of("lr-SGD"), own_weights(module)

    rates, weights = reference(run, 0, 1, None)
    found = run_ranks(run, 2, PP2, init_process_group=False)
    assert len(set(rates)) > 2
    assert found[0][0] == pytest.approx(rates)
    assert_weights([own for _, own in found], weights)


# ---------------------------------------------------------------- they show


class Shown(Net):
    """Shows metrics that only the last stage updates."""

    def __init__(self) -> None:
        super().__init__()
        self.train_accuracy = self.accuracy.clone()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        logits = self.model(batch["x"])
        self.train_accuracy(logits, batch["y"])
        self.log("train_accuracy", self.train_accuracy, prog_bar=True, on_step=True, on_epoch=True)
        return torch.nn.functional.cross_entropy(logits, batch["y"])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        self.log("val_shown", self.accuracy, prog_bar=True, on_step=False, on_epoch=True)


def show(rank: int, world_size: int, kind: Any) -> str:
    text = io.StringIO()
    os.environ["COLUMNS"] = "300"
    with contextlib.redirect_stdout(text), contextlib.redirect_stderr(text):
        fit(world_size, PP2, Shown(), callbacks=[kind()], enable_progress_bar=True, max_epochs=1)
    return text.getvalue()


@pytest.mark.parametrize("kind", [lc.TQDMProgressBar, lc.RichProgressBar])
def test_a_progress_bar_on_the_first_rank(kind: Any) -> None:
    if kind is lc.RichProgressBar:
        pytest.importorskip("rich")
    first, second = run_ranks(show, 2, kind, init_process_group=False)
    for key in ("train_accuracy_step", "train_accuracy_epoch", "val_loss", "val_shown", "4/4"):
        assert key in first, key
    assert "val_loss" not in second


@pytest.mark.parametrize("layout", ["pp2 1F1B", "pp2 interleaved"])
def test_the_summary_shows_the_whole_model(layout: str) -> None:
    def run(rank: int, world_size: int, degrees: dict[str, Any] | None) -> Any:
        summary, module = lc.ModelSummary(max_depth=2), Net()
        seen: list[Any] = []
        summary.summarize = lambda *args, **kwargs: seen.append(args[:3])  # type: ignore[method-assign]
        fit(world_size, degrees, module, callbacks=[summary], fast_dev_run=True)
        return seen

    world_size, degrees = LAYOUTS[layout]
    total = sum(p.numel() for p in Net().parameters())
    expected = reference(run, 0, 1, None)
    first, second = run_ranks(run, world_size, degrees, init_process_group=False)
    assert second == []
    assert first == expected
    assert first[0][1:] == (total, total)


# ---------------------------------------------------------------- options of the Trainer

OPTIONS: dict[str, dict[str, Any]] = {
    "overfit_batches": {"overfit_batches": 2},
    "limit_train_batches": {"limit_train_batches": 0.5, "limit_val_batches": 1},
    "max_steps": {"max_steps": 5, "val_check_interval": 2},
    "accumulate_grad_batches": {"accumulate_grad_batches": 2, "limit_train_batches": 2},
    "profiler": {"profiler": "simple"},
    "detect_anomaly": {"detect_anomaly": True},
    "fast_dev_run": {"fast_dev_run": 2},
}


@pytest.mark.parametrize("options", OPTIONS)
def test_options_do_what_they_do_on_one_process(options: str) -> None:
    def run(rank: int, world_size: int, degrees: dict[str, Any] | None) -> Any:
        module = Net()
        trainer = fit(world_size, degrees, module, **OPTIONS[options])
        return trainer.global_step, trainer.current_epoch, values_of(trainer), own_weights(module)

    step, epoch, values, weights = reference(run, 0, 1, None)
    found = run_ranks(run, 2, PP2, init_process_group=False)
    for own_step, own_epoch, own_values, _ in found:
        assert (own_step, own_epoch) == (step, epoch)
        assert_values(own_values, values)
    assert_weights([own for *_, own in found], weights)


class SlowRank(lc.Callback):
    def on_train_batch_start(self, *_: Any) -> None:
        time.sleep(0.02 if torch.distributed.get_rank() else 0.0)


def test_all_ranks_stop_in_time() -> None:
    def run(rank: int, world_size: int) -> tuple[int, float]:
        begin = time.monotonic()
        limit = {"seconds": 1}
        trainer = fit(world_size, PP2, Net(), max_time=limit, max_epochs=-1, callbacks=[SlowRank()])
        return trainer.global_step, time.monotonic() - begin

    (first, elapsed), (second, _) = run_ranks(run, 2, init_process_group=False)
    assert first == second > 0
    assert elapsed >= 1


@pytest.mark.parametrize("layout", ["pp2 1F1B", "pp2 x fsdp2"])
@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
def test_half_precision(precision: str, layout: str) -> None:
    def run(rank: int, world_size: int, degrees: dict[str, Any] | None, precision: str) -> Any:
        class Half(Net):
            dtypes: ClassVar[list[torch.dtype]] = []

            def training_step(self, batch: Any, batch_idx: int) -> Any:
                x = batch["x"].to(torch.bfloat16 if precision == "bf16-true" else torch.float32)
                return super().training_step({**batch, "x": x}, batch_idx)

            def validation_step(self, batch: Any, batch_idx: int) -> None:
                x = batch["x"].to(torch.bfloat16 if precision == "bf16-true" else torch.float32)
                super().validation_step({**batch, "x": x}, batch_idx)

            def on_train_start(self) -> None:
                for child in self.modules():
                    if isinstance(child, torch.nn.Linear):
                        child.register_forward_hook(lambda *args: self.dtypes.append(args[2].dtype))

        module = Half(dtype=torch.float32)
        trainer = fit(world_size, degrees, module, precision=precision)
        return values_of(trainer), {p.dtype for p in module.parameters()}, set(module.dtypes)

    world_size, degrees = LAYOUTS[layout]
    exact, _, _ = reference(run, 0, 1, None, "32-true")
    wanted = torch.bfloat16 if precision == "bf16-true" else torch.float32
    found = run_ranks(run, world_size, degrees, precision, init_process_group=False)
    for values, parameters, _ in found:
        assert values == found[0][0]
        assert parameters == {wanted}
        for key in ("train_loss", "val_loss"):
            assert values[key] == pytest.approx(exact[key], rel=1e-2 if precision == "bf16-mixed" else 3e-2)
    assert all(dtypes == {torch.bfloat16} for _, _, dtypes in found)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_gradient_norm_is_logged_before_clipping(layout: str) -> None:
    def run(rank: int, world_size: int, degrees: dict[str, Any] | None) -> Any:
        module, written = Net(), Written()
        options: dict[str, Any] = {"callbacks": [GradientNorm()], "logger": written}
        fit(world_size, degrees, module, gradient_clip_val=0.05, **options)
        return written.of("grad_norm"), own_weights(module)

    world_size, degrees = LAYOUTS[layout]
    norms, weights = reference(run, 0, 1, None)
    assert min(norms) > 0.05
    found = run_ranks(run, world_size, degrees, init_process_group=False)
    for own_norms, _ in found:
        assert own_norms == pytest.approx(norms, rel=1e-6)
    assert_weights([own for _, own in found], weights)


# ---------------------------------------------------------------- hooks


class Recorded(Net):
    """Records its hooks, and what is there when they are called."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if "training_step" not in self.calls[-1:]:  # once for each microbatch and stage
            self.calls.append("training_step")
        return super().training_step(batch, batch_idx)

    def _grads(self) -> str:
        missing = {p.grad is None for p in self.parameters()}
        return {frozenset({True}): "none", frozenset({False}): "all"}.get(frozenset(missing), "some")

    def on_train_start(self) -> None:
        self.calls.append("on_train_start")

    def on_train_epoch_start(self) -> None:
        self.calls.append("on_train_epoch_start")

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.calls.append(f"on_train_batch_start {batch['index'].tolist()}")

    def on_before_zero_grad(self, optimizer: Any) -> None:
        self.calls.append("on_before_zero_grad")

    def on_before_backward(self, loss: Tensor) -> None:
        self.calls.append(f"on_before_backward {float(loss.detach()):.6f}")

    def on_after_backward(self) -> None:
        self.calls.append(f"on_after_backward {self._grads()}")

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.calls.append(f"on_before_optimizer_step {self._grads()}")

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        self.calls.append("optimizer_zero_grad")
        super().optimizer_zero_grad(epoch, batch_idx, optimizer)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.calls.append(f"on_train_batch_end {float(outputs['loss']):.6f}")

    def on_train_epoch_end(self) -> None:
        self.calls.append("on_train_epoch_end")

    def on_validation_batch_start(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.calls.append(f"on_validation_batch_start {batch['index'].tolist()}")

    def on_validation_batch_end(
        self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self.calls.append(f"on_validation_batch_end {outputs}")


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("layout", ["pp2 1F1B", "pp2 interleaved"])
def test_hooks_in_the_order_of_one_process(layout: str, accumulate: int) -> None:
    """One difference: gradients are zeroed before the step, which runs backwards too, not after it."""

    def run(rank: int, world_size: int, degrees: dict[str, Any] | None) -> list[str]:
        module = Recorded()
        trainer = start(world_size, degrees, accumulate_grad_batches=accumulate)
        trainer.fit(module, samples(8, BATCH), samples(6, 4))
        return module.calls

    expected: list[str] = reference(run, 0, 1, None)
    for at, call in enumerate(expected):
        if call == "training_step" and expected[at + 1] == "on_before_zero_grad":
            expected[at : at + 3] = ["on_before_zero_grad", "optimizer_zero_grad", "training_step"]
    world_size, degrees = LAYOUTS[layout]
    for calls in run_ranks(run, world_size, degrees, init_process_group=False):
        assert calls == expected

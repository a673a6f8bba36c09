"""Checkpoints as a Trainer's user meets them: callbacks, ckpt_path everywhere, Lightning's own files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from omegaconf import OmegaConf
from torch.distributed.checkpoint import FileSystemReader

from tests.distributed.case import Case
from tests.distributed.checkpoint_case import (
    CASE,
    LAYOUTS,
    Module,
    assert_continues,
    assert_equal,
    loader,
    resume,
    train_and_save,
    trainer_for,
)
from tests.harness import reference, run_ranks
from titanplug.errors import CheckpointError

TIED = Case(global_batch=8, num_rows=40, tied=True)


@pytest.mark.parametrize(
    "module",
    [{"case": TIED}, {"optimizer": "sgd"}, {"frozen": "model.layers.1"}],
    ids=["tied embeddings", "optimizer without state", "frozen block"],
)
def test_kinds_of_modules(module: dict[str, Any], tmp_path: Path) -> None:
    """From tp2 to fsdp2; the names are those of the module in one process, a shared weight is saved once."""

    def save(*args: Any) -> Any:
        return train_and_save(*args, **module)

    def go_on(*args: Any) -> Any:
        return resume(*args, **module)

    expected = run_ranks(save, 2, {"tp": 2}, tmp_path, init_process_group=False)[0]
    path = tmp_path / "mid" / "epoch=0-step=3.ckpt"
    names = FileSystemReader(path).read_metadata().state_dict_metadata
    in_model = {name for name in names if name.startswith("state_dict.")}
    assert in_model == {f"state_dict.{name}" for name, _ in Module(**module).named_parameters()}
    degrees = {"dp_shard": 2}
    for (run,) in run_ranks(go_on, 2, degrees, [path], 2, init_process_group=False):
        assert_continues(run, expected, 3, 2, tolerance=1e-10)


class Scored(Module):
    def on_validation_epoch_end(self) -> None:
        self.log("score", [0.1, 3.0, 2.0, 2.5][self.trainer.current_epoch])


def test_callbacks_and_ckpt_path(tmp_path: Path) -> None:
    """save_top_k with removal, save_last; validate, test and predict load what they are told to."""

    def train(rank: int, world_size: int) -> Any:
        L.seed_everything(7, verbose=False)
        saves = ModelCheckpoint(
            tmp_path, "{epoch}", monitor="score", mode="max", save_top_k=2, save_last=True
        )
        trainer = trainer_for(
            world_size,
            {"dp_shard": 2},
            max_epochs=4,
            callbacks=[saves],
            enable_checkpointing=True,
        )
        lit = Scored()
        rows = loader(trainer.strategy)
        trainer.fit(lit, rows, rows)
        last = float(trainer.callback_metrics["val_loss"])
        lit = Module()
        results = {
            path: (
                trainer.validate(lit, rows, ckpt_path=path, verbose=False)[0]["val_loss"],
                trainer.test(lit, rows, ckpt_path=path, verbose=False)[0]["val_loss"],
                torch.cat(trainer.predict(lit, rows, ckpt_path=path)).double().sum().item(),
            )
            for path in ("best", "last", str(tmp_path / "epoch=3.ckpt"), None)
        }
        return results, saves.best_model_path, saves.best_k_models, last

    for results, best, kept, last in run_ranks(train, 2, init_process_group=False):
        assert Path(best).name == "epoch=1.ckpt"
        assert {Path(path).name for path in kept} == {"epoch=1.ckpt", "epoch=3.ckpt"}
        for path, result in results.items():
            assert result[0] == result[1]
            assert (result == results["best"]) == (path == "best")
            assert (result == results["last"]) == (path != "best")
        assert results["last"][0] == pytest.approx(last, rel=1e-6)
    found = {path.name for path in tmp_path.iterdir()}
    assert found == {"epoch=1.ckpt", "epoch=3.ckpt", "last.ckpt"}


def test_lightnings_own_file(tmp_path: Path) -> None:
    """A run of plain Lightning goes on under any layout, with its optimizer; or is evaluated."""
    expected = reference(train_and_save, 0, 1, None, tmp_path)
    path = tmp_path / "epoch end" / "epoch=0-step=5.ckpt"
    assert path.is_file()

    def go_on(rank: int, world_size: int, degrees: dict[str, Any]) -> Any:
        (run,) = resume(rank, world_size, degrees, [path], 1)
        trainer = trainer_for(world_size, degrees)
        lit = Module()
        result = trainer.validate(lit, loader(trainer.strategy), ckpt_path=path, verbose=False)
        return run, result[0]["val_loss"]

    def evaluate_plainly() -> float:
        trainer = trainer_for(1, None)
        rows = loader(trainer.strategy)
        return float(trainer.validate(Module(), rows, ckpt_path=path, verbose=False)[0]["val_loss"])

    val_loss = reference(evaluate_plainly)
    for layout in ("fsdp2 x tp2", "replicate2"):
        world_size, degrees = LAYOUTS[layout]
        for run, result in run_ranks(go_on, world_size, degrees, init_process_group=False):
            assert_equal(run.first, expected.saved[5])
            assert list(run.grads) == [5]
            assert result == pytest.approx(val_loss, rel=1e-6)


def test_weights_alone(tmp_path: Path) -> None:
    path = tmp_path / "weights.ckpt"

    def run() -> None:
        trainer = trainer_for(1, {}, max_steps=1)
        lit = Module()
        trainer.fit(lit, loader(trainer.strategy))
        trainer.save_checkpoint(path, weights_only=True)
        fresh = Module()
        again = trainer_for(1, {}, max_steps=2)
        again.validate(fresh, loader(trainer.strategy), ckpt_path=path, verbose=False)
        for name, value in lit.state_dict().items():
            assert torch.equal(fresh.state_dict()[name], value)
        with pytest.raises(CheckpointError, match="holds weights only"):
            again.fit(fresh, loader(trainer.strategy), ckpt_path=path)

    reference(run)


class OtherGroups(Module):
    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters())


class Thing:
    pass


def test_what_is_refused_and_what_is_trusted(tmp_path: Path) -> None:
    """weights_only=False reaches the strategy from every call, though Lightning drops it on the way."""
    plain, objects = tmp_path / "plain.ckpt", tmp_path / "objects.ckpt"

    def run() -> None:
        config = OmegaConf.create({"lr": 0.1, "sizes": [1, "${lr}"]})
        for path, hparams in [(plain, {"config": config}), (objects, {"thing": Thing()})]:
            trainer = trainer_for(1, {}, max_steps=1)
            trainer.fit(Module(**hparams), loader(trainer.strategy))
            trainer.save_checkpoint(path)
        rows = loader(trainer.strategy)
        calls = {
            "fit": lambda trainer, lit, **k: trainer.fit(lit, rows, **k),
            "validate": lambda trainer, lit, **k: trainer.validate(lit, rows, verbose=False, **k),
            "test": lambda trainer, lit, **k: trainer.test(lit, rows, verbose=False, **k),
            "predict": lambda trainer, lit, **k: trainer.predict(lit, rows, **k),
        }
        for call in calls.values():
            call(trainer_for(1, {}, max_steps=2), Module(), ckpt_path=plain)
            with pytest.raises(CheckpointError, match=r"Thing|weights_only=False"):
                call(trainer_for(1, {}, max_steps=2), Module(), ckpt_path=objects)
            trainer = trainer_for(1, {}, max_steps=2)
            call(trainer, Module(), ckpt_path=objects, weights_only=False)
        with pytest.raises(CheckpointError, match="1 groups of .* in the checkpoint it has 2"):
            trainer_for(1, {}).fit(OtherGroups(), rows, ckpt_path=plain)
        with pytest.raises(CheckpointError, match="does not exist"):
            trainer_for(1, {}).fit(Module(), rows, ckpt_path=tmp_path / "none.ckpt")
        saved = torch.load(plain / "meta.pt", weights_only=True)["hyper_parameters"]
        assert saved == {"config": {"lr": 0.1, "sizes": [1, 0.1]}}

    reference(run)


def test_saving_changes_nothing(tmp_path: Path) -> None:
    """Neither before the first step, when optimizers have no state yet, nor later."""

    class Saving(Module):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            self.trainer.save_checkpoint(tmp_path / f"{batch_idx}.ckpt")

    def train(kind: type[Module]) -> Any:
        L.seed_everything(7, verbose=False)
        trainer = trainer_for(1, {}, max_steps=3)
        lit = kind(CASE)
        trainer.fit(lit, loader(trainer.strategy))
        return lit.state()

    assert_equal(reference(train, Saving), reference(train, Module))
    assert len(list(tmp_path.iterdir())) == 3

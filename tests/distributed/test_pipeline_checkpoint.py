"""Checkpoints under pipeline parallel are those of the one-process model; any layout loads any other's."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader
from torch.utils.data import DataLoader

from tests.distributed.case import Case, Module, Rows, build_trainer, whole
from tests.harness import run_ranks
from titanplug.callbacks import SeedCheckpoint
from titanplug.checkpoint.weights import consolidate
from titanplug.strategy import TitanStrategy

CASE = Case(num_rows=48, by_targets=True, ignored="uneven")


class TwoGroups(Module):
    """AdamW with two learning rates and a scheduler."""

    def configure_optimizers(self) -> Any:
        named = list(self.named_parameters())
        groups = [
            {"params": [p for n, p in named if "norm" in n], "lr": 1e-3, "weight_decay": 0.0},
            {"params": [p for n, p in named if "norm" not in n], "lr": 1e-2},
        ]
        optimizer = torch.optim.AdamW(groups, weight_decay=0.1)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def run(
    rank: int,
    world_size: int,
    degrees: dict[str, Any] | None,
    max_steps: int,
    load: str | None,
    save: str | None,
    case: Case = CASE,
) -> tuple[list[float], dict[str, Tensor], list[Any]]:
    """Train to ``max_steps``, from ``load`` on; returns losses, own weights and learning rates."""
    L.seed_everything(7, verbose=False)
    strategy: Any = "auto" if degrees is None else TitanStrategy(**degrees)
    dp_size = 1 if degrees is None else strategy.parallel_dims.resolve(world_size).size("batch")
    trainer = build_trainer(world_size, strategy, max_epochs=4, max_steps=max_steps)
    module = TwoGroups(case)
    loader = DataLoader(Rows(case), batch_size=case.global_batch // dp_size, shuffle=True)
    trainer.fit(module, loader, ckpt_path=load)
    if save:
        trainer.save_checkpoint(save)
    weights = {name: whole(p) for name, p in module.named_parameters()}
    rates = [group["lr"] for group in trainer.optimizers[0].param_groups]
    return module.losses, weights, rates


LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "pp2 x fsdp2 interleaved": (4, {"pp": 2, "dp_shard": 2, "pp_microbatches": 2}),
    "pp4": (4, {"pp": 4, "pp_schedule": "1F1B", "pp_microbatches": 4}),
    "fsdp4": (4, {"dp_shard": 4}),
    "tp2 x fsdp2": (4, {"tp": 2, "dp_shard": 2}),
    "cp2 x tp2": (4, {"cp": 2, "tp": 2}),
    "1 process": (1, {}),
}


FIRST = "pp2 x fsdp2 interleaved"
OTHERS = [name for name in LAYOUTS if name != FIRST]
BY_DEFAULT = {(FIRST, FIRST), (FIRST, "1 process"), (FIRST, "tp2 x fsdp2"), ("cp2 x tp2", FIRST)}


@pytest.mark.parametrize(
    "saved_by, loaded_by",
    [
        pytest.param(*pair, marks=() if pair in BY_DEFAULT else pytest.mark.slow)
        for pair in [(FIRST, FIRST), *((FIRST, o) for o in OTHERS), *((o, FIRST) for o in OTHERS)]
    ],
)
def test_resumes_in_another_layout(saved_by: str, loaded_by: str, tmp_path: Path) -> None:
    case = Case(num_rows=48, by_targets=True, ignored="uneven", tied=True)
    world_size, degrees = LAYOUTS[saved_by]
    straight = run_ranks(run, world_size, degrees, 8, None, None, case, init_process_group=False)
    path = str(tmp_path / "middle.ckpt")
    run_ranks(run, world_size, degrees, 4, None, path, case, init_process_group=False)  # mid-epoch
    world_size, degrees = LAYOUTS[loaded_by]
    resumed = run_ranks(run, world_size, degrees, 8, path, None, case, init_process_group=False)
    expected = {name: value for _, weights, _ in straight for name, value in weights.items()}
    for losses, weights, rates in resumed:
        torch.testing.assert_close(losses, straight[0][0][4:], rtol=1e-6, atol=0)
        assert rates == straight[0][2]
        for name, value in weights.items():
            # The head's weight has the embedding's name where both are tied on one rank.
            wanted = expected.get(name, expected["model.tok_embeddings.weight"])
            torch.testing.assert_close(value, wanted, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("tied", [True, False])
def test_goes_on_from_a_file_of_one_process(tied: bool, tmp_path: Path) -> None:
    case = replace(CASE, tied=tied)
    degrees = {"pp": 2, "pp_microbatches": 2}
    straight = run_ranks(run, 2, degrees, 8, None, None, case, init_process_group=False)
    run_ranks(run, 2, degrees, 4, None, str(tmp_path / "middle.ckpt"), case, init_process_group=False)
    file = consolidate(tmp_path / "middle.ckpt", tmp_path / "middle.pt")
    whole_file = torch.load(file, weights_only=True)
    assert set(whole_file["state_dict"]) == set(Module(case).state_dict())
    saved = FileSystemReader(tmp_path / "middle.ckpt").read_metadata().state_dict_metadata
    assert ("state_dict.model.output.weight" in saved) == (not tied)  # a shared weight is saved once
    resumed = run_ranks(run, 2, degrees, 8, str(file), None, case, init_process_group=False)
    for losses, weights, _ in resumed:
        torch.testing.assert_close(losses, straight[0][0][4:], rtol=1e-6, atol=0)
        for _, own, _ in straight:
            for name in own.keys() & weights.keys():
                torch.testing.assert_close(weights[name], own[name], rtol=1e-9, atol=1e-12)


def keep_best(rank: int, world_size: int, folder: str) -> tuple[str, float, str]:
    L.seed_everything(7, verbose=False)
    keep = ModelCheckpoint(folder, monitor="train_loss_step", mode="min", save_top_k=2, every_n_train_steps=1)
    trainer = build_trainer(
        world_size,
        TitanStrategy(pp=2, pp_microbatches=2),
        enable_checkpointing=True,
        callbacks=[keep],
        max_steps=5,
    )
    trainer.fit(Module(CASE), DataLoader(Rows(CASE), batch_size=8))
    return keep.best_model_path, float(keep.best_model_score), keep.kth_best_model_path  # type: ignore[arg-type]


def test_best_checkpoints_are_the_same_on_every_rank(tmp_path: Path) -> None:
    first, second = run_ranks(keep_best, 2, str(tmp_path), init_process_group=False)
    assert first == second
    assert Path(first[0]).is_dir() and len(list(tmp_path.iterdir())) == 2


def from_seed(rank: int, world_size: int, degrees: dict[str, Any], seed: str, path: str) -> list[float]:
    L.seed_everything(int(seed), verbose=False)
    start = Path(path).exists()
    strategy = TitanStrategy(**degrees)
    dp_size = strategy.parallel_dims.resolve(world_size).size("batch")
    callbacks = [] if start else [SeedCheckpoint(path)]
    trainer = build_trainer(world_size, strategy, max_steps=4, callbacks=callbacks)
    module = TwoGroups(CASE)
    loader = DataLoader(Rows(CASE), batch_size=CASE.global_batch // dp_size, shuffle=True)
    trainer.fit(module, loader, ckpt_path=path if start else None)
    return module.losses


def test_layouts_begin_alike_from_a_seed_checkpoint(tmp_path: Path) -> None:
    """With weights that something else has drawn, and another seed of the run."""
    path = str(tmp_path / "seed.ckpt")
    (expected,) = run_ranks(from_seed, 1, {}, "3", path, init_process_group=False)
    for losses in run_ranks(
        from_seed, 2, {"pp": 2, "pp_microbatches": 2}, "4", path, init_process_group=False
    ):
        torch.testing.assert_close(losses, expected, rtol=1e-9, atol=0)

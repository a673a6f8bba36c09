"""Ranks that were given other settings stop, with the names and the values."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from tests.harness import run_ranks
from titanplug.errors import ConfigError
from titanplug.strategy import TitanStrategy


class Module(L.LightningModule):
    def __init__(self, rank: int, **given: Any) -> None:
        super().__init__()
        self.save_hyperparameters(ignore=["rank"])
        self.rank_lr = 0.1 * (1 + given.get("lr_by_rank", False) * rank)
        self.net = torch.nn.Linear(2, 1)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.net(batch[0]).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.net.parameters(), lr=self.rank_lr)


def fit(rank: int, num_ranks: int, what: str) -> str:
    """The error, or nothing."""
    given: dict[str, Any] = {
        "lr": {"lr_by_rank": True},
        "hparams": {"layers": [{"dropout": 0.1 * rank}]},
        "lacking": {"width": 3} if rank == 0 else {},
        "of the rank": {"local_rank": rank, "folder": f"/tmp/{rank}"},
    }.get(what, {})
    settings = {"accumulate_grad_batches": 1 + rank} if what == "trainer" else {}
    trainer = L.Trainer(
        accelerator="cpu",
        devices=num_ranks,
        strategy=TitanStrategy(),
        max_steps=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **settings,  # type: ignore[arg-type]
    )
    try:
        trainer.fit(Module(rank, **given), DataLoader(TensorDataset(torch.ones(4, 2)), batch_size=2))
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("what", "told"),
    [
        ("lr", "optimizer 0, group 0: lr is 0.1 on rank 0 and 0.2 on rank 1"),
        ("hparams", "hparams.layers[0].dropout is 0.0 on rank 0 and 0.1 on rank 1"),
        ("lacking", "some have hyperparameters that others lack"),
        ("trainer", "trainer.accumulate_grad_batches is 1 on rank 0 and 2 on rank 1"),
    ],
)
def test_other_settings_are_an_error_on_all_ranks(what: str, told: str) -> None:
    errors = run_ranks(fit, 2, what, init_process_group=False)
    assert all(told in error for error in errors), errors


@pytest.mark.parametrize("what", ["same", "of the rank"])
def test_what_may_differ_does(what: str) -> None:
    assert run_ranks(fit, 2, what, init_process_group=False) == ["", ""]

"""LanguageModel and the callbacks under titanplug's strategy: the numbers of one process."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor
from torch.utils.data import DataLoader

from tests.harness import reference, run_ranks
from titanplug import TitanStrategy
from titanplug.callbacks import GradientNorm, LayoutSummary, StepLines
from titanplug.callbacks import step_lines as clock
from titanplug.models import TransformerConfig
from titanplug.modules import LanguageModel, cosine

V, S, ROWS = 33, 16, 16
CONFIG = TransformerConfig(
    vocab_size=V, dim=16, num_layers=2, num_heads=4, hidden_dim=24, tie_embeddings=True
)


class Ticks(Callback):
    """A clock that goes on by a second for each batch."""

    now = 0.0

    def on_train_batch_start(self, *_: Any) -> None:
        Ticks.now += 1


class Record(Callback):
    """What StepLines logs on rank 0, by step."""

    def __init__(self) -> None:
        self.rates: list[float] = []
        self.losses: list[float] = []
        self.norms: list[float] = []

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_step % 2 == 0:
            values = trainer.callback_metrics
            self.rates.append(float(values.get("tokens_per_s", 0)))
            self.losses.append(float(values["train_loss"]))
            self.norms.append(float(values["grad_norm"]))


def rows() -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(5)
    tokens = torch.randint(0, V, (ROWS, S + 1), generator=generator)
    items = []
    for index, row in enumerate(tokens):
        labels = row[1:].clone()
        labels[: (index * 3) % S] = -100  # unequal numbers of targets
        num_bytes = torch.tensor(40 + index)
        items.append({"input_ids": row[:-1], "labels": labels, "target_bytes": num_bytes})
    return items


def train(world_size: int, path: str, layout: dict[str, int]) -> dict[str, Any]:
    clock.time.perf_counter = lambda: Ticks.now  # type: ignore[attr-defined]  # this rank is a fork
    L.seed_everything(3, verbose=False)
    record = Record()
    dp_size = world_size // layout.get("tp", 1)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=world_size,
        strategy=TitanStrategy(**layout),
        max_steps=4,
        max_epochs=-1,
        log_every_n_steps=2,
        gradient_clip_val=0.5,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[LayoutSummary(), GradientNorm(), StepLines(), Ticks(), record],
        default_root_dir=path,
    )
    module = LanguageModel(CONFIG, partial(torch.optim.AdamW, lr=1e-2), partial(cosine, warmup_steps=2))
    data = DataLoader(rows(), batch_size=8 // dp_size)  # type: ignore[arg-type]
    trainer.fit(module, data, DataLoader(rows()[:11], batch_size=3))  # type: ignore[arg-type]
    return {
        "losses": record.losses,
        "norms": record.norms,
        "rates": record.rates,
        "val": [float(trainer.callback_metrics[f"val_{k}"]) for k in ("loss", "bits_per_byte")],
    }


@pytest.mark.parametrize("layout", [{"dp_shard": 2}, {"dp_shard": 1, "tp": 2}])
def test_every_layout_trains_and_reports_like_one_process(layout: dict[str, int], tmp_path: Path) -> None:
    path = str(tmp_path)
    alone = reference(lambda: train(1, path, {"dp_shard": 1}))
    ranks = run_ranks(lambda rank, size: train(size, path, layout), 2, init_process_group=False)
    for result in ranks:
        assert result["losses"] == pytest.approx(alone["losses"], rel=1e-5)
        assert result["norms"] == pytest.approx(alone["norms"], rel=1e-5)
        assert result["val"] == pytest.approx(alone["val"], rel=1e-5)
    # 8 rows a second, whoever reads them: tensor-parallel ranks read the same ones.
    assert alone["rates"] == ranks[0]["rates"] == [8 * S] * 2

"""The data modules under TitanStrategy: all ranks together read what one process reads, resumed too."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from tests.harness import reference, run_ranks
from titanplug import TitanStrategy
from titanplug.data import ByteTokenizer, HFDataModule, PackedDataModule, TextDataModule

pytest.importorskip("datasets")

STEPS = 14
EPOCH = 6
Batches = list[list[list[int]]]
"""Tokens by step and row."""


class Recorder(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = torch.nn.Linear(1, 1)
        self.batches: Batches = []

    def training_step(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        self.batches.append(batch["input_ids"].tolist())
        loss: torch.Tensor = self.model(batch["target_bytes"].float()[:, None]).mean()
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-6)


def build_text(folder: Path, batch_size: int) -> PackedDataModule:
    path = folder / "a.txt"
    if not path.exists():
        path.write_text("".join(f"line {i} of {i * i}\n" for i in range(40 * EPOCH)))
    return TextDataModule(
        ByteTokenizer(),
        path=str(path),
        validation_fraction=0.0,
        test_fraction=0.0,
        seq_len=128,
        batch_size=batch_size,
        seed=5,
        cache_dir=str(folder),
    )


def build_stream(folder: Path, batch_size: int) -> PackedDataModule:
    path = folder / "a.json"
    if not path.exists():
        path.write_text("".join(json.dumps({"text": f"<{i}>" * (1 + i % 5)}) + "\n" for i in range(90)))
    return HFDataModule(
        ByteTokenizer(),
        "json",
        data_files=str(path),
        validation_split=None,
        test_split=None,
        streaming=True,
        shuffle_block=7,
        batches_per_epoch=EPOCH,
        seq_len=16,
        batch_size=batch_size,
        seed=5,
        cache_dir=str(folder),
    )


def fit(
    rank: int,
    world_size: int,
    folder: Path,
    build: Any,
    *,
    global_batch: int = 4,
    until: int = STEPS,
    save_at: int | None = None,
    resume_at: int | None = None,
    plain: bool = False,
) -> Batches:
    datamodule = build(folder, global_batch // world_size)
    saving = ModelCheckpoint(folder, "{step}", every_n_train_steps=save_at or 10**6, save_top_k=-1)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=world_size,
        strategy="auto" if plain else TitanStrategy(),
        max_steps=until,
        callbacks=[saving],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = Recorder()
    path = None if resume_at is None else folder / f"step={resume_at}.ckpt"
    trainer.fit(module, datamodule=datamodule, ckpt_path=path)
    return module.batches


def join(ranks: list[Batches]) -> list[list[list[int]]]:
    """The rows of each step on all ranks, as a set would hold them."""
    return [sorted(row for batch in step for row in batch) for step in zip(*ranks, strict=True)]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "hf"))


def run(world_size: int, *args: Any, **options: Any) -> list[list[list[int]]]:
    return join(
        run_ranks(lambda rank, size: fit(rank, size, *args, **options), world_size, init_process_group=False)
    )


@pytest.mark.parametrize("saved", [4, EPOCH, 8])
def test_text_is_read_alike_and_resumed_on_any_number_of_ranks(tmp_path: Path, saved: int) -> None:
    expected = join([reference(lambda: fit(0, 1, tmp_path, build_text, plain=True))])
    assert expected[0] not in expected[1:] and len(expected) == STEPS
    first = run(2, tmp_path, build_text, until=saved, save_at=saved)
    assert first == expected[:saved]
    for world_size in (1, 2, 4):
        assert run(world_size, tmp_path, build_text, resume_at=saved) == expected[saved:]


@pytest.mark.parametrize("saved", [4, EPOCH])
def test_a_stream_is_shared_and_resumed(tmp_path: Path, saved: int) -> None:
    expected = run(2, tmp_path, build_stream)
    rows = [tuple(row) for step in expected for row in step]
    assert len(rows) == 4 * STEPS == len(set(rows)), "both ranks read the same share"
    assert run(2, tmp_path, build_stream, until=saved, save_at=saved) == expected[:saved]
    assert run(2, tmp_path, build_stream, resume_at=saved) == expected[saved:]

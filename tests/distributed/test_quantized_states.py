"""AdamW with states of 8 bits (torchao): checkpoints hold plain numbers, loading quantizes them again."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, TensorDataset

from tests.harness import run_ranks
from titanplug.checkpoint.weights import read_checkpoint
from titanplug.modules import adamw_8bit
from titanplug.strategy import TitanStrategy

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(find_spec("torchao") is None, reason="needs titanplug[int8]"),
]


class Module(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.large = torch.nn.Linear(128, 128)  # quantized
        self.small = torch.nn.Linear(128, 1)  # too small for it

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return (self.small(self.large(batch[0]).relu()) - batch[0].sum(-1, keepdim=True)).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return adamw_8bit(self.parameters(), lr=1e-2)


def run(rank: int, num_ranks: int, steps: int, save: str | None, load: str | None) -> dict[str, Any]:
    """Weights at the end, and the kind and the numbers of a state of the optimizer."""
    generator = torch.Generator().manual_seed(1)
    rows = TensorDataset(torch.randn(64, 128, generator=generator))
    trainer = L.Trainer(
        accelerator="cpu",
        devices=num_ranks,
        strategy=TitanStrategy(dp_shard=num_ranks),
        max_steps=steps,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = Module()
    trainer.fit(module, DataLoader(rows, batch_size=8 // num_ranks), ckpt_path=load)
    if save is not None:
        trainer.save_checkpoint(save)
    state = trainer.optimizers[0].state[module.large.weight]["exp_avg_sq"]
    local = state._local_tensor if isinstance(state, DTensor) else state
    weight: Any = module.large.weight
    return {
        "weight": weight.full_tensor() if isinstance(weight, DTensor) else weight.detach(),
        "kind": type(local).__name__,
        "state": local.dequantize(),
    }


def test_a_resumed_run_is_the_same_and_other_layouts_load_it(tmp_path: Path) -> None:
    saved = str(tmp_path / "half.ckpt")
    arguments: dict[str, Any] = {"init_process_group": False, "timeout_s": 200.0}
    whole = run_ranks(run, 2, 4, None, None, **arguments)
    half = run_ranks(run, 2, 2, saved, None, **arguments)
    again = run_ranks(run, 2, 4, None, saved, **arguments)
    assert torch.equal(again[0]["weight"], whole[0]["weight"])
    assert {rank["kind"] for rank in (*whole, *again)} == {"OptimState8bit"}
    content = read_checkpoint(saved)["optimizer_states"][0]["state"]
    kept = content[0]["exp_avg_sq"]
    assert type(kept) is torch.Tensor and kept.dtype == torch.float32
    assert torch.equal(kept, torch.cat([rank["state"] for rank in half]))
    (alone,) = run_ranks(run, 1, 2, None, saved, **arguments)  # it trains no further step
    torch.testing.assert_close(alone["state"], kept, rtol=0.1, atol=kept.max().item() / 50)
    assert alone["kind"] == "OptimState8bit"

"""The model, data and reference that the distributed tests share.

4 blocks, dim 16, 4 heads, vocabulary 33 (odd on purpose), sequence 16, SGD: Adam would hide a constant
factor in the gradient. The reference is a plain loop over the whole batch, without Lightning.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, Dataset

from titanplug.models import Transformer, TransformerConfig
from titanplug.strategy import TitanStrategy

VOCAB, SEQ = 33, 16


@dataclass(frozen=True)
class Case:
    """What is trained. ``global_batch`` rows a step are read by all data-parallel ranks together."""

    global_batch: int = 8
    num_rows: int = 24
    accumulate: int = 1
    clip: float | None = None
    clip_by_value: bool = False
    tied: bool = False
    by_targets: bool = False
    ignored: str = ""  # "uneven", "empty rows", "all", "but the last" (all targets are in one place)
    seq_len: int = SEQ
    documents: bool = False  # rows are packed with several
    dtype: torch.dtype = torch.float64
    options: dict[str, Any] = field(default_factory=dict)
    model: dict[str, Any] = field(default_factory=dict)
    accelerator: str = "cpu"
    trainer: dict[str, Any] = field(default_factory=dict)


class Rows(Dataset[dict[str, Tensor]]):
    def __init__(self, case: Case) -> None:
        generator = torch.Generator().manual_seed(0)
        length = case.seq_len
        self.tokens = torch.randint(0, VOCAB, (case.num_rows, length + 1), generator=generator)
        self.labels = self.tokens[:, 1:].clone()
        for row in range(case.num_rows):
            if case.ignored == "uneven":
                self.labels[row, 1 + (row * 5) % length :] = -100
            elif case.ignored == "but the last":
                self.labels[row, :-2] = -100
            elif (case.ignored == "empty rows" and row % 2) or case.ignored == "all":
                self.labels[row] = -100
        starts = torch.rand(case.num_rows, length, generator=generator) < 0.2
        starts[:, 0] = True
        index = torch.arange(length)
        first = torch.where(starts, index, 0).cummax(1).values
        # Of packed documents: which one a token is of, and where in it.
        self.packed = (
            {"document_ids": starts.long().cumsum(1), "positions": index - first} if case.documents else {}
        )

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return self.rows(index)

    def rows(self, index: Any) -> dict[str, Tensor]:
        packed = {name: value[index] for name, value in self.packed.items()}
        return {"input_ids": self.tokens[index, :-1], "labels": self.labels[index], **packed}


def build_model(case: Case) -> Transformer:
    torch.manual_seed(3)
    sizes: dict[str, Any] = {"dim": 16, "num_layers": 4, "num_heads": 4, "hidden_dim": 24, "init_std": 0.3}
    config = TransformerConfig(
        vocab_size=VOCAB, max_seq_len=case.seq_len, tie_embeddings=case.tied, **{**sizes, **case.model}
    )
    return Transformer(config).to(case.dtype)


class Module(L.LightningModule):
    """An ordinary module; what follows ``training_step`` is for the tests."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.case = case
        self.model = build_model(case)
        self.grads: list[dict[str, Tensor]] = []
        self.norms: list[float] = []
        self.losses: list[float] = []

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        logits = run_model(self.model, batch)
        loss = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        if self.case.by_targets:
            return {"loss": loss, "num_targets": (batch["labels"] != -100).sum()}
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.grads.append({name: whole(p.grad) for name, p in self.named_parameters()})
        strategy = self.trainer.strategy
        if isinstance(strategy, TitanStrategy):
            self.norms.append(float(strategy.compute_gradient_norm(optimizer)))

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if not self.trainer.fit_loop._should_accumulate():  # then Lightning reads per-step values
            self.losses.append(float(self.trainer.callback_metrics["train_loss_step"]))


def run_model(model: Transformer, batch: dict[str, Tensor]) -> Tensor:
    logits: Tensor = model(batch["input_ids"], batch.get("positions"), batch.get("document_ids"))
    return logits


def whole(tensor: Tensor | None) -> Tensor:
    assert tensor is not None
    value = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return value.detach().cpu().clone()


@dataclass
class Result:
    grads: list[dict[str, Tensor]]
    norms: list[float]
    losses: list[float]
    epoch_loss: float
    weights: dict[str, Tensor]


def train_reference(case: Case) -> Result:
    """One process, one batch at a time, the loss written out."""
    model, rows = build_model(case), Rows(case)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    result = Result([], [], [], 0.0, {})
    batches = list(torch.arange(case.num_rows).split(case.global_batch))
    windows = [batches[i : i + case.accumulate] for i in range(0, len(batches), case.accumulate)]
    weighted = counted = 0.0
    for window in windows:
        optimizer.zero_grad()
        counts = []
        for index in window:
            labels = rows.labels[index]
            counts.append(int((labels != -100).sum()) if case.by_targets else len(index))
        for index, count in zip(window, counts, strict=True):
            logits = run_model(model, rows.rows(index))
            labels = rows.labels[index]
            loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
            loss = loss / max(int((labels != -100).sum()), 1)
            (loss * count / max(sum(counts), 1)).backward()
            weighted, counted = weighted + float(loss) * count, counted + count
        result.losses.append(float(loss))
        grads = {f"model.{name}": whole(p.grad) for name, p in model.named_parameters()}
        result.grads.append(grads)
        if case.clip and case.clip_by_value:
            nn.utils.clip_grad_value_(model.parameters(), case.clip)
        elif case.clip:
            nn.utils.clip_grad_norm_(model.parameters(), case.clip)
        result.norms.append(float(torch.stack([g.norm() for g in grads.values()]).norm()))
        optimizer.step()
    result.epoch_loss = weighted / counted if counted else math.nan
    result.weights = {f"model.{name}": whole(p) for name, p in model.named_parameters()}
    return result


def build_trainer(world_size: int, strategy: Any, **options: Any) -> L.Trainer:
    quiet: dict[str, Any] = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
        "log_every_n_steps": 1,
        "max_epochs": 1,
    }
    return L.Trainer(
        **{"accelerator": "cpu", "devices": world_size, "strategy": strategy, **quiet, **options}
    )


def train_titan(
    rank: int,
    world_size: int,
    case: Case,
    degrees: dict[str, Any],
    build: Callable[[Case], L.LightningModule] = Module,
) -> Result:
    """What a rank runs: the same training through the Trainer."""
    L.seed_everything(7, verbose=False)
    strategy = TitanStrategy(**degrees, **case.options)
    dims = strategy.parallel_dims.resolve(world_size)
    trainer = build_trainer(
        world_size,
        strategy,
        accumulate_grad_batches=case.accumulate,
        gradient_clip_val=case.clip,
        gradient_clip_algorithm="value" if case.clip_by_value else "norm",
        accelerator=case.accelerator,
        **case.trainer,
    )
    module: Any = build(case)
    loader = DataLoader(Rows(case), batch_size=case.global_batch // dims.size("batch"))
    trainer.fit(module, loader)
    return Result(
        module.grads,
        module.norms,
        module.losses,
        float(trainer.callback_metrics["train_loss_epoch"]),
        {name: whole(p) for name, p in module.named_parameters()},
    )


def assert_same(result: Result, expected: Result, tolerance: float) -> None:
    """Gradients of every step, parameters, norms and logged values equal the reference's."""
    assert len(result.grads) == len(expected.grads)
    for step, (grads, wanted) in enumerate(zip(result.grads, expected.grads, strict=True)):
        assert grads.keys() == wanted.keys()
        for name, grad in wanted.items():
            error = float((grads[name] - grad).abs().max() / grad.abs().max().clamp_min(1e-30))
            if grad.abs().max() == 0:
                error = float(grads[name].abs().max())
            assert error < tolerance, f"gradient of {name} in step {step}: {error:.2e}"
    for name, weight in expected.weights.items():
        error = float((result.weights[name] - weight).abs().max() / weight.abs().max())
        assert error < tolerance, f"{name} after training: {error:.2e}"
    torch.testing.assert_close(result.norms, expected.norms, rtol=tolerance, atol=1e-15)
    # Lightning keeps logged values in the default dtype, float32 here.
    logged = max(tolerance, 1e-6)
    torch.testing.assert_close(result.losses, expected.losses, rtol=logged, atol=1e-9)
    torch.testing.assert_close(result.epoch_loss, expected.epoch_loss, rtol=logged, atol=1e-9, equal_nan=True)

"""The same training written by hand and run by the Trainer, for side-by-side measurements.

A hand-written loop does what the Trainer's run does: the same Transformer, layout, data and optimizer, the
loss of a mean over samples, optionally one global clip. Everything runs inside an initialised rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from typing_extensions import override

from titanplug.mesh import Mesh, ParallelDims
from titanplug.models import Transformer, TransformerConfig
from titanplug.parallel.fsdp import ShardOptions
from titanplug.parallel.gradients import (
    clip_by_norm,
    global_gradient_norm,
    group_by_copies,
    reduce_partial_gradients,
)
from titanplug.parallel.local_optimizer import LocalShards
from titanplug.parallel.parallelize import parallelize
from titanplug.parallel.pipeline.stages import PipelineOptions
from titanplug.parallel.styles import TensorOptions
from titanplug.strategy import TitanStrategy
from titanplug.validation import ContextOptions


@dataclass(frozen=True)
class Workload:
    """What is trained.

    Args:
        dim: width of the model.
        num_layers: number of blocks.
        seq_len: tokens in a row.
        batch_size: rows a data-parallel rank reads for a step.
        vocab_size: number of token ids.
        clip: largest gradient norm; None clips nothing.
        num_steps: steps of a run.
    """

    dim: int = 256
    num_layers: int = 8
    seq_len: int = 256
    batch_size: int = 4
    vocab_size: int = 1024
    clip: float | None = None
    num_steps: int = 8

    @property
    def config(self) -> TransformerConfig:
        """The model's shape."""
        return TransformerConfig(
            vocab_size=self.vocab_size,
            dim=self.dim,
            num_layers=self.num_layers,
            num_heads=8,
            num_kv_heads=4,
            hidden_dim=self.dim * 5 // 2,
            max_seq_len=self.seq_len,
        )


class RandomTokens(Dataset[dict[str, Tensor]]):
    """Rows of random tokens."""

    def __init__(self, workload: Workload, num_rows: int) -> None:
        generator = torch.Generator().manual_seed(0)
        shape = (num_rows, workload.seq_len + 1)
        self.tokens = torch.randint(0, workload.vocab_size, shape, generator=generator)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.tokens[index, :-1], "labels": self.tokens[index, 1:]}


def build_model(workload: Workload) -> Transformer:
    """The same weights on every rank."""
    torch.manual_seed(0)
    return Transformer(workload.config)


class Module(L.LightningModule):
    """The ordinary module of the Trainer's run."""

    def __init__(self, workload: Workload, model: nn.Module | None = None) -> None:
        super().__init__()
        self.model = build_model(workload) if model is None else model

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        logits = self.model(batch["input_ids"])
        return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class ModuleWithLosses(Module):
    """Keeps what callbacks see as the loss of each step."""

    def __init__(self, workload: Workload, losses: list[float]) -> None:
        super().__init__(workload)
        self._losses = losses

    @override
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self._losses.append(float(outputs["loss"]))


class AroundStep(L.Callback):
    """Calls a function before the first and after each step."""

    def __init__(self, mark: Callable[[int], None]) -> None:
        self.mark = mark

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.mark(-1)

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.mark(batch_idx)


def run_trainer(
    workload: Workload,
    strategy: Any,
    world_size: int,
    dp_size: int,
    mark: Callable[[int], None],
    module: L.LightningModule | None = None,
) -> None:
    """Train by the Trainer; ``mark(step)`` is called after each step."""
    trainer = L.Trainer(
        accelerator="cpu",
        devices=world_size,
        strategy=strategy,
        max_steps=workload.num_steps,
        gradient_clip_val=workload.clip,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[AroundStep(mark)],
    )
    rows = RandomTokens(workload, workload.num_steps * workload.batch_size * dp_size)
    loader = DataLoader(rows, batch_size=workload.batch_size)
    trainer.fit(module or Module(workload), loader)


def run_titan(
    workload: Workload, degrees: dict[str, int], world_size: int, mark: Callable[[int], None]
) -> None:
    """Train by the Trainer with TitanStrategy."""
    dims = ParallelDims(**degrees).resolve(world_size)
    run_trainer(workload, TitanStrategy(**degrees), world_size, dims.size("batch"), mark)


def run_loop(
    workload: Workload,
    degrees: dict[str, int],
    world_size: int,
    mark: Callable[[int], None],
    *,
    local_optimizer: bool = False,
) -> None:
    """Train by a hand-written loop on the same parallel model. Needs a process group.

    With ``local_optimizer`` the optimizer steps on local shards, as under TitanStrategy; else on DTensors,
    as in everybody's loop.
    """
    dims = ParallelDims(**degrees).resolve(world_size)
    mesh = Mesh(dims, "cpu")
    model = build_model(workload)
    layout = parallelize(
        model,
        model.parallel_plan(),
        mesh,
        device=torch.device("cpu"),
        seed=0,
        tensor=TensorOptions(),
        shard=ShardOptions(),
        pipeline=PipelineOptions(),
        context=ContextOptions(),
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    parameters = list(model.parameters())
    partial = layout.partial_parameters(model)
    groups = group_by_copies(parameters, world_size)
    shards = LocalShards(optimizer)
    dp_size = dims.size("batch")
    mark(-1)
    for step, batch in enumerate(batches(workload, mesh.rank("batch"), dp_size)):
        logits = model(batch["input_ids"])
        loss = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())
        optimizer.zero_grad()
        (loss / (dp_size * dims.cp)).backward()  # ranks of cp have parts of one gradient
        if layout.tensor.group is not None:
            reduce_partial_gradients(partial, layout.tensor.group)
        if workload.clip:
            norm = global_gradient_norm(groups, 2.0, torch.device("cpu"))
            clip_by_norm(parameters, workload.clip, norm)
        if local_optimizer:
            shards.enter()
        optimizer.step()
        shards.exit()
        mark(step)


def batches(workload: Workload, dp_rank: int, dp_size: int) -> Iterator[dict[str, Tensor]]:
    """The batches of a data-parallel rank, as a plain loader gives them."""
    rows = RandomTokens(workload, workload.num_steps * workload.batch_size * dp_size)
    order = list(range(dp_rank, len(rows), dp_size))
    subset = torch.utils.data.Subset(rows, order)
    yield from DataLoader(subset, batch_size=workload.batch_size)

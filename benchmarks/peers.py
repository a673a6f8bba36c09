"""What Lightning and torch offer for the same layouts: loops and modules on DTensor's own styles."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

from benchmarks.loops import Workload, batches, build_model, run_trainer


def apply_dtensor_styles(model: nn.Module, mesh: DeviceMesh) -> None:
    """Tensor, sequence and loss parallel as torch's tutorial has it."""
    top = {
        "tok_embeddings": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "output": ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False),
    }
    parallelize_module(model, mesh, top)
    for block in model.layers.values():
        styles = {
            "attention_norm": SequenceParallel(),
            "ffn_norm": SequenceParallel(),
            "attention": PrepareModuleInput(
                input_layouts=(Shard(1), None), desired_input_layouts=(Replicate(), None)
            ),
            "feed_forward": PrepareModuleInput(
                input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)
            ),
            **{f"attention.{name}": ColwiseParallel() for name in ("wq", "wk", "wv")},
            "attention.wo": RowwiseParallel(output_layouts=Shard(1)),
            "feed_forward.w1": ColwiseParallel(),
            "feed_forward.w3": ColwiseParallel(),
            "feed_forward.w2": RowwiseParallel(output_layouts=Shard(1)),
        }
        parallelize_module(block, mesh, styles)


def apply_torch(model: nn.Module, dp_mesh: DeviceMesh, tp_mesh: DeviceMesh) -> None:
    """The layout by torch alone: DTensor styles, then FSDP2 on blocks and root."""
    if tp_mesh.size() > 1:
        apply_dtensor_styles(model, tp_mesh)
    if dp_mesh.size() > 1:
        for block in model.layers.values():
            fully_shard(block, mesh=dp_mesh)
        fully_shard(model, mesh=dp_mesh, reshard_after_forward=False)


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean over all targets."""
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def _loss_context(tp_size: int) -> AbstractContextManager[None]:
    return loss_parallel() if tp_size > 1 else nullcontext()


def run_torch_loop(
    workload: Workload, degrees: dict[str, int], world_size: int, mark: Callable[[int], None]
) -> None:
    """Train by a hand-written loop on DTensor's own styles and FSDP2. Needs a process group."""
    tp = degrees.get("tp", 1)
    dp = world_size // tp
    mesh = init_device_mesh("cpu", (dp, tp), mesh_dim_names=("dp", "tp"))
    model = build_model(workload)
    apply_torch(model, mesh["dp"], mesh["tp"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    mark(-1)
    for step, batch in enumerate(batches(workload, mesh["dp"].get_local_rank(), dp)):
        with _loss_context(tp):
            loss = cross_entropy(model(batch["input_ids"]), batch["labels"])
            optimizer.zero_grad()
            loss.backward()
        if workload.clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), workload.clip)
        optimizer.step()
        mark(step)


class TorchModule(L.LightningModule):
    """What a user of Lightning's own ModelParallelStrategy writes."""

    def __init__(self, workload: Workload) -> None:
        super().__init__()
        self.workload = workload

    def configure_model(self) -> None:
        if hasattr(self, "model"):
            return
        self.model = build_model(self.workload)
        mesh = self.device_mesh
        assert mesh is not None
        self.tp_size = mesh["tensor_parallel"].size()
        apply_torch(self.model, mesh["data_parallel"], mesh["tensor_parallel"])

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        with _loss_context(self.tp_size):
            return cross_entropy(self.model(batch["input_ids"]), batch["labels"])

    def backward(self, loss: Tensor) -> None:
        with _loss_context(self.tp_size):
            loss.backward()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def run_lightning(
    workload: Workload, degrees: dict[str, int], world_size: int, mark: Callable[[int], None]
) -> None:
    """Train by the Trainer with Lightning's ModelParallelStrategy."""
    tp = degrees.get("tp", 1)
    strategy = ModelParallelStrategy(data_parallel_size=world_size // tp, tensor_parallel_size=tp)
    run_trainer(workload, strategy, world_size, world_size // tp, mark, TorchModule(workload))

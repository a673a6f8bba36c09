"""Says at the start of training how the run is laid out."""

from __future__ import annotations

from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Callback
from torch import nn
from torch.distributed.tensor import DTensor
from typing_extensions import override

from titanplug.callbacks.console import say
from titanplug.callbacks.ranks import find_dims, gather_from_ranks, ranks_by_share
from titanplug.mesh import ParallelDims

MAX_LISTED_RANKS = 16


class LayoutSummary(Callback):
    """Prints axes and degrees, what each rank reads, precision, and parameters per rank."""

    @override
    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        parameters = list(pl_module.parameters())  # a shared one comes once
        local = sum(p.to_local().numel() if isinstance(p, DTensor) else p.numel() for p in parameters)
        everyone = gather_from_ranks(trainer, local, counted_here(trainer, parameters))
        held, total = sorted(int(row[0]) for row in everyone), int(sum(row[1] for row in everyone))
        if trainer.is_global_zero:
            say(describe_layout(trainer, total, held))


def counted_here(trainer: L.Trainer, parameters: list[nn.Parameter]) -> int:
    """Numbers in the parameters that this rank counts for all: those of its pipeline stages, once."""
    stages: Any = getattr(trainer.strategy, "pipeline", None)
    if stages is None:
        return sum(p.numel() for p in parameters) if trainer.is_global_zero else 0
    mesh = trainer.strategy.mesh  # type: ignore[attr-defined]
    if any(mesh.rank(axis) for axis in ("dp_replicate", "dp_shard", "cp", "tp")):
        return 0
    elsewhere = sum(
        trainer.lightning_module.get_parameter(tied.alias).numel()
        for tied in stages.tied
        if tied.alias and stages.rank != tied.ranks[0]
    )
    return sum(p.numel() for p in parameters) - elsewhere


def describe_stages(stages: Any) -> str:
    """Schedule and modules of each pipeline stage."""
    parts = []
    for stage, positions in enumerate(stages.bounds):
        first, last = stages.names[positions.start], stages.names[positions.stop - 1]
        named = first if first == last else f"{first} to {last}"
        parts.append(f"{stage} on pp rank {stages.stage_to_rank[stage]}: {named}")
    return f"{stages.options.schedule}; stage " + "; ".join(parts)


def describe_layout(trainer: L.Trainer, num_parameters: int, held: list[int]) -> str:
    """The text.

    Args:
        trainer: whose strategy is set up.
        num_parameters: of the whole model.
        held: parameters that each rank holds, in ascending order.
    """
    dims = find_dims(trainer)
    world_size, device = trainer.world_size, trainer.strategy.root_device.type
    processes = "1 process" if world_size == 1 else f"{world_size} processes"
    layout = type(trainer.strategy).__name__ if dims is None else str(dims)
    on_ranks = f"{held[0]:,}" if held[0] == held[-1] else f"{held[0]:,} to {held[-1]:,}"
    lines = [
        ("Layout", f"{processes} on {device}" + (f": {layout}" if world_size > 1 else "")),
        ("Reading", "all samples" if dims is None else describe_reading(dims)),
        ("Precision", str(trainer.precision)),
        ("Parameters", f"{num_parameters:,}; {on_ranks} on each rank"),
    ]
    stages: Any = getattr(trainer.strategy, "pipeline", None)
    if stages is not None:
        lines.insert(1, ("Stages", describe_stages(stages)))
    return "\n".join(f"{name:<11}{text}" for name, text in lines)


def describe_reading(dims: ParallelDims) -> str:
    """Which ranks read which samples."""
    shares = ranks_by_share(dims)
    if len(shares) == 1:
        return "all samples" if dims.world_size == 1 else "all ranks read the same samples"
    if dims.world_size > MAX_LISTED_RANKS:
        return f"{len(shares)} shares of the samples, each read by {len(shares[0])} ranks"
    listed = "; ".join(
        f"share {share}: rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
        for share, ranks in enumerate(shares)
    )
    return f"{len(shares)} shares of the samples ({listed})"

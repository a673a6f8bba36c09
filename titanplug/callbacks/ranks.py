"""What callbacks need to know of the layout, for titanplug's strategy and for any other."""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
import torch.distributed as dist

from titanplug.mesh import Mesh, ParallelDims


def find_dims(trainer: L.Trainer) -> ParallelDims | None:
    """The resolved degrees, where titanplug's strategy runs; else None."""
    dims = getattr(trainer.strategy, "parallel_dims", None)
    return dims if isinstance(dims, ParallelDims) else None


def counts_samples(trainer: L.Trainer) -> bool:
    """Whether this rank counts in sums over samples: one of the ranks that read the same ones does."""
    dims = find_dims(trainer)
    if dims is None:
        return True
    if dims.pp == dims.cp == dims.tp == 1:
        return True
    mesh: Mesh = trainer.strategy.mesh  # type: ignore[attr-defined]
    return mesh.rank("pp") == mesh.rank("cp") == mesh.rank("tp") == 0


def ranks_by_share(dims: ParallelDims) -> list[list[int]]:
    """Global ranks that read each share of the samples, by share.

    Ranks are numbered with the last axis fastest, as in the mesh.
    """
    shares: list[list[int]] = [[] for _ in range(dims.size("batch"))]
    degrees = list(dims.degrees.items())
    for rank in range(dims.world_size):
        position, rest = {}, rank
        for axis, degree in reversed(degrees):
            rest, position[axis] = divmod(rest, degree)
        share = position["dp_replicate"] * dims.dp_shard + position["dp_shard"]
        shares[share].append(rank)
    return shares


def gather_from_ranks(trainer: L.Trainer, *values: float) -> list[list[float]]:
    """The values of every rank, by rank. A collective over all processes where there are several."""
    if trainer.world_size == 1 or not dist.is_initialized():
        return [list(values)]
    device = trainer.strategy.root_device
    mine = torch.tensor(values, dtype=torch.float64, device=device)
    everyone = [torch.empty_like(mine) for _ in range(trainer.world_size)]
    dist.all_gather(everyone, mine)
    result: list[list[float]] = torch.stack(everyone).tolist()
    return result


def is_log_step(trainer: L.Trainer, step: int) -> bool:
    """Whether Lightning writes the values of optimizer step ``step``, counted from 1."""
    every: int = trainer.log_every_n_steps  # type: ignore[attr-defined]
    return every > 0 and step % every == 0


def logged_value(trainer: L.Trainer, name: str) -> float | None:
    """A logged value on the host, or None. Waits for the device: for log steps only."""
    value: Any = trainer.callback_metrics.get(name)
    return None if value is None else float(value)

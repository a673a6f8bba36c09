"""Context parallel: steps of Trainer + TitanStrategy(cp=2) against a hand-written loop, and its backends.

    python -m benchmarks.context [--rounds 4] [--sizes "50 ms"] [--backends ring] [--output x.json]

First table: contestants with the same backend take turns step by step in the same two processes. Compared is
the processor time of both ranks per step (their sum, so that waiting for each other doesn't count), shown are
the median over all steps and the quartiles; wall time of the slower rank is measured likewise. Peak memory
is of separate runs. Every run checks that all compute the same losses.

- ``titan``: the ordinary module through ``Trainer(strategy=TitanStrategy(cp=2, cp_backend=...))``;
- ``loop``: FSDP2 over the ranks, the batch cut by hand, positions given, the model's attention replaced by
  one that calls the backend, the sum of the local losses over the global count; AdamW on local shards;
- ``plain``: the same with AdamW on DTensors, as in everybody's loop.

Second table: the backends against each other on longer and longer sequences, in that loop.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from typing_extensions import override

from benchmarks.loops import ModuleWithLosses, Workload, batches, build_model, run_trainer
from benchmarks.pipeline import Contest, Turns, compare, over_ranks, ratios_in_turn, run_contest
from benchmarks.trainer_overhead import WARM_UP
from tests.harness import run_ranks
from titanplug.attention import TokenMask
from titanplug.attention.backends import BACKENDS
from titanplug.models import Transformer
from titanplug.parallel.collectives import AxisGroup
from titanplug.parallel.gradients import clip_by_norm, global_gradient_norm, group_by_copies
from titanplug.parallel.local_optimizer import LocalShards
from titanplug.parallel.sequence import SequenceShards
from titanplug.strategy import TitanStrategy
from titanplug.validation import CONTEXT_BACKENDS

CP = 2
SIZES = {
    "50 ms": Workload(dim=64, num_layers=4, seq_len=256, batch_size=2, vocab_size=256, num_steps=33),
    "200 ms": Workload(dim=256, num_layers=8, seq_len=256, batch_size=2, vocab_size=1024, num_steps=13),
    "600 ms": Workload(dim=256, num_layers=8, seq_len=1024, batch_size=2, vocab_size=1024, num_steps=9),
}
DEMANDED = {"50 ms": 1.05, "200 ms": 1.02, "600 ms": 1.02}
"""Processor time of titan over that of the loop, at most."""
LENGTHS = (512, 1024, 2048, 4096, 8192)


def run_titan_context(
    workload: Workload, backend: str, mark: Callable[[int], None], losses: list[float]
) -> None:
    """Train by the Trainer with TitanStrategy; the loss of each step goes into ``losses``."""
    strategy = TitanStrategy(cp=CP, dp_shard=1, cp_backend=backend)
    run_trainer(workload, strategy, CP, 1, mark, ModuleWithLosses(workload, losses))


# ---------------------------------------------------------------- by hand


class HandAttention(nn.Module):
    """Takes the place of the model's attention.

    Args:
        backend: its name.
        shards: how every sequence lies over ranks.
        scale: of the scores.
    """

    def __init__(self, backend: str, shards: SequenceShards, scale: float) -> None:
        super().__init__()
        self._attend, self._shards, self._scale = BACKENDS[backend], shards, scale
        self._mask = TokenMask()

    @override
    def forward(self, query: Tensor, key: Tensor, value: Tensor, mask: TokenMask) -> Tensor:
        """Causal, whatever the mask says: these rows are no documents."""
        return self._attend(query, key, value, self._mask, self._shards, self._scale, 0.0)


def replace_attention(model: Transformer, backend: str, shards: SequenceShards) -> None:
    """Let every layer attend by ``backend``."""
    for layer in model.layers.values():
        attention: Any = layer.attention
        attention.core = HandAttention(backend, shards, attention.head_size**-0.5)


def cut(x: Tensor, rank: int, size: int, *, zigzag: bool) -> Tensor:
    """A rank's tokens of (B, S)."""
    if not zigzag:
        return x.chunk(size, 1)[rank]
    chunks = x.chunk(2 * size, 1)
    return torch.cat([chunks[rank], chunks[2 * size - 1 - rank]], 1)


def context_steps(
    workload: Workload,
    backend: str,
    losses: list[float] | None,
    *,
    local_optimizer: bool = True,
) -> Iterator[int]:
    """The hand-written loop, one step at a time; the first thing it gives is -1. Needs a process group.

    Args:
        workload: what is trained.
        backend: name of the attention backend.
        losses: the loss of each step goes here; None leaves it on the device.
        local_optimizer: the optimizer steps on local shards, as under TitanStrategy; else on DTensors, as in
            everybody's loop.
    """
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("cp",))
    group, zigzag = AxisGroup.of(mesh), backend != "ulysses"
    cut_here = partial(cut, rank=group.rank, size=group.size, zigzag=zigzag)
    model = build_model(workload)
    replace_attention(model, backend, SequenceShards.of(workload.seq_len, group, zigzag=zigzag))
    for unit in [*model.layers.values(), model]:
        sharded: FSDPModule = fully_shard(unit, mesh=mesh, reshard_after_forward=unit is not model)
        sharded.set_gradient_divide_factor(1.0)  # ranks have parts of one gradient
        sharded.set_force_sum_reduction_for_comms(True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    local, parameters = LocalShards(optimizer), list(model.parameters())
    groups = group_by_copies(parameters, group.size)
    positions = cut_here(torch.arange(workload.seq_len).expand(workload.batch_size, -1))
    yield -1
    for step, batch in enumerate(batches(workload, 0, 1)):
        tokens, labels = cut_here(batch["input_ids"]), cut_here(batch["labels"])
        logits = model(tokens, positions)
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
        loss = loss / batch["labels"].numel()
        optimizer.zero_grad()
        loss.backward()
        total = loss.detach()
        dist.all_reduce(total, group=group.group)
        if workload.clip:
            norm = global_gradient_norm(groups, 2.0, torch.device("cpu"))
            clip_by_norm(parameters, workload.clip, norm)
        if local_optimizer:
            local.enter()
        optimizer.step()
        local.exit()
        if losses is not None:
            losses.append(float(total))
        yield step


def run_context_loop(
    workload: Workload,
    degrees: dict[str, int],
    world_size: int,
    mark: Callable[[int], None],
    *,
    backend: str = "all_gather",
) -> None:
    """The hand-written loop on ``cp`` ranks, without a look at its losses."""
    assert degrees["cp"] == world_size
    for step in context_steps(workload, backend, None):
        mark(step)


# ---------------------------------------------------------------- backends on longer sequences


def long_workload(length: int) -> Workload:
    """One row, and a model in which attention dominates."""
    steps = WARM_UP + max(3, min(12, 16384 // length))
    return Workload(dim=64, num_layers=2, seq_len=length, batch_size=1, vocab_size=64, num_steps=steps)


def saved_bytes(rank: int, num_ranks: int, workload: Workload, backend: str | None) -> int:
    """What a forward keeps for its backward, each storage once, weights left out.

    Args:
        rank: of this process.
        num_ranks: of the group.
        workload: what is trained.
        backend: name of the attention backend; None: the whole sequence on one process.
    """
    model = build_model(workload)
    tokens = torch.zeros(workload.batch_size, workload.seq_len, dtype=torch.int64)
    labels, positions = tokens, torch.arange(workload.seq_len).expand_as(tokens)
    if backend is not None:
        group = AxisGroup(dist.distributed_c10d._get_default_group(), num_ranks, rank)
        zigzag = backend != "ulysses"
        replace_attention(model, backend, SequenceShards.of(workload.seq_len, group, zigzag=zigzag))
        tokens, positions = (cut(x, rank, num_ranks, zigzag=zigzag) for x in (tokens, positions))
        labels = tokens
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    sizes: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            sizes[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = F.cross_entropy(model(tokens, positions).flatten(0, 1), labels.flatten())
    loss.backward()
    return sum(sizes.values())


def measure_backends(
    rank: int, num_ranks: int, workload: Workload, backends: list[str]
) -> dict[str, list[tuple[float, float]]]:
    """Processor and wall time of each step of the loop with each backend, which take turns."""
    first, *others = [partial(context_steps, workload, backend) for backend in backends]
    turns = Turns(dict(zip(backends[1:], others, strict=True)), backends[0])
    for step in first(turns.losses[backends[0]]):
        turns.next(step)
    turns.require_equal_losses()
    return turns.seconds


def compare_backends(workload: Workload, backends: list[str]) -> dict[str, dict[str, float]]:
    """By backend: seconds of processor and wall time of a step, and bytes saved on a rank.

    Besides, the median of the ratios to the first backend, step by step; and of the bytes to those of one
    process.
    """
    ranks = run_ranks(measure_backends, CP, workload, backends)
    whole = run_ranks(saved_bytes, 1, workload, None)[0]
    times = {backend: over_ranks([rank[backend] for rank in ranks]) for backend in backends}
    result: dict[str, dict[str, float]] = {}
    for backend, own in times.items():
        row = result[backend] = {key: statistics.median(values) for key, values in own.items()}
        for key, values in own.items():
            steps = zip(values, times[backends[0]][key], strict=True)
            row[f"{key} / {backends[0]}"] = statistics.median(a / b for a, b in steps)
        row["saved_bytes"] = max(run_ranks(saved_bytes, CP, workload, backend))
        row["saved_bytes / one process"] = row["saved_bytes"] / whole
    return result


# ---------------------------------------------------------------- the command


def contest_of(backend: str, workload: Workload) -> Contest:
    """TitanStrategy against the hand-written loop, its optimizer on local shards and on DTensors."""
    return Contest(
        workload,
        CP,
        partial(run_titan_context, workload, backend),
        {
            "loop": partial(context_steps, workload, backend),
            "plain": partial(context_steps, workload, backend, local_optimizer=False),
        },
    )


def main() -> None:
    """Measure, print both tables, and write them as JSON if asked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rounds", type=int, default=4, help="runs in turn")
    parser.add_argument("--backends", nargs="+", default=list(CONTEXT_BACKENDS), choices=CONTEXT_BACKENDS)
    parser.add_argument("--sizes", nargs="*", default=list(SIZES), choices=SIZES)
    parser.add_argument("--lengths", nargs="*", type=int, default=list(LENGTHS), help="of the second table")
    parser.add_argument("--output", type=Path, help="write the figures here as JSON")
    arguments = parser.parse_args()
    results: dict[str, Any] = {}
    print(f"load before: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    print(f"{'backend':11} {'size':7} {'titan ms (cpu, wall)':21} titan / loop; titan / plain")
    for size in arguments.sizes:
        for backend in arguments.backends:
            contest = contest_of(backend, SIZES[size])
            table = compare([run_contest(contest)])
            table["in turn"] = ratios_in_turn(contest, arguments.rounds)
            results[f"{backend}, {size}"] = table
            print(_line(backend, size, table), flush=True)
    print(f"{'tokens':6} {'backend':11} {'ms cpu':>8} {'ms wall':>8} cpu, wall / first; saved bytes / one")
    for length in arguments.lengths:
        rows = results[f"{length} tokens"] = compare_backends(long_workload(length), arguments.backends)
        for backend, row in rows.items():
            cpu, wall, *ratios, saved, share = row.values()
            shown = ", ".join(f"{ratio:.2f}" for ratio in ratios)
            times = f"{cpu * 1e3:8.1f} {wall * 1e3:8.1f}"
            print(
                f"{length:6} {backend:11} {times} {shown}; {saved / 2**20:.2f} MiB, {share:.3f}", flush=True
            )
    print(f"load after: {os.getloadavg()[0]:.1f}")
    if arguments.output:
        arguments.output.write_text(json.dumps(results, indent=2))


def _line(backend: str, size: str, table: dict[str, Any]) -> str:
    own = table["median"]["titan"]
    parts = []
    for name, found in table["in turn"].items():
        (middle, low, high), (wall, *_) = found["cpu_s"], found["wall_s"]
        demand = ""
        if name == "loop":
            met = "met" if middle <= DEMANDED[size] else "NOT MET"
            demand = f"; at most {DEMANDED[size]}: {met}"
        memory = table[f"titan / {name}"]["memory_mib"]
        spread = f"{low:.3f} to {high:.3f}"
        parts.append(f"{name} cpu {middle:.3f} ({spread}{demand}) wall {wall:.3f} memory {memory:.3f}")
    times = f"{own['cpu_s'] * 1e3:.1f}, {own['wall_s'] * 1e3:.1f}"
    return f"{backend:11} {size:7} {times:21} {'; '.join(parts)}"


if __name__ == "__main__":
    main()

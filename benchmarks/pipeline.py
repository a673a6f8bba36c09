"""Step cost of Trainer + TitanStrategy under pipeline parallel against a loop on torch's own pipelining.

    python -m benchmarks.pipeline [--rounds 5] [--schedules 1F1B Interleaved1F1B] [--output x.json]

Two ranks, 8 microbatches a step. Compared is the processor time of both ranks per step (their sum, so that
waiting for each other doesn't count): contestants take turns step by step in the same processes, since
separate runs on a shared machine differ by more than what is measured; shown are the median over all steps
and the quartiles. Wall time and peak memory are of separate runs in turn, medians of the rounds' ratios.
Every round checks that both compute the same losses.

- ``titan``: the ordinary module through ``Trainer(strategy=TitanStrategy(pp=2, dp_shard=1, ...))``;
- ``torch``: a hand-written loop on torch.distributed.pipelining, the same model cut into the same stages.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B
from typing_extensions import override

from benchmarks.loops import Module, Workload, batches, build_model, run_trainer
from benchmarks.peers import cross_entropy
from benchmarks.trainer_overhead import WARM_UP, measure
from tests.harness import run_ranks
from titanplug.models import Transformer
from titanplug.models.attention import SequenceContext
from titanplug.parallel.pipeline.split import module_costs, ordered_modules, split_by_cost
from titanplug.schedules.catalogue import chunks_per_rank, stage_to_rank
from titanplug.strategy import TitanStrategy

DEGREES = {"pp": 2, "dp_shard": 1}
NUM_MICROBATCHES = 8
SCHEDULES = ("1F1B", "Interleaved1F1B")
SIZES = {
    "50 ms": Workload(dim=64, num_layers=4, seq_len=64, batch_size=8, vocab_size=256, num_steps=43),
    "200 ms": Workload(dim=256, num_layers=8, seq_len=64, batch_size=8, vocab_size=1024, num_steps=15),
}
DEMANDED = {"50 ms": 1.05, "200 ms": 1.02}
"""Processor time of titan over that of torch, at most."""
LOSS_TOLERANCE = 1e-5


class _ModuleWithLosses(Module):
    """Keeps what callbacks see as the loss of each step."""

    def __init__(self, workload: Workload, losses: list[float]) -> None:
        super().__init__(workload)
        self._losses = losses

    @override
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self._losses.append(float(outputs["loss"]))


def run_titan_pipeline(
    workload: Workload,
    degrees: dict[str, int],
    world_size: int,
    mark: Callable[[int], None],
    *,
    schedule: str,
    losses: list[float],
) -> None:
    """Train by the Trainer with TitanStrategy; the loss of each step goes into ``losses``."""
    strategy = TitanStrategy(
        pp=degrees["pp"],
        dp_shard=degrees["dp_shard"],
        pp_schedule=schedule,
        pp_microbatches=NUM_MICROBATCHES,
    )
    run_trainer(workload, strategy, world_size, 1, mark, _ModuleWithLosses(workload, losses))


class StageModel(nn.Module):
    """A part of a Transformer, as torch's users write it: what another stage has is None here.

    Args:
        model: the whole model.
        names: the modules of the stage.
    """

    def __init__(self, model: Transformer, names: list[str]) -> None:
        super().__init__()
        self.rotary = model.rotary
        self.tok_embeddings = model.tok_embeddings if "tok_embeddings" in names else None
        own = {key: layer for key, layer in model.layers.items() if f"layers.{key}" in names}
        self.layers = nn.ModuleDict(own)
        self.norm = model.norm if "norm" in names else None
        self.output = model.output if "output" in names else None

    @override
    def forward(self, hidden: Tensor) -> Tensor:
        """Token ids on the first stage, else hidden states -> hidden states, on the last stage logits."""
        context = SequenceContext(self.rotary)
        if self.tok_embeddings is not None:
            hidden = self.tok_embeddings(hidden)
        for layer in self.layers.values():
            hidden = layer(hidden, context)
        if self.norm is not None:
            hidden = self.norm(hidden)
        return hidden if self.output is None else self.output(hidden)


def build_stages(workload: Workload, schedule: str, rank: int, num_ranks: int) -> list[PipelineStage]:
    """This rank's stages of the model, cut as TitanStrategy cuts it; shapes are given beforehand."""
    model = build_model(workload)
    names, layers = ordered_modules(model, model.parallel_plan().pipeline)
    holders = stage_to_rank(schedule, num_ranks, chunks_per_rank(schedule, None))
    bounds = split_by_cost(module_costs(model, names, layers), layers, len(holders))
    rows, last = workload.batch_size // NUM_MICROBATCHES, len(holders) - 1
    tokens = torch.empty(rows, workload.seq_len, dtype=torch.int64, device="meta")
    hidden = torch.empty(rows, workload.seq_len, workload.dim, device="meta", requires_grad=True)
    logits = torch.empty(rows, workload.seq_len, workload.vocab_size, device="meta", requires_grad=True)
    return [
        PipelineStage(
            StageModel(model, names[bounds[stage].start : bounds[stage].stop]),
            stage,
            len(holders),
            torch.device("cpu"),
            input_args=tokens if stage == 0 else hidden,
            output_args=logits if stage == last else hidden,
        )
        for stage, holder in enumerate(holders)
        if holder == rank
    ]


def run_torch_pipeline(
    workload: Workload,
    degrees: dict[str, int],
    world_size: int,
    mark: Callable[[int], None],
    *,
    schedule: str,
    losses: list[float],
) -> None:
    """Train by a hand-written loop on torch's pipelining. Needs a process group.

    The loss of each step goes into ``losses`` on the rank that has the last stage.
    """
    for step in torch_steps(workload, world_size, schedule=schedule, losses=losses):
        mark(step)


def torch_steps(workload: Workload, world_size: int, *, schedule: str, losses: list[float]) -> Iterator[int]:
    """The loop, one step at a time; the first thing it gives is -1, when all is set up."""
    stages = build_stages(workload, schedule, dist.get_rank(), world_size)
    run: Any
    if schedule == "1F1B":
        run = Schedule1F1B(stages[0], NUM_MICROBATCHES, _part_of_loss, scale_grads=False)
    else:
        run = ScheduleInterleaved1F1B(list(stages), NUM_MICROBATCHES, _part_of_loss, scale_grads=False)
    parameters = [parameter for stage in stages for parameter in stage.submod.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=1e-3)
    first, last = stages[0].is_first, stages[-1].is_last
    yield -1
    for step, batch in enumerate(batches(workload, 0, 1)):
        optimizer.zero_grad()
        inputs = (batch["input_ids"],) if first else ()
        parts: list[Tensor] | None = [] if last else None
        run.step(*inputs, target=batch["labels"] if last else None, losses=parts, return_outputs=False)
        optimizer.step()
        if parts:
            losses.append(float(torch.stack(parts).detach().sum()))
        yield step


def _part_of_loss(logits: Tensor, labels: Tensor) -> Tensor:
    return cross_entropy(logits, labels) / NUM_MICROBATCHES


CONTESTANTS: dict[str, tuple[Callable[..., None], bool]] = {
    "titan": (run_titan_pipeline, False),
    "torch": (run_torch_pipeline, True),
}


def measure_with_losses(
    rank: int, world_size: int, run: Callable[..., None], workload: Workload, schedule: str
) -> tuple[dict[str, float], list[float]]:
    """Figures of this rank, and the losses that it knows."""
    losses: list[float] = []

    def run_collected(*args: Any) -> None:
        *others, mark = args

        def mark_collected(step: int) -> None:
            if step == WARM_UP - 2:
                # The first full collection after a fork goes through all of the parent's objects, for as long
                # as several steps. Now neither has it among its counted steps.
                gc.collect()
            mark(step)

        run(*others, mark_collected, schedule=schedule, losses=losses)

    return measure(rank, world_size, run_collected, workload, DEGREES), losses


def measure_in_turn(rank: int, world_size: int, workload: Workload, schedule: str) -> dict[str, list[float]]:
    """Processor time of each step of both contestants, which take turns step by step in one process.

    What else a shared machine does falls on both alike, which separate runs can't have.
    """
    seconds: dict[str, list[float]] = {"titan": [], "torch": []}
    own: list[float] = []
    peer: Iterator[int] | None = None
    before = 0.0

    def mark(step: int) -> None:
        nonlocal peer, before
        now = time.process_time()
        if peer is None:  # the process group is there
            peer = torch_steps(workload, world_size, schedule=schedule, losses=[])
            next(peer)
        else:
            seconds["titan"].append(now - before)
            next(peer)
            seconds["torch"].append(time.process_time() - now)
        if step == WARM_UP - 2:
            gc.collect()
        before = time.process_time()

    run_titan_pipeline(workload, DEGREES, world_size, mark, schedule=schedule, losses=own)
    return {name: values[WARM_UP:] for name, values in seconds.items()}


def ratio_in_turn(schedule: str, workload: Workload, rounds: int) -> tuple[float, float, float]:
    """Median over steps of titan's processor time over torch's, both ranks summed; and the quartiles."""
    ratios: list[float] = []
    for _ in range(rounds):
        ranks = run_ranks(measure_in_turn, DEGREES["pp"], workload, schedule, init_process_group=False)
        steps = zip(*(zip(rank["titan"], rank["torch"], strict=True) for rank in ranks), strict=True)
        ratios += [sum(a for a, _ in step) / sum(b for _, b in step) for step in steps]
    low, middle, high = statistics.quantiles(ratios, n=4)
    return middle, low, high


def run_round(schedule: str, workload: Workload, number: int = 0) -> dict[str, dict[str, float]]:
    """Each contestant once, in turn the one and the other first.

    Raises:
        AssertionError: they compute other losses.
    """
    order = list(CONTESTANTS.items())
    result = {}
    losses = {}
    for name, (run, process_group) in order if number % 2 == 0 else reversed(order):
        ranks = run_ranks(
            measure_with_losses, DEGREES["pp"], run, workload, schedule, init_process_group=process_group
        )
        figures = [figures for figures, _ in ranks]
        losses[name] = ranks[-1][1]  # the last stage is there
        result[name] = {
            "cpu_s": sum(rank["cpu_s"] for rank in figures),
            "wall_s": max(rank["wall_s"] for rank in figures),
            "memory_mib": max(rank["memory_mib"] for rank in figures),
        }
    assert len(losses["titan"]) == workload.num_steps
    torch.testing.assert_close(losses["titan"], losses["torch"], rtol=0, atol=LOSS_TOLERANCE)
    return result


def compare(rounds: list[dict[str, dict[str, float]]]) -> dict[str, Any]:
    """Medians, and medians of the rounds' ratios of titan to torch."""
    keys = list(rounds[0]["titan"])
    ratios = {key: [r["titan"][key] / r["torch"][key] for r in rounds] for key in keys}
    return {
        "median": {
            name: {key: statistics.median(r[name][key] for r in rounds) for key in keys}
            for name in CONTESTANTS
        },
        "titan / torch": {key: round(statistics.median(values), 3) for key, values in ratios.items()},
    }


def main() -> None:
    """Measure, print a table, and write it as JSON if asked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rounds", type=int, default=5, help="alternating rounds")
    parser.add_argument("--schedules", nargs="+", default=list(SCHEDULES), choices=SCHEDULES)
    parser.add_argument("--sizes", nargs="+", default=list(SIZES), choices=SIZES)
    parser.add_argument("--output", type=Path, help="write the figures here as JSON")
    arguments = parser.parse_args()
    results: dict[str, Any] = {}
    print(f"load before: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    print(f"{'schedule':16} {'size':7} {'ms cpu (titan, torch)':22} {'ms wall':15} titan / torch")
    print(f"{'':16} {'':7} {'of separate runs':22} {'':15} cpu step by step, the rest of separate runs")
    for size in arguments.sizes:
        for schedule in arguments.schedules:
            rounds = [run_round(schedule, SIZES[size], number) for number in range(arguments.rounds)]
            table = results[f"{schedule}, {size}"] = compare(rounds)
            table["in turn"] = ratio_in_turn(schedule, SIZES[size], arguments.rounds)
            print(_line(schedule, size, table), flush=True)
    print(f"load after: {os.getloadavg()[0]:.1f}")
    if arguments.output:
        arguments.output.write_text(json.dumps(results, indent=2))


def _line(schedule: str, size: str, table: dict[str, Any]) -> str:
    titan, torch_ = table["median"]["titan"], table["median"]["torch"]
    times = [f"{titan[key] * 1e3:.1f}, {torch_[key] * 1e3:.1f}" for key in ("cpu_s", "wall_s")]
    ratio, (middle, low, high) = table["titan / torch"], table["in turn"]
    met = "met" if middle <= DEMANDED[size] else "NOT MET"
    spread = f"{low:.3f} to {high:.3f}"
    return (
        f"{schedule:16} {size:7} {times[0]:22} {times[1]:15} "
        f"cpu {middle:.3f} ({spread}; at most {DEMANDED[size]}: {met}) "
        f"wall {ratio['wall_s']:.3f} memory {ratio['memory_mib']:.3f}"
    )


if __name__ == "__main__":
    main()

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
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B
from typing_extensions import override

from benchmarks.loops import ModuleWithLosses, Workload, batches, build_model, run_trainer
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


def run_titan_pipeline(
    workload: Workload, schedule: str, mark: Callable[[int], None], losses: list[float]
) -> None:
    """Train by the Trainer with TitanStrategy; the loss of each step goes into ``losses``."""
    strategy = TitanStrategy(
        pp=DEGREES["pp"],
        dp_shard=DEGREES["dp_shard"],
        pp_schedule=schedule,
        pp_microbatches=NUM_MICROBATCHES,
    )
    run_trainer(workload, strategy, DEGREES["pp"], 1, mark, ModuleWithLosses(workload, losses))


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


def torch_steps(workload: Workload, schedule: str, losses: list[float]) -> Iterator[int]:
    """A hand-written loop on torch's pipelining, one step at a time. Needs a process group.

    The first thing it gives is -1, when all is set up. The loss of each step goes into ``losses`` on the rank
    that has the last stage.
    """
    stages = build_stages(workload, schedule, dist.get_rank(), DEGREES["pp"])
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


# ---------------------------------------------------------------- TitanStrategy against loops


@dataclass(frozen=True)
class Contest:
    """The same work by the Trainer with TitanStrategy and by hand-written loops.

    Args:
        workload: what is trained.
        num_ranks: processes of each contestant.
        titan: trains; takes what it calls with the number of each step, -1 before the first, and where it
            puts losses.
        loops: train one step at a time, by name; take where they put losses and give the same numbers. Need
            a process group.
    """

    workload: Workload
    num_ranks: int
    titan: Callable[[Callable[[int], None], list[float]], None]
    loops: dict[str, Callable[[list[float]], Iterator[int]]]


def measure_with_losses(
    rank: int, num_ranks: int, contest: Contest, name: str
) -> tuple[dict[str, float], list[float]]:
    """Figures of this rank with one contestant, and the losses that it knows."""
    losses: list[float] = []

    def run(*args: Any) -> None:
        mark = args[-1]
        if name == "titan":
            contest.titan(mark, losses)
        else:
            for step in contest.loops[name](losses):
                mark(step)

    return measure(rank, num_ranks, run, contest.workload, {}), losses


def run_contest(contest: Contest, number: int = 0) -> dict[str, dict[str, float]]:
    """Each contestant once, in an odd round the other way round.

    Raises:
        AssertionError: they compute other losses.
    """
    order = ["titan", *contest.loops]
    result = {}
    losses = {}
    for name in order if number % 2 == 0 else reversed(order):
        ranks = run_ranks(
            measure_with_losses, contest.num_ranks, contest, name, init_process_group=name != "titan"
        )
        figures = [figures for figures, _ in ranks]
        losses[name] = ranks[-1][1]  # the last stage of a pipeline is there
        result[name] = {
            "cpu_s": sum(rank["cpu_s"] for rank in figures),
            "wall_s": max(rank["wall_s"] for rank in figures),
            "memory_mib": max(rank["memory_mib"] for rank in figures),
        }
    assert len(losses["titan"]) == contest.workload.num_steps
    for name in contest.loops:
        torch.testing.assert_close(losses["titan"], losses[name], rtol=0, atol=LOSS_TOLERANCE)
    return result


def compare(rounds: list[dict[str, dict[str, float]]]) -> dict[str, Any]:
    """Medians, and medians of the rounds' ratios of titan to each loop."""
    names, keys = list(rounds[0]), list(rounds[0]["titan"])

    def median_ratio(name: str, key: str) -> float:
        return round(statistics.median(r["titan"][key] / r[name][key] for r in rounds), 3)

    return {
        "median": {
            name: {key: statistics.median(r[name][key] for r in rounds) for key in keys} for name in names
        },
        **{
            f"titan / {name}": {key: median_ratio(name, key) for key in keys}
            for name in names
            if name != "titan"
        },
    }


class Turns:
    """Lets contestants take turns step by step in one process.

    What else a shared machine does falls on all alike, which separate runs can't have.

    Args:
        loops: all contestants, or all but one, which calls :meth:`next` after each of its steps.
        own: name of that one.
    """

    def __init__(self, loops: dict[str, Callable[[list[float]], Iterator[int]]], own: str) -> None:
        self._make, self._own = loops, own
        self._loops: dict[str, Iterator[int]] = {}
        self._before = 0.0, 0.0
        self.seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in [own, *loops]}
        """Processor and wall time of each step."""
        self.losses: dict[str, list[float]] = {name: [] for name in self.seconds}

    def next(self, step: int) -> None:
        """A step of the own contestant is over; -1: it is set up, and the process group is there."""
        self._add(self._own, step)
        if step == -1:
            self._loops = {name: make(self.losses[name]) for name, make in self._make.items()}
        names = list(self._loops)
        # Nobody is always behind the same one.
        for name in names if step % 2 else reversed(names):
            self._before = _now()
            next(self._loops[name])
            self._add(name, step)
        if step == WARM_UP - 2:
            gc.collect()  # the first full collection after a fork takes as long as several steps
        self._before = _now()

    def require_equal_losses(self) -> None:
        """Where this rank knows them.

        Raises:
            AssertionError: the contestants compute other losses.
        """
        known = [losses for losses in self.losses.values() if losses]
        for losses in known[1:]:
            torch.testing.assert_close(losses, known[0], rtol=0, atol=LOSS_TOLERANCE)

    def _add(self, name: str, step: int) -> None:
        if step >= WARM_UP:
            cpu, wall = _now()
            self.seconds[name].append((cpu - self._before[0], wall - self._before[1]))


def _now() -> tuple[float, float]:
    return time.process_time(), time.perf_counter()


def measure_in_turn(rank: int, num_ranks: int, contest: Contest) -> dict[str, list[tuple[float, float]]]:
    """Processor and wall time of each step of all contestants on this rank."""
    turns = Turns(contest.loops, "titan")
    contest.titan(turns.next, turns.losses["titan"])
    turns.require_equal_losses()
    return turns.seconds


def ratios_in_turn(contest: Contest, rounds: int) -> dict[str, dict[str, tuple[float, float, float]]]:
    """Median over steps of titan's time over each loop's, and the quartiles.

    Processor time is that of all ranks together; wall time that of the slowest.
    """
    ratios: dict[str, dict[str, list[float]]] = {name: {"cpu_s": [], "wall_s": []} for name in contest.loops}
    for _ in range(rounds):
        ranks = run_ranks(measure_in_turn, contest.num_ranks, contest, init_process_group=False)
        own = over_ranks([rank["titan"] for rank in ranks])
        for name, found in ratios.items():
            others = over_ranks([rank[name] for rank in ranks])
            for key, values in found.items():
                values += [a / b for a, b in zip(own[key], others[key], strict=True)]
    return {name: {key: quartiles(values) for key, values in found.items()} for name, found in ratios.items()}


def over_ranks(ranks: list[list[tuple[float, float]]]) -> dict[str, list[float]]:
    """By step: processor time of all ranks, and wall time of the slowest."""
    steps = list(zip(*ranks, strict=True))
    return {
        "cpu_s": [sum(cpu for cpu, _ in step) for step in steps],
        "wall_s": [max(wall for _, wall in step) for step in steps],
    }


def quartiles(values: list[float]) -> tuple[float, float, float]:
    """The median, and the first and the third quartile."""
    low, middle, high = statistics.quantiles(values, n=4)
    return middle, low, high


# ---------------------------------------------------------------- the command


def contest_of(schedule: str, workload: Workload) -> Contest:
    """TitanStrategy against torch's pipelining."""
    return Contest(
        workload,
        DEGREES["pp"],
        partial(run_titan_pipeline, workload, schedule),
        {"torch": partial(torch_steps, workload, schedule)},
    )


def run_round(schedule: str, workload: Workload, number: int = 0) -> dict[str, dict[str, float]]:
    """See :func:`run_contest`."""
    return run_contest(contest_of(schedule, workload), number)


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
            turns = ratios_in_turn(contest_of(schedule, SIZES[size]), arguments.rounds)
            table["in turn"] = turns["torch"]["cpu_s"]
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

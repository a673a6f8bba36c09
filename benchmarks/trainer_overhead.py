"""Step cost of Trainer + TitanStrategy against hand-written loops and Lightning's own strategy.

    python -m benchmarks.trainer_overhead [--rounds 5] [--layouts dp_shard2 tp2] [--output x.json]

Contestants alternate in one run. Compared is the processor time of all ranks per step (their sum, so that
waiting for each other doesn't count), median of the rounds' ratios; wall time and peak memory beside it.

- ``loop``: a hand-written loop on the same parallel model, its optimizer on DTensors as in everybody's;
- ``titan``: the same model, data and optimizer through ``Trainer(strategy=TitanStrategy(...))``;
- ``lightning``: Lightning's ModelParallelStrategy, its user applying FSDP2 and DTensor's styles;
- ``torch``: a hand-written loop on FSDP2 and DTensor's styles.
"""

from __future__ import annotations

import argparse
import gc
import json
import resource
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.loops import Workload, run_loop, run_titan
from benchmarks.peers import run_lightning, run_torch_loop
from tests.harness import run_ranks

LAYOUTS: dict[str, tuple[int, dict[str, int]]] = {
    "dp_shard2": (2, {"dp_shard": 2}),
    "tp2": (2, {"dp_shard": 1, "tp": 2}),
    "dp_shard2xtp2": (4, {"dp_shard": 2, "tp": 2}),
}
SIZES = {
    "20 ms": Workload(dim=64, num_layers=1, seq_len=64, batch_size=2, vocab_size=256, num_steps=63),
    "200 ms": Workload(dim=256, num_layers=8, seq_len=128, batch_size=2, vocab_size=1024, num_steps=12),
}
CONTESTANTS: dict[str, tuple[Callable[..., None], bool]] = {
    "loop": (run_loop, True),
    "titan": (run_titan, False),
    "lightning": (run_lightning, False),
    "torch": (run_torch_loop, True),
}
WARM_UP = 3  # steps not counted


def measure(
    rank: int,
    world_size: int,
    run: Callable[..., None],
    workload: Workload,
    degrees: dict[str, int],
) -> dict[str, float]:
    """Seconds of processor and wall time per step, and peak memory in MiB, of this rank."""
    marks: dict[int, tuple[float, float]] = {}

    def mark(step: int) -> None:
        if step == WARM_UP - 2:
            gc.collect()  # the first full collection after a fork takes long, and would fall on one of them
        marks[step] = time.process_time(), time.perf_counter()

    run(workload, degrees, world_size, mark)
    first, last = marks[WARM_UP - 1], marks[workload.num_steps - 1]
    steps = workload.num_steps - WARM_UP
    return {
        "cpu_s": (last[0] - first[0]) / steps,
        "wall_s": (last[1] - first[1]) / steps,
        "memory_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }


def run_round(layout: str, workload: Workload) -> dict[str, dict[str, float]]:
    """Each contestant once."""
    world_size, degrees = LAYOUTS[layout]
    result = {}
    for name, (run, process_group) in CONTESTANTS.items():
        ranks = run_ranks(measure, world_size, run, workload, degrees, init_process_group=process_group)
        result[name] = {
            "cpu_s": sum(rank["cpu_s"] for rank in ranks),
            "wall_s": max(rank["wall_s"] for rank in ranks),
            "memory_mib": max(rank["memory_mib"] for rank in ranks),
        }
    return result


def compare(rounds: list[dict[str, dict[str, float]]]) -> dict[str, Any]:
    """Medians, and medians of the rounds' ratios of titan to each other contestant."""
    table: dict[str, Any] = {"median": {}, "titan / other": {}}
    for name in CONTESTANTS:
        table["median"][name] = {
            key: statistics.median(r[name][key] for r in rounds) for key in rounds[0][name]
        }
        if name != "titan":
            table["titan / other"][name] = {
                key: round(statistics.median(r["titan"][key] / r[name][key] for r in rounds), 3)
                for key in rounds[0][name]
            }
    return table


def main() -> None:
    """Measure, print a table, and write it as JSON if asked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rounds", type=int, default=5, help="alternating rounds")
    parser.add_argument("--layouts", nargs="+", default=list(LAYOUTS), choices=LAYOUTS)
    parser.add_argument("--sizes", nargs="+", default=list(SIZES), choices=SIZES)
    parser.add_argument("--output", type=Path, help="write the figures here as JSON")
    arguments = parser.parse_args()
    results: dict[str, Any] = {}
    print(f"{'layout':14} {'steps near':10} {'titan ms (cpu, wall)':22} titan / loop, lightning, torch")
    for size in arguments.sizes:
        for layout in arguments.layouts:
            rounds = [run_round(layout, SIZES[size]) for _ in range(arguments.rounds)]
            table = results[f"{layout}, {size}"] = compare(rounds)
            own = table["median"]["titan"]
            ratios = table["titan / other"]
            shown = " ".join(
                f"{name} cpu {r['cpu_s']:.2f} wall {r['wall_s']:.2f} memory {r['memory_mib']:.2f};"
                for name, r in ratios.items()
            )
            times = f"{own['cpu_s'] * 1e3:.1f}, {own['wall_s'] * 1e3:.1f}"
            print(f"{layout:14} {size:10} {times:22} {shown}", flush=True)
    if arguments.output:
        arguments.output.write_text(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()

"""A step costs what a hand-written loop costs: collectives, host synchronisations, Python calls."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.context import run_context_loop
from benchmarks.loops import Workload, run_loop, run_titan
from tests.harness import run_ranks

FIRST, LAST = 2, 5  # counted steps: caches are warm, the epoch has not ended
MAX_EXTRA_CALLS = 1000
MAX_BORDER_CALLS = 200  # of a model's border under context parallel, which a loop has written out in its step


class _Operations(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func)
        communicates = name.startswith(("c10d.", "_c10d_functional.")) and "wait" not in name
        if communicates or "_local_scalar_dense" in name:
            self.counts[name.split(".")[1]] += 1
        return func(*args, **(kwargs or {}))


def _count_operations(rank: int, world_size: int, run: Any, *args: Any) -> dict[str, float]:
    mode = _Operations()
    marks: dict[int, Counter[str]] = {}
    with mode:
        run(*args, world_size, lambda step: marks.__setitem__(step, mode.counts.copy()))
    marks[LAST].subtract(marks[FIRST])
    return {name: n / (LAST - FIRST) for name, n in marks[LAST].items() if n}


def _count_calls(rank: int, world_size: int, run: Any, *args: Any) -> float:
    calls = 0
    marks: dict[int, int] = {}

    def count(frame: Any, event: str, arg: Any) -> None:
        nonlocal calls
        calls += event == "call"

    def mark(step: int) -> None:
        if step == FIRST:
            sys.setprofile(count)
        marks[step] = calls
        if step == LAST:
            sys.setprofile(None)

    run(*args, world_size, mark)
    return (marks[LAST] - marks[FIRST]) / (LAST - FIRST)


def _compare(
    count: Callable[..., Any], workload: Workload, degrees: dict[str, int], world_size: int
) -> tuple[Any, Any]:
    # A loop on titanplug's border would have its costs, too.
    by_hand = run_context_loop if "cp" in degrees else partial(run_loop, local_optimizer=True)
    loop = run_ranks(count, world_size, by_hand, workload, degrees)
    titan = run_ranks(count, world_size, run_titan, workload, degrees, init_process_group=False)
    return loop[0], titan[0]


LAYOUTS = [
    ({"dp_shard": 2}, 2),
    ({"dp_replicate": 2, "dp_shard": 1}, 2),
    ({"dp_shard": 1, "tp": 2}, 2),
    ({"dp_shard": 2, "tp": 2}, 4),
    ({"dp_shard": 1, "cp": 2}, 2),
]


def _small(num_layers: int, clip: float | None) -> Workload:
    return Workload(dim=32, num_layers=num_layers, seq_len=16, vocab_size=64, num_steps=7, clip=clip)


@pytest.mark.parametrize("clip", [None, 1.0])
@pytest.mark.parametrize(("degrees", "world_size"), LAYOUTS)
def test_collectives_and_synchronisations(
    degrees: dict[str, int], world_size: int, clip: float | None
) -> None:
    loop, titan = _compare(_count_operations, _small(2, clip), degrees, world_size)
    assert titan == loop


@pytest.mark.parametrize(("degrees", "world_size"), LAYOUTS)
def test_python_calls(degrees: dict[str, int], world_size: int) -> None:
    extra = []
    for num_layers in (2, 4):
        loop, titan = _compare(_count_calls, _small(num_layers, 1.0), degrees, world_size)
        extra.append(titan - loop)
    allowed = MAX_EXTRA_CALLS + (MAX_BORDER_CALLS if "cp" in degrees else 0)
    assert max(extra) <= allowed, extra
    assert abs(extra[1] - extra[0]) <= 30, f"overhead grows with the number of layers: {extra}"

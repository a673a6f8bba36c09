"""The context benchmark compares like with like: the same losses, and figures of all contestants."""

from __future__ import annotations

import pytest

from benchmarks.context import CP, compare_backends, contest_of, saved_bytes
from benchmarks.loops import Workload
from benchmarks.pipeline import compare, ratios_in_turn, run_contest
from tests.harness import run_ranks
from titanplug.validation import CONTEXT_BACKENDS

TINY = Workload(dim=32, num_layers=2, seq_len=16, batch_size=2, vocab_size=64, num_steps=6)


def test_contestants() -> None:
    table = compare([run_contest(contest_of("all_gather", TINY))])  # which compares the losses of six steps
    for name in ("loop", "plain"):
        assert table[f"titan / {name}"].keys() == {"cpu_s", "wall_s", "memory_mib"}
    assert all(value > 0 for value in table["median"]["titan"].values())


@pytest.mark.parametrize("backend", CONTEXT_BACKENDS)
def test_contestants_in_turn(backend: str) -> None:
    ratios = ratios_in_turn(contest_of(backend, TINY), 1)  # which compares the losses, too
    assert ratios.keys() == {"loop", "plain"}
    assert all(low <= middle <= high for of in ratios.values() for middle, low, high in of.values())


def test_backends_in_turn() -> None:
    rows = compare_backends(TINY, ["all_gather", "ring"])
    assert rows["all_gather"]["cpu_s / all_gather"] == 1
    assert rows["ring"]["cpu_s"] > 0


def test_a_rank_saves_its_share() -> None:
    whole = run_ranks(saved_bytes, 1, TINY, None)[0]
    for backend in CONTEXT_BACKENDS:
        for saved in run_ranks(saved_bytes, CP, TINY, backend):
            assert whole / CP <= saved <= 1.3 * whole / CP, backend

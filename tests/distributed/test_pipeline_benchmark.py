"""The pipeline benchmark compares like with like: the same losses, and figures of both contestants."""

from __future__ import annotations

import pytest

from benchmarks.loops import Workload
from benchmarks.pipeline import SCHEDULES, compare, run_round

TINY = Workload(dim=32, num_layers=4, seq_len=8, batch_size=8, vocab_size=64, num_steps=6)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_both_compute_the_same_losses(schedule: str) -> None:
    table = compare([run_round(schedule, TINY)])  # which compares the losses of six steps
    assert table["titan / torch"].keys() == {"cpu_s", "wall_s", "memory_mib"}
    assert all(value > 0 for value in table["median"]["titan"].values())

"""The benchmark of checkpoints runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import checkpoint
from benchmarks.loops import Workload
from tests.harness import run_ranks


@pytest.mark.slow
def test_runs(tmp_path: Path) -> None:
    workload = Workload(dim=32, num_layers=2, seq_len=16, batch_size=1, vocab_size=64, num_steps=2)
    times, num_bytes = run_ranks(checkpoint.run, 2, workload, tmp_path, 2, init_process_group=False)[0]
    assert set(times) == {"save", "load", "blocking, first", "blocking"}
    assert all(seconds > 0 for rounds in times.values() for pair in rounds for seconds in pair)
    assert num_bytes > 3 * 4 * 32 * 64

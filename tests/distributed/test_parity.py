"""Every layout gives the gradients, weights, norms and logged values of one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.distributed.case import Case, assert_same, train_reference, train_titan
from tests.harness import reference, run_ranks

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "1 process": (1, {}),
    "fsdp2": (2, {"dp_shard": 2}),
    "fsdp4": (4, {"dp_shard": 4}),
    "replicate2": (2, {"dp_replicate": 2, "dp_shard": 1}),
    "hsdp 2x2": (4, {"dp_replicate": 2, "dp_shard": 2}),
    "tp2": (2, {"tp": 2}),
    "tp4": (4, {"tp": 4}),
    "fsdp2 x tp2": (4, {"dp_shard": 2, "tp": 2}),
    "hsdp 2x2 x tp2": (8, {"dp_replicate": 2, "dp_shard": 2, "tp": 2}),
}
CASES = {
    "plain": Case(),
    "accumulate, ragged end": Case(num_rows=30, accumulate=2, clip=0.5),
    "uneven targets": Case(by_targets=True, ignored="uneven", clip=0.1),
    "uneven targets, accumulate, tied": Case(
        by_targets=True, ignored="uneven", accumulate=2, tied=True, clip=0.1
    ),
    "empty shares": Case(by_targets=True, ignored="empty rows"),
    "clip by value": Case(clip=1e-3, clip_by_value=True),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", CASES)
def test_equals_one_process(layout: str, name: str) -> None:
    world_size, degrees = LAYOUTS[layout]
    case = CASES[name]
    expected = reference(train_reference, case)
    results = run_ranks(train_titan, world_size, case, degrees, init_process_group=False)
    for result in results:
        assert_same(result, expected, tolerance=1e-12)


@pytest.mark.parametrize("layout", ["fsdp2 x tp2"])
def test_float32(layout: str) -> None:
    world_size, degrees = LAYOUTS[layout]
    case = Case(dtype=torch.float32, by_targets=True, ignored="uneven", clip=0.1)
    expected = reference(train_reference, case)
    for result in run_ranks(train_titan, world_size, case, degrees, init_process_group=False):
        assert_same(result, expected, tolerance=1e-5)

"""The parity of tests/distributed on CUDA devices and NCCL, for as many as the machine has."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.distributed.case import Case, assert_same, train_reference, train_titan
from tests.harness import reference, run_ranks

pytestmark = pytest.mark.gpu

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "1 device": (1, {}),
    "fsdp2": (2, {"dp_shard": 2}),
    "tp2": (2, {"tp": 2}),
    "fsdp2 x tp2": (4, {"dp_shard": 2, "tp": 2}),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("accumulate", [1, 2])
def test_equals_one_process(layout: str, accumulate: int) -> None:
    world_size, degrees = LAYOUTS[layout]
    if torch.cuda.device_count() < world_size:
        pytest.skip(f"needs {world_size} CUDA devices")
    case = Case(by_targets=True, ignored="uneven", clip=0.1, accumulate=accumulate, tied=True)
    expected = reference(train_reference, case)
    on_gpu = replace(case, accelerator="gpu")
    for result in run_ranks(train_titan, world_size, on_gpu, degrees, init_process_group=False):
        assert_same(result, expected, tolerance=1e-12)


def test_bf16_mixed_keeps_float32_weights() -> None:
    results = run_ranks(_train_bf16, 1, init_process_group=False)
    assert results == [({torch.float32}, True)]


def _train_bf16(rank: int, world_size: int) -> tuple[set[torch.dtype], bool]:
    case = Case(dtype=torch.float32, accelerator="gpu", trainer={"precision": "bf16-mixed"})
    result = train_titan(rank, world_size, case, {})
    finite = all(bool(weight.isfinite().all()) for weight in result.weights.values())
    return {weight.dtype for weight in result.weights.values()}, finite

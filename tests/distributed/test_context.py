"""Under context parallel: the gradients, weights, norms and logged values of one process."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.distributed.case import Case, assert_same, train_reference, train_titan
from tests.distributed.test_pipeline import SCHEDULES, Validated, joined
from tests.harness import reference, run_ranks

BACKENDS = ["all_gather", "ring", "ulysses", "torch"]
TARGETS = Case(
    num_rows=20,
    accumulate=2,
    by_targets=True,
    ignored="uneven",
    clip=0.1,
    trainer={"val_check_interval": 1},
    model={"num_heads": 8, "num_kv_heads": 4},
)
"""Two batches a window, the last window of one, the last batch smaller; a validation after each batch."""


def check(world_size: int, degrees: dict[str, Any], case: Case, tolerance: float = 1e-12) -> None:
    expected = reference(train_reference, case)
    results = run_ranks(train_titan, world_size, case, degrees, Validated, init_process_group=False)
    assert_same(joined(results, expected), expected, tolerance)


def with_options(case: Case, **options: Any) -> Case:
    return replace(case, options={**case.options, **options})


@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("cp", [2, 4])
@pytest.mark.parametrize("backend", BACKENDS)
def test_backends(backend: str, cp: int, kv_heads: int) -> None:
    if backend == "ulysses" and kv_heads < cp:
        kv_heads = 8
    case = replace(TARGETS, model={"num_heads": 8, "num_kv_heads": kv_heads})
    check(cp, {"cp": cp, "dp_shard": 1}, with_options(case, cp_backend=backend))


LAYOUTS: dict[str, tuple[int, dict[str, int]]] = {
    "cp2 x fsdp2": (4, {"cp": 2, "dp_shard": 2}),
    "cp2 x replicate2": (4, {"cp": 2, "dp_replicate": 2, "dp_shard": 1}),
    "cp2 x tp2": (4, {"cp": 2, "tp": 2, "dp_shard": 1}),
    "cp2 x pp2": (4, {"cp": 2, "pp": 2, "dp_shard": 1}),
    "cp2 x pp2 x tp2": (8, {"cp": 2, "pp": 2, "tp": 2, "dp_shard": 1}),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout: str, backend: str) -> None:
    world_size, degrees = LAYOUTS[layout]
    options = {"pp_microbatches": 2} if "pp" in degrees else {}
    check(world_size, degrees, with_options(TARGETS, cp_backend=backend, **options))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_schedule(schedule: str) -> None:
    number = 4 if schedule == "DualPipeV" else 2
    check(4, {"cp": 2, "pp": 2}, with_options(TARGETS, pp_schedule=schedule, pp_microbatches=number))


FOUR_AXES = {
    "fsdp": {"pp": 2, "dp_shard": 2, "cp": 2, "tp": 2},
    "replicate": {"pp": 2, "dp_replicate": 2, "dp_shard": 1, "cp": 2, "tp": 2},
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", FOUR_AXES)
def test_all_axes_together(kind: str) -> None:
    options = {"pp_schedule": "Interleaved1F1B", "pp_microbatches": 2}
    check(16, FOUR_AXES[kind], with_options(replace(TARGETS, documents=True), **options))


@pytest.mark.parametrize("backend", ["all_gather", "ulysses"])
@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("layout", ["cp2", "cp4", "cp2 x pp2", "cp2 x tp2"])
def test_packed_documents(layout: str, window: int | None, backend: str) -> None:
    """Documents that lie across the borders of shards, and windows that reach over them."""
    world_size, degrees = {"cp2": (2, {"cp": 2}), "cp4": (4, {"cp": 4}), **LAYOUTS}[layout]
    case = replace(TARGETS, documents=True, model={**TARGETS.model, "sliding_window": window})
    check(world_size, degrees, with_options(case, cp_backend=backend))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("seq_len", [13, 3])
def test_lengths_that_do_not_divide(seq_len: int, backend: str) -> None:
    check(2, {"cp": 2}, with_options(replace(TARGETS, seq_len=seq_len), cp_backend=backend))


def test_length_under_both_axes_of_the_sequence() -> None:
    check(4, {"cp": 2, "tp": 2}, replace(TARGETS, seq_len=13))
    check(4, {"cp": 2, "tp": 2}, with_options(TARGETS, sequence_parallel=False, loss_parallel=False))


@pytest.mark.parametrize("ignored", ["but the last", "empty rows", "all", "uneven", ""])
@pytest.mark.parametrize("by_targets", [True, False])
def test_targets_in_one_place(ignored: str, by_targets: bool) -> None:
    """Also where the loss is a mean that the step doesn't give the number of targets of."""
    case = replace(TARGETS, ignored=ignored, by_targets=by_targets)
    if ignored in ("all", "empty rows") and not by_targets:
        case = replace(case, ignored="but the last", seq_len=7)
    check(4, {"cp": 4}, case)


@pytest.mark.parametrize("load_balance", [True, False])
@pytest.mark.parametrize("backend", BACKENDS)
def test_order_of_the_sequence(backend: str, load_balance: bool) -> None:
    check(4, {"cp": 4}, with_options(TARGETS, cp_backend=backend, cp_load_balance=load_balance))


@pytest.mark.parametrize("backend", BACKENDS)
def test_float32(backend: str) -> None:
    case = with_options(replace(TARGETS, dtype=torch.float32), cp_backend=backend)
    check(4, {"cp": 2, "dp_shard": 2}, case, tolerance=1e-5)

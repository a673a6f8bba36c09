"""Under any pipeline schedule: the gradients, weights, norms and logged values of one process."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader

from tests.distributed.case import Case, Module, Result, Rows, assert_same, train_reference, train_titan
from tests.harness import reference, run_ranks

SCHEDULES = [
    "GPipe",
    "1F1B",
    "Interleaved1F1B",
    "LoopedBFS",
    "InterleavedZeroBubble",
    "ZBVZeroBubble",
    "DualPipeV",
]
TARGETS = Case(
    num_rows=30,
    accumulate=2,
    by_targets=True,
    ignored="uneven",
    clip=0.1,
    trainer={"val_check_interval": 1},
)
"""Two batches a window, the last window of one, the last batch smaller; a validation after each batch."""
LAYOUTS: dict[str, tuple[int, dict[str, int]]] = {
    "pp2": (2, {"pp": 2}),
    "pp4": (4, {"pp": 4}),
    "pp2 x fsdp2": (4, {"pp": 2, "dp_shard": 2}),
    "pp2 x replicate2": (4, {"pp": 2, "dp_replicate": 2, "dp_shard": 1}),
    "pp2 x tp2": (4, {"pp": 2, "tp": 2}),
}


class Validated(Module):
    """Is validated on batches that don't divide, too."""

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        logits = self.model(batch["input_ids"])
        self.log("val_loss", F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten()))

    def val_dataloader(self) -> DataLoader[dict[str, Tensor]]:
        return DataLoader(Rows(replace(self.case, num_rows=5, ignored="")), batch_size=3)


def joined(results: list[Result], expected: Result) -> Result:
    """One result of the stages' own: each has the parameters that it holds, all the same numbers."""
    first = results[0]
    for result in results[1:]:
        assert result.norms == first.norms
        assert result.losses == first.losses
        assert result.epoch_loss == first.epoch_loss or math.isnan(first.epoch_loss)
    merged = Result([{} for _ in first.grads], first.norms, first.losses, first.epoch_loss, {})
    for result in results:
        for into, grads in zip([*merged.grads, merged.weights], [*result.grads, result.weights], strict=True):
            for name, value in grads.items():
                # The head of a model with tied embeddings is on another stage than its weight's name.
                own = name if name in expected.weights else "model.tok_embeddings.weight"
                assert own not in into or torch.equal(into[own], value)
                into[own] = value
    return merged


def check(world_size: int, degrees: dict[str, Any], case: Case, tolerance: float = 1e-12) -> None:
    expected = reference(train_reference, case)
    results = run_ranks(train_titan, world_size, case, degrees, Validated, init_process_group=False)
    assert_same(joined(results, expected), expected, tolerance)


def with_schedule(case: Case, schedule: str, num_microbatches: int, **model: Any) -> Case:
    options = {"pp_schedule": schedule, "pp_microbatches": num_microbatches}
    return replace(case, options=options, model=model)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_schedule(schedule: str, layout: str) -> None:
    world_size, degrees = LAYOUTS[layout]
    pp = degrees["pp"]
    model = {"num_layers": 8} if pp == 4 else {}
    # DualPipeV needs two microbatches a stage; a rank reads 4 rows, or 8 without other data-parallel ranks.
    number = 2 * pp if schedule == "DualPipeV" else pp
    check(world_size, degrees, with_schedule(TARGETS, schedule, number, **model))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_three_axes(schedule: str) -> None:
    number = 4 if schedule == "DualPipeV" else 2
    check(8, {"pp": 2, "dp_shard": 2, "tp": 2}, with_schedule(TARGETS, schedule, number))


@pytest.mark.parametrize("layout", ["pp2", "pp2 x fsdp2", "pp2 x tp2"])
@pytest.mark.parametrize("schedule", ["1F1B", "ZBVZeroBubble"])
def test_tied_embeddings(schedule: str, layout: str) -> None:
    """The embedding and the head are on two ranks, or on one (V-shaped)."""
    world_size, degrees = LAYOUTS[layout]
    check(world_size, degrees, replace(with_schedule(TARGETS, schedule, 2), tied=True))


@pytest.mark.parametrize("ignored", ["", "empty rows", "uneven"])
def test_unequal_microbatches(ignored: str) -> None:
    """Batches of 6 in 4 microbatches, a last one of 2, microbatches without targets."""
    case = Case(global_batch=6, num_rows=20, by_targets=bool(ignored), ignored=ignored, clip=0.5)
    check(2, {"pp": 2}, with_schedule(case, "1F1B", 4))


def test_float32() -> None:
    case = replace(with_schedule(TARGETS, "Interleaved1F1B", 2), dtype=torch.float32)
    check(4, {"pp": 2, "dp_shard": 2}, case, tolerance=1e-5)


@pytest.mark.parametrize("by_value", [True, False])
def test_clipping(by_value: bool) -> None:
    case = Case(clip=1e-3, clip_by_value=by_value)
    check(4, {"pp": 2, "dp_shard": 2}, with_schedule(case, "Interleaved1F1B", 2))

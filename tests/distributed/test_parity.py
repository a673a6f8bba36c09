"""Every layout gives the gradients, weights, norms and logged values of one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.distributed.case import Case, Module, assert_same, train_reference, train_titan
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


@pytest.mark.parametrize("sequence_parallel", [True, False])
@pytest.mark.parametrize("loss_parallel", [True, False])
def test_switches(sequence_parallel: bool, loss_parallel: bool) -> None:
    options = {"sequence_parallel": sequence_parallel, "loss_parallel": loss_parallel}
    case = Case(by_targets=True, ignored="uneven", clip=0.1, options=options)
    expected = reference(train_reference, case)
    degrees = {"dp_shard": 2, "tp": 2}
    for result in run_ranks(train_titan, 4, case, degrees, init_process_group=False):
        assert_same(result, expected, tolerance=1e-12)


@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_families(sequence_parallel: bool) -> None:
    """Grouped queries, biases, norms of queries and keys, a sliding window."""
    model = {"num_kv_heads": 2, "qkv_bias": True, "qk_norm": True, "sliding_window": 5}
    case = Case(model=model, options={"sequence_parallel": sequence_parallel}, clip=0.1)
    expected = reference(train_reference, case)
    for result in run_ranks(train_titan, 2, case, {"tp": 2}, init_process_group=False):
        assert_same(result, expected, tolerance=1e-12)


def test_empty_window_gives_zero_gradients() -> None:
    case = Case(by_targets=True, ignored="all", num_rows=16)
    expected = reference(train_reference, case)
    expected.epoch_loss = float("nan")  # a mean over nothing, of the whole epoch
    for result in run_ranks(train_titan, 2, case, {"dp_shard": 2}, init_process_group=False):
        assert_same(result, expected, tolerance=1e-12)
        assert all(not grad.any() for grads in result.grads for grad in grads.values())
        assert result.losses == [0.0, 0.0]


class SumOverCount(Module):
    """A mean written out, which is 0/0 with a gradient of NaN where a share has no targets."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        logits, labels = self.model(batch["input_ids"]), batch["labels"]
        losses = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
        count = (labels != -100).sum()
        loss = (losses / count).sum()
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        return {"loss": loss, "num_targets": count}


@pytest.mark.parametrize("degrees", [{"dp_shard": 2}, {"dp_shard": 2, "tp": 2}])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_division_by_no_targets(degrees: dict[str, int], accumulate: int) -> None:
    case = Case(by_targets=True, ignored="empty rows", accumulate=accumulate, clip=0.1)
    expected = reference(train_reference, case)
    world_size = 2 * degrees.get("tp", 1)
    for result in run_ranks(train_titan, world_size, case, degrees, SumOverCount, init_process_group=False):
        assert_same(result, expected, tolerance=1e-12)

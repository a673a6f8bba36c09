"""The debug switch finds ranks that read other data or hold other gradients than their peers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.distributed.case import Case, Module, train_titan
from tests.harness import run_ranks
from titanplug.plan import ParallelPlan, ReplicateParallel
from titanplug.strategy.peer_checks import PeerDifferenceError

CHECKED = Case(num_rows=16, options={"check_peers": True})
DEGREES = {"dp_shard": 2, "tp": 2}


def test_agreeing_ranks_pass() -> None:
    assert len(run_ranks(train_titan, 4, CHECKED, DEGREES, init_process_group=False)) == 4


class ReadsAnotherBatch(Module):
    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        shift = torch.distributed.get_rank() % 2
        return {**batch, "input_ids": batch["input_ids"].roll(shift, 1)}


class ForgetsToSum(Module):
    """Says that the norms' gradients are complete, while each rank sees its shard of the sequence."""

    def configure_parallel_plan(self) -> ParallelPlan:
        plan = self.model.parallel_plan().prefixed("model")
        norms = {"model.layers.*.*_norm": ReplicateParallel()}
        return plan.merged(ParallelPlan(tensor=norms))


@pytest.mark.parametrize(
    ("module", "named"),
    [(ReadsAnotherBatch, "the batch"), (ForgetsToSum, "model.layers.0.attention_norm.weight")],
)
def test_a_difference_is_named(module: type[Module], named: str) -> None:
    with pytest.raises(PeerDifferenceError, match=named):
        run_ranks(train_titan, 4, CHECKED, DEGREES, module, init_process_group=False)

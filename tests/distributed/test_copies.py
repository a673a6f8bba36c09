"""Copies of a weight on several ranks stay bitwise equal while it is trained."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

from tests.distributed.case import Case, Module, Rows, build_trainer
from tests.harness import run_ranks
from titanplug import TitanStrategy


def train(rank: int, world_size: int, degrees: dict[str, int]) -> dict[str, tuple[str, Tensor]]:
    """This rank's shard of each weight after training in float32, and how it is placed."""
    module = Module(Case(dtype=torch.float32))
    nn.init.normal_(module.model.output.weight, std=0.1 * (rank + 1))  # other values on each rank
    trainer = build_trainer(world_size, TitanStrategy(**degrees), gradient_clip_val=1.0)
    trainer.fit(module, DataLoader(Rows(module.case), batch_size=2))
    shards = {}
    for name, parameter in module.named_parameters():
        assert isinstance(parameter, DTensor)
        shards[name] = (str(parameter.placements), parameter.to_local().detach().clone())
    return shards


def test_replicas_of_hsdp() -> None:
    ranks = run_ranks(train, 4, {"dp_replicate": 2, "dp_shard": 2}, init_process_group=False)
    for name, (placements, _) in ranks[0].items():
        assert "R" in placements
        assert torch.equal(ranks[0][name][1], ranks[2][name][1])
        assert torch.equal(ranks[1][name][1], ranks[3][name][1])


def test_weights_that_tensor_parallel_replicates() -> None:
    ranks = run_ranks(train, 4, {"dp_shard": 2, "tp": 2}, init_process_group=False)
    norms = [name for name in ranks[0] if "norm" in name]
    assert len(norms) == 9
    for name in norms:
        assert torch.equal(ranks[0][name][1], ranks[1][name][1])
        assert torch.equal(ranks[2][name][1], ranks[3][name][1])
        assert not ranks[0][name][1].eq(1).all()  # it was trained

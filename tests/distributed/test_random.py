"""Initial weights and random draws: alike in every layout and on copies, different over data."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

from tests.distributed.case import Case, Module, Rows, build_model, build_trainer, whole
from tests.harness import run_ranks
from titanplug import ColwiseParallel, ParallelPlan, ReplicateParallel, RowwiseParallel, TitanStrategy
from titanplug.errors import ConfigError

LAYOUTS: dict[str, tuple[int, dict[str, int]]] = {
    "fsdp2": (2, {"dp_shard": 2}),
    "hsdp 2x2": (4, {"dp_replicate": 2, "dp_shard": 2}),
    "tp2": (2, {"tp": 2}),
    "fsdp2 x tp2": (4, {"dp_shard": 2, "tp": 2}),
}


# --------------------------------------------------------------------------------------
# Draws in a step
# --------------------------------------------------------------------------------------


class Dropping(L.LightningModule):
    """Dropout on a hidden state that all tensor-parallel ranks hold whole; ``masks`` are what it kept."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.drop = nn.Dropout(0.5)
        self.masks: list[Tensor] = []

    def configure_parallel_plan(self) -> ParallelPlan:
        return ParallelPlan({"up": ColwiseParallel(), "down": RowwiseParallel(output="replicate")})

    def _step(self, batch: Tensor) -> Tensor:
        dropped = self.drop(self.down(self.up(batch).tanh()))
        self.masks.append(dropped.detach() != 0)
        return (batch + dropped).square().mean()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self._step(batch)

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.drop.train()  # a user's own Monte Carlo
        self._step(batch)
        self.drop.eval()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def drop(rank: int, world_size: int, seed: int, validates: bool) -> tuple[list[Tensor], list[Tensor]]:
    L.seed_everything(seed, verbose=False)
    module, data = Dropping(), torch.ones(12, 8)
    strategy = TitanStrategy(dp_shard=2, tp=2, sequence_parallel=False)
    trainer = build_trainer(world_size, strategy, val_check_interval=1)
    torch.rand(rank + 1)  # what a rank has drawn before makes no difference
    loader = DataLoader(data, batch_size=2)  # type: ignore[arg-type]
    trainer.fit(module, loader, loader if validates else None)
    return module.masks, [whole(p) for p in module.parameters()]


def test_dropout_is_equal_over_tp_and_different_over_dp() -> None:
    results = run_ranks(drop, 4, 7, False, init_process_group=False)
    again = run_ranks(drop, 4, 7, False, init_process_group=False)
    masks = [masks for masks, _ in results]
    assert len(masks[0]) == 3
    for step in range(3):
        for dp in range(2):
            assert torch.equal(masks[2 * dp][step], masks[2 * dp + 1][step])
        assert not torch.equal(masks[0][step], masks[2][step])
        assert 0 < masks[0][step].float().mean() < 1
    assert not torch.equal(masks[0][0], masks[0][1])
    assert not torch.equal(masks[2][0], masks[0][1])  # one rank's draws don't follow another's
    for (_, weights), (_, weights_again) in zip(results, again, strict=True):
        assert all(map(torch.equal, weights, weights_again))


def test_draws_of_validation_change_nothing_and_the_seed_does() -> None:
    (_, weights), *_ = run_ranks(drop, 4, 7, False, init_process_group=False)
    (_, validated), *_ = run_ranks(drop, 4, 7, True, init_process_group=False)
    (_, otherwise), *_ = run_ranks(drop, 4, 8, False, init_process_group=False)
    assert all(map(torch.equal, weights, validated))
    assert not torch.equal(weights[0], otherwise[0])


# --------------------------------------------------------------------------------------
# Initial weights
# --------------------------------------------------------------------------------------


class Several(L.LightningModule):
    """A model with its own weights in each place, one with tied embeddings, and one with buffers."""

    def __init__(self, *, meta: bool) -> None:
        super().__init__()
        if not meta:
            self._build()

    def configure_model(self) -> None:
        if not hasattr(self, "model"):
            self._build()

    def _build(self) -> None:
        self.model = build_model(Case(dtype=torch.float32))
        self.tied = build_model(Case(dtype=torch.float32, tied=True))
        self.statistics = nn.BatchNorm1d(6)

    def configure_parallel_plan(self) -> ParallelPlan:
        plans = [getattr(self, name).parallel_plan().prefixed(name) for name in ("model", "tied")]
        return plans[0].merged(plans[1]).merged(ParallelPlan({"statistics": ReplicateParallel()}))

    def training_step(self, batch: Any, batch_idx: int) -> None:
        raise AssertionError("no step is run")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def state(module: nn.Module) -> dict[str, Tensor]:
    tensors = [*module.named_parameters(remove_duplicate=False), *module.named_buffers()]
    return {name: whole(tensor) for name, tensor in tensors}


def lay_out(module: L.LightningModule, world_size: int, **options: Any) -> None:
    trainer = build_trainer(world_size, TitanStrategy(**options), max_steps=0)
    trainer.fit(module, DataLoader(Rows(Case())))


def initial_state(rank: int, world_size: int, degrees: dict[str, int]) -> Any:
    L.seed_everything(7, verbose=False)
    torch.rand(rank)
    module = Several(meta=True)
    lay_out(module, world_size, meta_init=True, **degrees)
    return state(module), module.tied.tok_embeddings.weight is module.tied.output.weight


@pytest.fixture(scope="module")
def one_process() -> dict[str, Tensor]:
    [(weights, tied)] = run_ranks(initial_state, 1, {}, init_process_group=False)
    assert tied
    return weights  # type: ignore[no-any-return]


def assert_bitwise(result: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert result.keys() == expected.keys()
    different = [name for name, value in expected.items() if not torch.equal(result[name], value)]
    assert not different


@pytest.mark.parametrize("layout", LAYOUTS)
def test_meta_weights_are_equal_in_every_layout(layout: str, one_process: dict[str, Tensor]) -> None:
    world_size, degrees = LAYOUTS[layout]
    for weights, tied in run_ranks(initial_state, world_size, degrees, init_process_group=False):
        assert tied
        assert_bitwise(weights, one_process)


def test_meta_weights_are_weights(one_process: dict[str, Tensor]) -> None:
    matrices = {name: value for name, value in one_process.items() if value.ndim == 2}
    assert all(0.05 < value.std() < 1 for value in matrices.values())
    blocks = [matrices[f"model.layers.{i}.attention.wq.weight"] for i in range(4)]
    assert not torch.equal(blocks[0], blocks[1])  # a seed for each module
    assert not torch.equal(matrices["model.tok_embeddings.weight"], matrices["tied.tok_embeddings.weight"])
    assert one_process["statistics.running_var"].eq(1).all()
    assert one_process["statistics.running_mean"].eq(0).all()
    assert one_process["model.norm.weight"].eq(1).all()


class WithValues(Several):
    """Every rank would start elsewhere; buffers too, kept in checkpoints or not."""

    def __init__(self, seed: int | None) -> None:
        self.seed = seed
        super().__init__(meta=False)

    def _build(self) -> None:
        super()._build()
        if self.seed is None:
            torch.seed()
        else:
            torch.manual_seed(self.seed)
        self.register_buffer("kept", torch.randn(3))
        self.register_buffer("unkept", torch.randn(3), persistent=False)
        self.statistics.running_mean.normal_()  # type: ignore[operator,union-attr]
        for parameter in self.parameters():
            nn.init.normal_(parameter)


def values_of_rank_0(rank: int, world_size: int, degrees: dict[str, int], seeded: bool) -> Any:
    module = WithValues(100 + rank if seeded else None)
    before = state(module)
    lay_out(module, world_size, **degrees)
    return before, state(module)


@pytest.mark.parametrize(("layout", "seeded"), [("hsdp 2x2", True), ("fsdp2 x tp2", False)])
def test_a_model_with_values_keeps_those_of_rank_0(layout: str, seeded: bool) -> None:
    world_size, degrees = LAYOUTS[layout]
    results = run_ranks(values_of_rank_0, world_size, degrees, seeded, init_process_group=False)
    befores = [before for before, _ in results]
    assert not torch.equal(befores[0]["kept"], befores[1]["kept"])
    for _, after in results:
        assert_bitwise(after, befores[0])


class Bare(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))


class BareBuffer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.arange(4.0))


class Unfilled(Several):
    def _build(self) -> None:
        self.model = nn.ModuleDict({"a": Bare(), "b": BareBuffer(), "c": nn.Linear(2, 2)})

    def configure_parallel_plan(self) -> ParallelPlan:
        return ParallelPlan()


def lay_out_unfilled(rank: int, world_size: int) -> None:
    lay_out(Unfilled(meta=True), world_size, meta_init=True)


def test_what_nothing_fills_is_named() -> None:
    with pytest.raises(ConfigError) as raised:
        run_ranks(lay_out_unfilled, 2, init_process_group=False)
    message = str(raised.value)
    assert "model.a (Bare)" in message and "model.b (BareBuffer)" in message
    assert "model.c" not in message
    assert "`init_weights`" in message and "meta_init=False" in message


# --------------------------------------------------------------------------------------
# Copies stay copies
# --------------------------------------------------------------------------------------


def train_copies(rank: int, world_size: int, degrees: dict[str, int]) -> dict[str, tuple[str, Tensor]]:
    """This rank's shard of each weight after training in float32, and how it is placed."""
    torch.manual_seed(rank)
    module = Module(Case(dtype=torch.float32))
    nn.init.normal_(module.model.output.weight, std=0.1 * (rank + 1))
    trainer = build_trainer(world_size, TitanStrategy(**degrees), gradient_clip_val=1.0)
    trainer.fit(module, DataLoader(Rows(module.case), batch_size=2))
    shards = {}
    for name, parameter in module.named_parameters():
        assert isinstance(parameter, DTensor)
        shards[name] = (str(parameter.placements), parameter.to_local().detach().clone())
    return shards


def test_copies_are_bitwise_equal_after_training() -> None:
    ranks = run_ranks(train_copies, 4, LAYOUTS["hsdp 2x2"][1], init_process_group=False)
    for name, (placements, shard) in ranks[0].items():
        assert "R" in placements
        assert torch.equal(shard, ranks[2][name][1])
        assert torch.equal(ranks[1][name][1], ranks[3][name][1])
    ranks = run_ranks(train_copies, 4, LAYOUTS["fsdp2 x tp2"][1], init_process_group=False)
    norms = [name for name in ranks[0] if "norm" in name]
    assert len(norms) == 9
    for name in norms:
        assert torch.equal(ranks[0][name][1], ranks[1][name][1])
        assert torch.equal(ranks[2][name][1], ranks[3][name][1])
        assert not ranks[0][name][1].eq(1).all()  # it was trained

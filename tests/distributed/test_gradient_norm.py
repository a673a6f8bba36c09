"""The gradient norm where a module or its user does something unusual; see also test_clipping.py."""

from __future__ import annotations

import math
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.distributed.case import VOCAB, Case, Module, Rows, build_model, build_trainer, whole
from tests.harness import reference, run_ranks
from titanplug import ParallelPlan, ReplicateParallel, TitanStrategy
from titanplug.callbacks import GradientNorm
from titanplug.mesh import ParallelDims
from titanplug.parallel.collectives import AxisGroup
from titanplug.parallel.gradients import reduce_partial_gradients
from titanplug.strategy.gradient_window import NonFiniteGradientError

CLIP = 0.1
TP2: dict[str, Any] = {"tp": 2}
DP2_TP2: dict[str, Any] = {"dp_shard": 2, "tp": 2}


class Mixed(Module):
    """The common model, a layer that every tensor-parallel rank computes alike, and a weight of its own."""

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        self.adapter = nn.Linear(VOCAB, VOCAB, dtype=case.dtype)
        self.scale = nn.Parameter(torch.tensor([1.5], dtype=case.dtype))
        self.temperature = nn.Parameter(torch.tensor([0.7], dtype=case.dtype))
        self.shown: list[float] = []

    def configure_parallel_plan(self) -> ParallelPlan:
        own = ParallelPlan({"adapter": ReplicateParallel(), "": ReplicateParallel()})
        return self.model.parallel_plan().prefixed("model").merged(own)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        logits = self.model(batch["input_ids"]) * self.temperature[0]  # a number: still sharded
        logits = self.adapter(logits) * self.scale
        return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.shown.append(float(self.trainer.callback_metrics["grad_norm"]))


class Overridden(Mixed):
    """Clips by itself, to another limit every other step."""

    def configure_gradient_clipping(
        self, optimizer: Any, gradient_clip_val: Any = None, gradient_clip_algorithm: Any = None
    ) -> None:
        limit = CLIP if self.global_step % 2 else 10 * CLIP
        self.clip_gradients(optimizer, gradient_clip_val=limit, gradient_clip_algorithm="norm")


def fit(rank: int, world_size: int, module: Any, strategy: Any, *callbacks: Callback, **options: Any) -> Any:
    """A training of ``module``, built before the ranks were forked; returns it, read by the rank."""
    L.seed_everything(7, verbose=False)
    dims = getattr(strategy, "parallel_dims", ParallelDims()).resolve(world_size)
    trainer = build_trainer(world_size, strategy, callbacks=list(callbacks), **options)
    case = module.case
    trainer.fit(module, DataLoader(Rows(case), batch_size=case.global_batch // dims.size("batch")))
    return module


def weights(module: Any) -> dict[str, Tensor]:
    return {name: whole(p) for name, p in module.named_parameters()}


def assert_close(result: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert result.keys() == expected.keys()
    for name, wanted in expected.items():
        error = float((result[name] - wanted).abs().max() / wanted.abs().max())
        assert error < 1e-12, f"{name}: {error:.2e}"


def norm_of(grads: list[Tensor], norm_type: float) -> float:
    return float(torch.nn.utils.get_total_norm(grads, norm_type))


# --------------------------------------------------------------------------------------
# Automatic optimization
# --------------------------------------------------------------------------------------


def train_mixed(
    rank: int, world_size: int, build: Any, degrees: dict[str, Any], norm_type: Any, clip: Any
) -> Any:
    strategy = TitanStrategy(**degrees, gradient_norm_type=norm_type)
    module = fit(rank, world_size, build(Case()), strategy, GradientNorm(), gradient_clip_val=clip)
    return module.norms, module.shown, module.grads, weights(module)


def train_mixed_alone(build: Any, norm_type: float, limits: list[float]) -> Any:
    """One process, a plain loop with torch's own clipping."""
    module, rows = build(Case()), Rows(Case())
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    norms, grads = [], []
    for limit, index in zip(limits, torch.arange(24).split(8), strict=True):
        optimizer.zero_grad()
        batch = {"input_ids": rows.tokens[index, :-1], "labels": rows.labels[index]}
        module.training_step(batch, 0).backward()
        grads.append({name: whole(p.grad) for name, p in module.named_parameters()})
        norms.append(norm_of(list(grads[-1].values()), norm_type))
        nn.utils.clip_grad_norm_(module.parameters(), limit, norm_type)
        optimizer.step()
    return norms, grads, weights(module)


@pytest.mark.parametrize("norm_type", ["inf", 2.0])
def test_norm_of_any_mix_of_parameters_is_that_of_one_process(norm_type: Any) -> None:
    norms, grads, wanted = reference(train_mixed_alone, Mixed, float(norm_type), [CLIP] * 3)
    assert min(norms) > CLIP  # it does clip
    for result in run_ranks(train_mixed, 4, Mixed, DP2_TP2, norm_type, CLIP, init_process_group=False):
        result_norms, shown, result_grads, result_weights = result
        torch.testing.assert_close(result_norms, norms, rtol=1e-12, atol=0)
        torch.testing.assert_close(shown, norms, rtol=1e-6, atol=0)
        for step, step_grads in enumerate(grads):
            assert_close(result_grads[step], step_grads)
        assert_close(result_weights, wanted)


def test_own_clipping_hook() -> None:
    norms, _, wanted = reference(train_mixed_alone, Overridden, 2.0, [10 * CLIP, CLIP, 10 * CLIP])
    for result in run_ranks(train_mixed, 2, Overridden, TP2, 2.0, None, init_process_group=False):
        torch.testing.assert_close(result[0], norms, rtol=1e-12, atol=0)
        assert_close(result[3], wanted)


# --------------------------------------------------------------------------------------
# Not finite
# --------------------------------------------------------------------------------------


class Breaks(Module):
    """In the second step one gradient element of one rank becomes ``value``."""

    def __init__(self, case: Case, value: float, manual: bool) -> None:
        super().__init__(case)
        self.value = value
        self.automatic_optimization = not manual
        self.before: dict[str, Tensor] = {}

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        if self.automatic_optimization:
            return loss
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        self.break_gradient()
        optimizer.step()
        return None

    def on_after_backward(self) -> None:
        if self.automatic_optimization:
            self.break_gradient()

    def break_gradient(self) -> None:
        self.before = {name: p.full_tensor() for name, p in self.optimizer_parameters()}
        if self.global_step == 1 and self.global_rank == 3:
            grad: Any = self.optimizer_parameters()[0][1].grad
            grad._local_tensor.view(-1)[0] = self.value

    def optimizer_parameters(self) -> list[tuple[str, Any]]:
        groups: Any = self.trainer.optimizers[0].param_groups
        return [(str(i), p) for i, p in enumerate(groups[0]["params"])]

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        pass

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        pass


def break_a_step(
    rank: int, world_size: int, value: float, norm_type: Any, manual: bool, clip: Any
) -> tuple[str, int, bool]:
    strategy = TitanStrategy(**DP2_TP2, gradient_norm_type=norm_type, error_if_nonfinite=True)
    module = Breaks(Case(), value, manual)
    with pytest.raises(NonFiniteGradientError) as raised:
        fit(rank, world_size, module, strategy, gradient_clip_val=clip)
    unchanged = [torch.equal(p.full_tensor(), module.before[n]) for n, p in module.optimizer_parameters()]
    return str(raised.value), module.global_step, all(unchanged)


@pytest.mark.parametrize(
    ("value", "norm_type", "manual", "clip"),
    [(math.inf, 2.0, False, None), (math.nan, "inf", False, CLIP), (math.inf, "inf", True, None)],
    ids=["inf, not clipped", "nan, largest value", "inf, manual"],
)
def test_nonfinite_gradient_stops_all_ranks_before_the_step(
    value: float, norm_type: Any, manual: bool, clip: Any
) -> None:
    results = run_ranks(break_a_step, 4, value, norm_type, manual, clip, init_process_group=False)
    assert [(step, unchanged) for _, step, unchanged in results] == [(1, True)] * 4
    assert len({message for message, _, _ in results}) == 1
    assert f"norm is {value}" in results[0][0]


# --------------------------------------------------------------------------------------
# Manual optimization
# --------------------------------------------------------------------------------------


class ByHand(L.LightningModule):
    """Two models whose logits are added, each with an optimizer; gradients of the first are added up over two
    batches, with the norm asked for in between, those of the second come from a closure."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.case = case
        self.automatic_optimization = False
        self.first, self.second = build_model(case), build_model(case)
        self.norms: list[float] = []

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        first, second = self.optimizers()  # type: ignore[misc,attr-defined]
        with self.toggled_optimizer(first):
            if batch_idx % 2 == 0:
                first.zero_grad()
            self.manual_backward(self.loss(batch) / 2)
            self.ask(first)
            if batch_idx % 2 == 1:
                self.clip_gradients(first, CLIP, "norm")
                first.step()

        def closure() -> None:
            second.zero_grad()
            self.manual_backward(self.loss(batch))

        with self.toggled_optimizer(second):
            second.step(closure=closure)

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        logits = self.first(batch["input_ids"]) + self.second(batch["input_ids"])
        return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())

    def ask(self, optimizer: Any) -> None:
        strategy = self.trainer.strategy
        if isinstance(strategy, TitanStrategy):
            self.norms.append(float(strategy.compute_gradient_norm(optimizer)))
        else:
            grads = [p.grad for group in optimizer.param_groups for p in group["params"]]
            self.norms.append(norm_of(grads, 2.0))

    def configure_optimizers(self) -> Any:
        models = (self.first, self.second)
        return [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5) for model in models]


def train_by_hand(rank: int, world_size: int, degrees: dict[str, Any] | None) -> Any:
    strategy = "auto" if degrees is None else TitanStrategy(**degrees)
    module = fit(rank, world_size, ByHand(Case(num_rows=32)), strategy)
    grads = {name: whole(p.grad) for name, p in module.named_parameters()}
    return module.norms, grads, weights(module)


@pytest.mark.parametrize("degrees", [TP2, DP2_TP2], ids=["tp2", "fsdp2 x tp2"])
def test_two_optimizers_by_hand_with_a_closure(degrees: dict[str, int]) -> None:
    norms, grads, wanted = reference(train_by_hand, 0, 1, None)
    assert len(norms) == 4 and max(norms) > CLIP
    ranks = 2 if len(degrees) == 1 else 4
    for result in run_ranks(train_by_hand, ranks, degrees, init_process_group=False):
        torch.testing.assert_close(result[0], norms, rtol=1e-12, atol=0)
        assert_close(result[1], grads)
        assert_close(result[2], wanted)


# --------------------------------------------------------------------------------------
# Partial sums
# --------------------------------------------------------------------------------------


def add_up_parts(rank: int, world_size: int) -> tuple[Tensor, Tensor]:
    parameter = nn.Parameter(torch.zeros(1000, dtype=torch.bfloat16))
    part = torch.randint(-255, 256, (1000,), generator=torch.Generator().manual_seed(rank))
    parameter.grad = part.to(torch.bfloat16)  # exact
    group = dist.group.WORLD
    assert group is not None
    reduce_partial_gradients([parameter], AxisGroup(group, world_size, rank))
    return part, parameter.grad


def test_parts_in_half_types_are_rounded_once() -> None:
    results = run_ranks(add_up_parts, 4)
    total = torch.stack([part for part, _ in results]).sum(dim=0)
    for _, grad in results:
        assert torch.equal(grad, total.to(torch.bfloat16))

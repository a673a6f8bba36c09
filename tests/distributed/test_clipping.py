"""One gradient norm over all ranks, whatever kinds of parameters there are, and manual optimization."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.utils.data import DataLoader, TensorDataset

from tests.distributed.case import build_trainer, whole
from tests.harness import reference, run_ranks
from titanplug import (
    ColwiseParallel,
    ParallelPlan,
    ReplicateParallel,
    RowwiseParallel,
    TitanStrategy,
)
from titanplug.parallel.gradients import (
    clip_by_norm,
    clip_by_value,
    global_gradient_norm,
    group_by_copies,
)
from titanplug.strategy.gradient_window import NonFiniteGradientError

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one process": (1, {}),
    "fsdp2": (2, {}),
    "replicate2": (2, {"dp_replicate": 2, "dp_shard": 1}),
    "tp2": (2, {"tp": 2}),
    "dp2 x tp2": (4, {"dp_shard": 2, "tp": 2}),
    "hsdp 2x2": (4, {"dp_replicate": 2, "dp_shard": 2}),
}
D, ROWS = 4, 12


class Scale(nn.Module):
    """A module with a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.linspace(0.5, 1.5, D))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor


class Mixed(L.LightningModule):
    """Split, replicated and odd-sized parameters, one of them a plain parameter of a module."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.scale = Scale()
        self.norm = nn.LayerNorm(D)
        self.up = nn.Linear(D, 6)
        self.down = nn.Linear(6, D)
        self.head = nn.Linear(D, 3)
        self.unused = nn.Linear(D, 2)
        self.double()
        self.norms: list[float] = []

    def configure_parallel_plan(self) -> ParallelPlan:
        return ParallelPlan(
            tensor={
                "scale": ReplicateParallel(),
                "norm": ReplicateParallel(),
                "up": ColwiseParallel(),
                "down": RowwiseParallel(),
                "head": ReplicateParallel(),
                "unused": ReplicateParallel(),
            }
        )

    def compute(self, x: Tensor) -> Tensor:
        hidden = self.norm(self.scale(x))
        return torch.as_tensor(self.head(hidden + self.down(torch.tanh(self.up(hidden)))))

    def loss(self, x: Tensor) -> Tensor:
        return (self.compute(x) - x[..., :3]).square().flatten(1).sum(1).mean()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch[0])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        strategy: Any = self.trainer.strategy
        self.norms.append(float(strategy.compute_gradient_norm(optimizer)))


def samples() -> Tensor:
    return torch.randn(ROWS, 2, D, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def loader(size: int) -> DataLoader[Any]:
    return DataLoader(TensorDataset(samples()), batch_size=size)


def weights_of(module: nn.Module) -> dict[str, Tensor]:
    return {name: whole(p) for name, p in module.named_parameters()}


# ---------------------------------------------------------------- through the Trainer


def _by_hand(norm_type: float, limit: float) -> tuple[list[float], dict[str, Tensor]]:
    module, norms = Mixed(), []
    optimizer = module.configure_optimizers()
    for x in samples().split(4):
        optimizer.zero_grad()
        module.loss(x).backward()
        norms.append(float(nn.utils.clip_grad_norm_(module.parameters(), limit, norm_type)))
        optimizer.step()
    return norms, weights_of(module)


def _clipped(rank: int, world_size: int, degrees: Any, norm_type: Any, limit: float) -> Any:
    L.seed_everything(7, verbose=False)
    strategy = TitanStrategy(**degrees, gradient_norm_type=norm_type)
    trainer = build_trainer(world_size, strategy, gradient_clip_val=limit)
    module = Mixed()
    trainer.fit(module, loader(4 * degrees.get("tp", 1) // world_size))
    return module.norms, weights_of(module)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_norm_equals_one_process(layout: str) -> None:
    world_size, degrees = LAYOUTS[layout]
    kinds: list[Any] = [("inf", 0.05), (math.inf, 0.05), (2.0, 0.1), (1.0, 0.5), (3, 0.1), (2.0, 1e9)]

    def run(rank: int, world_size: int) -> Any:
        return [_clipped(rank, world_size, degrees, *kind) for kind in kinds]

    expected = [reference(_by_hand, float(kind), limit) for kind, limit in kinds]
    found = run_ranks(run, world_size, init_process_group=False)
    for results in found:
        for (norms, weights), (wanted_norms, wanted) in zip(results, expected, strict=True):
            assert norms == pytest.approx(wanted_norms, rel=1e-12)
            torch.testing.assert_close(weights, wanted, rtol=1e-12, atol=1e-14)
        # Not just close: a rank that clips by another number drifts away.
        assert [norms for norms, _ in results] == [norms for norms, _ in found[0]]


# ---------------------------------------------------------------- plain tensors beside DTensors


def _mixes(rank: int, world_size: int) -> dict[str, Any]:
    """Plain, replicated, sharded, doubly sharded and uneven parameters on three meshes."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    values = [torch.randn(n, 4, dtype=torch.float64) for n in (3, 5, 2, 7, 1, 6)]
    grads = [torch.randn_like(value) for value in values]
    places: list[Any] = [
        None,  # plain: every rank holds it
        (mesh, [Replicate(), Replicate()]),
        (mesh["tp"], [Replicate()]),
        (mesh["dp"], [Shard(0)]),
        (mesh, [Shard(0), Shard(0)]),  # one row on four ranks: three have none
        (mesh, [Replicate(), Shard(1)]),
    ]
    parameters = []
    for value, grad, place in zip(values, grads, places, strict=True):
        if place is None:
            parameter = nn.Parameter(value.clone())
            parameter.grad = grad.clone()
        else:
            parameter = nn.Parameter(distribute_tensor(value, *place, src_data_rank=None))
            parameter.grad = distribute_tensor(grad.clone(), *place, src_data_rank=None)
        parameters.append(parameter)
    parameters.append(nn.Parameter(torch.zeros(2)))  # without a gradient
    groups = group_by_copies(parameters, world_size)
    found: dict[str, Any] = {}
    for norm_type in (1.0, 2.0, 3.5, math.inf):
        norm = global_gradient_norm(groups, norm_type, torch.device("cpu"))
        wanted = torch.cat([g.flatten() for g in grads]).norm(norm_type)
        found[f"norm {norm_type}"] = (float(norm), float(wanted))
    norm = global_gradient_norm(groups, 2.0, torch.device("cpu"))
    clip_by_norm(parameters, 1.5, norm)
    scaled = [grad * (1.5 / (norm + 1e-6)) for grad in grads]
    found["clipped"] = _error(parameters, scaled)
    clip_by_norm(parameters, 1e9, norm)  # far away: nothing changes
    found["not clipped"] = _error(parameters, scaled)
    clip_by_value(parameters, 0.1)
    found["by value"] = _error(parameters, [grad.clamp(-0.1, 0.1) for grad in scaled])
    for norm_type in (2.0, math.inf):
        for bad in (math.nan, math.inf):
            if rank == 1:
                assert parameters[1].grad is not None
                parameters[1].grad._local_tensor[0, 0] = bad  # type: ignore[attr-defined]
            norm = global_gradient_norm(groups, norm_type, torch.device("cpu"))
            found[f"{bad} in norm {norm_type}"] = math.isfinite(float(norm))
    return found


def _error(parameters: list[nn.Parameter], wanted: list[Tensor]) -> float:
    grads = [p.grad for p in parameters if p.grad is not None]
    found = [grad.full_tensor() if isinstance(grad, DTensor) else grad for grad in grads]
    return max(float((f - w).abs().max()) for f, w in zip(found, wanted, strict=True))


def test_norm_and_clipping_of_any_mix() -> None:
    ranks = run_ranks(_mixes, 4)
    for found in ranks:
        for name, value in found.items():
            if name.startswith("norm"):
                assert value[0] == pytest.approx(value[1], rel=1e-14), name
            elif " in norm" in name:
                assert value is False, name
            else:
                assert value < 1e-15, name
    assert all(found["norm 2.0"] == ranks[0]["norm 2.0"] for found in ranks)


def _no_gradients(rank: int, world_size: int) -> list[float]:
    """A rank without a gradient takes part."""
    parameter = nn.Parameter(torch.ones(2))
    if rank == 0:
        parameter.grad = torch.tensor([3.0, 4.0])
    groups = group_by_copies([parameter], 1)
    return [float(global_gradient_norm(groups, p, torch.device("cpu"))) for p in (2.0, math.inf)]


def test_a_rank_without_gradients_takes_part() -> None:
    assert run_ranks(_no_gradients, 2) == [[5.0, 4.0]] * 2


# ---------------------------------------------------------------- gradients that aren't finite


class Explodes(Mixed):
    """In the second step, one element of one rank's gradient is infinite or NaN."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.value = value
        self.before: dict[str, Tensor] = {}

    def on_after_backward(self) -> None:
        if self.trainer.global_step == 1:
            self.before = weights_of(self)
            if self.global_rank == self.trainer.world_size - 1:
                grad: Any = self.up.weight.grad
                local = grad._local_tensor if isinstance(grad, DTensor) else grad
                local.view(-1)[0] = self.value

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        pass


@pytest.mark.parametrize("layout", ["one process", "fsdp2", "tp2", "dp2 x tp2"])
def test_a_gradient_that_is_not_finite_stops_all_ranks_before_the_step(layout: str) -> None:
    world_size, degrees = LAYOUTS[layout]

    def run(rank: int, world_size: int) -> list[Any]:
        found = []
        cases: list[Any] = [
            (math.inf, 2.0, None),
            (math.nan, 2.0, 0.1),
            (math.nan, "inf", None),
            (-math.inf, "inf", 0.1),
        ]
        for value, norm_type, limit in cases:
            strategy = TitanStrategy(**degrees, gradient_norm_type=norm_type, error_if_nonfinite=True)
            trainer = build_trainer(world_size, strategy, gradient_clip_val=limit)
            module = Explodes(value)
            with pytest.raises(NonFiniteGradientError, match="error_if_nonfinite=True"):
                trainer.fit(module, loader(4 * degrees.get("tp", 1) // world_size))
            unchanged = all(
                torch.equal(weight, module.before[name]) for name, weight in weights_of(module).items()
            )
            found.append((trainer.global_step, unchanged))
        return found

    for found in run_ranks(run, world_size, init_process_group=False):
        assert found == [(1, True)] * 4


# ---------------------------------------------------------------- manual optimization


class Manual(Mixed):
    """Two optimizers, each with a loss and a clipped step of its own in one training step."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def configure_optimizers(self) -> Any:
        first = [*self.scale.parameters(), *self.norm.parameters(), *self.up.parameters()]
        second = [*self.down.parameters(), *self.head.parameters()]
        return [torch.optim.SGD(first, lr=0.1), torch.optim.SGD(second, lr=0.2)]

    def training_step(self, batch: Any, batch_idx: int) -> None:
        first, second = self.optimizers()  # type: ignore[attr-defined]
        steps(
            self,
            batch[0],
            [first, second],
            self.manual_backward,
            lambda optimizer, limit: self.clip_gradients(
                optimizer, gradient_clip_val=limit, gradient_clip_algorithm="norm"
            ),
        )


def steps(
    module: Mixed,
    x: Tensor,
    optimizers: list[Any],
    backward: Callable[[Tensor], Any],
    clip: Callable[[Any, float], Any],
) -> None:
    """The same code for the plain loop: two losses, the second on what the first has changed."""
    first, second = optimizers
    first.zero_grad()
    backward(module.loss(x))
    clip(first, 0.1)
    first.step()
    second.zero_grad()
    backward(module.loss(x) * 2)
    backward(module.loss(2 * x).abs())  # adds up, as without any strategy
    clip(second, 0.2)
    second.step()


def _manual_by_hand(sizes: list[int]) -> dict[str, Tensor]:
    module = Manual()
    optimizers = module.configure_optimizers()
    for x in samples()[: sum(sizes)].split(sizes):
        steps(
            module,
            x,
            optimizers,
            lambda loss: loss.backward(),
            lambda opt, limit: nn.utils.clip_grad_norm_(opt.param_groups[0]["params"], limit),
        )
    return weights_of(module)


def _manual(rank: int, world_size: int, degrees: Any) -> dict[str, Tensor]:
    L.seed_everything(7, verbose=False)
    trainer = build_trainer(world_size, TitanStrategy(**degrees))
    module = Manual()
    size = 4 * degrees.get("tp", 1) // world_size
    trainer.fit(module, DataLoader(TensorDataset(samples()[:9]), batch_size=size))
    return weights_of(module)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_manual_optimization_equals_one_process(layout: str) -> None:
    world_size, degrees = LAYOUTS[layout]
    expected = reference(_manual_by_hand, [4, 4, 1])
    for weights in run_ranks(_manual, world_size, degrees, init_process_group=False):
        torch.testing.assert_close(weights, expected, rtol=1e-12, atol=1e-14)


class Accumulates(Manual):
    """Steps after every second batch, as the user counts them."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer, _ = self.optimizers()  # type: ignore[attr-defined]
        self.manual_backward(self.loss(batch[0]) / 2)
        if batch_idx % 2:
            optimizer.step()
            optimizer.zero_grad()
            self.zero_grad()


def _accumulated_by_hand() -> dict[str, Tensor]:
    module = Manual()
    optimizer, _ = module.configure_optimizers()
    for index, x in enumerate(samples().split(4)):
        (module.loss(x) / 2).backward()
        if index % 2:
            optimizer.step()
            module.zero_grad()
    return weights_of(module)


@pytest.mark.parametrize("layout", ["fsdp2", "dp2 x tp2"])
def test_manual_accumulation_adds_up_what_the_user_weighs(layout: str) -> None:
    world_size, degrees = LAYOUTS[layout]

    def run(rank: int, world_size: int) -> dict[str, Tensor]:
        trainer = build_trainer(world_size, TitanStrategy(**degrees))
        module = Accumulates()
        trainer.fit(module, loader(4 * degrees.get("tp", 1) // world_size))
        return weights_of(module)

    expected = reference(_accumulated_by_hand)
    for weights in run_ranks(run, world_size, init_process_group=False):
        torch.testing.assert_close(weights, expected, rtol=1e-12, atol=1e-14)


def test_the_norm_is_told_apart_from_the_local_one() -> None:
    """The tests above would pass with local norms if those were equal: they are not."""

    def run(rank: int, world_size: int) -> float:
        module = Mixed()
        module.loss(samples()[rank::world_size]).backward()
        assert not dist.is_initialized()
        return float(nn.utils.clip_grad_norm_(module.parameters(), 1e9))

    first, second = run_ranks(run, 2, init_process_group=False)
    assert abs(first - second) > 1e-3

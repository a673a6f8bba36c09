"""Optimizers give the weights and the state of one process, and users see the module's parameters."""

from __future__ import annotations

import copy
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, TensorDataset

from tests.distributed.case import build_trainer, whole
from tests.harness import reference, run_ranks
from titanplug import ColwiseParallel, ParallelPlan, ReplicateParallel, RowwiseParallel, TitanStrategy
from titanplug.parallel.local_optimizer import _ELEMENTWISE, is_elementwise

FSDP2: dict[str, int] = {"dp_shard": 2}
DP2_TP2: dict[str, int] = {"dp_shard": 2, "tp": 2}
STEPS, BATCH = 3, 4
SETTINGS: dict[str, dict[str, Any]] = {
    "SGD": {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01},
    "Adam": {"lr": 0.05, "amsgrad": True},
    "AdamW": {"lr": 0.05, "weight_decay": 0.1},
    "Adagrad": {"lr": 0.1, "initial_accumulator_value": 0.1},
    "RMSprop": {"lr": 0.05, "momentum": 0.9, "centered": True},
    "ASGD": {"lr": 0.1, "t0": 1.0},
}


class Net(L.LightningModule):
    """Odd sizes, so that shards are unequal: 7 and 3 rows, and 1."""

    def __init__(self, build: Any) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.norm = nn.LayerNorm(5)
        self.up, self.down, self.last = nn.Linear(5, 6), nn.Linear(6, 3), nn.Linear(3, 1)
        self.double()
        self.build = build
        self.sees: dict[str, bool] = {}

    def configure_parallel_plan(self) -> ParallelPlan:
        alike = ReplicateParallel()
        styles = {"up": ColwiseParallel(), "down": RowwiseParallel(output="replicate")}
        return ParallelPlan({"norm": alike, "last": alike, **styles})

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        return F.mse_loss(self.last(self.down(self.up(self.norm(x)).tanh()).tanh()), y)

    def configure_optimizers(self) -> Any:
        return self.build(self.parameters())

    def inner_optimizer(self) -> torch.optim.Optimizer:
        return self.trainer.optimizers[0]

    def see(self, where: str) -> None:
        """Whether the optimizer holds the module's parameters at this point."""
        groups = self.inner_optimizer().param_groups
        held = [p for group in groups for p in group["params"]]
        own = list(self.parameters())
        same = len(held) == len(own) and all(a is b for a, b in zip(held, own, strict=True))
        self.sees[where] = self.sees.get(where, True) and same

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.see("before step")

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.see("after step")


def fit(world_size: int, module: Net, degrees: dict[str, int] | None, **options: Any) -> Net:
    strategy = "auto" if degrees is None else TitanStrategy(**degrees)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(STEPS * BATCH, 5, generator=generator, dtype=torch.float64)
    data = TensorDataset(x, x.sin().sum(dim=1, keepdim=True))
    loader = DataLoader(data, batch_size=BATCH // (degrees or {}).get("dp_shard", 1))
    build_trainer(world_size, strategy, **options).fit(module, loader)
    return module


def read(module: Net) -> dict[str, Tensor]:
    """Weights and the optimizer's state, whole."""
    state = module.inner_optimizer().state
    values = {name: whole(p) for name, p in module.named_parameters()}
    for name, parameter in module.named_parameters():
        for key, value in state[parameter].items():
            if isinstance(value, Tensor):
                assert isinstance(value, DTensor) == (isinstance(parameter, DTensor) and value.ndim > 0)
                values[f"{name}/{key}"] = whole(value)
    return values


def assert_close(result: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float = 1e-11) -> None:
    assert result.keys() == expected.keys()
    for name, wanted in expected.items():
        error = float((result[name] - wanted).abs().max() / wanted.abs().max().clamp_min(1e-3))
        assert error < tolerance, f"{name}: {error:.2e}"


# --------------------------------------------------------------------------------------
# Each optimizer
# --------------------------------------------------------------------------------------


def builder(cls: Any) -> Any:
    return lambda parameters: cls(parameters, **SETTINGS.get(cls.__name__, {"lr": 0.05}))


def train_each(
    rank: int, world_size: int, classes: tuple[Any, ...], degrees: dict[str, int] | None
) -> dict[str, Any]:
    results = {}
    for cls in classes:
        module = fit(world_size, Net(builder(cls)), degrees)
        if degrees is not None:
            assert module.sees == {"before step": True, "after step": True}
        results[cls.__name__] = read(module)
    return results


@pytest.fixture(scope="module")
def one_process() -> dict[str, Any]:
    results: dict[str, Any] = reference(train_each, 0, 1, _ELEMENTWISE, None)
    return results


@pytest.fixture(scope="module")
def fsdp2() -> list[dict[str, Any]]:
    return run_ranks(train_each, 2, _ELEMENTWISE, FSDP2, init_process_group=False)


@pytest.mark.parametrize("name", [cls.__name__ for cls in _ELEMENTWISE])
def test_elementwise_optimizer(name: str, one_process: Any, fsdp2: Any) -> None:
    for rank in fsdp2:
        assert_close(rank[name], one_process[name])


def test_on_two_meshes(one_process: Any) -> None:
    classes = (torch.optim.SGD, torch.optim.AdamW)
    for rank in run_ranks(train_each, 4, classes, DP2_TP2, init_process_group=False):
        for cls in classes:
            assert_close(rank[cls.__name__], one_process[cls.__name__])


class OwnSGD(torch.optim.SGD):
    """Scales the step of each parameter by the norm of the whole parameter."""

    saw: list[type]

    def step(self, closure: Any = None) -> Any:
        loss = closure()
        parameters = [p for group in self.param_groups for p in group["params"]]
        self.saw = [type(p) for p in parameters]
        with torch.no_grad():
            for p in parameters:
                p -= 0.1 * p.norm() * p.grad
        return loss


def train_by_whole_parameters(rank: int, world_size: int, degrees: dict[str, int] | None) -> Any:
    module = fit(world_size, Net(lambda parameters: OwnSGD(parameters, lr=0.1)), degrees)
    optimizer: Any = module.inner_optimizer()
    return read(module), [issubclass(kind, DTensor) for kind in optimizer.saw]


def test_optimizer_of_ones_own_sees_dtensors() -> None:
    expected, _ = reference(train_by_whole_parameters, 0, 1, None)
    for result, dtensors in run_ranks(train_by_whole_parameters, 2, FSDP2, init_process_group=False):
        assert all(dtensors)
        assert_close(result, expected)


def train_matrices(rank: int, world_size: int, degrees: dict[str, int] | None) -> dict[str, Tensor]:
    def build(parameters: Any) -> Any:
        return torch.optim.Muon([p for p in parameters if p.ndim == 2 and len(p) > 1], lr=0.1)

    return read(fit(world_size, Net(build), degrees))


def test_optimizer_that_is_not_elementwise() -> None:
    [parameter] = nn.Linear(2, 2, bias=False).parameters()
    for name in ("Adafactor", "Muon", "LBFGS"):
        assert not is_elementwise(getattr(torch.optim, name)([parameter]))
    expected = reference(train_matrices, 0, 1, None)
    for rank in run_ranks(train_matrices, 2, FSDP2, init_process_group=False):
        assert_close(rank, expected, tolerance=5e-2)  # Muon computes in bfloat16


# --------------------------------------------------------------------------------------
# What users do with an optimizer
# --------------------------------------------------------------------------------------


class Reloads(Net):
    """Puts the optimizer's own state back between steps, then replaces and drops a part of it."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        optimizer = self.inner_optimizer()
        if batch_idx == 0 and self.reloads:
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        if batch_idx == 1:
            first, second = list(self.parameters())[:2]
            optimizer.state[first]["exp_avg"] = torch.zeros_like(optimizer.state[first]["exp_avg"])
            del optimizer.state[second]

    reloads = True


def train_reloaded(rank: int, world_size: int, degrees: dict[str, int] | None, reloads: bool) -> Any:
    module = Reloads(builder(torch.optim.AdamW))
    module.reloads = reloads
    return read(fit(world_size, module, degrees))


def test_state_may_be_loaded_replaced_and_dropped_between_steps(one_process: Any) -> None:
    expected = reference(train_reloaded, 0, 1, None, False)
    assert any(not torch.equal(expected[name], one_process["AdamW"][name]) for name in expected)
    straight = run_ranks(train_reloaded, 2, FSDP2, False, init_process_group=False)
    reloaded = run_ranks(train_reloaded, 2, FSDP2, True, init_process_group=False)
    for plain, again in zip(straight, reloaded, strict=True):
        assert_close(plain, expected)
        assert all(torch.equal(again[name], value) for name, value in plain.items())


class Watched(Net):
    """Step hooks, two groups, a schedule, and an average of the weights kept by a hook."""

    def configure_optimizers(self) -> Any:
        self.average: list[Tensor] = []
        parameters = list(self.parameters())
        groups: Any = [{"params": parameters[:3], "lr": 0.01}, {"params": parameters[3:]}]
        optimizer = torch.optim.Adam(groups, lr=0.1)
        optimizer.register_step_pre_hook(lambda *_: self.see("pre hook"))
        optimizer.register_step_post_hook(self.after_step)
        return [optimizer], [
            {"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5), "interval": "step"}
        ]

    def after_step(self, optimizer: Any, *_: Any) -> None:
        self.see("post hook")
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        if all(p in optimizer.state for p in parameters):
            self.sees["state in post hook"] = True
        average = self.average or [torch.zeros_like(p) for p in parameters]
        self.average = [0.5 * old + 0.5 * p.detach() for old, p in zip(average, parameters, strict=True)]


def train_watched(rank: int, world_size: int, degrees: dict[str, int] | None) -> Any:
    module = fit(world_size, Watched(None), degrees)
    rates = [group["lr"] for group in module.inner_optimizer().param_groups]
    return read(module), [whole(value) for value in module.average], rates, module.sees


def test_step_hooks_groups_and_schedules() -> None:
    expected, average, rates, _ = reference(train_watched, 0, 1, None)
    assert rates == [0.01 / 8, 0.1 / 8]
    for result in run_ranks(train_watched, 2, FSDP2, init_process_group=False):
        assert_close(result[0], expected)
        for value, wanted in zip(result[1], average, strict=True):
            torch.testing.assert_close(value, wanted, rtol=1e-11, atol=1e-13)
        assert result[2] == rates
        places = ["before step", "after step", "pre hook", "post hook", "state in post hook"]
        assert result[3] == dict.fromkeys(places, True)


class Fails(Net):
    """The second step fails inside of the optimizer."""

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        if self.global_step == 1:
            optimizer.param_groups[0]["lr"] = None


def fail_inside_a_step(rank: int, world_size: int) -> tuple[dict[str, bool], bool]:
    module = Fails(builder(torch.optim.AdamW))
    with pytest.raises(TypeError):
        fit(world_size, module, FSDP2)
    module.see("after failure")
    state = module.inner_optimizer().state
    return module.sees, all(p in state for p in module.parameters())


def test_a_failing_step_leaves_the_modules_parameters() -> None:
    for sees, has_state in run_ranks(fail_inside_a_step, 2, init_process_group=False):
        assert sees == {"after step": True, "after failure": True}
        assert has_state

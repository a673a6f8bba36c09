"""What is kept, computed and reduced in which type under each precision, in every layout."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

from tests.distributed.case import Case, Rows, build_model, build_trainer
from tests.harness import run_ranks
from titanplug import ParallelPlan, ReplicateParallel, TitanStrategy

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one process": (1, {}),
    "fsdp2": (2, {}),
    "tp2": (2, {"tp": 2}),
    "fsdp2 x tp2": (4, {"dp_shard": 2, "tp": 2}),
}
# Parameters and gradients, computation, optimizer state.
TYPES = {
    "32-true": (torch.float32, torch.float32, torch.float32),
    "bf16-mixed": (torch.float32, torch.bfloat16, torch.float32),
    "bf16-true": (torch.bfloat16, torch.bfloat16, torch.bfloat16),
}


class Typed(L.LightningModule):
    """Notes the types that it meets."""

    def __init__(self, early: bool) -> None:
        super().__init__()
        self.model: Any = build_model(Case(dtype=torch.float32)) if early else None
        self.met: dict[str, set[torch.dtype]] = {}
        self.losses: list[float] = []

    def configure_model(self) -> None:
        if self.model is None:
            self.model = build_model(Case(dtype=torch.get_default_dtype()))
        self.model.layers["1"].feed_forward.register_forward_hook(
            lambda module, args, out: self.meet("computed", out)
        )

    def meet(self, where: str, *tensors: Tensor) -> None:
        self.met.setdefault(where, set()).update(tensor.dtype for tensor in tensors)

    def _loss(self, batch: Any) -> Tensor:
        logits = self.model(batch["input_ids"])
        self.meet("batch", batch["input_ids"])
        return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self._loss(batch)
        self.losses.append(float(loss))
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self._loss(batch)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.meet("parameters", *self.parameters())
        self.meet("gradients", *(p.grad for p in self.parameters() if p.grad is not None))
        strategy: Any = self.trainer.strategy
        assert torch.isfinite(strategy.compute_gradient_norm(optimizer))

    def on_train_end(self) -> None:
        states = self.optimizers().state.values()  # type: ignore[union-attr]
        self.meet("state", *(value for state in states for key, value in state.items() if key != "step"))

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def _train(rank: int, world_size: int, degrees: Any, precision: Any, **options: Any) -> Any:
    L.seed_everything(7, verbose=False)
    early = options.pop("early", True)
    strategy = TitanStrategy(**degrees, **options)
    trainer = build_trainer(world_size, strategy, precision=precision, gradient_clip_val=1.0)
    module = Typed(early)
    size = 8 * degrees.get("tp", 1) // world_size
    rows = Rows(Case(num_rows=24))
    trainer.fit(module, DataLoader(rows, batch_size=size), DataLoader(rows, batch_size=size))
    return module.met, module.losses


@pytest.mark.parametrize("precision", TYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_types(layout: str, precision: str) -> None:
    world_size, degrees = LAYOUTS[layout]
    kept, computed, state = TYPES[precision]

    def run(rank: int, world_size: int) -> Any:
        return [
            _train(rank, world_size, degrees, precision),
            _train(rank, world_size, degrees, precision, early=False, meta_init=True),
        ]

    for found in run_ranks(run, world_size, init_process_group=False):
        for met, losses in found:
            assert met["parameters"] == met["gradients"] == {kept}
            assert met["computed"] == {computed}
            assert met["state"] == {state}
            assert met["batch"] == {torch.int64}
            assert all(2.0 < loss < 8.0 for loss in losses)


def test_losses_differ_by_rounding_only() -> None:
    found = {
        (layout, precision): run_ranks(
            _train, LAYOUTS[layout][0], LAYOUTS[layout][1], precision, init_process_group=False
        )
        for layout in ("one process", "fsdp2 x tp2")
        for precision in ("32-true", "bf16-mixed")
    }
    single = found["one process", "32-true"][0][1]
    mixed = found["one process", "bf16-mixed"][0][1]
    assert single != mixed
    assert mixed == pytest.approx(single, rel=0.02)
    for precision, rel in (("32-true", 1e-4), ("bf16-mixed", 0.02)):
        ranks = [losses for _, losses in found["fsdp2 x tp2", precision]]
        # Each data rank has half of the rows.
        together = [(a + b) / 2 for a, b in zip(ranks[0], ranks[2], strict=True)]
        assert together == pytest.approx(single, rel=rel)


# ---------------------------------------------------------------- reduction in float32

TINY = 2.0**-10  # lost in bfloat16 beside 1


class Adds(L.LightningModule):
    """Its gradient is the mean of what the ranks hold: 1 on the first, little on the others."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 8, bias=False)
        self.grad: Tensor | None = None

    def configure_parallel_plan(self) -> ParallelPlan:
        return ParallelPlan(tensor={"layer": ReplicateParallel()})

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        return (self.layer.weight[:, 0].sum() * batch).mean()

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        grad: Any = self.layer.weight.grad
        self.grad = grad.full_tensor() if isinstance(grad, DTensor) else grad

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1.0)


@pytest.mark.parametrize("degrees", [{}, {"dp_replicate": 2}, {"dp_replicate": 4, "dp_shard": 1}])
def test_gradients_are_reduced_in_float32(degrees: dict[str, Any]) -> None:
    def run(rank: int, world_size: int) -> Any:
        trainer = build_trainer(world_size, TitanStrategy(**degrees), precision="bf16-mixed")
        module = Adds()
        held: Any = torch.tensor([4.0, 4 * TINY, 4 * TINY, 4 * TINY])
        trainer.fit(module, DataLoader(held, batch_size=1))
        return module.grad

    for grad in run_ranks(run, 4, init_process_group=False):
        assert torch.equal(grad[:, 0], torch.full((8,), 1 + 3 * TINY))


# ---------------------------------------------------------------- inputs, and plugins by instance


def floats() -> Any:
    rows: Any = torch.ones(4, 4)
    return DataLoader(rows, batch_size=1)


class Floats(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.met: list[torch.dtype] = []

    def configure_parallel_plan(self) -> ParallelPlan:
        return ParallelPlan(tensor={"layer": ReplicateParallel()})

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        out = self.layer(batch)
        self.met += [batch.dtype, out.dtype]
        return out.float().square().mean()

    def predict_step(self, batch: Tensor, batch_idx: int) -> Any:
        return self.layer(batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"precision": "32-true"}, (torch.float32, torch.float32)),
        ({"precision": "bf16-mixed"}, (torch.float32, torch.bfloat16)),
        ({"precision": "bf16-true"}, (torch.bfloat16, torch.bfloat16)),
        ({"plugins": MixedPrecision("bf16-mixed", "cpu")}, (torch.float32, torch.bfloat16)),
    ],
)
@pytest.mark.parametrize("strategy", ["titan", {"dp_shard": 1, "tp": 2}])
def test_a_batch_of_floats_is_converted_as_on_one_process(
    strategy: Any, options: dict[str, Any], expected: Any
) -> None:
    def run(rank: int, world_size: int) -> Any:
        chosen = strategy if isinstance(strategy, str) else TitanStrategy(**strategy)
        trainer = build_trainer(world_size, chosen, **options)
        module = Floats()
        trainer.fit(module, floats())
        predictions: Any = trainer.predict(module, floats())
        return module.met[:2], predictions[0].dtype

    for met, predicted in run_ranks(run, 2, init_process_group=False):
        assert tuple(met) == expected
        assert predicted == expected[1]


def test_a_module_keeps_one_precision() -> None:
    def run(rank: int, world_size: int) -> str:
        module = Floats()
        loader = floats()
        build_trainer(world_size, TitanStrategy(), precision="bf16-mixed").fit(module, loader)
        with pytest.raises(ValueError) as error:
            build_trainer(world_size, TitanStrategy(), precision="32-true").fit(module, loader)
        return str(error.value)

    for message in run_ranks(run, 2, init_process_group=False):
        assert "laid out once" in message and "precision" in message

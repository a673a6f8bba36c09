"""What is computed, kept and reduced in which type. (What is refused: tests/unit/test_bad_plans.py.)"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader

from tests.distributed.case import Case, Module, Rows, build_trainer, train_reference, train_titan
from tests.harness import reference, run_ranks
from titanplug import TitanStrategy
from titanplug.validation import PRECISIONS

F32, F64, BF16 = torch.float32, torch.float64, torch.bfloat16
FSDP2: dict[str, int] = {"dp_shard": 2}
TP2: dict[str, int] = {"tp": 2}
DP2_TP2: dict[str, int] = {"dp_shard": 2, "tp": 2}


# --------------------------------------------------------------------------------------
# Types
# --------------------------------------------------------------------------------------


class _Collectives(TorchDispatchMode):
    """Types of the floating-point tensors that collectives send, by name; without those of single numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: dict[str, set[torch.dtype]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func)
        if name.startswith("c10d."):
            found = {t.dtype for t in _tensors(args) if t.numel() > 2 and t.is_floating_point()}
            self.sent.setdefault(name.split(".")[1], set()).update(found)
        return func(*args, **(kwargs or {}))


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return [t for item in value for t in _tensors(item)] if isinstance(value, list | tuple) else []


class Typed(Module):
    """Notes types."""

    def __init__(self) -> None:
        super().__init__(Case(dtype=F32, num_rows=16))
        self.types: dict[str, Any] = {}

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        block = self.model.layers["1"]
        hooks = [
            module.register_forward_hook(lambda _, __, out: self.note("activations", [out]))
            for module in (block.attention.wq, block.feed_forward, self.model.output)
        ]
        loss = super().training_step(batch, batch_idx)
        self.note("loss", [loss])
        for hook in hooks:
            hook.remove()
        return loss

    def note(self, name: str, tensors: Any) -> None:
        found = {t.to_local().dtype if isinstance(t, DTensor) else t.dtype for t in tensors}
        self.types[name] = self.types.get(name, set()) | found

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.note("gradients", [p.grad for p in self.parameters()])

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.note("parameters", self.parameters())
        state = self.trainer.optimizers[0].state
        self.note("state", [of[key] for of in state.values() for key in ("exp_avg", "exp_avg_sq")])


def note_types(rank: int, world_size: int, precision: str, degrees: dict[str, int]) -> Any:
    module = Typed()
    trainer = build_trainer(world_size, TitanStrategy(**degrees), precision=precision)
    with _Collectives() as collectives:
        trainer.fit(module, DataLoader(Rows(module.case), batch_size=4))
    return module.types, collectives.sent


def assert_types(types: dict[str, set[torch.dtype]], precision: str) -> None:
    kept = BF16 if precision == "bf16-true" else F32
    computed = F32 if precision == "32-true" else BF16
    assert types == {
        "parameters": {kept},
        "state": {kept},
        "gradients": {kept},
        "activations": {computed},
        "loss": {kept},
    }


@pytest.mark.parametrize("precision", PRECISIONS)
def test_types_under_fsdp(precision: str) -> None:
    for types, sent in run_ranks(note_types, 2, precision, FSDP2, init_process_group=False):
        assert_types(types, precision)
        assert sent["_reduce_scatter_base_"] == {F32}
        assert sent["_allgather_base_"] == {F32 if precision == "32-true" else BF16}


@pytest.mark.parametrize("precision", PRECISIONS)
def test_types_under_tensor_parallel(precision: str) -> None:
    for types, sent in run_ranks(note_types, 2, precision, TP2, init_process_group=False):
        assert_types(types, precision)
        # The loss and the gradients of norms are sums in float32; activations are sent as they are.
        assert sent["allreduce_"] <= {F32, F64}
        assert sent["_reduce_scatter_base_"] == {F32 if precision == "32-true" else BF16}


# --------------------------------------------------------------------------------------
# Values
# --------------------------------------------------------------------------------------

STEPS = 5
CASE = Case(dtype=F32, num_rows=8 * STEPS, trainer={"precision": "bf16-mixed"})


@pytest.mark.parametrize("degrees", [FSDP2, TP2, DP2_TP2], ids=["fsdp2", "tp2", "fsdp2 x tp2"])
def test_loss_stays_close_to_float32(degrees: dict[str, int]) -> None:
    expected = reference(train_reference, Case(dtype=F32, num_rows=8 * STEPS))
    assert expected.losses[0] - expected.losses[-1] > 0.1  # it learns, so gradients count
    ranks = 2 if len(degrees) == 1 else 4
    for result in run_ranks(train_titan, ranks, CASE, degrees, init_process_group=False):
        assert len(result.losses) == STEPS
        torch.testing.assert_close(result.losses, expected.losses, rtol=0, atol=2e-2)
        assert result.losses != expected.losses  # not computed in float32

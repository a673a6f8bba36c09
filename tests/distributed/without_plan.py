"""A model without a plan, in the ways a LightningModule may be written."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import Dataset

from tests.distributed.case import whole
from titanplug import ParallelPlan

GLOBAL_BATCH, STEPS, FEATURES = 8, 3, 5


class Points(Dataset[tuple[Tensor, Tensor]]):
    """Pairs of (F,) and (1,) float64."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.x = torch.randn(GLOBAL_BATCH * STEPS, FEATURES, generator=generator, dtype=torch.float64)
        self.y = self.x.sin().sum(dim=1, keepdim=True)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.x[index], self.y[index]


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.norm(self.inner(x)).tanh()
        return x


class Plain(L.LightningModule):
    """Tuples; the model is called once. The repeated blocks become FSDP units, the rest is the root's."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first = nn.Linear(FEATURES, 6)
        self.blocks = nn.ModuleList(Block(6) for _ in range(2))
        self.last = nn.Linear(6, 1)
        self.double()
        self.grads: list[dict[str, Tensor | None]] = []
        self.build()

    def build(self) -> None:
        """What a subclass changes."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        result: Tensor = self.last(x)
        return result

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        return F.mse_loss(self(x), y)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.1)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.grads.append(
            {name: None if p.grad is None else whole(p.grad) for name, p in self.named_parameters()}
        )


class CallsLayers(Plain):
    """The step calls what is inside the model, and uses a weight by itself."""

    def configure_parallel_plan(self) -> ParallelPlan:
        return ParallelPlan()  # no units but the root: a layer of a unit is gathered with the unit alone

    def _block(self, index: int) -> Any:
        return self.blocks[index]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        hidden = F.linear(x, self.first.weight, self.first.bias)
        hidden = hidden + self._block(1).inner(self._block(0).norm(hidden))
        return F.mse_loss(self.last(hidden), y)


class CallsPastUnits(CallsLayers):
    def configure_parallel_plan(self) -> ParallelPlan:
        return ParallelPlan(fsdp_units=["blocks.*"])


class CallsTwice(Plain):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        return F.mse_loss(self(x), y) + (self(-x) + self(x)).square().mean()


class PartlyFrozen(Plain):
    def build(self) -> None:
        self.first.requires_grad_(False)
        self.blocks[0].inner.requires_grad_(False)
        self.blocks[1].requires_grad_(False)


class PartlyUnused(Plain):
    def build(self) -> None:
        self.unused = nn.Linear(3, 3, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.last(self.blocks[0](self.first(x)))
        return result


class OwnParameters(Plain):
    """Parameters of the LightningModule itself, one of them a single number."""

    def build(self) -> None:
        self.scale = nn.Parameter(torch.full((1,), 1.5, dtype=torch.float64))
        self.shift = nn.Parameter(torch.zeros(FEATURES, dtype=torch.float64))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        return F.mse_loss(self(x + self.shift) * self.scale, y)


class OwnBackward(Plain):
    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        (2 * loss).backward(*args, **kwargs)


class ReturnsMore(Plain):
    """A dict with further tensors, some of them in the graph; other hooks get them as they were."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        hidden = self.first(x)
        return {"loss": F.mse_loss(self(x), y), "hidden": hidden, "more": [hidden.detach(), "text"]}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        assert outputs["hidden"].shape == (len(batch[0]), 6)
        assert torch.equal(outputs["hidden"], outputs["more"][0])
        assert outputs["more"][1] == "text"


class Recomputes(Plain):
    """Activation checkpointing inside the model, around an FSDP unit and inside the root."""

    reentrant = False

    def forward(self, x: Tensor) -> Tensor:
        x = checkpoint(lambda x: self.first(x).tanh(), x, use_reentrant=False)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        result: Tensor = self.last(x)
        return result


class RecomputesReentrant(Recomputes):
    reentrant = True


@dataclass
class Pair:
    x: Tensor
    y: Tensor


def collate_pair(rows: list[tuple[Tensor, Tensor]]) -> Pair:
    return Pair(torch.stack([x for x, _ in rows]), torch.stack([y for _, y in rows]))


def collate_nested(rows: list[tuple[Tensor, Tensor]]) -> dict[str, Any]:
    pair = collate_pair(rows)
    return {"name": "points", "inputs": {"x": pair.x}, "targets": [pair.y]}


class OfDataclasses(Plain):
    collate = staticmethod(collate_pair)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return F.mse_loss(self(batch.x), batch.y)


class OfNestedDicts(Plain):
    collate = staticmethod(collate_nested)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return F.mse_loss(self(batch["inputs"]["x"]), batch["targets"][0])


class ByHand(Plain):
    """Manual optimization: two backwards before a step, clipped, and another step with new weights."""

    def build(self) -> None:
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(F.mse_loss(self(x), y))
        self.manual_backward(0.5 * self(-x).square().mean())
        self.clip_gradients(optimizer, gradient_clip_val=0.4, gradient_clip_algorithm="norm")
        optimizer.step()
        optimizer.zero_grad()
        self.manual_backward(F.mse_loss(self(x), y))
        optimizer.step()


class Adversarial(Plain):
    """Two models, two optimizers, the one's loss flowing through the other; layers are called directly.

    Gradients are zeroed after a step only, so those that a toggled optimizer must not get would stay.
    """

    def build(self) -> None:
        self.automatic_optimization = False
        self.critic = nn.Sequential(nn.Linear(1, 4), nn.Tanh(), nn.Linear(4, 1)).double()

    def configure_optimizers(self) -> Any:
        own = [p for name, p in self.named_parameters() if not name.startswith("critic")]
        return torch.optim.SGD(own, lr=0.1), torch.optim.SGD(self.critic.parameters(), lr=0.2)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        makes, judges = self.optimizers()  # type: ignore[attr-defined]
        with self.toggled_optimizer(makes):
            self._update(makes, F.softplus(-self.critic(self(x))).mean())
        with self.toggled_optimizer(judges):
            made = self.last(self.blocks[1](self.blocks[0](self.first(x)))).detach()
            self._update(judges, F.softplus(-self.critic(y)).mean() + F.softplus(self.critic(made)).mean())

    def _update(self, optimizer: Any, loss: Tensor) -> None:
        self.manual_backward(loss)
        optimizer.step()
        optimizer.zero_grad()


class StepsBetweenForwards(Plain):
    """Steps with the gradients of an earlier batch after a forward: weights that are gathered are old."""

    def build(self) -> None:
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        optimizer: Any = self.optimizers()
        before = self.last(self.first(x)).detach()
        if batch_idx:
            optimizer.step()
            optimizer.zero_grad()
        self.manual_backward(F.mse_loss(self.last(self.first(x)), y + before))


MODULES = {
    kind.__name__: kind
    for kind in (
        Plain,
        CallsLayers,
        CallsTwice,
        PartlyFrozen,
        PartlyUnused,
        OwnParameters,
        OwnBackward,
        ReturnsMore,
        Recomputes,
        RecomputesReentrant,
        OfDataclasses,
        OfNestedDicts,
        ByHand,
        Adversarial,
        StepsBetweenForwards,
    )
}

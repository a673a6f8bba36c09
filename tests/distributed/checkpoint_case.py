"""What the checkpoint tests train: two optimizer groups, a schedule, shuffled data, all steps recorded."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from tests.distributed.case import Case, Rows, build_model, build_trainer
from titanplug.strategy import TitanStrategy

GLOBAL_BATCH = 8
CASE = Case(global_batch=GLOBAL_BATCH, num_rows=40)  # 5 steps an epoch
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "1 process": (1, {}),
    "tp2": (2, {"tp": 2}),
    "replicate2": (2, {"dp_replicate": 2, "dp_shard": 1}),
    "fsdp2 x tp2": (4, {"dp_shard": 2, "tp": 2}),
    "fsdp4": (4, {"dp_shard": 4}),
    "hsdp 2x2": (4, {"dp_replicate": 2, "dp_shard": 2}),
}


@dataclass
class State:
    """Parameters, moments, and settings of a run at one step."""

    step: int
    weights: dict[str, Tensor]
    optimizer: dict[str, Tensor]
    rates: list[float]


@dataclass
class Run:
    """What happened in a run: entries by global step; ``first`` is the state at its start."""

    grads: dict[int, dict[str, Tensor]] = field(default_factory=dict)
    losses: dict[int, float] = field(default_factory=dict)
    rates: dict[int, list[float]] = field(default_factory=dict)
    epochs: dict[int, int] = field(default_factory=dict)
    saved: dict[int, State] = field(default_factory=dict)
    validations: list[tuple[int, float]] = field(default_factory=list)  # step and loss
    first: State | None = None


class Module(L.LightningModule):
    """Trains with AdamW in two groups. ``noise`` hides random tokens: it needs equal random draws."""

    def __init__(
        self,
        case: Case = CASE,
        noise: bool = False,
        optimizer: str = "adamw",
        frozen: str = "",
        **hparams: Any,
    ) -> None:
        super().__init__()
        self.save_hyperparameters(hparams)
        self.model = build_model(case)
        if frozen:
            self.get_submodule(frozen).requires_grad_(False)
        self.noise = noise
        self.optimizer_name = optimizer
        self.run = Run()

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        tokens = batch["input_ids"]
        if self.noise:
            tokens = torch.where(torch.rand(tokens.shape) < 0.3, 0, tokens)
        logits = self.model(tokens)
        loss = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        logits = self.model(batch["input_ids"])
        self.log("val_loss", F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten()))

    test_step = validation_step

    def predict_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        logits: Tensor = self.model(batch["input_ids"])
        return logits

    def configure_optimizers(self) -> Any:
        thick = [p for p in self.parameters() if p.ndim > 1]
        thin = [p for p in self.parameters() if p.ndim <= 1]
        if self.optimizer_name == "sgd":
            return torch.optim.SGD([{"params": thick}, {"params": thin, "lr": 0.01}], lr=0.1)
        optimizer = torch.optim.AdamW(
            [{"params": thick, "weight_decay": 0.1}, {"params": thin, "lr": 1e-3}], lr=1e-2
        )
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.7)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]

    # ---------------------------------------------------------------- recording

    def on_train_start(self) -> None:
        self.run.first = self.state()

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        step = self.trainer.global_step
        trained = {name: p for name, p in self.named_parameters() if p.requires_grad}
        self.run.grads[step] = {name: whole(p.grad) for name, p in trained.items()}
        self.run.epochs[step] = self.trainer.current_epoch
        self.run.rates[step] = [group["lr"] for group in optimizer.param_groups]

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.run.losses[self.trainer.global_step - 1] = float(self.trainer.callback_metrics["train_loss"])

    def on_validation_end(self) -> None:
        if self.trainer.state.fn == "fit":
            loss = float(self.trainer.callback_metrics["val_loss"])
            self.run.validations.append((self.trainer.global_step, loss))

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.run.saved[self.trainer.global_step] = self.state()

    def state(self) -> State:
        names = {id(p): name for name, p in self.named_parameters()}
        (optimizer,) = self.trainer.optimizers
        moments = {
            f"{names[id(p)]}/{key}": whole(value)
            for p, values in optimizer.state.items()
            for key, value in values.items()
        }
        weights = {name: whole(value) for name, value in self.state_dict().items()}
        rates = [group["lr"] for group in optimizer.param_groups]
        return State(self.trainer.global_step, weights, moments, rates)


def whole(tensor: Tensor | None) -> Tensor:
    assert tensor is not None
    value = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return value.detach().clone()


def loader(strategy: Any, case: Case = CASE, **options: Any) -> DataLoader[Any]:
    size = strategy.parallel_dims.size("batch") if isinstance(strategy, TitanStrategy) else 1
    return DataLoader(Rows(case), **{"batch_size": GLOBAL_BATCH // size, **options})


def trainer_for(world_size: int, degrees: dict[str, Any] | None, **options: Any) -> L.Trainer:
    """A quiet Trainer; ``degrees=None`` is Lightning alone on one process."""
    strategy: Any = "auto" if degrees is None else TitanStrategy(**degrees)
    return build_trainer(world_size, strategy, **{"max_epochs": 2, **options})


def train_and_save(
    rank: int,
    world_size: int,
    degrees: Any,
    folder: Path,
    validate: bool = False,
    stop: int = -1,
    ckpt_path: Path | None = None,
    options: dict[str, Any] | None = None,
    **module: Any,
) -> Run:
    """The uninterrupted run: 10 steps, saved mid-epoch, at the last batch, and at the epoch's end."""
    L.seed_everything(7, verbose=False)
    saves: list[L.Callback] = [
        ModelCheckpoint(folder / "mid", every_n_train_steps=3, save_top_k=-1, save_last=True),
        ModelCheckpoint(folder / "last batch", every_n_train_steps=5, save_top_k=-1),
        ModelCheckpoint(folder / ("validated" if validate else "epoch end"), every_n_epochs=1, save_top_k=-1),
    ]
    kept: dict[str, Any] = {"callbacks": saves, "enable_checkpointing": True, "max_steps": stop}
    trainer = trainer_for(world_size, degrees, **kept, **(options or {}))
    lit = Module(**module)
    val_loader = loader(trainer.strategy) if validate else None
    trainer.fit(lit, loader(trainer.strategy, shuffle=True), val_loader, ckpt_path=ckpt_path)
    return lit.run


def resume(
    rank: int, world_size: int, degrees: Any, paths: list[Path], steps: int, **module: Any
) -> list[Run]:
    """Continue from each checkpoint for some steps, as a new process with another seed would."""
    runs = []
    for path in paths:
        L.seed_everything(8, verbose=False)
        start = int(path.stem.rpartition("=")[2])
        trainer = trainer_for(world_size, degrees, max_epochs=-1, max_steps=start + steps)
        lit = Module(**module)
        with torch.no_grad():
            for parameter in lit.parameters():
                parameter.zero_()
        trainer.fit(lit, loader(trainer.strategy, shuffle=True), ckpt_path=path)
        runs.append(lit.run)
    return runs


def assert_continues(run: Run, expected: Run, start: int, steps: int, tolerance: float) -> None:
    """The run starts from the saved state, and its steps are those of the uninterrupted run."""
    assert run.first is not None
    assert_equal(run.first, expected.saved[start])
    assert list(run.grads) == list(range(start, start + steps))
    for step, grads in run.grads.items():
        for name, grad in expected.grads[step].items():
            error = float((grads[name] - grad).abs().max() / grad.abs().max())
            assert error < tolerance, f"gradient of {name} in step {step}: {error:.2e}"
        assert run.rates[step] == expected.rates[step]
        assert abs(run.losses[step] - expected.losses[step]) < 1e-6 * abs(expected.losses[step])


def assert_equal(state: State, expected: State) -> None:
    """Bitwise: loading into another layout only moves numbers."""
    assert state.step == expected.step
    assert state.rates == expected.rates
    assert state.weights.keys() == expected.weights.keys()
    assert state.optimizer.keys() == expected.optimizer.keys()
    for name, weight in expected.weights.items():
        assert torch.equal(state.weights[name], weight), name
    for name, value in expected.optimizer.items():
        assert torch.equal(state.optimizer[name], value), name

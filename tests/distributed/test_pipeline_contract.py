"""The module stays as it is under pp: any names, any arguments of the model, any code around its call."""

from __future__ import annotations

import traceback
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from tests.distributed.case import build_trainer
from tests.harness import reference, run_ranks
from titanplug import ParallelPlan, PipelineOrder
from titanplug.errors import ConfigError, TitanplugError
from titanplug.schedules.catalogue import build_table, write_csv
from titanplug.strategy import TitanStrategy

WIDTH, LENGTH, VOCAB = 12, 6, 19


class Layer(nn.Module):
    """Attention by a mask that the model makes, and a second argument by keyword."""

    kind = "causal"

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.drop = nn.Dropout(dropout)

    def forward(self, hidden: Tensor, mask: Tensor, *, gain: Tensor | None = None) -> Tensor:
        weights = torch.softmax(hidden @ hidden.mT + mask, -1)
        mixed = self.drop(torch.tanh(self.mix(weights @ hidden)))
        return hidden + (mixed if gain is None else mixed * gain[:, None, None])


class Odd(nn.Module):
    """Names of its own, a position table, a loop with an index, code between and after the layers."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCAB, WIDTH)
        self.places = nn.Embedding(LENGTH, WIDTH)
        self.body = nn.ModuleList([Layer(dropout) for _ in range(5)])
        self.final = nn.LayerNorm(WIDTH)
        self.to_words = nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, ids: Tensor, pad: Tensor, gain: Tensor | None = None) -> Tensor:
        hidden = self.words(ids) + self.places(torch.arange(ids.shape[1]))
        mask = torch.zeros(ids.shape[0], 1, LENGTH, dtype=hidden.dtype)
        mask = mask.masked_fill(pad[:, None], -1e9)
        for index, layer in enumerate(self.body):
            if self.body[index].kind == "causal":
                hidden = layer(hidden, mask, gain=gain) * 0.9
        return self.to_words(self.final(hidden * 2)).float().to(hidden.dtype)

    def parallel_plan(self) -> ParallelPlan:
        return ParallelPlan(
            fsdp_units=("body.*",),
            pipeline=PipelineOrder(("words", "places"), "body", ("final", "to_words")),
        )


class Rows(Dataset[dict[str, Any]]):
    def __init__(self, num_rows: int = 16) -> None:
        torch.manual_seed(1)
        self.ids = torch.randint(0, VOCAB, (num_rows, LENGTH + 1))
        self.pad = torch.rand(num_rows, LENGTH) < 0.3
        self.pad[:, 0] = False
        self.gain = torch.rand(num_rows, dtype=torch.float64)

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, i: int) -> dict[str, Any]:
        return {
            "ids": self.ids[i, :-1],
            "labels": self.ids[i, 1:],
            "pad": self.pad[i],
            "gain": self.gain[i],
            "name": f"row {i}",
            "scale": torch.tensor(0.5, dtype=torch.float64),
        }


class Module(L.LightningModule):
    """Several losses, values before and after the call, a dict with more than the loss."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.net = Odd(dropout).double()
        self.teacher = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.outputs: list[Any] = []
        self.grads: list[dict[str, Tensor]] = []

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> dict[str, Any]:
        assert len(batch["name"]) == len(batch["ids"])
        self.log("before", batch["gain"].mean(), on_step=True, batch_size=len(batch["ids"]))
        logits = self.net(batch["ids"], batch["pad"], gain=batch["gain"])
        main = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())
        extra = batch["scale"].mean() * logits.pow(2).mean()
        self.log_dict({"main": main, "extra": extra})
        return {"loss": main + extra, "main": main.detach(), "guess": logits.argmax(-1)}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.outputs.append({key: value.clone() for key, value in outputs.items()})

    def on_after_backward(self) -> None:
        self.grads.append({n: p.grad.clone() for n, p in self.named_parameters() if p.grad is not None})

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.1)


def train(
    rank: int, world_size: int, options: dict[str, Any], build: Any = Module, **trainer: Any
) -> tuple[list[Any], list[dict[str, Tensor]], dict[str, Tensor]]:
    L.seed_everything(3, verbose=False)
    strategy = TitanStrategy(**{"pp": world_size, "pp_microbatches": 4, "pp_schedule": "1F1B", **options})
    fitting = build_trainer(world_size, strategy, **trainer)
    module = build()
    fitting.fit(module, DataLoader(Rows(), batch_size=8))
    return module.outputs, module.grads, {k: v.clone() for k, v in fitting.callback_metrics.items()}


def train_alone(build: Any = Module) -> tuple[list[Any], list[dict[str, Tensor]], dict[str, Tensor]]:
    L.seed_everything(3, verbose=False)
    trainer = build_trainer(1, "auto")
    module = build()
    trainer.fit(module, DataLoader(Rows(), batch_size=8))
    return module.outputs, module.grads, {k: v.clone() for k, v in trainer.callback_metrics.items()}


def assert_alike(results: list[Any], expected: Any) -> None:
    for outputs, grads, metrics in results:
        for found, wanted in zip(outputs, expected[0], strict=True):
            assert found.keys() == wanted.keys()
            for key, value in wanted.items():
                torch.testing.assert_close(found[key], value, rtol=1e-10, atol=1e-12)
        for step, wanted in zip(grads, expected[1], strict=True):
            for name, grad in step.items():
                torch.testing.assert_close(grad, wanted[name], rtol=1e-10, atol=1e-12)
        assert metrics.keys() == expected[2].keys()
        for key, value in expected[2].items():
            torch.testing.assert_close(metrics[key], value, rtol=1e-6, atol=1e-8)
    held = {name for _, grads, _ in results for name in grads[0]}
    assert held == expected[1][0].keys()


SPLIT = [["net.words", "net.places", "body.0", "body.1", "body.2"], ["body.[34]", "final", "to_words"]]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"pp_schedule": "interleaved_1f1b", "pp_chunks": 2},
        {"pp_schedule": "dualpipe-v"},
        {"pp_split": SPLIT},
        {"pp_first_weight": 3.0, "pp_last_weight": 0.0},
    ],
)
def test_a_foreign_model(options: dict[str, Any]) -> None:
    assert_alike(run_ranks(train, 2, options, init_process_group=False), reference(train_alone))


def test_own_schedule(tmp_path: Path) -> None:
    write_csv(build_table("GPipe", 2, 4), tmp_path / "mine.csv")
    options = {"pp_schedule": str(tmp_path / "mine.csv")}
    assert_alike(run_ranks(train, 2, options, init_process_group=False), reference(train_alone))


class InHalves(Module):
    """Can't run its step on each stage: what goes into the model and the loss are apart."""

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Any:
        loss = self.pipeline_loss(self.net(**self.pipeline_inputs(batch)), batch)
        self.log("loss", loss)
        return {"loss": loss}

    def pipeline_inputs(self, batch: dict[str, Any]) -> dict[str, Any]:
        return {"ids": batch["ids"], "pad": batch["pad"], "gain": None}

    def pipeline_loss(self, logits: Tensor, batch: dict[str, Any]) -> Tensor:
        return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())


def halves(rank: int, world_size: int) -> list[dict[str, Tensor]]:
    return train(rank, world_size, {}, InHalvesOnly)[1]


class InHalvesOnly(InHalves):
    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Any:
        raise AssertionError("not called under pp")

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        pass


def test_step_in_halves() -> None:
    expected = reference(train_alone, InHalves)
    for grads in run_ranks(halves, 2, init_process_group=False):
        for step, wanted in zip(grads, expected[1], strict=True):
            for name, grad in step.items():
                torch.testing.assert_close(grad, wanted[name], rtol=1e-10, atol=1e-12)


def dropout_twice(rank: int, world_size: int) -> bool:
    first, second = (train(rank, world_size, {}, lambda: Module(0.5)) for _ in range(2))
    without = train(rank, world_size, {})
    same = all(torch.equal(a[k], b[k]) for a, b in zip(first[1], second[1], strict=True) for k in a)
    return same and any(not torch.equal(first[1][0][k], without[1][0][k]) for k in first[1][0])


def test_a_run_with_dropout_repeats_bitwise() -> None:
    assert all(run_ranks(dropout_twice, 2, init_process_group=False))


# ---------------------------------------------------------------------------------------
# Refusals
# ---------------------------------------------------------------------------------------


class Twice(Module):
    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Any:
        return self.net(batch["ids"], batch["pad"]).mean() + self.net(batch["ids"], batch["pad"]).mean()


class Never(Module):
    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Any:
        return torch.zeros((), requires_grad=True)


class ReturnsNone(Module):
    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Any:
        self.net(batch["ids"], batch["pad"])


class OddBatch(Module):
    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return {**batch, "shared": torch.arange(LENGTH)}


class Skips(Odd):
    """A connection over the layers, which pipeline stages don't have."""

    def forward(self, ids: Tensor, pad: Tensor, gain: Tensor | None = None) -> Tensor:
        start = hidden = self.words(ids) + self.places(torch.arange(ids.shape[1]))
        mask = torch.zeros(1, 1, LENGTH, dtype=hidden.dtype)
        for layer in self.body:
            hidden = layer(hidden, mask) + start
        return self.to_words(self.final(hidden))


class SkipModule(Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = Skips().double()


class SumsOutside(Odd):
    """Its residual sums are outside of the layers."""

    def forward(self, ids: Tensor, pad: Tensor, gain: Tensor | None = None) -> Tensor:
        hidden = self.words(ids) + self.places(torch.arange(ids.shape[1]))
        mask = torch.zeros(1, 1, LENGTH, dtype=hidden.dtype)
        for layer in self.body:
            hidden = hidden + layer(hidden, mask)
        return self.to_words(self.final(hidden))


class SumsOutsideModule(Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = SumsOutside().double()

    def validation_step(self, batch: dict[str, Any], batch_idx: int) -> None:
        self.net(batch["ids"], batch["pad"])


@pytest.mark.parametrize("call", ["fit", "validate"])
def test_what_does_not_travel_is_refused_on_the_last_stage_too(call: str) -> None:
    def run(rank: int, world_size: int) -> None:
        trainer = build_trainer(world_size, TitanStrategy(pp=2, pp_schedule="1F1B", pp_microbatches=2))
        getattr(trainer, call)(SumsOutsideModule(), DataLoader(Rows(), batch_size=8))

    with pytest.raises(TitanplugError, match="a residual sum outside of the layer") as caught:
        run_ranks(run, 2, init_process_group=False, timeout_s=60)
    assert "what stage 1 (" in str(caught.value)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (Twice, "the model is called twice in one step"),
        (Never, "returned without a call of the model's modules"),
        (ReturnsNone, "training_step returned None"),
        (OddBatch, "batch['shared'] has shape (6,) in a batch of 8 samples"),
        (SkipModule, "computed is NaN"),
    ],
)
def test_refused_in_a_step(build: Any, message: str) -> None:
    with pytest.raises(TitanplugError) as caught:
        run_ranks(train, 3, {"pp_microbatches": 3}, build, init_process_group=False, timeout_s=60)
    assert message in str(caught.value)


class Fails(Module):
    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Any:
        output = super().training_step(batch, batch_idx)
        if batch_idx == 1:
            raise ValueError("on purpose")
        return output


class FailsEarly(Module):
    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Any:
        if batch_idx == 1 and self.trainer.global_rank == 0:
            raise ValueError("on purpose")
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize(("build", "stage"), [(Fails, 1), (FailsEarly, 0)])
def test_an_error_names_its_stage(build: Any, stage: int) -> None:
    with pytest.raises(ValueError, match="on purpose") as caught:
        run_ranks(train, 2, {}, build, init_process_group=False, timeout_s=60)
    assert f"In pipeline stage {stage} of 2 (" in "".join(traceback.format_exception(caught.value))


class Manual(Module):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class OwnBackward(Module):
    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        loss.backward()


class TrainsOutside(Module):
    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.ones(()))


class NoOrder(Module):
    def configure_parallel_plan(self) -> ParallelPlan:
        return ParallelPlan(fsdp_units=("net.body.*",))


@pytest.mark.parametrize(
    ("build", "options", "message"),
    [
        (Manual, {}, "automatic_optimization=False"),
        (OwnBackward, {}, "overrides `backward`"),
        (TrainsOutside, {}, "temperature: this parameter trains"),
        (Module, {"pp": 2, "pp_chunks": 3, "pp_schedule": "LoopedBFS"}, "6 stages for 5 layers"),
        (Module, {"pp_split": [["words", "body.*"], ["final", "to_words"]]}, "places is in no stage"),
        (Module, {"pp": 2, "pp_split": [["words"]]}, "pp_split lists 1 stages"),
    ],
)
def test_refused_before_processes_start(build: Any, options: dict[str, Any], message: str) -> None:
    strategy = TitanStrategy(**{"pp": 2, "pp_schedule": "1F1B", **options})
    trainer = build_trainer(2, strategy)
    with pytest.raises(ConfigError) as caught:
        trainer.fit(build(), DataLoader(Rows(), batch_size=8))
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("options", "messages"),
    [
        ({"pp": 2, "pp_schedule": "2F2B"}, ["pp_schedule='2F2B'", "Interleaved1F1B"]),
        ({"pp": 4, "pp_schedule": "1F1B", "pp_microbatches": 2}, ["pp_microbatches=2", "4 or more"]),
        (
            {"pp": 2, "pp_chunks": 2, "pp_schedule": "GPipe", "pp_first_weight": -1, "tp": 0},
            ["pp_chunks=2", "pp_first_weight=-1", "tp=0"],
        ),
        (
            {"pp": 2, "pp_split": [["a"], ["b"]], "pp_last_weight": 2.0, "pp_schedule": "1F1B"},
            ["pp_last_weight=2.0 with pp_split"],
        ),
        ({"pp": 2, "reshard_after_forward": True}, ["reshard_after_forward=True with pp > 1"]),
    ],
)
def test_wrong_options(options: dict[str, Any], messages: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        TitanStrategy(**options)
    assert all(message in str(caught.value) for message in messages)

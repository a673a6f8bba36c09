"""The module stays as it is under cp: any model, any code around its calls, the results of one process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset
from torchmetrics import CatMetric, MeanMetric, SumMetric
from torchmetrics.classification import MulticlassAccuracy
from torchmetrics.text import Perplexity

from tests.distributed.case import build_trainer, whole
from tests.distributed.test_logging import Written
from tests.harness import reference, run_ranks
from titanplug import ParallelPlan, PipelineOrder, TitanStrategy
from titanplug.attention import DotProductAttention, TokenMask, dot_product_attention, token_positions
from titanplug.metrics import BitsPerByte, token_nll
from titanplug.plan import ColwiseParallel, ReplicateParallel, RowwiseParallel

VOCAB, WIDTH, HEADS, CLASSES = 11, 8, 4, 3
DIMS: dict[str, int | None] = {"model.ids": 1, "model.positions": 1, "model.documents": 1}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "cp2": (2, {"cp": 2}),
    "cp2 x fsdp2": (4, {"cp": 2, "dp_shard": 2}),
    "cp2 x tp2": (4, {"cp": 2, "tp": 2}),
    "cp2 x pp2": (4, {"cp": 2, "pp": 2, "pp_schedule": "1F1B", "pp_microbatches": 2}),
}
BACKENDS = ["all_gather", "ring", "ulysses", "torch"]


# ---------------------------------------------------------------------------------------
# A user's model, data and module
# ---------------------------------------------------------------------------------------


class Layer(nn.Module):
    """Attention by a function or a module, and a feed-forward with a dropout."""

    def __init__(self, dropout: float, recompute: str) -> None:
        super().__init__()
        self.norm, self.core, self.recompute = nn.LayerNorm(WIDTH), DotProductAttention(), recompute
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.up, self.down, self.drop = nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH), nn.Dropout(dropout)

    def forward(self, x: Tensor, documents: Tensor | TokenMask | None, causal: bool = True) -> Tensor:
        if self.recompute and torch.is_grad_enabled():
            again = self.recompute == "reentrant"
            return checkpoint(self.compute, x, documents, causal, use_reentrant=again)  # type: ignore[no-any-return]
        return self.compute(x, documents, causal)

    def compute(self, x: Tensor, documents: Tensor | TokenMask | None, causal: bool) -> Tensor:
        y = self.norm(x)
        q, k, v = (
            lin(y).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for lin in (self.q, self.k, self.v)
        )
        if documents is None and causal:
            heads = dot_product_attention(q, k, v)
        elif isinstance(documents, TokenMask):
            heads = self.core(q, k, v, documents)
        else:
            heads = self.core(q, k, v, TokenMask(causal=causal, document_ids=documents))
        x = x + self.o(heads.transpose(1, 2).flatten(2))
        out: Tensor = x + self.drop(self.down(torch.tanh(self.up(x))))
        return out


@dataclass
class Output:
    logits: Tensor
    hidden: tuple[Tensor, Tensor]
    note: str = "none"


class Model(nn.Module):
    """Positions are an argument; ``kind`` is what it returns."""

    def __init__(self, kind: str = "logits", dropout: float = 0.0, recompute: str = "") -> None:
        super().__init__()
        self.kind = kind
        self.words, self.places = nn.Embedding(VOCAB, WIDTH), nn.Embedding(16, WIDTH)
        self.layers = nn.ModuleList([Layer(dropout, recompute) for _ in range(2)])
        self.final, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(
        self,
        ids: Tensor,
        positions: Tensor,
        documents: Tensor | None = None,
        embedded: Tensor | None = None,
        causal: bool = True,
        mask: TokenMask | None = None,
    ) -> Any:
        hidden = start = (self.words(ids) if embedded is None else embedded) + self.places(positions)
        for layer in self.layers:
            hidden = layer(hidden, documents if mask is None else mask, causal)
        logits = self.head(self.final(hidden))
        if self.kind == "dict":
            return {"logits": logits, "states": [start, hidden], "loss": None}
        if self.kind == "dataclass":
            return Output(logits, (start, hidden))
        return (logits, hidden) if self.kind == "tuple" else logits


class Rows(Dataset[dict[str, Tensor]]):
    def __init__(self, length: int, num_rows: int = 8) -> None:
        rows = torch.Generator().manual_seed(1)
        self.tokens = torch.randint(0, VOCAB, (num_rows, length + 1), generator=rows)
        self.weights = torch.rand(num_rows, length, generator=rows, dtype=torch.float64)
        self.documents = (torch.rand(num_rows, length, generator=rows) < 0.3).long().cumsum(1)
        self.cut = torch.randint(2, length, (num_rows,), generator=rows)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        length = self.tokens.shape[1] - 1
        labels = self.tokens[i, 1:].masked_fill(torch.arange(length) >= self.cut[i], -100)
        return {
            "index": torch.tensor(i),
            "ids": self.tokens[i, :-1],
            "labels": self.tokens[i, 1:],
            "uneven": labels,
            "positions": torch.arange(length),
            "weights": self.weights[i],
            "documents": self.documents[i],
            "class": self.tokens[i, 0] % CLASSES,
            "bytes": 3 + self.tokens[i, 1],
        }


class Module(L.LightningModule):
    """Trains by ``use``; a frozen teacher, and trained parameters outside of the model where asked."""

    def __init__(self, use: Any, outside: bool = True, **model: Any) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.use = use
        self.model = Model(**model).double()
        self.teacher = Model().double().requires_grad_(False)
        if outside:
            self.temperature = nn.Parameter(torch.tensor([0.7], dtype=torch.float64))
            self.classify = nn.Linear(WIDTH, CLASSES, dtype=torch.float64)
            self.outer = nn.Embedding(VOCAB, WIDTH, dtype=torch.float64)
        self.seen: list[Any] = []
        self.grads: list[dict[str, Tensor]] = []

    def run(self, batch: dict[str, Tensor], model: Any = None, **changes: Any) -> Any:
        model = self.model if model is None else model
        return model(**{"ids": batch["ids"], "positions": batch["positions"], **changes})

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        loss = self.use(self, batch)
        self.log("loss", loss["loss"] if isinstance(loss, dict) else loss, on_step=True, on_epoch=True)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.1)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        named = [(name, p.grad) for name, p in self.named_parameters()]
        self.grads.append({name: whole(grad) for name, grad in named if grad is not None})

    def configure_parallel_plan(self) -> ParallelPlan:
        split: dict[str, Any] = dict.fromkeys(("q", "k", "v", "up"), ColwiseParallel())
        split |= dict.fromkeys(("o", "down"), RowwiseParallel())
        alike = ("*.words", "*.places", "*.layers.*.norm", "*.final", "*.head", "classify", "outer", "")
        tensor = {f"*.layers.*.{name}": style for name, style in split.items()}
        return ParallelPlan(
            tensor={**tensor, **dict.fromkeys(alike, ReplicateParallel())},
            fsdp_units=["model.layers.*"],
            sequence_dims={**DIMS, "model.embedded": 1, "teacher.ids": 1, "teacher.positions": 1},
            pipeline=PipelineOrder(
                ("model.words", "model.places"), "model.layers", ("model.final", "model.head")
            ),
            heads=(HEADS, HEADS),
        )


def fit(
    world_size: int,
    degrees: dict[str, Any] | None,
    module: Any,
    length: int = 16,
    batch_size: int = 4,
    **options: Any,
) -> L.Trainer:
    L.seed_everything(3, verbose=False)
    strategy: Any = "auto" if degrees is None else TitanStrategy(**degrees)
    dp = 1 if degrees is None else strategy.parallel_dims.resolve(world_size).size("batch")
    trainer = build_trainer(world_size, strategy, **options)
    trainer.fit(module, DataLoader(Rows(length), batch_size=batch_size // dp))
    return trainer


def flat(logits: Tensor, labels: Tensor, **options: Any) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), **options)


# ---------------------------------------------------------------------------------------
# Losses
# ---------------------------------------------------------------------------------------


def two_calls(m: Module, b: Any) -> Any:
    """R-Drop: the second call is of the sequence backwards."""
    one, two = m.run(b), m.run(b, ids=b["ids"].flip(1))
    apart = F.kl_div(one.log_softmax(-1), two.log_softmax(-1), log_target=True, reduction="batchmean")
    return flat(one, b["labels"]) + 0.1 * apart + 0.01 * two.square().mean()


def two_lengths(m: Module, b: Any) -> Any:
    short = m.model(b["ids"][:, :7], b["positions"][:, :7])
    return flat(m.run(b), b["labels"]) + flat(short, b["labels"][:, :7])


def distillation(m: Module, b: Any) -> Any:
    with torch.no_grad():
        target = (m.run(b, m.teacher) / 2).softmax(-1)
    logits = m.run(b)
    soft = F.kl_div((logits / 2).log_softmax(-1), target, reduction="none").sum(-1).mean()
    return soft + 0.5 * flat(logits, b["labels"])


def preference(m: Module, b: Any) -> Any:
    """DPO: sums over each sample, against a frozen model."""

    def score(model: Model, ids: Tensor) -> Any:
        logits = m.run(b, model, ids=ids)[:, :-1]
        picked = logits.log_softmax(-1).gather(2, ids[:, 1:, None]).squeeze(2)
        return (picked * b["weights"][:, 1:]).sum(1)

    other = b["ids"].flip(1)
    gain = score(m.model, b["ids"]) - score(m.teacher, b["ids"]) - score(m.model, other)
    return -F.logsigmoid(0.1 * gain).mean()


def soft_prompt(m: Module, b: Any) -> Any:
    """Embedded outside of the model by a trained table, of which a gradient is taken in the step."""
    embedded = m.outer(b["ids"]) * m.temperature
    loss = flat(m.run(b, embedded=embedded), b["labels"])
    (slope,) = torch.autograd.grad(loss, embedded, retain_graph=True)
    return loss * (1 + slope.square().sum().sqrt())


def shifted(m: Module, b: Any) -> Any:
    logits = m.run(b)
    return F.cross_entropy(logits[:, :-1].reshape(-1, VOCAB), b["ids"][:, 1:].reshape(-1))


def weighted(m: Module, b: Any) -> Any:
    losses = flat(m.run(b), b["labels"], reduction="none")
    return (losses * b["weights"].flatten()).mean()


def per_sample(m: Module, b: Any) -> Any:
    losses = flat(m.run(b), b["labels"], reduction="none").view(b["ids"].shape)
    return losses.mean(dim=1).square().mean()


def soft_cap(m: Module, b: Any) -> Any:
    logits = m.run(b) / m.temperature
    capped = 5 * torch.tanh(logits / 5)
    return flat(capped, b["labels"], label_smoothing=0.1) + 1e-2 * capped.logsumexp(-1).square().mean()


def gathers(m: Module, b: Any) -> Any:
    logits = m.run(b)
    ranked = logits.sort(1).values.cumsum(1).var((1, 2))
    over_time = logits.softmax(1).roll(1, 1) * logits.flip(1)
    return ranked.mean() + over_time.sum((1, 2)).mean() + torch.einsum("bsv,btv->b", logits, logits).mean()


def reward(m: Module, b: Any) -> Any:
    """By how many tokens are right, which is no function with a gradient."""
    logits = m.run(b)
    right = (logits.argmax(-1) == b["labels"]).double().mean(1)
    picked = logits.log_softmax(-1).gather(-1, b["labels"].unsqueeze(-1))[..., 0].mean(1)
    return -(picked * (right + 0.1)).mean()


def tuple_output(m: Module, b: Any) -> Any:
    logits, hidden = m.run(b)
    pooled = F.cross_entropy(m.classify(hidden.mean(1)), b["class"])
    last = F.cross_entropy(m.classify(hidden[:, -1]), b["class"])
    return flat(logits, b["labels"]) + pooled + last + 0.1 * m.classify(hidden).square().mean()


def dict_output(m: Module, b: Any) -> Any:
    out = m.run(b)
    start, hidden = out["states"]
    assert out["loss"] is None
    return flat(out["logits"], b["labels"]) + (hidden - start).square().mean()


def dataclass_output(m: Module, b: Any) -> Any:
    out = m.run(b)
    assert isinstance(out, Output) and out.note == "none" and out.logits.shape == (*b["ids"].shape, VOCAB)
    return flat(out.logits, b["labels"]) + F.cosine_similarity(*out.hidden, dim=-1).mean()


LOSSES: dict[str, tuple[Callable[[Module, Any], Any], dict[str, Any]]] = {
    "mean": (lambda m, b: flat(m.run(b), b["labels"]), {}),
    "shifted": (shifted, {}),
    "weighted": (weighted, {}),
    "per sample": (per_sample, {}),
    "last token": (lambda m, b: F.cross_entropy(m.run(b)[:, -1], b["labels"][:, -1]), {}),
    "documents": (lambda m, b: flat(m.run(b, documents=b["documents"]), b["labels"]), {}),
    "both ways": (lambda m, b: flat(m.run(b, causal=False), b["labels"]), {}),
    "reward": (reward, {}),
    "gathers": (gathers, {}),
    "tuple": (lambda m, b: flat(m.run(b)[0], b["labels"]) + m.run(b)[1].mean(), {"kind": "tuple"}),
    "dict": (dict_output, {"kind": "dict"}),
    "dataclass": (dataclass_output, {"kind": "dataclass"}),
    "targets": (
        lambda m, b: {"loss": flat(m.run(b), b["uneven"]), "num_targets": (b["uneven"] != -100).sum()},
        {},
    ),
    "distillation": (distillation, {}),
    "preference": (preference, {}),
    "two calls": (two_calls, {}),
    "two lengths": (two_lengths, {}),
    "soft cap": (soft_cap, {}),
    "pooled": (tuple_output, {"kind": "tuple"}),
    "soft prompt": (soft_prompt, {}),
    "uneven": (lambda m, b: flat(m.run(b), b["uneven"]), {}),
}
IN_LAYOUT = {
    "cp2 x fsdp2": [
        "mean",
        "weighted",
        "last token",
        "targets",
        "distillation",
        "preference",
        "two calls",
        "pooled",
    ],
    "cp2 x tp2": [
        "shifted",
        "gathers",
        "targets",
        "both ways",
        "two lengths",
        "soft cap",
        "pooled",
        "soft prompt",
    ],
    "cp2 x pp2": ["mean", "shifted", "weighted", "per sample", "documents", "reward", "gathers", "targets"],
}
"""A mean of means over samples is one process's in the first; the last calls the model once."""


def losses(
    rank: int, world_size: int, degrees: dict[str, Any] | None, names: list[str], length: int
) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in names:
        use, model = LOSSES[name]
        outside = degrees is None or "pp" not in degrees
        module = Module(use, outside, **model)
        try:
            # The mean that is logged over targets is one over samples in plain Lightning.
            own = {} if degrees is None and name == "targets" else degrees
            trainer = fit(world_size, own, module, length)
        except Exception as error:  # shown by the test
            found[name] = f"{type(error).__name__}: {error}"
            continue
        logged = {key: float(value) for key, value in trainer.callback_metrics.items()}
        found[name] = module.grads, logged
    return found


def assert_same(found: dict[str, Any], expected: dict[str, Any], tolerance: float = 1e-12) -> None:
    """Gradients of each step and logged values of each case; ``found`` may have those of one stage only."""
    problems = []
    for name, wanted in expected.items():
        errors = [result for result in (found[name], wanted) if isinstance(result, str)]
        if errors:
            problems.append(f"{name}: {errors}")
            continue
        for step, (grads, right) in enumerate(zip(found[name][0], wanted[0], strict=True)):
            scale = max(float(grad.abs().max()) for grad in right.values())
            for key, grad in grads.items():
                error = float((grad - right[key]).abs().max()) / scale
                if not error < tolerance:
                    problems.append(f"{name}, step {step}, {key}: {error:.1e}")
        for key, value in wanted[1].items():
            if found[name][1][key] != pytest.approx(value, rel=1e-6):
                problems.append(f"{name}, {key}: {found[name][1][key]} is not {value}")
    assert not problems, "\n".join(problems)


def check_losses(layout: str, names: list[str], length: int) -> None:
    world_size, degrees = LAYOUTS[layout]
    expected = reference(losses, 0, 1, None, names, length)
    for found in run_ranks(losses, world_size, degrees, names, length, init_process_group=False):
        assert_same(found, expected)


def test_losses_with_padding() -> None:
    check_losses("cp2", list(LOSSES), 13)


def test_losses_without_padding() -> None:
    check_losses(
        "cp2", ["mean", "shifted", "both ways", "gathers", "two lengths", "soft prompt", "uneven"], 16
    )


@pytest.mark.parametrize("layout", ["cp2 x fsdp2", "cp2 x tp2", "cp2 x pp2"])
def test_losses_in_layouts(layout: str) -> None:
    check_losses(layout, IN_LAYOUT[layout], 13)


class Itself(L.LightningModule):
    """The model: layers of its own, called as ``self(ids)``, positions of what it is given."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.words = nn.Embedding(VOCAB, WIDTH, dtype=torch.float64)
        self.layers = nn.ModuleList([Layer(0.0, "").double() for _ in range(2)])
        self.head = nn.Linear(WIDTH, VOCAB, dtype=torch.float64)
        self.grads: list[dict[str, Tensor]] = []

    def forward(self, x: Tensor, *, gain: Tensor | None = None) -> Any:
        hidden = self.words(x)
        for layer in self.layers:
            hidden = layer(hidden, None)
        hidden = self.head(hidden)
        return hidden if gain is None else hidden * gain.unsqueeze(-1)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = flat(self(batch["ids"]), batch["labels"])
        loss = loss + flat(self(x=batch["ids"].flip(1), gain=batch["weights"]), batch["labels"])
        self.log("loss", loss)
        return loss

    def configure_parallel_plan(self) -> ParallelPlan:
        return ParallelPlan(sequence_dims={"x": 1, "gain": 1})

    on_before_optimizer_step = Module.on_before_optimizer_step
    configure_optimizers = Module.configure_optimizers


@pytest.mark.parametrize("layout", ["cp2", "cp2 x fsdp2"])
def test_a_module_that_is_the_model(layout: str) -> None:
    def run(rank: int, world_size: int, degrees: dict[str, Any] | None) -> dict[str, Any]:
        module = Itself()
        trainer = fit(world_size, degrees, module, 13)
        return {"itself": (module.grads, {k: float(v) for k, v in trainer.callback_metrics.items()})}

    world_size, degrees = LAYOUTS[layout]
    expected = reference(run, 0, 1, None)
    for found in run_ranks(run, world_size, degrees, init_process_group=False):
        assert_same(found, expected)


# ---------------------------------------------------------------------------------------
# Activation checkpointing by the user
# ---------------------------------------------------------------------------------------


def recomputed(
    rank: int, world_size: int, degrees: dict[str, Any] | None, backends: list[str], kinds: list[str]
) -> dict[str, Any]:
    found = {}
    for backend in backends:
        for kind in kinds:
            by_documents = backend in ("all_gather", "ulysses")

            def use(m: Module, b: Any, by_documents: bool = by_documents) -> Tensor:
                documents = b["documents"] if by_documents else None
                return flat(m.run(b, documents=documents), b["labels"])

            options = None if degrees is None else {**degrees, "cp_backend": backend}
            module = Module(use, degrees is None or "pp" not in degrees, recompute=kind)
            trainer = fit(world_size, options, module, 13)
            logged = {key: float(value) for key, value in trainer.callback_metrics.items()}
            found[f"{backend}, {kind}"] = module.grads, logged
    return found


@pytest.mark.parametrize("layout", ["cp2", "cp2 x pp2"])
def test_blocks_that_are_computed_again(layout: str) -> None:
    world_size, degrees = LAYOUTS[layout]
    expected = reference(recomputed, 0, 1, None, ["all_gather", "ring"], [""])
    plain = {"all_gather": "all_gather", "ulysses": "all_gather", "ring": "ring", "torch": "ring"}
    kinds = ["plain", "reentrant"]
    wanted = {f"{name}, {kind}": expected[f"{like}, "] for name, like in plain.items() for kind in kinds}
    for found in run_ranks(recomputed, world_size, degrees, BACKENDS, kinds, init_process_group=False):
        assert_same(found, wanted)


# ---------------------------------------------------------------------------------------
# Logs, metrics, evaluation
# ---------------------------------------------------------------------------------------


@dataclass
class Answer:
    """What a step returns, where the model isn't in stages: Lightning doesn't look into it."""

    index: Tensor
    logits: Tensor
    some: list[Tensor] = field(default_factory=list)


class Logs(Module):
    """Every reduction, from steps and other hooks; metrics on logits, on losses and on samples."""

    def __init__(self, outside: bool = True) -> None:
        super().__init__(None, outside)
        self.outside = outside
        self.accuracy = MulticlassAccuracy(VOCAB, average="micro")
        self.perplexity, self.bits = Perplexity(ignore_index=-100), BitsPerByte()
        self.mean, self.losses, self.seen_rows = MeanMetric(), CatMetric(), SumMetric()

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        logits = self.run(batch)
        losses = flat(logits, batch["labels"], reduction="none").view(batch["ids"].shape)
        loss = losses.mean()
        self.log("loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        self.log("tokens", batch["ids"].numel(), reduce_fx="sum", on_step=True, on_epoch=True)
        self.log("bytes", batch["bytes"].sum(), reduce_fx="sum", on_epoch=True)
        self.log("of_samples", losses.sum(1).sum(), reduce_fx="sum", on_epoch=True)
        self.log("largest", logits.max(), reduce_fx="max", on_step=True, on_epoch=True)
        self.log("smallest", losses.min(), reduce_fx="min", on_epoch=True)
        self.log("sized", loss * 2, batch_size=len(batch["ids"]), on_step=False, on_epoch=True)
        self.log("right", (logits.argmax(-1) == batch["labels"]).float().mean(), on_epoch=True)
        self.log("number", 2.5)
        self.mean(losses)
        self.log("mean_metric", self.mean, on_step=False, on_epoch=True)
        return {"loss": loss, "logits": logits}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        assert outputs["logits"].shape == (*batch["ids"].shape, VOCAB)
        self.log("after", outputs["logits"].square().mean(), on_step=True, on_epoch=True)

    def evaluate(self, batch: dict[str, Tensor], stage: str) -> Any:
        logits = self.run(batch)
        nll, count = token_nll(logits, batch["uneven"])
        self.accuracy(logits.argmax(-1), batch["labels"])
        self.perplexity(logits.float(), batch["uneven"])
        self.bits(nll, batch["bytes"].sum())
        self.losses(flat(logits, batch["labels"], reduction="none"))
        self.seen_rows(torch.ones(len(batch["ids"])))
        metrics = {"accuracy": self.accuracy, "perplexity": self.perplexity, "bits": self.bits}
        for name, metric in {**metrics, "rows": self.seen_rows}.items():
            self.log(f"{stage}_{name}", metric, on_step=False, on_epoch=True)
        self.log(f"{stage}_nll", nll, reduce_fx="sum", prog_bar=True)
        self.log(f"{stage}_count", count, reduce_fx="sum")
        self.log(f"{stage}_loss", flat(logits, batch["labels"]))
        return self.answer(batch["index"], logits)

    def answer(self, *values: Any) -> Any:
        return Answer(*values) if self.outside else vars(Answer(*values))

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        return self.evaluate(batch, "val")

    def test_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        return self.evaluate(batch, "test")

    def on_validation_batch_end(self, outputs: Any, batch: Any, *_: Any) -> None:
        logits = outputs.logits if self.outside else outputs["logits"]
        assert type(logits) is Tensor and logits.shape == (*batch["ids"].shape, VOCAB)
        self.log("val_after", logits.max(), reduce_fx="max")

    def on_validation_epoch_end(self) -> None:
        self.log("val_sum_of_losses", self.losses.compute().sum())
        self.losses.reset()

    on_test_epoch_end = on_validation_epoch_end

    def predict_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        logits = self.run(batch)
        return self.answer(batch["index"], logits, [logits[:, -1], logits.argmax(-1)])


def evaluated(rank: int, world_size: int, degrees: dict[str, Any] | None) -> Any:
    """Train two epochs with validations inside of accumulation windows, test and predict."""
    L.seed_everything(3, verbose=False)
    strategy: Any = "auto" if degrees is None else TitanStrategy(**degrees)
    dp = 1 if degrees is None else strategy.parallel_dims.resolve(world_size).size("batch")
    written = Written()
    options = {"accumulate_grad_batches": 2, "val_check_interval": 1, "max_epochs": 2}
    trainer = build_trainer(world_size, strategy, logger=written, **options)
    module = Logs(degrees is None or "pp" not in degrees)
    loaders = [DataLoader(Rows(13, rows), batch_size=4 // dp) for rows in (8, 10, 7)]
    trainer.fit(module, loaders[0], loaders[1])
    values = {key: float(value) for key, value in trainer.callback_metrics.items()}
    trainer.test(module, loaders[1], verbose=False)
    values |= {key: float(value) for key, value in trainer.callback_metrics.items()}
    predictions: Any = trainer.predict(module, loaders[2])
    return values, written.rows, [part if isinstance(part, dict) else vars(part) for part in predictions]


@pytest.mark.parametrize("layout", ["cp2", "cp2 x fsdp2", "cp2 x pp2"])
def test_values_and_predictions(layout: str) -> None:
    world_size, degrees = LAYOUTS[layout]
    values, rows, predictions = reference(evaluated, 0, 1, None)
    results = run_ranks(evaluated, world_size, degrees, init_process_group=False)
    for own_values, own_rows, _ in results:
        assert own_values.keys() == values.keys()
        for key, value in values.items():
            assert own_values[key] == pytest.approx(value, rel=1e-5), key
        assert [step for step, _ in own_rows] == [step for step, _ in rows]
        for (step, own), (_, wanted) in zip(own_rows, rows, strict=True):
            assert own == pytest.approx(wanted, rel=1e-5), step
    complete = results[:1] if "dp_shard" in degrees else results
    for _, _, own_predictions in complete:
        parts = [(part["index"], part["logits"], *part["some"]) for part in predictions]
        own_parts = [(part["index"], part["logits"], *part["some"]) for part in own_predictions]
        for found, wanted in zip(zip(*own_parts, strict=True), zip(*parts, strict=True), strict=True):
            assert all(type(tensor) is Tensor for tensor in found)
            # Two data-parallel ranks take turns row by row; the rows are those of one process.
            torch.testing.assert_close(torch.cat(found), torch.cat(wanted), rtol=1e-10, atol=1e-10)


# ---------------------------------------------------------------------------------------
# Random draws
# ---------------------------------------------------------------------------------------


class Draws(Module):
    """Draws in the step, for samples in the model, and for tokens in its dropouts."""

    def __init__(self) -> None:
        super().__init__(None, dropout=0.5)
        self.drawn: dict[str, list[Tensor]] = {"step": [], "samples": [], "tokens": []}
        self.model.words.register_forward_hook(self.per_sample)
        self.model.get_submodule("layers.0.drop").register_forward_hook(self.per_token)

    def per_sample(self, module: nn.Module, args: Any, output: Tensor) -> Tensor:
        self.drawn["samples"].append(torch.rand(len(output)))
        return output * (1 + self.drawn["samples"][-1].double()[:, None, None])

    def per_token(self, module: nn.Module, args: Any, output: Tensor) -> None:
        self.drawn["tokens"].append(output == 0)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        self.drawn["step"].append(torch.rand(3))
        loss = flat(self.run(batch), batch["labels"])
        self.drawn["step"].append(torch.rand(3))
        return loss


def draws(rank: int, world_size: int) -> Any:
    first, second = Draws(), Draws()
    for module in (first, second):
        fit(world_size, {"cp": 2}, module)
    same = all(
        torch.equal(a[key], b[key]) for a, b in zip(first.grads, second.grads, strict=True) for key in a
    )
    return same, first.drawn


def test_random_draws() -> None:
    (same, one), (same_too, two) = run_ranks(draws, 2, init_process_group=False)
    assert same and same_too
    for key in ("step", "samples"):
        assert all(torch.equal(a, b) for a, b in zip(one[key], two[key], strict=True)), key
    assert not torch.equal(one["step"][0], one["step"][1])
    masks = torch.cat([*one["tokens"], *two["tokens"]])
    assert 0.4 < masks.double().mean() < 0.6
    for mine, other in zip(one["tokens"], two["tokens"], strict=True):
        # Independent: half of the elements agree.
        assert 0.4 < (mine == other).double().mean() < 0.6


# ---------------------------------------------------------------------------------------
# Switches of the Trainer and of the strategy
# ---------------------------------------------------------------------------------------


class Manual(Module):
    """Two optimizers, one backward each, by hand."""

    def __init__(self, use: Any) -> None:
        super().__init__(use)
        self.automatic_optimization = False

    def configure_optimizers(self) -> Any:
        inside = torch.optim.SGD(self.model.parameters(), lr=0.1)
        return inside, torch.optim.SGD([self.temperature], lr=0.1)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        optimizers: Any = self.optimizers()
        inside, outside = optimizers
        for optimizer in (inside, outside):
            loss = self.use(self, batch)
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
        self.log("loss", loss)


def per_step_lengths(m: Module, b: Any) -> Any:
    length = (16, 13, 7, 3)[m.global_step % 4]
    logits = m.model(b["ids"][:, :length], b["positions"][:, :length])
    return flat(logits / m.temperature, b["labels"][:, :length])


def switches(rank: int, world_size: int, degrees: dict[str, Any] | None) -> dict[str, Any]:
    def use(m: Module, b: Any) -> Any:
        return flat(m.run(b) / m.temperature, b["uneven"])

    def run(module: Module, trainer: dict[str, Any] | None = None, **strategy: Any) -> Any:
        own = None if degrees is None else {**degrees, **strategy}
        done = fit(world_size, own, module, **{"max_epochs": 2, **(trainer or {})})
        return module.grads, {key: float(value) for key, value in done.callback_metrics.items()}

    clip = {"gradient_clip_val": 0.05}
    return {
        "manual": run(Manual(use)),
        "clipped": run(Module(use), clip),
        "clipped by value": run(Module(use), {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}),
        "checked": run(Module(use), clip, error_if_nonfinite=True, check_peers=True),
        "accumulated": run(Module(use), {"accumulate_grad_batches": 2}),
        "lengths": run(Module(per_step_lengths)),
        "lengths, blocks": run(Module(per_step_lengths), cp_load_balance=False),
        "another backend": run(Module(use), cp_backend="ring"),
    }


def test_switches() -> None:
    expected = reference(switches, 0, 1, None)
    for found in run_ranks(switches, 2, {"cp": 2}, init_process_group=False):
        assert_same(found, expected)


def in_turn(rank: int, world_size: int, every: list[dict[str, Any] | None]) -> dict[str, Any]:
    """Runs of one process after each other, under several layouts."""
    found = {}
    for number, degrees in enumerate(every):
        for recompute in ("", "plain"):
            module = Module(weighted, recompute=recompute)
            logged = fit(world_size, degrees, module).callback_metrics
            named = {key: float(value) for key, value in logged.items()}
            found[f"{number} {recompute}"] = module.grads, named
    return found


def test_runs_with_and_without_cp_in_turn() -> None:
    every: list[Any] = [{"cp": 2}, {"dp_shard": 2}, {"cp": 2, "cp_backend": "ulysses"}, {"dp_replicate": 2}]
    every[-1] = {"dp_replicate": 2, "dp_shard": 1}
    expected = reference(in_turn, 0, 1, [None] * len(every))
    for found in run_ranks(in_turn, 2, every, init_process_group=False):
        assert_same(found, expected)


def in_half(rank: int, world_size: int, degrees: dict[str, Any] | None) -> Any:
    module = Module(lambda m, b: flat(m.run(b), b["labels"])).float()
    trainer = fit(world_size, degrees, module, 13, precision="bf16-mixed")
    return module.grads, float(trainer.callback_metrics["loss"])


def test_mixed_precision() -> None:
    grads, loss = reference(in_half, 0, 1, None)
    for own, own_loss in run_ranks(in_half, 2, {"cp": 2}, init_process_group=False):
        assert own_loss == pytest.approx(loss, rel=1e-2)
        for found, wanted in zip(own, grads, strict=True):
            norm = torch.stack([grad.norm() for grad in wanted.values()]).norm()
            apart = torch.stack([(found[key] - grad).norm() for key, grad in wanted.items()]).norm()
            assert found["model.head.weight"].dtype == torch.float32
            assert apart / norm < 0.03


# ---------------------------------------------------------------------------------------
# Other graphs on the model's output, and other ways to call it
# ---------------------------------------------------------------------------------------


class Reverse(torch.autograd.Function):
    """The gradient goes back the other way (domain adaptation)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return -0.1 * grads[0]


class StraightThrough(torch.autograd.Function):
    """One-hot, with the gradient of what it was made of."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return F.one_hot(x.argmax(-1), x.shape[-1]).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0]


def through_functions(m: Module, b: Any) -> Any:
    logits, hidden = m.run(b)
    picked = StraightThrough.apply(logits)  # type: ignore[no-untyped-call]
    backwards = Reverse.apply(hidden)  # type: ignore[no-untyped-call]
    shifted = StraightThrough.apply(logits[:, 1:] / 2)  # type: ignore[no-untyped-call]
    hits = (picked.gather(-1, b["labels"][..., None])[..., 0] * b["weights"]).sum(1)
    alike = (shifted * F.one_hot(b["ids"][:, 1:], VOCAB)).sum(-1) * b["weights"][:, 1:]
    against = F.cross_entropy(m.classify(backwards.mean(1)), b["class"])
    return flat(logits, b["labels"]) + hits.square().mean() + alike.mean() + against


class Vocabulary(Module):
    """Logits stay sharded over the vocabulary under tp."""

    def configure_parallel_plan(self) -> ParallelPlan:
        plan = super().configure_parallel_plan()
        return replace(plan, tensor={**plan.tensor, "*.head": ColwiseParallel(output="logits")})


class OuterUnit(Vocabulary):
    """An FSDP unit outside of the model is called on its output."""

    def configure_parallel_plan(self) -> ParallelPlan:
        return replace(super().configure_parallel_plan(), fsdp_units=["model.layers.*", "classify"])


class Chain(Vocabulary):
    """Two models that are FSDP units, one after the other."""

    def __init__(self) -> None:
        super().__init__(chained, kind="tuple")
        self.second = Model().double()

    def configure_parallel_plan(self) -> ParallelPlan:
        plan = super().configure_parallel_plan()
        own: dict[str, int | None] = {"second.ids": 1, "second.positions": 1, "second.embedded": 1}
        return replace(plan, fsdp_units=["model", "second"], sequence_dims={**plan.sequence_dims, **own})


def chained(m: Any, b: Any) -> Any:
    logits, hidden = m.run(b)
    return flat(m.run(b, m.second, embedded=hidden), b["labels"]) + flat(logits, b["labels"])


class Hooked(Vocabulary):
    """A hook on the model's backward sees the gradient of the whole output."""

    def __init__(self) -> None:
        super().__init__(lambda m, b: flat(m.run(b), b["labels"]))

        def scaled(module: nn.Module, inputs: Any, outputs: Any) -> None:
            self.seen.append(outputs[0].shape)

        self.model.register_full_backward_hook(scaled)

    def on_train_end(self) -> None:
        assert self.seen == [torch.Size([4, 13, VOCAB])] * 2, self.seen


class OwnPositions(Model):
    """Positions of titanplug's function, or given and beside an ``arange`` that isn't of positions."""

    def forward(self, ids: Tensor, positions: Tensor | None = None) -> Any:  # type: ignore[override]
        if positions is None:
            here = token_positions(ids.shape[1], ids.device)
            return super().forward(ids, here.expand(ids.shape))
        unused = self.places(torch.arange(ids.shape[1])).sum()
        return super().forward(ids, positions) + 0 * unused


class Positions(Module):
    def __init__(self, use: Any) -> None:
        super().__init__(use)
        torch.manual_seed(5)
        self.model = OwnPositions().double()

    def configure_parallel_plan(self) -> ParallelPlan:
        return ParallelPlan(sequence_dims={"model.ids": 1, "model.positions": 1})


def same_share(m: Module, b: Any) -> Any:
    """Two lengths of which a rank holds as many tokens, computed again in backward."""
    short = m.model(b["ids"][:, :13], b["positions"][:, :13])
    return flat(m.run(b), b["labels"]) + flat(short, b["labels"][:, :13])


class Skips(Manual):
    """Neither the check before training nor the first step calls the model."""

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.log("weight", batch["weights"].mean())

    def val_dataloader(self) -> Any:
        return DataLoader(Rows(13), batch_size=4)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        if batch_idx:
            super().training_step(batch, batch_idx)


def made_in_the_step(m: Module, b: Any) -> Any:
    mask = TokenMask(document_ids=b["documents"])
    both_ways = TokenMask(causal=False, document_ids=b["documents"])
    return flat(m.run(b, mask=mask), b["labels"]) + flat(m.run(b, mask=both_ways), b["labels"])


@dataclass
class Around:
    """A module and how it is trained."""

    build: Callable[[], Module]
    length: int = 13
    strategy: dict[str, Any] = field(default_factory=dict)
    trainer: dict[str, Any] = field(default_factory=dict)


def head_unit(m: Module, b: Any) -> Any:
    logits, hidden = m.run(b)
    return flat(logits, b["labels"]) + m.classify(hidden).square().mean()


AROUND = {
    "functions": Around(lambda: Vocabulary(through_functions, kind="tuple")),
    "hook": Around(Hooked),
    "outer unit": Around(lambda: OuterUnit(head_unit, kind="tuple")),
    "chain": Around(Chain),
    "same share": Around(lambda: Module(same_share, recompute="plain"), 16),
    "same share, reentrant": Around(lambda: Module(same_share, recompute="reentrant"), 16),
    "skips": Around(lambda: Skips(weighted), trainer={"num_sanity_val_steps": 1}),
    "own positions": Around(lambda: Positions(lambda m, b: flat(m.model(b["ids"]), b["labels"]))),
    "arange": Around(lambda: Positions(lambda m, b: flat(m.run(b), b["labels"]))),
    "mask": Around(lambda: Module(made_in_the_step)),
    "mask, ulysses": Around(lambda: Module(made_in_the_step), strategy={"cp_backend": "ulysses"}),
}
AROUND_IN: dict[str, tuple[int, dict[str, Any], list[str]]] = {
    "cp2": (2, {"cp": 2}, list(AROUND)),
    "cp2 x tp2": (4, {"cp": 2, "tp": 2}, ["functions", "hook"]),
    "tp2": (2, {"tp": 2}, ["functions", "hook"]),
    "cp4": (4, {"cp": 4}, ["own positions"]),
}


def around(rank: int, world_size: int, degrees: dict[str, Any] | None, names: list[str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in names:
        case = AROUND[name]
        module = case.build()
        own = None if degrees is None else {**degrees, **case.strategy}
        try:
            trainer = fit(world_size, own, module, case.length, **case.trainer)
        except Exception as error:  # shown by the test
            found[name] = f"{type(error).__name__}: {error}"
            continue
        found[name] = module.grads, {key: float(v) for key, v in trainer.callback_metrics.items()}
    return found


@pytest.mark.parametrize("layout", list(AROUND_IN))
def test_around_the_model(layout: str) -> None:
    world_size, degrees, names = AROUND_IN[layout]
    expected = reference(around, 0, 1, None, names)
    for found in run_ranks(around, world_size, degrees, names, init_process_group=False):
        assert_same(found, expected)


# ---------------------------------------------------------------------------------------
# Checkpoints
# ---------------------------------------------------------------------------------------


class Adam(Module):
    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=1e-2)

    def state(self) -> dict[str, Tensor]:
        optimizer: Any = self.optimizers(use_pl_optimizer=False)
        moments = {
            f"{name}.{key}": whole(optimizer.state[p][key])
            for name, p in self.named_parameters()
            if p in optimizer.state
            for key in ("exp_avg", "exp_avg_sq")
        }
        return {**{name: whole(p) for name, p in self.named_parameters()}, **moments}

    def on_train_start(self) -> None:
        self.seen.append(self.state() if self.global_step else {})

    def on_train_end(self) -> None:
        self.seen.append(self.state())


def one_epoch(
    rank: int, world_size: int, degrees: dict[str, Any], folder: Path, epoch: int
) -> list[dict[str, Tensor]]:
    """Train epoch ``epoch`` from the checkpoint of the one before."""
    L.seed_everything(3, verbose=False)
    strategy = TitanStrategy(**degrees)
    dp = strategy.parallel_dims.resolve(world_size).size("batch")
    saving = ModelCheckpoint(folder, filename=f"epoch {epoch}", save_top_k=-1)
    options = {"enable_checkpointing": True, "callbacks": [saving], "max_epochs": epoch + 1}
    trainer = build_trainer(world_size, strategy, **options)
    module = Adam(weighted)
    last = folder / f"epoch {epoch - 1}.ckpt" if epoch else None
    trainer.fit(module, DataLoader(Rows(13), batch_size=4 // dp), ckpt_path=last)
    return module.seen


def test_checkpoints_go_to_other_layouts_and_back(tmp_path: Path) -> None:
    every: list[tuple[int, dict[str, Any]]] = [(2, {"cp": 2}), (1, {}), (2, {"cp": 2}), (2, {"dp_shard": 2})]
    own = tmp_path / "alone"
    alone = reference(lambda: [one_epoch(0, 1, {}, own, epoch)[1] for epoch in range(len(every))])
    for epoch, (world_size, degrees) in enumerate(every):
        arguments = world_size, degrees, tmp_path / "cp", epoch
        for start, end in run_ranks(one_epoch, *arguments[:1], *arguments[1:], init_process_group=False):
            if epoch:
                torch.testing.assert_close(start, alone[epoch - 1], rtol=1e-9, atol=1e-12)
            torch.testing.assert_close(end, alone[epoch], rtol=1e-9, atol=1e-12)

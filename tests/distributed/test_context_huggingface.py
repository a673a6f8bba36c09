"""transformers models under context parallel: gradients of one process with transformers' own attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
import transformers as hf
from torch import Tensor
from torch.utils.data import DataLoader

from tests.distributed.case import build_trainer, whole
from tests.harness import reference, run_ranks
from titanplug.attention import huggingface
from titanplug.attention.huggingface import sequence_dims, use_attention
from titanplug.errors import ConfigError
from titanplug.plan import ParallelPlan
from titanplug.strategy import TitanStrategy

VOCAB, ROWS, SEQ = 33, 4, 16
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.3,
}
WINDOWS: dict[str, Any] = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}
KINDS: dict[str, Any] = {
    "llama": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**SIZES)),
    "qwen3": lambda: hf.Qwen3ForCausalLM(hf.Qwen3Config(**SIZES, head_dim=8, **WINDOWS)),
    "mistral": lambda: hf.MistralForCausalLM(hf.MistralConfig(**SIZES, sliding_window=5)),
    "longrope": lambda: hf.LlamaForCausalLM(
        hf.LlamaConfig(**SIZES, rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0})
    ),
}


@dataclass(frozen=True)
class Case:
    kind: str = "llama"
    given: str = "plain"
    shifted: bool = True  # the step shifts; else labels come shifted
    checkpointing: bool = False
    length: int = SEQ
    call: str = "step"  # who computes the loss: "step", "model"; or what else the call asks for
    backend: str = "all_gather"


def rows(case: Case) -> list[dict[str, Tensor]]:
    """Rows of a batch; what padding predicts has no label."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, VOCAB, (ROWS, case.length), generator=generator)
    batch, mask = {"input_ids": tokens, "labels": tokens.clone()}, torch.ones_like(tokens)
    if case.given in ("right", "left"):
        for row in range(1, ROWS):
            mask[row, slice(-3 * row, None) if case.given == "right" else slice(0, 3 * row)] = 0
        batch["attention_mask"] = mask
    if case.given == "packed":
        cuts = (0, 3, 4, 9) if case.length > 9 else (0, 2)
        starts = torch.zeros_like(mask)
        for row in range(ROWS):
            starts[row, [cut + (row if cut else 0) for cut in cuts]] = 1
        index = torch.arange(case.length)
        batch["position_ids"] = index - torch.where(starts == 1, index, 0).cummax(1).values
        batch["labels"] = tokens.masked_fill(starts == 1, -100)
    of_padding = (mask == 0) | (F.pad(mask, (1, -1), value=1) == 0)
    batch["labels"] = batch["labels"].masked_fill(of_padding, -100)
    if not case.shifted:
        labels = torch.cat([batch["labels"][:, 1:], torch.full((ROWS, 1), -100)], 1)
        batch["labels"] = labels
    return [{name: value[row] for name, value in batch.items()} for row in range(ROWS)]


def build(case: Case) -> Any:
    torch.manual_seed(0)
    model = KINDS[case.kind]().double()
    if case.checkpointing:
        model.gradient_checkpointing_enable()
    return model


def loss_of(logits: Tensor, labels: Tensor, case: Case) -> Tensor:
    if case.shifted:
        logits, labels = logits[:, :-1], labels[:, 1:]
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


class Module(L.LightningModule):
    def __init__(self, case: Case) -> None:
        super().__init__()
        self.case = case
        self.model = use_attention(build(case))
        self.grads: dict[str, Tensor] = {}

    def configure_parallel_plan(self) -> ParallelPlan:
        return ParallelPlan(fsdp_units=["model.model.layers.*"], sequence_dims=sequence_dims("model"))

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        labels = batch.pop("labels")
        if self.case.call == "model":
            return self.model(**batch, labels=labels).loss
        more = {"logits_to_keep": 3} if self.case.call == "logits_to_keep" else {}
        loss = loss_of(self.model(**batch, **more).logits, labels, self.case)
        return {"loss": loss, "num_targets": (labels[:, 1:] if self.case.shifted else labels).ne(-100).sum()}

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.grads = {name: whole(p.grad) for name, p in self.named_parameters()}


def train(rank: int, world_size: int, case: Case, degrees: dict[str, int]) -> dict[str, Tensor]:
    strategy = TitanStrategy(**degrees, cp_backend=case.backend)
    module = Module(case)
    batch_size = ROWS // strategy.parallel_dims.resolve(world_size).size("batch")
    build_trainer(world_size, strategy).fit(module, DataLoader(rows(case), batch_size=batch_size))
    assert not huggingface._masks
    return module.grads


def train_reference(case: Case) -> dict[str, Tensor]:
    """One process, transformers' own attention."""
    model = build(case)
    model.set_attn_implementation("sdpa")
    batch = next(iter(DataLoader(rows(case), batch_size=ROWS)))
    labels = batch.pop("labels")
    loss_of(model(**batch, use_cache=False).logits, labels, case).backward()
    return {f"model.{name}": whole(p.grad) for name, p in model.named_parameters()}


def check(case: Case, world_size: int = 2, degrees: dict[str, int] | None = None) -> None:
    expected = reference(train_reference, case)
    results = run_ranks(
        train, world_size, case, degrees or {"cp": 2, "dp_shard": 1}, init_process_group=False
    )
    for grads in results:
        assert grads.keys() == expected.keys()
        for name, grad in expected.items():
            error = float((grads[name] - grad).abs().max() / grad.abs().max())
            assert error < 1e-12, f"gradient of {name}: {error:.2e}"


@pytest.mark.parametrize("given", ["plain", "right", "left", "packed"])
@pytest.mark.parametrize("kind", ["llama", "qwen3", "mistral"])
def test_gradients(kind: str, given: str) -> None:
    check(Case(kind, given))


@pytest.mark.parametrize("given", ["plain", "right", "packed"])
def test_gradients_with_fsdp(given: str) -> None:
    check(Case("mistral", given), 4, {"cp": 2, "dp_shard": 2})


@pytest.mark.parametrize("length", [13, 3])
def test_lengths_that_do_not_divide(length: int) -> None:
    check(Case("llama", "packed" if length > 9 else "plain", length=length))


def test_labels_that_come_shifted() -> None:
    check(Case(given="left", shifted=False))


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated")
@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_layers_computed_again(kind: str) -> None:
    check(Case(kind, "packed", checkpointing=True))


@pytest.mark.parametrize("backend", ["ring", "ulysses", "torch"])
def test_backends(backend: str) -> None:
    check(Case(given="packed" if backend == "ulysses" else "plain", backend=backend))


@pytest.mark.parametrize(
    ("case", "message"),
    [
        (Case(call="model"), "was given labels under cp > 1.*Compute the loss in the step"),
        (Case(call="logits_to_keep"), "was given logits_to_keep under cp > 1.*Slice the logits in the step"),
        (Case("longrope"), "rotary positions of the type dynamic.*Use cp=1"),
        (Case(given="right", backend="ring"), "cp_backend='ring' can't do document ids"),
    ],
)
def test_what_cp_cannot_do(case: Case, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        run_ranks(train, 2, case, {"cp": 2, "dp_shard": 1}, init_process_group=False)

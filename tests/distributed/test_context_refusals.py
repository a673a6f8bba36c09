"""What context parallel can't do is refused, on all ranks at once, with what to do instead."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.distributed.case import build_trainer
from tests.distributed.test_context_contract import VOCAB, Module, fit, flat
from tests.harness import run_ranks
from titanplug import ParallelPlan, TitanStrategy
from titanplug.attention import DotProductAttention, dot_product_attention
from titanplug.errors import ConfigError, TitanplugError

WIDTH = 12  # is not the length of a part


# ---------------------------------------------------------------------------------------
# Models that mix tokens by other means than titanplug's attention
# ---------------------------------------------------------------------------------------


def heads(x: Tensor) -> Tensor:
    return x.unflatten(-1, (2, -1)).transpose(1, 2)


def joined(x: Tensor) -> Tensor:
    return x.transpose(1, 2).flatten(2)


def attend(x: Tensor, mask: Any = None, **options: Any) -> Tensor:
    return joined(dot_product_attention(*[heads(x)] * 3, mask, **options))


def causal(x: Tensor) -> Tensor:
    return torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()


def by_hand(x: Tensor) -> Tensor:
    return (x @ x.mT).masked_fill(~causal(x), float("-inf")).softmax(-1) @ x


def backwards(x: Tensor) -> Tensor:
    return x[:, torch.arange(x.shape[1] - 1, -1, -1)]


MIXES: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "sdpa": lambda m, x: joined(F.scaled_dot_product_attention(*[heads(x)] * 3, is_causal=True)),
    "attention": lambda m, x: m.attention(x, x, x)[0],
    "encoder": lambda m, x: m.encoder(x),
    "lstm": lambda m, x: m.lstm(x)[0],
    "gru": lambda m, x: m.gru(x)[0],
    "convolution": lambda m, x: m.convolution(x.mT)[..., :-2].mT,
    "causal convolution": lambda m, x: F.conv1d(F.pad(x.mT, (2, 0)), m.convolution.weight).mT,
    "by hand": lambda m, x: by_hand(x),
    "by hand, heads": lambda m, x: joined(F.softmax(heads(x) @ heads(x).mT, dim=-1) @ heads(x)),
    "mean": lambda m, x: x - x.mean(1, keepdim=True),
    "cumsum": lambda m, x: x.cumsum(dim=-2),
    "roll": lambda m, x: x.roll(1, 1),
    "flip": lambda m, x: torch.flip(x, (1,)),
    "roll by names": lambda m, x: x.roll(shifts=1, dims=1),
    "flip by numbers": lambda m, x: x.flip(0, 1),
    "mean over an axis": lambda m, x: x - x.mean(axis=1, keepdim=True),
    "slice": lambda m, x: torch.cat([x[:, :1], x[:, :-1]], 1),
    "arange from 0": lambda m, x: x + m.places(torch.arange(0, x.shape[1])),
    "pad": lambda m, x: x + F.pad(x, (0, 0, 1, 0))[:, :-1],
    "arange": lambda m, x: x + m.places(torch.arange(x.shape[1])),
    "parameter": lambda m, x: x + m.places.weight[: x.shape[1]],
    "buffer": lambda m, x: x + m.waves[:, : x.shape[1], :],
    "cross": lambda m, x: joined(dot_product_attention(heads(x), *[torch.cat([heads(x)] * 2, 2)] * 2)),
    "own mask": lambda m, x: attend(x, causal(x)),
    "window": lambda m, x: joined(DotProductAttention(window=3)(*[heads(x)] * 3)),
    "dropout": lambda m, x: attend(x, dropout_p=0.5),
    "index": lambda m, x: x + backwards(x),
    "product": lambda m, x: causal(x).double() @ x,
}


class Mixes(nn.Module):
    """Does ``how`` to its hidden states; attends ordinarily besides, unless that is left out."""

    def __init__(self, how: str = "", attends: bool = True) -> None:
        super().__init__()
        self.how, self.attends = how, attends
        self.words, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)
        self.places = nn.Embedding(32, WIDTH)
        self.register_buffer("waves", torch.rand(1, 32, WIDTH))
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.encoder = nn.TransformerEncoderLayer(WIDTH, 2, 8, batch_first=True)
        self.lstm, self.gru = nn.LSTM(WIDTH, WIDTH, batch_first=True), nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.convolution = nn.Conv1d(WIDTH, WIDTH, 3, padding=2)

    def forward(self, ids: Tensor, mask: Tensor | None = None, labels: Tensor | None = None) -> Any:
        x = self.words(ids)
        if self.how in MIXES:
            x = MIXES[self.how](self, x)
        logits = self.head(attend(x) if self.attends else x)
        if self.how == "loss":
            return flat(logits, ids)
        return torch.einsum("bsd->bd", logits)[:, :5] if self.how == "pooled" else logits


class Refused(Module):
    """One model with a plan of its own."""

    def __init__(self, how: str = "", dims: Any = None, use: Any = None) -> None:
        super().__init__(use or ordinary)
        self.model: Any = Mixes(how).double()
        self.dims = {"model.ids": 1} if dims is None else dims

    def configure_parallel_plan(self) -> ParallelPlan:
        return ParallelPlan(sequence_dims=self.dims)


class LateTeacher(Refused):
    """A second model is first called in step 2, and never calls titanplug's attention."""

    def __init__(self, how: str) -> None:
        super().__init__("", {"model.ids": 1, "teacher.ids": 1}, late_teacher)
        self.teacher: Any = Mixes(how, attends=False).double().requires_grad_(False)


class Planless(L.LightningModule):
    """Says nothing about parallelism."""

    def __init__(self) -> None:
        super().__init__()
        self.model = Mixes().double()
        self.use = ordinary

    training_step, configure_optimizers = Module.training_step, Module.configure_optimizers


# ---------------------------------------------------------------------------------------
# Steps
# ---------------------------------------------------------------------------------------


def ordinary(m: Any, b: Any) -> Any:
    return m.model(b["ids"]).square().mean()


def late_teacher(m: Any, b: Any) -> Any:
    loss = ordinary(m, b)
    return loss if m.global_step == 0 else loss + m.teacher(b["ids"]).mean() * loss


def with_mask(m: Any, b: Any) -> Any:
    length = b["ids"].shape[1]
    return m.model(b["ids"], torch.zeros(len(b["ids"]), 1, length, length)).mean()


def checkpointed_loss(m: Any, b: dict[str, Tensor]) -> Any:
    logits = m.run(b)
    loss = checkpoint(lambda x: flat(x, b["labels"]), logits, use_reentrant=True)
    return loss + 0.01 * logits.square().mean()


def checkpointed_call(m: Any, b: Any) -> Any:
    def run(embedded: Tensor) -> Any:
        return m.run(b, embedded=embedded)

    logits: Any = checkpoint(run, m.outer(b["ids"]), use_reentrant=True)
    return flat(logits, b["labels"]) + 0.1 * m.temperature.sum()


def both_ways(m: Any, b: Any) -> Any:
    """Two lengths of which a rank holds as many tokens."""
    short = m.model(b["ids"][:, :13], b["positions"][:, :13], causal=False)
    return short.square().mean() + m.run(b, causal=False).square().mean()


# ---------------------------------------------------------------------------------------
# On all ranks
# ---------------------------------------------------------------------------------------

LABELED = {"model.ids": 1, "model.labels": 1}
POSITIONS = ["makes positions from the length", "token_positions"]
REFUSALS: dict[str, tuple[Callable[[], Any], dict[str, Any], list[str]]] = {
    **{
        how: (lambda how=how: Refused(how), {}, [f"uses {what} under cp=2", "cp=1"])  # type: ignore[misc]
        for how, what in {
            "attention": "nn.MultiheadAttention",
            "encoder": "nn.MultiheadAttention",
            "lstm": "an LSTM",
            "gru": "a GRU",
            "convolution": "a convolution over the sequence",
            "causal convolution": "a convolution over the sequence",
            "by hand": "attention of its own",
            "by hand, heads": "attention of its own",
            "mean": "`mean` over the sequence",
            "cumsum": "`cumsum` over the sequence",
            "roll": "`roll` over the sequence",
            "flip": "`flip` over the sequence",
            "roll by names": "`roll` over the sequence",
            "flip by numbers": "`flip` over the sequence",
            "mean over an axis": "`mean` over the sequence",
            "slice": "a slice of the sequence",
            "pad": "padding of the sequence",
        }.items()
    },
    "sdpa": (lambda: Refused("sdpa"), {}, ["scaled_dot_product_attention", "dot_product_attention"]),
    "arange": (lambda: Refused("arange"), {}, POSITIONS),
    "arange from 0": (lambda: Refused("arange from 0"), {}, POSITIONS),
    "parameter": (lambda: Refused("parameter"), {}, POSITIONS),
    "buffer": (lambda: Refused("buffer"), {}, POSITIONS),
    "index": (lambda: LateTeacher("index"), {}, ["teacher never called titanplug's attention", "cp=1"]),
    "product": (lambda: LateTeacher("product"), {}, ["teacher never called titanplug's attention", "cp=1"]),
    "cross": (lambda: Refused("cross"), {}, ["8 queries to 16 keys", "Use cp=1"]),
    "own mask": (lambda: Refused("own mask"), {}, ["shape (8, 8)", "TokenMask("]),
    "dropout": (lambda: Refused("dropout"), {}, ["can't do attention dropout", "Use cp_backend='ulysses'"]),
    "window": (lambda: Refused("window"), {"cp_backend": "ring"}, ["a sliding window", "'all_gather'"]),
    "loss": (lambda: Refused("loss"), {}, ["a single number (a loss?)", "compute losses"]),
    "pooled": (lambda: Refused("pooled"), {}, ["a tensor of shape (4, 5)", "in the step"]),
    "a mask": (lambda: Refused(use=with_mask), {}, ["'mask'", "shape (4, 1, 16, 16)", "document_ids"]),
    "lengths": (
        lambda: Refused("", LABELED, lambda m, b: m.model(b["ids"], labels=b["labels"][:, 1:]).mean()),
        {},
        ["ids: 16, labels: 15", "Expand them"],
    ),
    "never called": (
        lambda: Refused(use=lambda m, b: m.temperature.sum()),
        {},
        ["the step didn't call model", "Call the model"],
    ),
    "dim 2": (
        lambda: Refused("", {"model.ids": 2}),
        {},
        [
            "'ids' of model the sequence dim 2",
            "called with shape (4, 16)",
            "must be a tensor that has the dim",
        ],
    ),
    "a dict": (
        lambda: Refused(use=lambda m, b: m.model({"ids": b["ids"]}).mean()),
        {},
        ["called with dict", "name the arguments of a module inside"],
    ),
    "reentrant": (
        lambda: Module(checkpointed_call),
        {},
        ["its gradient would be lost", "use_reentrant=False"],
    ),
    "reentrant loss": (
        lambda: Module(checkpointed_loss),
        {},
        ["can't be made a leaf", "use_reentrant=False"],
    ),
    "same share": (
        lambda: Module(both_ways, recompute="plain"),
        {},
        ["sequences of two lengths of which a rank holds 8 tokens", "Pad them to one length"],
    ),
    "same share, reentrant": (
        lambda: Module(both_ways, recompute="reentrant"),
        {},
        ["sequences of two lengths of which a rank holds 8 tokens", "Pad them to one length"],
    ),
    "no dims": (lambda: Refused("", {}), {}, ["no sequence_dims", "Use cp=1", "ParallelPlan("]),
    "no plan": (Planless, {}, ["has no sequence_dims", "Use cp=1", "configure_parallel_plan"]),
    "few heads": (lambda: Refused(), {"cp_backend": "ulysses", "cp": 4}, ["cp must divide both", "or"]),
    "no padding": (lambda: Refused(), {"cp_pad": False, "cp": 3}, ["16 tokens", "multiple of 6", "or 18"]),
}


def refused(rank: int, world_size: int) -> dict[str, tuple[bool, str, float]]:
    found = {}
    for name, (build, options, _) in REFUSALS.items():
        if world_size != options.get("cp", 2):
            continue
        start = time.monotonic()
        try:
            fit(world_size, {"cp": 2, **options}, build())
        except Exception as error:  # told by the test
            text = f"{type(error).__name__}: {error}"
            found[name] = isinstance(error, TitanplugError), text, time.monotonic() - start
        else:
            found[name] = False, "not refused", 0.0
    return found


@pytest.mark.parametrize("cp", [2, 3, 4])
def test_refused_on_all_ranks_at_once(cp: int) -> None:
    problems = []
    for rank, found in enumerate(run_ranks(refused, cp, init_process_group=False)):
        for name, (on_purpose, message, took_s) in found.items():
            told = all(part in message for part in REFUSALS[name][2])
            if not (on_purpose and told and took_s < 5):
                problems.append(f"rank {rank}, {name}, {took_s:.1f} s: {message}")
    assert not problems, "\n\n".join(problems)


def test_documents_in_a_ring() -> None:
    def run(rank: int, world_size: int) -> list[str]:
        messages = []
        for backend in ("ring", "torch"):
            module = Module(lambda m, b: flat(m.run(b, documents=b["documents"]), b["labels"]))
            with pytest.raises(ConfigError) as error:
                fit(world_size, {"cp": 2, "cp_backend": backend}, module)
            messages.append(str(error.value))
        return messages

    for messages in run_ranks(run, 2, init_process_group=False):
        for message in messages:
            assert "document ids" in message and "Use cp_backend='all_gather' or 'ulysses'" in message


# ---------------------------------------------------------------------------------------
# Before processes start
# ---------------------------------------------------------------------------------------


def test_refused_before_processes_start() -> None:
    with pytest.raises(ConfigError, match="cp_backend='ringo'.*Did you mean 'ring'"):
        TitanStrategy(cp=2, cp_backend="ringo")
    with pytest.raises(ConfigError, match="cp=3.*4 processes"):
        build_trainer(4, TitanStrategy(cp=3))
    with pytest.raises(ConfigError, match="cp=0"):
        TitanStrategy(cp=0)
    wrong: Any = {"'model.ids' is '1'.*a whole number": {"model.ids": "1"}}
    plans = {
        "has no sequence_dims": {},
        "'net'.*Its children are model.*Correct the plan": {"net.ids": 1},
        "'tokens', and Mixes.forward takes ids, mask, labels.*Correct": {"model.ids": 1, "model.tokens": 1},
        "'model.head' and of 'model'.*cut once": {"model.ids": 1, "model.head.input": 1},
        "and of 'the module'.*cut once": {"args": 1, "model.ids": 1},
        **wrong,
    }
    for message, dims in plans.items():
        strategy = TitanStrategy(cp=2, plan=ParallelPlan(sequence_dims=dims))
        with pytest.raises(ConfigError, match=message):
            strategy.validate_module(Planless())
        with pytest.raises(ConfigError, match=message):
            TitanStrategy(cp=2).validate_module(Refused("", dims))
    plan = ParallelPlan(sequence_dims={"model.ids": 1}, heads=(4, 1))
    with pytest.raises(ConfigError, match="cp x tp must divide both"):
        TitanStrategy(cp=2, cp_backend="ulysses", plan=plan).validate_module(Planless())


def test_the_hook_goes_before_the_plan_of_the_model() -> None:
    def with_plan(module: Any, **dims: int) -> Any:
        module.model.parallel_plan = lambda: ParallelPlan(sequence_dims=dims)
        return module

    strategy = TitanStrategy(cp=2)
    strategy.validate_module(with_plan(Planless(), ids=1))
    strategy.validate_module(with_plan(Refused(), tokens=1))
    with pytest.raises(ConfigError, match="'tokens'"):
        strategy.validate_module(with_plan(Planless(), tokens=1))
    with pytest.raises(ConfigError, match="Refused has no sequence_dims"):
        strategy.validate_module(with_plan(Refused("", {}), ids=1))

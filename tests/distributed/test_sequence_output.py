"""Ordinary code on outputs that are sharded over the sequence gives the results of the whole."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.harness import run_ranks
from titanplug.mesh import Mesh, ParallelDims
from titanplug.parallel.collectives import AxisGroup
from titanplug.parallel.logits import ShardedLogits
from titanplug.parallel.sequence import SequenceShards
from titanplug.parallel.sequence_output import ShardedSequence
from titanplug.parallel.sharded_tensor import gather_shards

B, V = 2, 5

Use = Callable[[Any, Tensor], Any]
"""From logits (B, S, V) and labels (B, S) to a tensor, the same code for whole and sharded logits."""


class Case(NamedTuple):
    cp: int
    tp: int
    length: int
    zigzag: bool

    def __str__(self) -> str:
        return f"cp={self.cp}, tp={self.tp}, S={self.length}, {'zigzag' if self.zigzag else 'blocks'}"


CASES = [
    Case(2, 1, 8, zigzag=True),
    Case(2, 1, 7, zigzag=True),  # padded to 8
    Case(2, 1, 7, zigzag=False),
    Case(3, 1, 7, zigzag=True),  # padded to 12: chunks of only padding
    Case(3, 1, 9, zigzag=False),
    Case(4, 1, 3, zigzag=True),  # padded to 8: a rank without tokens
    Case(4, 1, 3, zigzag=False),
    Case(2, 2, 7, zigzag=True),
    Case(2, 2, 7, zigzag=False),
]


def flat(use: Use) -> Use:
    return lambda logits, labels: use(logits.flatten(0, 1), labels.flatten())


def shifted(logits: Any, labels: Tensor, **options: Any) -> Any:
    """As many models do it: the labels are the inputs, moved by one."""
    logits = logits[..., :-1, :].contiguous()
    return F.cross_entropy(logits.view(-1, logits.size(-1)), labels[:, 1:].reshape(-1), **options)


def only_token(labels: Tensor, at: int) -> Tensor:
    return labels.masked_fill(torch.arange(labels.shape[1]) != at, -100)


def weights(logits: Any) -> Tensor:
    return torch.linspace(0.5, 2.0, logits.shape[-1], dtype=logits.dtype)


def masked_mean(logits: Any, labels: Tensor) -> Any:
    losses = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
    mask = (labels > 1).flatten().to(losses.dtype)
    return (mask * losses).sum() / mask.sum().clamp(min=1)


def masked_in_place(logits: Any, labels: Tensor) -> Any:
    logits = logits * 1
    logits[..., 1:2] = -5.0
    return flat(F.cross_entropy)(logits, labels)


def a_slice_in_place(logits: Any, labels: Tensor) -> Any:
    logits = logits * 1
    logits[:, 1:].mul_(2.0)
    logits[1:].add_(0.5)
    return flat(F.cross_entropy)(logits, labels)


def view_in_place(logits: Any, labels: Tensor) -> Any:
    logits = logits * 1
    logits.view(-1, logits.shape[-1]).cumsum_(-1).div_(2.0)
    logits *= 3
    return flat(F.cross_entropy)(logits, labels)


def hooked(logits: Any, labels: Tensor) -> Any:
    assert not logits.requires_grad or logits.register_hook(lambda grad: grad * 2)
    return flat(F.cross_entropy)(logits, labels)


def distillation(logits: Any, labels: Tensor) -> Any:
    teacher = torch.sin(torch.arange(logits.numel(), dtype=logits.dtype)).view(logits.shape)
    return F.kl_div(
        F.log_softmax(logits / 2, -1), F.log_softmax(teacher, -1), reduction="batchmean", log_target=True
    )


def of_two(logits: Any, labels: Tensor) -> Any:
    other = logits.detach() * 0.5 + 1
    ratio = logits.log_softmax(-1) - other.log_softmax(-1)
    return ratio.gather(-1, labels.unsqueeze(-1)).squeeze(-1)


USES: dict[str, Use] = {
    # The loss in its own form, and its options.
    "mean": flat(F.cross_entropy),
    "sum": flat(lambda x, y: F.cross_entropy(x, y, reduction="sum")),
    "none": flat(lambda x, y: F.cross_entropy(x, y, reduction="none")),
    "module": flat(lambda x, y: torch.nn.CrossEntropyLoss()(x, y)),
    "keywords": flat(lambda x, y: F.cross_entropy(input=x, target=y)),
    "ignored": lambda x, y: flat(F.cross_entropy)(x, y.masked_fill(y == 2, -100)),
    "ignored, none": flat(lambda x, y: F.cross_entropy(x, y, ignore_index=1, reduction="none")),
    "another ignore_index": flat(lambda x, y: F.cross_entropy(x, y, ignore_index=0)),
    "targets of the first token": lambda x, y: flat(F.cross_entropy)(x, only_token(y, 0)),
    "targets of the last token": lambda x, y: flat(F.cross_entropy)(x, only_token(y, y.shape[1] - 1)),
    "no targets": lambda x, y: F.cross_entropy(
        x.flatten(0, 1), torch.full_like(y, -100).flatten(), reduction="sum"
    ),
    "label smoothing": flat(lambda x, y: F.cross_entropy(x, y, label_smoothing=0.1)),
    "class weights": flat(lambda x, y: F.cross_entropy(x, y, weights(x), ignore_index=3)),
    "class weights, smooth": flat(lambda x, y: F.cross_entropy(x, y, weights(x), label_smoothing=0.2)),
    "class weights, none": flat(lambda x, y: F.cross_entropy(x, y, weights(x), reduction="none")),
    "size_average": flat(lambda x, y: F.cross_entropy(x, y, size_average=False)),
    "nll": flat(lambda x, y: F.nll_loss(F.log_softmax(x, -1), y)),
    "probabilities": lambda x, y: F.cross_entropy(
        x.flatten(0, 1), F.one_hot(y, x.shape[-1]).flatten(0, 1).to(x.dtype) * 0.9
    ),
    "classes second": lambda x, y: F.cross_entropy(x.transpose(1, 2), y),
    "one sample": lambda x, y: F.cross_entropy(x[1], y[1]),
    "one sample, shifted": lambda x, y: F.cross_entropy(x[0, 1:], y[0, :-1]),
    "no samples": lambda x, y: F.cross_entropy(x[:0].flatten(0, 1), y[:0].flatten(), reduction="sum"),
    # Changes on the way to the loss.
    "shifted": shifted,
    "shifted, none": lambda x, y: shifted(x, y, reduction="none"),
    "shifted, one slice": lambda x, y: F.cross_entropy(
        x[:, :-1].reshape(-1, V), y[:, 1:].reshape(-1), ignore_index=4
    ),
    "slice of a slice": lambda x, y: flat(F.cross_entropy)(x[:, 1:][:, :-1], y[:, 1:-1]),
    "one token": lambda x, y: flat(F.cross_entropy)(x[:, 1:2], y[:, 1:2]),
    "a token": lambda x, y: F.cross_entropy(x[:, -1], y[:, -1]),
    "every other token": lambda x, y: flat(F.cross_entropy)(x[:, ::2], y[:, ::2]),
    "mask of positions": lambda x, y: F.cross_entropy(x[y > 0], y[y > 0]),
    "merged and split": lambda x, y: x.view(-1, V).view(B, -1, V)[:, 1:] * 2,
    "merged, sliced": lambda x, y: x.flatten(0, 1)[1:],
    "merged all": lambda x, y: x.flatten().square(),
    "temperature": flat(lambda x, y: F.cross_entropy(x / 0.7, y)),
    "soft cap": flat(lambda x, y: F.cross_entropy(torch.tanh(x / 3) * 3, y)),
    "bias": flat(lambda x, y: F.cross_entropy(x + weights(x), y)),
    "masked classes": flat(lambda x, y: F.cross_entropy(x.masked_fill(weights(x) < 0.6, -9.0), y)),
    "masked in place": masked_in_place,
    "a slice in place": a_slice_in_place,
    "view in place": view_in_place,
    # Each token alone.
    "softmax": lambda x, y: F.softmax(x, dim=-1)[:, 1:],
    "softmax over time": lambda x, y: x.softmax(1),
    "z-loss": lambda x, y: torch.logsumexp(x, -1).square().mean(),
    "max": lambda x, y: x.max(-1).values,
    "max of all": lambda x, y: x.max(),
    "topk": lambda x, y: x.topk(2).values,
    "gather": lambda x, y: x.log_softmax(-1).gather(-1, y.unsqueeze(-1)),
    "sum of classes": lambda x, y: x.square().sum(2),
    "difference of two": of_two,
    "two that lie differently": lambda x, y: x[:, 1:] - x[:, :-1],
    "with its mean": lambda x, y: x - x.mean(-1, keepdim=True),
    "with a whole tensor": lambda x, y: (1 - x) * (2 * y.unsqueeze(-1) + x.detach()),
    "the same for all samples": lambda x, y: x * y[:1].unsqueeze(-1),
    "a number for each sample": lambda x, y: x * y[:, :1].unsqueeze(-1),
    # Over all tokens.
    "sum over all": lambda x, y: x.sum(),
    "mean over all": lambda x, y: torch.mean(x),
    "mean of a slice": lambda x, y: x[:, 1:].flatten(0, 1).mean(),
    "sum of the last token": lambda x, y: x[:, -1:].square().sum(),
    "masked mean": masked_mean,
    "scaled by a sum": lambda x, y: (x * x.mean()).log_softmax(-1)[:, 1:],
    "scaled by sums of samples": lambda x, y: x * (x * 2).sum((1, 2), keepdim=True).expand(x.shape),
    "hook on the gradient": hooked,
    "distillation": distillation,
    "rows": lambda x, y: sum(row.square().sum() for row in x),
    "cosine": lambda x, y: F.cosine_similarity(x, x.detach() + 1, dim=-1),
    "itself": lambda x, y: gather_shards({"logits": x})["logits"],
    # No gradient.
    "argmax": lambda x, y: x.argmax(-1),
    "accuracy": lambda x, y: (x.argmax(-1) == y).float().mean(),
    "accuracy, shifted": lambda x, y: (y[:, 1:] == x[:, :-1].argmax(-1)).sum(),
    "list": lambda x, y: torch.tensor(x.detach().tolist(), dtype=torch.float64),
    "number": lambda x, y: torch.tensor(x[0, 0, 0].item()),
    "pickled": lambda x, y: pickle.loads(pickle.dumps(x.detach())),
    # There it could not be gathered any more.
    "on another device": lambda x, y: torch.tensor(type(x.detach().to("meta")) is Tensor),
}


# ---------------------------------------------------------------- running them on ranks


def _inputs(case: Case, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(case.length)
    logits = torch.randn(B, case.length, V, generator=generator, dtype=torch.float64)
    return logits.to(dtype), torch.randint(0, V, (B, case.length), generator=generator)


def _backward(result: Tensor, parts: int) -> None:
    if result.requires_grad:
        # Not every element weighs alike.
        slope = torch.linspace(-1, 2, result.numel(), dtype=torch.float64) if result.numel() > 1 else 1.5
        ((result.flatten().double() * slope).sum() / parts).backward()


def _run(case: Case, use: Use, groups: dict[str, AxisGroup], dtype: torch.dtype) -> dict[str, float]:
    """Errors against the whole tensor, of the result and of the gradients of the leaves."""
    logits, labels = _inputs(case, dtype)
    whole = logits.clone().requires_grad_()
    wanted = use(whole, labels)
    _backward(wanted, 1)

    shards = SequenceShards.of(case.length, groups["cp"], zigzag=case.zigzag)
    part = shards.shard(logits, 1)
    columns = slice(None)
    if case.tp > 1:
        start, width = groups["tp"].block(V)
        columns = slice(start, start + width)
    leaf = part[..., columns].clone().requires_grad_()
    local = ShardedLogits(leaf, V, groups["tp"]) if case.tp > 1 else leaf
    found = gather_shards(use(ShardedSequence(local, shards), labels))
    assert type(found) is Tensor and found.dtype == wanted.dtype, (type(found), found.dtype, wanted.dtype)
    assert found.requires_grad == wanted.requires_grad
    _backward(found, case.cp)

    errors = {"result": _error(found.detach(), wanted.detach())}
    if whole.grad is not None:
        assert leaf.grad is not None
        rows = shards.shard(whole.grad, 1)
        rows[:, shards.positions(rows.device) >= case.length] = 0
        errors["gradient"] = _error(leaf.grad, rows[..., columns])
    return errors


def _error(found: Tensor, wanted: Tensor) -> float:
    assert found.shape == wanted.shape, (found.shape, wanted.shape)
    if not found.numel():
        return 0.0
    return float((found.double() - wanted.double()).abs().max() / wanted.double().abs().max().clamp_min(1.0))


def _groups(case: Case, world_size: int) -> dict[str, AxisGroup]:
    mesh = Mesh(ParallelDims(cp=case.cp, tp=case.tp).resolve(world_size), "cpu")
    return {"cp": AxisGroup.of(mesh["cp"]), "tp": AxisGroup.of(mesh["tp"])}


def _all_uses(rank: int, world_size: int, case: Case) -> dict[str, Any]:
    groups = _groups(case, world_size)
    found: dict[str, Any] = {}
    for name, use in USES.items():
        try:
            found[name] = _run(case, use, groups, torch.float64)
        except Exception as error:  # told by the test
            found[name] = f"{type(error).__name__}: {error}"
    return found


@pytest.mark.parametrize("case", CASES, ids=str)
def test_equals_the_whole(case: Case) -> None:
    failures = []
    for rank, found in enumerate(run_ranks(_all_uses, case.cp * case.tp, case)):
        for name, errors in found.items():
            if isinstance(errors, str) or not max(errors.values()) < 1e-12:  # NaN is a failure
                failures.append(f"{name}, rank {rank}: {errors}")
    assert not failures, "\n".join(failures)


# ---------------------------------------------------------------- other types, other targets


def _types(rank: int, world_size: int, case: Case) -> list[tuple[str, dict[str, float]]]:
    groups = _groups(case, world_size)
    found = []
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        # Autocast of the CPU to bfloat16 doesn't know what to make of float16.
        for autocast in (False, True)[: 1 if dtype is torch.float16 else 2]:
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                for name in ("mean", "sum", "none", "ignored", "class weights", "shifted", "mean over all"):
                    found.append((f"{name}, {dtype}, {autocast=}", _run(case, USES[name], groups, dtype)))
    return found


@pytest.mark.parametrize("case", [CASES[1], CASES[7]], ids=str)
def test_other_types_with_and_without_autocast(case: Case) -> None:
    """The type of the result is that of the ordinary function (checked in ``_run``)."""
    for found in run_ranks(_types, case.cp * case.tp, case):
        for name, errors in found:
            # bfloat16 has 8 bits, and the two sides round in different places.
            bound = 1e-5 if "float32, autocast=False" in name else 0.02
            assert max(errors.values()) < bound, (name, errors)


def _sequence(world_size: int, length: int = 5) -> ShardedSequence:
    shards = SequenceShards.of(
        length, _groups(Case(world_size, 1, length, True), world_size)["cp"], zigzag=True
    )
    return ShardedSequence(torch.zeros(1, shards.local_length, V, requires_grad=True), shards)


def test_mean_over_nothing_is_nan_as_in_the_ordinary_functions() -> None:
    def use(rank: int, world_size: int) -> list[bool]:
        x = _sequence(world_size)
        losses = [F.cross_entropy(x[0], torch.full((5,), -100)), x[:0].mean()]
        return [bool(loss.isnan()) for loss in losses]

    assert run_ranks(use, 2) == [[True, True]] * 2


def test_a_target_out_of_range_is_an_error_where_its_token_is() -> None:
    def use(rank: int, world_size: int) -> str:
        x, labels = _sequence(world_size, 4), torch.tensor([0, 7, 0, 0])
        if rank == 1:  # tokens 1 and 2
            with pytest.raises(IndexError) as error:
                F.cross_entropy(x[0], labels)
            return str(error.value)
        return ""

    assert "7" in run_ranks(use, 2)[1]


def test_a_trained_number_has_the_same_gradient_on_every_rank() -> None:
    def use(rank: int, world_size: int) -> float:
        scale = torch.tensor(2.0, dtype=torch.float64, requires_grad=True)
        bias = torch.zeros(V, dtype=torch.float64, requires_grad=True)
        logits, labels = _inputs(CASES[1], torch.float64)
        whole = flat(F.cross_entropy)(logits * scale + bias, labels)
        wanted = torch.autograd.grad(whole, [scale, bias])
        shards = SequenceShards.of(7, _groups(CASES[1], world_size)["cp"], zigzag=True)
        x = ShardedSequence(shards.shard(logits, 1), shards)
        # A sum over the ranks of the gradients, as for any parameter.
        loss = flat(F.cross_entropy)(x * scale + bias, labels) / world_size
        found = torch.autograd.grad(loss, [scale, bias])
        return max(_error(mine * world_size, all_) for mine, all_ in zip(found, wanted, strict=True))

    assert max(run_ranks(use, 2)) < 1e-13


def test_with_logits_of_the_whole_sequence() -> None:
    def use(rank: int, world_size: int) -> float:
        logits, _ = _inputs(CASES[7], torch.float64)
        other = torch.cos(logits).requires_grad_()
        (wanted,) = torch.autograd.grad((logits * other).square().sum(), other)
        groups = _groups(CASES[7], world_size)
        shards = SequenceShards.of(7, groups["cp"], zigzag=True)
        start, width = groups["tp"].block(V)
        leaf = other.detach()[..., start : start + width].clone().requires_grad_()
        x = ShardedSequence(shards.shard(logits, 1), shards)
        loss = (x * ShardedLogits(leaf, V, groups["tp"])).square().sum() / 2
        (found,) = torch.autograd.grad(loss, leaf)
        return _error(found * 2, wanted[..., start : start + width])

    assert max(run_ranks(use, 4)) < 1e-13


# ---------------------------------------------------------------- what it costs


class _Collectives(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.sent: list[tuple[str, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if str(func).startswith("c10d.") and "wait" not in str(func):
            tensors = args[0] if isinstance(args[0], list) else [args[0]]
            self.sent.append((str(func).split(".")[1], sum(t.numel() for t in tensors)))
        return func(*args, **(kwargs or {}))


ONE_NUMBER = [("allreduce_", 1)]
COSTS: dict[str, list[tuple[str, int]]] = {
    "mean": ONE_NUMBER,
    "sum": ONE_NUMBER,
    "module": ONE_NUMBER,
    "ignored": ONE_NUMBER,
    "label smoothing": ONE_NUMBER,
    "class weights": ONE_NUMBER,
    "nll": ONE_NUMBER,
    "shifted": ONE_NUMBER,
    "one sample": ONE_NUMBER,
    "soft cap": ONE_NUMBER,
    "bias": ONE_NUMBER,
    "z-loss": ONE_NUMBER,
    "masked mean": ONE_NUMBER,
    "accuracy": ONE_NUMBER,
    "accuracy, shifted": ONE_NUMBER,
    "mean of a slice": ONE_NUMBER,
    # Gathered at the end by the test: one number a token of the padded 8, not V; and its gradient.
    "argmax": [("_allgather_base_", B * 8)],
    "none": [("_allgather_base_", B * 8), ("_reduce_scatter_base_", B * 4)],
    "difference of two": [("_allgather_base_", B * 8), ("_reduce_scatter_base_", B * 4)],
    # The whole, once.
    "rows": [("_allgather_base_", B * 8 * V), ("_reduce_scatter_base_", B * 4 * V)],
}


def test_what_is_communicated() -> None:
    def use(rank: int, world_size: int) -> dict[str, list[tuple[str, int]]]:
        logits, labels = _inputs(CASES[1], torch.float64)
        shards = SequenceShards.of(7, _groups(CASES[1], world_size)["cp"], zigzag=True)
        found = {}
        for name in COSTS:
            leaf = shards.shard(logits, 1).clone().requires_grad_()
            with _Collectives() as mode:
                _backward(gather_shards(USES[name](ShardedSequence(leaf, shards), labels)), world_size)
            found[name] = mode.sent
        return found

    for found in run_ranks(use, 2):
        assert found == COSTS

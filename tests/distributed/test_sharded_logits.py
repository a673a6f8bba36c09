"""Ordinary code on logits that are sharded over the vocabulary gives the results of the whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.harness import run_ranks
from titanplug.parallel.collectives import (
    AxisGroup,
    copy_to_shards,
    gather_blocks,
    gather_from_shards,
    reduce_sum,
    scatter_sum,
)
from titanplug.parallel.logits import ShardedLogits
from titanplug.parallel.sharded_tensor import gather_shards

B, S, D = 2, 6, 5
NUM_RANKS = 4
# On 4 ranks: blocks of 9, 9, 9, 6; of 2, 2, 1, 0; of 1, 1, 1, 0; of 3, 3, 3, 0.
VOCABULARIES = (33, 5, 3, 9)

Use = Callable[[Any, Tensor], Any]
"""From logits (B, S, V) and labels (B, S) to a tensor, the same code for whole and sharded logits."""


def flat(use: Use) -> Use:
    return lambda logits, labels: use(logits.flatten(0, 1), labels.flatten())


def shifted(logits: Any, labels: Tensor) -> Any:
    """As many models do it: the labels are the inputs, moved by one."""
    logits = logits[..., :-1, :].contiguous()
    return F.cross_entropy(logits.view(-1, logits.size(-1)), labels[:, 1:].reshape(-1))


def masked_in_place(logits: Any, labels: Tensor) -> Any:
    logits[..., 1:2] = -5.0
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def filled_in_place(logits: Any, labels: Tensor) -> Any:
    flat_logits = logits.view(-1, logits.shape[-1])
    flat_logits.masked_fill_(torch.arange(logits.shape[-1]) == 2, -3.0)
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())  # the view shares its memory


def scaled_in_place(logits: Any, labels: Tensor) -> Any:
    logits.div_(2.0).mul_(torch.tensor(3.0))
    logits *= 0.5
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def with_ignored(labels: Tensor, value: int = -100) -> Tensor:
    return labels.masked_fill(torch.arange(S) % 3 == 0, value)


def weights(logits: Any) -> Tensor:
    return torch.linspace(0.5, 2.0, logits.shape[-1], dtype=logits.dtype)


USES: dict[str, Use] = {
    # The loss in its own form, and its options.
    "mean": flat(F.cross_entropy),
    "sum": flat(lambda x, y: F.cross_entropy(x, y, reduction="sum")),
    "none": flat(lambda x, y: F.cross_entropy(x, y, reduction="none")),
    "module": flat(lambda x, y: torch.nn.CrossEntropyLoss()(x, y)),
    "keywords": flat(lambda x, y: F.cross_entropy(input=x, target=y)),
    "ignored": lambda x, y: F.cross_entropy(x.flatten(0, 1), with_ignored(y).flatten()),
    "ignored, sum": lambda x, y: F.cross_entropy(x.flatten(0, 1), with_ignored(y).flatten(), reduction="sum"),
    "ignored, none": lambda x, y: F.cross_entropy(
        x.flatten(0, 1), with_ignored(y).flatten(), reduction="none"
    ),
    "another ignore_index": lambda x, y: F.cross_entropy(
        x.flatten(0, 1), with_ignored(y, 0).flatten(), ignore_index=0
    ),
    "all ignored": lambda x, y: F.cross_entropy(
        x.flatten(0, 1), torch.full_like(y, -100).flatten(), reduction="sum"
    ),
    "one row": lambda x, y: F.cross_entropy(x[0, 0], y[0, 0]),
    "no rows": lambda x, y: F.cross_entropy(x[:0].flatten(0, 1), y[:0].flatten(), reduction="sum"),
    "label smoothing": flat(lambda x, y: F.cross_entropy(x, y, label_smoothing=0.1)),
    "class weights": flat(lambda x, y: F.cross_entropy(x, y, weights(x))),
    "probabilities": lambda x, y: F.cross_entropy(
        x.flatten(0, 1), F.one_hot(y, x.shape[-1]).flatten(0, 1).to(x.dtype) * 0.9
    ),
    "classes second": lambda x, y: F.cross_entropy(x.transpose(1, 2), y),
    "classes second, none": lambda x, y: F.cross_entropy(x.mT, y, reduction="none"),
    # Changes on the way to the loss.
    "shifted": shifted,
    "slices": lambda x, y: F.cross_entropy(x[:, :-1].flatten(0, 1), y[:, 1:].flatten()),
    "mask of positions": lambda x, y: F.cross_entropy(x[y > 0], y[y > 0]),
    "index tensor": lambda x, y: F.cross_entropy(
        x[:, torch.tensor([0, 2])].flatten(0, 1), y[:, :2].flatten()
    ),
    "columns": lambda x, y: x[..., 1:].sum((0, 1)),
    "temperature": flat(lambda x, y: F.cross_entropy(x / 0.7, y)),
    "soft cap": flat(lambda x, y: F.cross_entropy(torch.tanh(x / 3) * 3, y)),
    "scale from the left": flat(lambda x, y: F.cross_entropy(2 * x, y)),
    "bias": flat(lambda x, y: F.cross_entropy(x + weights(x), y)),
    "cat": lambda x, y: F.cross_entropy(torch.cat([x, x * 2]).flatten(0, 1), torch.cat([y, y]).flatten()),
    "stack": lambda x, y: torch.stack([x, x], 0).mean((1, 2)),
    "where": lambda x, y: torch.where(y.unsqueeze(-1) > 1, x, 0.0).mean(-1),
    "named input": lambda x, y: F.cross_entropy(torch.flatten(input=x, end_dim=1), y.flatten()),
    "masked in place": masked_in_place,
    "filled in place through a view": filled_in_place,
    "scaled in place": scaled_in_place,
    # Uses without that loss.
    "log-softmax and nll": flat(lambda x, y: F.nll_loss(F.log_softmax(x, -1), y)),
    "softmax": lambda x, y: F.softmax(x, dim=-1),
    "softmax over time": lambda x, y: x.softmax(1),
    "z-loss": lambda x, y: torch.logsumexp(x, -1).square().mean(),
    "max": lambda x, y: x.max(-1).values,
    "mean of all": lambda x, y: x.mean(),
    "gather": lambda x, y: x.log_softmax(-1).gather(-1, y.unsqueeze(-1)),
    "rows": lambda x, y: sum(row.square().sum() for row in x),
    "permute": lambda x, y: x.permute(2, 0, 1),
    "cosine": lambda x, y: F.cosine_similarity(x, x.detach() + 1, dim=-1),
    # No gradient.
    "argmax": lambda x, y: x.argmax(-1),
    "topk": lambda x, y: x.detach().topk(2, -1).indices,
    "accuracy": lambda x, y: (x.argmax(-1) == y).float().mean(),
    "list": lambda x, y: torch.tensor(x.detach().tolist(), dtype=torch.float64),
    "itself": lambda x, y: gather_shards(x),
}


def _inputs(vocabulary: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(vocabulary)
    hidden = torch.randn(B, S, D, generator=generator, dtype=torch.float64)
    weight = torch.randn(vocabulary, D, generator=generator, dtype=torch.float64)
    labels = torch.randint(0, vocabulary, (B, S), generator=generator)
    slope = torch.randn(4096, generator=generator, dtype=torch.float64)
    return hidden.to(dtype), weight.to(dtype), labels, slope


def _run(
    use: Use, build: Callable[[Tensor, Tensor], Any], vocabulary: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Result, and gradients of the hidden states and of the weight."""
    hidden, weight, labels, slope = _inputs(vocabulary, dtype)
    hidden.requires_grad_()
    weight.requires_grad_()
    result = use(build(hidden, weight), labels)
    if result.requires_grad:
        # Not every element weighs alike.
        slope = slope[: result.numel()].view(result.shape).to(result.dtype)
        (result * slope).sum().backward()
    return result.detach(), hidden.grad, weight.grad


def _compare(group: AxisGroup, use: Use, vocabulary: int, dtype: torch.dtype) -> dict[str, Any]:
    start, width = group.block(vocabulary)

    def build_sharded(hidden: Tensor, weight: Tensor) -> ShardedLogits:
        block = weight.narrow(0, start, width)
        return ShardedLogits(copy_to_shards(hidden, group) @ block.T, vocabulary, group)

    found, found_hidden, found_weight = _run(use, build_sharded, vocabulary, dtype)
    wanted, wanted_hidden, wanted_weight = _run(use, lambda h, w: h @ w.T, vocabulary, dtype)
    assert type(found) is Tensor and found.dtype == wanted.dtype, (type(found), found.dtype)
    assert (found_hidden is None) == (wanted_hidden is None)
    errors = {"result": _error(found, wanted)}
    if wanted_hidden is not None and found_hidden is not None:
        assert found_weight is not None and wanted_weight is not None
        errors["hidden"] = _error(found_hidden, wanted_hidden)
        block = slice(start, start + width)
        errors["weight"] = _error(found_weight[block], wanted_weight[block])
    return errors


def _error(found: Tensor, wanted: Tensor) -> float:
    assert found.shape == wanted.shape, (found.shape, wanted.shape)
    if not found.numel():
        return 0.0
    found, wanted = found.double(), wanted.double()
    # For few columns a gradient may be 0 up to rounding: compared with 1, not with itself.
    return float((found - wanted).abs().max() / wanted.abs().max().clamp_min(1.0))


def _all_uses(rank: int, world_size: int) -> dict[tuple[str, int], Any]:
    group = AxisGroup.of(_mesh(world_size))
    found: dict[tuple[str, int], Any] = {}
    for vocabulary in VOCABULARIES:
        for name, use in USES.items():
            try:
                found[name, vocabulary] = _compare(group, use, vocabulary, torch.float64)
            except Exception as error:  # told by the test of this use
                found[name, vocabulary] = f"{type(error).__name__}: {error}"
    return found


def _mesh(world_size: int) -> Any:
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cpu", (world_size,))


@pytest.fixture(scope="module")
def all_uses() -> list[dict[tuple[str, int], Any]]:
    return run_ranks(_all_uses, NUM_RANKS)


@pytest.mark.parametrize("name", USES)
def test_equals_the_whole(all_uses: list[dict[tuple[str, int], Any]], name: str) -> None:
    for rank, found in enumerate(all_uses):
        for vocabulary in VOCABULARIES:
            errors = found[name, vocabulary]
            assert isinstance(errors, dict), f"V={vocabulary}, rank {rank}: {errors}"
            worst = max(errors.values())
            assert worst < 1e-13, f"V={vocabulary}, rank {rank}: {errors}"


# ---------------------------------------------------------------- other types, other targets


def _half_types(rank: int, world_size: int) -> list[tuple[str, str, float, float]]:
    group = AxisGroup.of(_mesh(world_size))
    found = []
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for autocast in (False, True):
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                for name in ("mean", "sum", "none", "ignored", "all ignored"):
                    errors = _compare(group, USES[name], 33, dtype)
                    found.append((name, str(dtype), errors["result"], errors["hidden"]))
    return found


def test_half_types_with_and_without_autocast() -> None:
    """The type of the loss is that of the ordinary loss (checked in ``_compare``)."""
    for found in run_ranks(_half_types, 2):
        for name, dtype, result, hidden in found:
            # bfloat16 has 8 bits, and the two sides round in different places.
            assert result < 0.02, (name, dtype, result)
            assert hidden < 0.02, (name, dtype, hidden)


def _nan_without_targets(rank: int, world_size: int) -> bool:
    group = AxisGroup.of(_mesh(world_size))
    logits = ShardedLogits(torch.zeros(3, 2), 4, group)
    return bool(F.cross_entropy(logits, torch.full((3,), -100)).isnan())


def test_mean_over_no_targets_is_nan_as_in_the_ordinary_loss() -> None:
    assert run_ranks(_nan_without_targets, 2) == [True, True]


@pytest.mark.parametrize("target", [-1, 4, 1000])
def test_a_target_out_of_range_is_an_error(target: int) -> None:
    def use(rank: int, world_size: int) -> str:
        logits = ShardedLogits(torch.zeros(3, 2), 4, AxisGroup.of(_mesh(world_size)))
        with pytest.raises(RuntimeError) as error:
            F.cross_entropy(logits, torch.tensor([0, target, 1]))
        return str(error.value)

    for message in run_ranks(use, 2):
        assert "from 0 to 3" in message


# ---------------------------------------------------------------- the collectives themselves


def _change_in_place(rank: int, world_size: int) -> list[str]:
    """Which results of collectives can't be written into, as ordinary code does (`x += y`)."""
    group = AxisGroup.of(_mesh(world_size))
    collectives: dict[str, Callable[[Tensor], Tensor]] = {
        "gather_from_shards, rows": lambda x: gather_from_shards(x, 0, group),
        "gather_from_shards": lambda x: gather_from_shards(x, 1, group),
        "scatter_sum": lambda x: scatter_sum(x, 1, group),
        "reduce_sum": lambda x: reduce_sum(x, group),
        "gather_blocks": lambda x: gather_blocks(x, -1, x.shape[-1] * world_size, group),
        "gather_blocks, a short one": lambda x: gather_blocks(x[..., rank:], -1, 5, group),
    }
    refused = []
    for batch in (1, 2):
        for name, collective in collectives.items():
            x, plain = (torch.ones(batch, 4, 3, dtype=torch.float64, requires_grad=True) for _ in range(2))
            (collective(x * 2) * 3).sum().backward()
            out = collective(plain * 2)
            try:
                out += 0.0
                out *= 3
            except RuntimeError as error:
                refused.append(f"{name}: {error}")
                continue
            out.sum().backward()
            assert x.grad is not None and plain.grad is not None
            assert torch.equal(x.grad, plain.grad), name
    return refused


def test_results_of_collectives_can_be_changed_in_place() -> None:
    assert run_ranks(_change_in_place, 2) == [[], []]

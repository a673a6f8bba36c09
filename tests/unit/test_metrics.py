"""Sums of language metrics: equal to the definition, whatever the batches and ranks."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.harness import run_ranks
from titanplug.metrics import (
    BitsPerByte,
    MeanLoss,
    Perplexity,
    bits_per_byte,
    perplexity,
    token_nll,
)

B, S, V = 6, 5, 11


def batch(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(B, S, V, generator=generator, dtype=torch.float64).to(dtype)
    labels = torch.randint(0, V, (B, S), generator=generator)
    labels[1, 2:] = -100
    labels[4] = -100
    return logits, labels, torch.randint(1, 30, (B,), generator=generator)


def reference(logits: Tensor, labels: Tensor) -> tuple[float, int]:
    """The definition, target by target."""
    total, count = 0.0, 0
    for row, targets in zip(logits, labels, strict=True):
        for scores, target in zip(row, targets, strict=True):
            if target != -100:
                total -= torch.log_softmax(scores, -1)[target].item()
                count += 1
    return total, count


def test_token_nll_is_the_definition_and_differentiable() -> None:
    logits, labels, _ = batch()
    logits.requires_grad_()
    nll, count = token_nll(logits, labels)
    total, targets = reference(logits, labels)
    assert nll.item() == pytest.approx(total, rel=1e-14) and count.item() == targets
    nll.backward()
    mean = F.cross_entropy(logits.detach().requires_grad_().flatten(0, 1), labels.flatten())
    assert mean.item() == pytest.approx(total / targets, rel=1e-14)
    assert logits.grad is not None and logits.grad[4].abs().max() == 0


def test_without_targets_nothing_is_added_and_there_is_a_graph() -> None:
    logits, labels, _ = batch()
    logits.requires_grad_()
    nll, count = token_nll(logits, torch.full_like(labels, -100))
    nll.backward()
    assert nll.item() == 0 and count.item() == 0
    assert logits.grad is not None and not logits.grad.any()


def test_half_types_are_summed_in_float32() -> None:
    logits, labels, _ = batch(torch.bfloat16)
    nll, _ = token_nll(logits, labels)
    assert nll.dtype == torch.float32
    assert nll.item() == pytest.approx(reference(logits.double(), labels)[0], rel=1e-6)


def test_functions() -> None:
    assert bits_per_byte(torch.tensor(16 * math.log(2)), torch.tensor(4)).item() == pytest.approx(4)
    assert perplexity(torch.tensor(6 * math.log(7)), torch.tensor(6)).item() == pytest.approx(7)
    assert math.isnan(bits_per_byte(torch.tensor(0.0), torch.tensor(0)).item())


def update(metric: Any, rows: slice) -> None:
    logits, labels, num_bytes = (entry[rows] for entry in batch(torch.float32))
    nll, num_targets = token_nll(logits, labels)
    metric.update(nll, num_bytes.sum() if isinstance(metric, BitsPerByte) else num_targets)


def expected(kind: type) -> float:
    logits, labels, num_bytes = batch(torch.float32)
    total, count = reference(logits.double(), labels)
    if kind is BitsPerByte:
        return total / (math.log(2) * int(num_bytes.sum()))
    return total / count if kind is MeanLoss else math.exp(total / count)


@pytest.mark.parametrize("kind", [MeanLoss, Perplexity, BitsPerByte])
@pytest.mark.parametrize("cuts", [(0, 6), (0, 1, 2, 6), (0, 4, 5, 6)])
def test_classes_do_not_depend_on_the_batches(kind: type, cuts: tuple[int, ...]) -> None:
    metric = kind()
    for start, end in pairwise(cuts):
        update(metric, slice(start, end))
    assert metric.compute().item() == pytest.approx(expected(kind), rel=1e-6)
    metric.reset()
    assert metric.nll.item() == 0 and metric.count.item() == 0


def test_many_small_losses_are_not_lost() -> None:
    metric = MeanLoss()
    metric.update(torch.tensor(1e8), torch.tensor(1))
    for _ in range(100):
        metric.update(torch.tensor(0.25), torch.tensor(1))
    assert metric.nll.item() == 1e8 + 25  # float32 would still hold 1e8


def test_casting_the_module_leaves_the_sums_alone() -> None:
    metric = MeanLoss()
    metric.update(torch.tensor(1.0000001), torch.tensor(1))
    torch.nn.ModuleDict({"loss": metric}).to(torch.bfloat16)
    metric.reset()
    metric.update(torch.tensor(1e8), torch.tensor(1))
    metric.update(torch.tensor(1.0), torch.tensor(1))
    assert metric.nll.item() == 1e8 + 1 and metric.count.dtype == torch.int64


def test_ranks_with_unequal_shares_get_the_value_of_the_whole() -> None:
    def on_rank(rank: int, world_size: int) -> list[float]:
        metrics = [MeanLoss(), Perplexity(), BitsPerByte()]
        for metric in metrics:
            if rank == 0:
                update(metric, slice(0, 1))
                update(metric, slice(1, 4))
            else:
                update(metric, slice(4, 6))
        return [metric.compute().item() for metric in metrics]

    values = run_ranks(on_rank, 2)
    assert values[0] == values[1]
    assert values[0] == pytest.approx(list(map(expected, (MeanLoss, Perplexity, BitsPerByte))))

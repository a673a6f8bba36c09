"""Torchmetrics of a LightningModule on the ranks that hold different samples."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torchmetrics import Metric


def set_metric_group(module: nn.Module, group: dist.ProcessGroup) -> None:
    """Let the metrics of ``module`` gather over ``group``; those with a group of their own keep it.

    The group of all processes would count the copies that tensor-parallel ranks hold.
    """
    for metric in _metrics(module):
        if metric.process_group is None:
            metric.process_group = group


@contextmanager
def metrics_untouched(module: nn.Module) -> Iterator[None]:
    """Undo what happens to the metrics of ``module`` inside: the batch does not count.

    An empty list state keeps an empty tensor of what would have been appended: a rank without any entry
    would otherwise not take part when the state is gathered.
    """
    saved = [(metric, _state(metric)) for metric in _metrics(module)]
    try:
        yield
    finally:
        for metric, state in saved:
            _restore(metric, state)


def _metrics(module: nn.Module) -> list[Metric]:
    return [child for child in module.modules() if isinstance(child, Metric)]


def _state(metric: Metric) -> dict[str, Any]:
    state = {
        name: list(value) if isinstance(value := getattr(metric, name), list) else value.clone()
        for name in metric._defaults
    }
    return {**state, "_update_count": metric._update_count, "_computed": metric._computed}


def _restore(metric: Metric, state: dict[str, Any]) -> None:
    for name, old in state.items():
        if isinstance(old, list) and not old:
            new = getattr(metric, name)
            old = [entry[:0] if entry.ndim else entry.reshape(1)[:0] for entry in new]
            assert all(isinstance(entry, Tensor) for entry in old)
        setattr(metric, name, old)

"""Torchmetrics of a LightningModule on the ranks that hold different samples."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
from lightning.fabric.utilities.device_dtype_mixin import _update_properties
from torch import Tensor, nn
from torchmetrics import Metric
from torchmetrics.utilities.data import dim_zero_cat

from titanplug.strategy.stage_messages import StageMessages


def prepare_metrics(module: nn.Module, group: dist.ProcessGroup) -> None:
    """Let the metrics of ``module`` put their states together over ``group``, exactly.

    The group of all processes would count the copies that tensor-parallel ranks hold. Metrics with a group
    of their own keep it. List states may have any number of entries on each rank: torchmetrics gathers them
    entry by entry and expects the same number everywhere.
    """
    for metric in _metrics(module):
        if metric.process_group is None:
            metric.process_group = group
        if any(isinstance(default, list) for default in metric._defaults.values()):
            # A partial of a function of this module, so that the metric can still be copied and pickled.
            metric.__dict__["_sync_dist"] = partial(_sync_lists, metric)


class SharesStages(Protocol):
    """What metrics have to know of steps that run on pipeline stages."""

    in_step: bool
    messages: StageMessages


def share_metrics(module: nn.Module, steps: SharesStages) -> None:
    """Let metrics, which the last pipeline stage alone updates, give its results on every stage.

    Called on all stages alike, outside of steps, ``compute`` asks the last stage. Inside of a step, which
    that stage runs alone, it is what it was.
    """
    for metric in _metrics(module):
        if "_titanplug_compute" not in metric.__dict__:
            metric.__dict__["_titanplug_compute"] = metric.compute
        own = metric.__dict__["_titanplug_compute"]
        metric.__dict__["compute"] = partial(_compute_on_last, own, steps)


def _compute_on_last(compute: Any, steps: SharesStages) -> Any:
    if steps.in_step:
        return compute()
    return steps.messages.share(compute() if steps.messages.is_source else None)


def move_to_device(module: nn.Module, device: torch.device) -> None:
    """``module.to(device)`` that leaves what is there alone.

    DTensors that took part in a backward can't be moved, not even to where they are. States of metrics are
    neither parameters nor buffers.
    """
    tensors = [*module.parameters(), *module.buffers()]
    if any(tensor.device != device for tensor in tensors):
        module.to(device)
        return
    for metric in _metrics(module):
        metric.to(device)
    _update_properties(module, device=device)


@contextmanager
def metrics_untouched(module: nn.Module) -> Iterator[None]:
    """Undo what happens to the metrics of ``module`` inside: the batch does not count."""
    saved = [(metric, _state(metric)) for metric in _metrics(module)]
    try:
        yield
    finally:
        for metric, state in saved:
            for name, value in state.items():
                setattr(metric, name, value)


def _metrics(module: nn.Module) -> list[Metric]:
    return [child for child in module.modules() if isinstance(child, Metric)]


def _state(metric: Metric) -> dict[str, Any]:
    state = {
        name: list(value) if isinstance(value := getattr(metric, name), list) else value.clone()
        for name in metric._defaults
    }
    return {**state, "_update_count": metric._update_count, "_computed": metric._computed}


def _sync_lists(metric: Metric, dist_sync_fn: Any, process_group: Any = None) -> None:
    """Stands in for ``Metric._sync_dist``: fills list states up to the length of the longest first."""
    group = process_group or metric.process_group
    lengths = {}
    for name, reduction in metric._reductions.items():
        entries = getattr(metric, name)
        if isinstance(entries, list):
            if reduction == dim_zero_cat and entries:
                entries = [dim_zero_cat(entries)]
            lengths[name], filled = _fill(entries, group)
            setattr(metric, name, filled)
    type(metric)._sync_dist(metric, dist_sync_fn, process_group=process_group)
    for name, found in lengths.items():
        entries = getattr(metric, name)
        if metric._reductions[name] is None and isinstance(entries, list):
            # Entry by entry, each of all ranks in turn: what was filled in goes again.
            kept = [
                entries[i * len(found) + r]
                for i in range(max(found))
                for r in range(len(found))
                if i < found[r]
            ]
            setattr(metric, name, kept)


def _fill(entries: list[Tensor], group: Any) -> tuple[list[int], list[Tensor]]:
    """Number of entries on each rank, and this rank's with as many as the longest has."""
    first = entries[0] if entries else None
    everyone: list[Any] = [None] * dist.get_world_size(group)
    known = None if first is None else (first.dtype, tuple(first.shape), first.device.type)
    dist.all_gather_object(everyone, (len(entries), known), group=group)
    lengths = [length for length, _ in everyone]
    missing = max(lengths) - len(entries)
    if not missing:
        return lengths, entries
    dtype, shape, device_type = next(found for _, found in everyone if found is not None)
    device = first.device if first is not None else torch.device(device_type)
    # No rows; the other dims as elsewhere, so that it can be concatenated.
    filler = torch.zeros((0, *shape[1:]) if shape else (), dtype=dtype, device=device)
    return lengths, [*entries, *[filler] * missing]

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
from torch.utils._pytree import tree_map_only
from torchmetrics import Metric
from torchmetrics.utilities.data import dim_zero_cat
from torchmetrics.utilities.distributed import gather_all_tensors

from titanplug.strategy.stage_messages import StageMessages


def prepare_metrics(metrics: list[Metric], group: dist.ProcessGroup) -> None:
    """Let metrics put their states together over ``group``, exactly.

    The group of all processes would count the copies that tensor-parallel ranks hold. Metrics with a group
    of their own keep it. List states may have any number of entries on each rank: torchmetrics gathers them
    entry by entry and expects the same number everywhere.
    """
    for metric in metrics:
        if metric.process_group is None and not isinstance(metric.dist_sync_fn, _GatherOver):
            metric.dist_sync_fn = _GatherOver(group, metric.dist_sync_fn or gather_all_tensors)
        if any(isinstance(default, list) for default in metric._defaults.values()):
            # A partial of a function of this module, so that the metric can still be copied and pickled.
            metric.__dict__["_sync_dist"] = partial(_sync_lists, metric)


class _GatherOver:
    """Gathers over one group. A process group can't be copied or pickled: copies share it."""

    def __init__(self, group: dist.ProcessGroup, own: Any) -> None:
        self.group, self._own = group, own

    def __call__(self, tensor: Tensor, group: Any = None) -> Any:
        return self._own(tensor, group=group or self.group)

    def __deepcopy__(self, memo: Any) -> _GatherOver:
        return self

    def __reduce__(self) -> Any:
        return _own_gather, (self._own,)  # the group of another run is not this one


def _own_gather(own: Any) -> Any:
    return own


class SharesStages(Protocol):
    """What metrics have to know of steps that run on pipeline stages."""

    in_step: bool
    keeps_metric_calls: bool
    metric_calls: dict[int, list[Any]]
    messages: StageMessages


def share_metrics(metrics: list[Metric], steps: SharesStages) -> None:
    """Let metrics, which the last pipeline stage alone updates, give its results on every stage.

    May be called again, for metrics that have come since then or for the steps of another run.

    Called on all stages alike, outside of steps, ``compute`` asks the last stage. Inside of a step, which
    that stage runs alone, it is what it was.
    """
    for metric in metrics:
        own = metric.compute
        if isinstance(own, _ComputeOnLast):
            own = own.own
        metric.__dict__["compute"] = _ComputeOnLast(own, steps)
        if _record_call not in metric._forward_hooks.values():  # a copy has it, too
            metric.register_forward_hook(_record_call, with_kwargs=True)


def _record_call(metric: Any, args: Any, kwargs: Any, output: Any) -> None:
    """A forward hook that keeps what a metric is called with in the running step."""
    compute = metric.__dict__.get("compute")
    if isinstance(compute, _ComputeOnLast) and compute.steps.in_step and compute.steps.keeps_metric_calls:
        detached = tree_map_only(Tensor, Tensor.detach, (args, kwargs))
        compute.steps.metric_calls.setdefault(id(metric), []).append(detached)


def value_over_calls(metric: Metric, calls: list[Any]) -> Any:
    """What one call with the rows of all ``calls`` would have returned; the state stays as it is."""
    to_sync = metric._to_sync
    with metrics_untouched(find_metrics(metric)):
        metric.reset()
        for args, kwargs in calls:
            metric.update(*args, **kwargs)
        metric._to_sync = metric.dist_sync_on_step
        try:
            return metric.compute()
        finally:
            metric._to_sync = to_sync


class _ComputeOnLast:
    """``compute`` of a metric that the last stage alone updates. Metrics inside of it aren't asked again."""

    def __init__(self, own: Any, steps: SharesStages) -> None:
        self.own, self.steps = own, steps

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        steps = self.steps
        if steps.in_step:
            return self.own(*args, **kwargs)
        value = None
        if steps.messages.is_source:
            steps.in_step = True
            try:
                value = self.own(*args, **kwargs)
            finally:
                steps.in_step = False
        return steps.messages.share(value)


def move_to_device(module: nn.Module, device: torch.device) -> None:
    """``module.to(device)`` that leaves what is there alone.

    DTensors that took part in a backward can't be moved, not even to where they are. States of metrics are
    neither parameters nor buffers.
    """
    tensors = [*module.parameters(), *module.buffers()]
    if any(tensor.device != device for tensor in tensors):
        module.to(device)
        return
    for metric in find_metrics(module):
        metric.to(device)
    _update_properties(module, device=device)


@contextmanager
def metrics_untouched(metrics: list[Metric]) -> Iterator[None]:
    """Undo what happens to ``metrics`` inside: the batch does not count."""
    saved = [(metric, _state(metric)) for metric in metrics]
    try:
        yield
    finally:
        for metric, state in saved:
            for name, value in state.items():
                setattr(metric, name, value)


def find_metrics(module: nn.Module) -> list[Metric]:
    """The metrics in a module, also those inside of others."""
    return [child for child in module.modules() if isinstance(child, Metric)]


def _state(metric: Metric) -> dict[str, Any]:
    state = {
        name: list(value) if isinstance(value := getattr(metric, name), list) else value.clone()
        for name in metric._defaults
    }
    return {**state, "_update_count": metric._update_count, "_computed": metric._computed}


def _sync_lists(metric: Metric, dist_sync_fn: Any, process_group: Any = None) -> None:
    """Stands in for ``Metric._sync_dist``: fills list states up to the length of the longest first."""
    group = process_group or metric.process_group or getattr(dist_sync_fn, "group", None)
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

"""One logged value, its weight, and the reduction of many of them over ranks in one collective."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torchmetrics import Metric

from titanplug.errors import TitanplugError
from titanplug.strategy.microbatches import stack_numbers

_NEUTRAL = {"mean": 0.0, "sum": 0.0, "max": float("-inf"), "min": float("inf")}
# Rows that are reduced at a time. Ranks with different keys still send the same first rows.
_ROWS = 32


@dataclass
class LogEntry:
    """A value that was logged.

    Args:
        hook: the hook that logged it.
        name: its key.
        value: a number or a tensor of one element; a 0-dim floating tensor once it is weighed.
        options: the other arguments of ``self.log``.

    Attributes:
        weight: what counts for a mean.
        reduced: the value of all ranks together, once it is known.
        result: where Lightning keeps the value.
    """

    hook: str
    name: str
    value: Any
    options: dict[str, Any]
    weight: int | Tensor = 1
    reduced: Tensor | None = field(default=None, repr=False)
    result: Any = field(default=None, repr=False)

    @property
    def kind(self) -> str:
        """How values are put together: mean, sum, max or min."""
        reduce_fx = self.options.get("reduce_fx", "mean")
        name = reduce_fx if isinstance(reduce_fx, str) else getattr(reduce_fx, "__name__", "mean")
        return {"avg": "mean", "amax": "max", "amin": "min"}.get(name.lower(), name.lower())

    @property
    def is_own(self) -> bool:
        """Whether the caller reduces it, or nobody does."""
        return bool(self.options.get("rank_zero_only")) or self.options.get("sync_dist_group") is not None

    def on_step(self, training: bool) -> bool:
        """Whether the value of the step is kept; by default those of hooks of training are."""
        on_step = self.options.get("on_step")
        return training if on_step is None else bool(on_step)

    def weigh(self, samples: int, device: torch.device, loss: Any = None, count: int | Tensor = 0) -> None:
        """Find the weight; a value that doesn't count becomes neutral.

        Args:
            samples: rows of the batch that count on this rank.
            device: where the value goes.
            loss: the loss that the step returned, if any; a value equal to it weighs ``count``.
            count: what the loss is a mean over.
        """
        given, value = self.value, _as_number(self.value, device)
        weight: int | Tensor = samples
        if samples and isinstance(count, Tensor) and _is_same(given, loss):
            weight = count
        elif samples and self.options.get("batch_size") is not None:
            weight = self.options["batch_size"]
        if samples == 0:
            value = torch.full_like(value, _NEUTRAL.get(self.kind, 0.0))
        elif self.kind == "mean" and isinstance(weight, Tensor):
            value = value.masked_fill(weight.to(device) == 0, 0.0)  # a mean over nothing is 0/0
        elif self.kind == "mean" and weight == 0:
            value = torch.zeros_like(value)
        self.value, self.weight = value, weight


def merge_entries(parts: Sequence[Sequence[LogEntry]]) -> list[LogEntry]:
    """What a step logged on its microbatches, as one step on the whole batch would have.

    Args:
        parts: for each microbatch its entries, weighed.
    """
    by_key: dict[tuple[str, str], list[LogEntry]] = {}
    for entries in parts:
        for entry in {(entry.hook, entry.name): entry for entry in entries}.values():
            by_key.setdefault((entry.hook, entry.name), []).append(entry)
    return [_merged(entries) for entries in by_key.values()]


def _merged(entries: list[LogEntry]) -> LogEntry:
    first = entries[0]
    if isinstance(first.value, Metric):
        return first
    values = torch.stack([entry.value for entry in entries])
    weights: Any = sum(entry.weight for entry in entries)
    if first.kind == "mean":
        shares = stack_numbers([entry.weight for entry in entries], values.device)
        value = ((values.double() * shares).sum() / shares.sum().clamp_min(1e-300)).to(values.dtype)
    elif first.kind == "sum":
        value = values.sum()
    else:
        value = values.max() if first.kind == "max" else values.min()
    return replace(first, value=value, weight=weights)


def reduce_entries(
    entries: list[LogEntry], group: dist.ProcessGroup | None, size: int, device: torch.device
) -> None:
    """Fill ``reduced`` of each entry; a collective, with one more where there are maxima or minima.

    Args:
        entries: weighed entries, none on a rank that has nothing to reduce.
        group: the ranks to reduce over.
        size: their number.
        device: where the group communicates.

    Raises:
        TitanplugError: ranks have different keys; on every rank, with the keys of all.
    """
    keys = [f"{entry.hook}.{entry.name} ({entry.kind})" for entry in entries]
    slots = torch.zeros(-(-(len(entries) + 1) // _ROWS) * _ROWS, 2, dtype=torch.float64, device=device)
    code = float(_code(keys))
    slots[0, 0], slots[0, 1] = code, code**2
    extremes = torch.full_like(slots[:, 0], float("-inf"))
    for row, entry in enumerate(entries, start=1):
        value = entry.value.double()
        if entry.kind == "mean":
            slots[row, 0], slots[row, 1] = value * entry.weight, entry.weight
        elif entry.kind == "sum":
            slots[row, 0] = value
        else:
            extremes[row] = value if entry.kind == "max" else -value
    for part in slots.split(_ROWS):
        dist.all_reduce(part, group=group)
        if part.data_ptr() == slots.data_ptr():
            total, squares = part[0].tolist()
            if squares * size != total**2:
                raise _different_keys(keys, group, size)
    if any(entry.kind in ("max", "min") for entry in entries):
        dist.all_reduce(extremes, op=dist.ReduceOp.MAX, group=group)
    for row, entry in enumerate(entries, start=1):
        if entry.kind == "mean":
            weight = slots[row, 1]
            reduced = slots[row, 0] / torch.where(weight == 0, torch.ones_like(weight), weight)
        elif entry.kind == "sum":
            reduced = slots[row, 0]
        else:
            reduced = extremes[row] if entry.kind == "max" else -extremes[row]
        entry.reduced = reduced.to(entry.value.dtype)


def require_same_keys(
    keys: list[str], group: dist.ProcessGroup | None, size: int, device: torch.device
) -> None:
    """Agree that all ranks of ``group`` have the same ``keys``; a collective.

    Raises:
        TitanplugError: they don't; on every rank, with the keys of all.
    """
    code = _code(keys)
    codes = torch.tensor([code, -code], dtype=torch.int64, device=device)
    dist.all_reduce(codes, op=dist.ReduceOp.MAX, group=group)
    highest, lowest = codes.tolist()
    if highest != -lowest:
        raise _different_keys(keys, group, size)


def _different_keys(keys: list[str], group: dist.ProcessGroup | None, size: int) -> TitanplugError:
    everyone: list[Any] = [None] * size
    dist.all_gather_object(everyone, keys, group=group)
    ranks = range(size) if group is None else dist.get_process_group_ranks(group)
    shown = "; ".join(
        f"rank {rank} logged {', '.join(found) or 'nothing'}"
        for rank, found in zip(ranks, everyone, strict=True)
    )
    return TitanplugError(
        f"Ranks logged different keys: {shown}. Every rank must call `self.log` with the same keys in the "
        "same order, or values of different keys would be mixed. Log a neutral value where a rank has none, "
        "or pass rank_zero_only=True for a value that only rank 0 has."
    )


def _code(keys: list[str]) -> int:
    """A number below 2**20 that stands for the keys; sums and squares of many stay exact in float64."""
    return int.from_bytes(hashlib.sha256("\n".join(keys).encode()).digest()[:4], "little") >> 12


def _as_number(value: Any, device: torch.device) -> Tensor:
    """A 0-dim floating tensor. Integers become float64, which counts exactly."""
    tensor = value if isinstance(value, Tensor) else torch.tensor(value)
    if not tensor.is_floating_point():
        tensor = tensor.double()
    elif not isinstance(value, Tensor):
        tensor = tensor.to(torch.get_default_dtype())
    return tensor.to(device).reshape(())


def _is_same(value: Any, loss: Any) -> bool:
    if value is loss:
        return True
    if not isinstance(value, Tensor) or not isinstance(loss, Tensor):
        return False
    # `loss.detach()` is another object over the same number.
    return value.ndim == 0 and loss.ndim == 0 and value.data_ptr() == loss.data_ptr()

"""``self.log`` in a step, made exact over ranks and cheap.

Values logged in a step are recorded while it runs and passed on to Lightning when it is done, because only
then the weight of a loss (its number of targets) is known. On the way

- each value gets its weight: the number of targets for the loss, else ``batch_size``, else the samples;
- values of a batch that doesn't count become neutral, so that every rank has the same keys;
- per-step values are reduced over ranks where somebody reads them: on steps that are logged, for the
  progress bar, and for keys that a callback monitors. All keys go in one collective.

Every logged value is that of all ranks together, as one process would log it, whether ``sync_dist`` is set
or not; ``rank_zero_only`` and a ``sync_dist_group`` of the caller's are left alone.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from torch import Tensor
from torchmetrics import Metric

from titanplug.errors import TitanplugError
from titanplug.parallel.logits import ShardedLogits

_ARGUMENTS = (
    "prog_bar",
    "logger",
    "on_step",
    "on_epoch",
    "reduce_fx",
    "enable_graph",
    "sync_dist",
    "sync_dist_group",
    "add_dataloader_idx",
    "batch_size",
    "metric_attribute",
    "rank_zero_only",
)
_NEUTRAL = {"mean": 0.0, "sum": 0.0, "max": float("-inf"), "min": float("inf")}


@dataclass
class _Entry:
    name: str
    value: Any
    options: dict[str, Any]
    weight: int | Tensor = 1
    reduced: Tensor | None = field(default=None, repr=False)

    @property
    def kind(self) -> str:
        reduce_fx = self.options.get("reduce_fx", "mean")
        name = reduce_fx if isinstance(reduce_fx, str) else getattr(reduce_fx, "__name__", "mean")
        return {"avg": "mean", "amax": "max", "amin": "min"}.get(name.lower(), name.lower())


class StepLogs:
    """Records and passes on what the steps of one LightningModule log.

    Args:
        module: the LightningModule.
        group: process group of the ``loss`` view.
        size: number of ranks in it.
        device: where values are reduced.
    """

    def __init__(
        self,
        module: LightningModule,
        group: dist.ProcessGroup | None,
        size: int,
        device: torch.device,
    ) -> None:
        self._module = module
        self._group, self._size, self._device = group, size, device
        self._log: Callable[..., None] = module.log
        self._entries: list[_Entry] | None = None
        self.replaying: _Entry | None = None
        """The entry that is being passed on to Lightning, whose value needs no reduction any more."""
        self._keys: set[str] = set()
        module.__dict__["log"] = self.record

    def uninstall(self) -> None:
        """Give the module its own ``log`` back."""
        self._module.__dict__.pop("log", None)

    def start(self) -> None:
        """Begin to record."""
        self._entries = []

    def discard(self) -> None:
        """Stop recording and forget, after an error in a step."""
        self._entries = None

    def record(self, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        """Stands in for ``LightningModule.log``; the same arguments."""
        options = {**dict(zip(_ARGUMENTS, args, strict=False)), **kwargs}
        own = options.get("rank_zero_only") or options.get("sync_dist_group") is not None
        if own or isinstance(value, Metric):
            self._log(name, value, **options)
            return
        if isinstance(value, ShardedLogits):
            value = value.gather()
        if isinstance(value, Tensor) and not options.get("enable_graph"):
            value = value.detach()
        if self._entries is None:  # a hook outside of a step: each rank counts the same
            self._log(name, value, **{**options, "sync_dist": True})
            return
        self._entries.append(_Entry(name, value, options))

    def finish(self, *, samples: int, loss: Any, count: int | Tensor, reduce_steps: bool) -> None:
        """Pass the recorded values on.

        Args:
            samples: rows of the batch that count on this rank.
            loss: the loss that the step returned, if any; values equal to it weigh ``count``.
            count: what the loss is a mean over.
            reduce_steps: reduce all per-step values over ranks; else only those that are always read.
        """
        entries, self._entries = self._entries or [], None
        if not entries:
            return
        for entry in entries:
            self._weigh(entry, samples, loss, count)
        if self._size > 1:
            monitored = self._monitored()
            chosen = [
                entry
                for entry in entries
                if self._on_step(entry)
                and (reduce_steps or entry.options.get("prog_bar") or entry.name in monitored)
            ]
            if chosen:
                self._reduce(chosen)
        for entry in entries:
            self._keys.add(entry.name)
            options = {**entry.options, "sync_dist": True, "batch_size": entry.weight}
            self.replaying = entry
            try:
                self._log(entry.name, entry.value, **options)
            finally:
                self.replaying = None

    def check_keys(self) -> None:
        """Agree that all ranks logged the same keys, at the end of an evaluation epoch.

        Raises:
            TitanplugError: they did not; on every rank, with the keys of this one.
        """
        keys, self._keys = sorted(self._keys), set()
        if self._size > 1:
            code = _code(keys)
            codes = torch.tensor([code, -code], dtype=torch.int64, device=self._device)
            dist.all_reduce(codes, op=dist.ReduceOp.MAX, group=self._group)
            highest, lowest = codes.tolist()
            if highest != -lowest:
                raise TitanplugError(_different(keys))

    def _weigh(self, entry: _Entry, samples: int, loss: Any, count: int | Tensor) -> None:
        value = entry.value
        if not isinstance(value, Tensor):
            value = torch.tensor(value, device=self._device, dtype=_float_type(value))
        elif value.device != self._device:
            value = value.to(self._device)
        weight: int | Tensor | None = entry.options.get("batch_size")
        if weight is None:
            weight = samples
        if samples == 0:
            weight, value = 0, torch.full_like(value, _NEUTRAL.get(entry.kind, 0.0))
        elif isinstance(count, Tensor) and _is_same(entry.value, loss):
            weight, value = count, value.masked_fill(count == 0, 0.0)
        entry.value, entry.weight = value, weight

    def _on_step(self, entry: _Entry) -> bool:
        on_step = entry.options.get("on_step")
        return bool(self._module.trainer.training) if on_step is None else bool(on_step)

    def _monitored(self) -> set[str]:
        callbacks = self._module.trainer.callbacks  # type: ignore[attr-defined]
        monitors = [getattr(callback, "monitor", None) for callback in callbacks]
        return {name for key in monitors if key for name in (key, key.removesuffix("_step"))}

    def _reduce(self, entries: list[_Entry]) -> None:
        """Reduce per-step values over ranks: one collective for the keys and all sums, one for extremes."""
        slots = torch.zeros(_capacity(len(entries)), 2, dtype=torch.float64, device=self._device)
        code = _code([entry.name for entry in entries])
        slots[0, 0], slots[0, 1] = float(code), float(code) ** 2
        extremes = torch.full_like(slots[:, 0], float("-inf"))
        for row, entry in enumerate(entries, start=1):
            value = entry.value.double()
            if entry.kind == "mean":
                slots[row, 0], slots[row, 1] = value * entry.weight, entry.weight
            elif entry.kind == "sum":
                slots[row, 0], slots[row, 1] = value, 1.0
            else:
                extremes[row] = value if entry.kind == "max" else -value
        dist.all_reduce(slots, group=self._group)
        if any(entry.kind in ("max", "min") for entry in entries):
            dist.all_reduce(extremes, op=dist.ReduceOp.MAX, group=self._group)
        total, squares = slots[0].tolist()
        if squares * self._size != total**2:
            raise TitanplugError(_different([entry.name for entry in entries]))
        for row, entry in enumerate(entries, start=1):
            if entry.kind == "mean":
                reduced = slots[row, 0] / slots[row, 1]
            elif entry.kind == "sum":
                reduced = slots[row, 0]
            else:
                reduced = extremes[row] if entry.kind == "max" else -extremes[row]
            entry.reduced = reduced.to(entry.value.dtype)


def _float_type(value: Any) -> torch.dtype | None:
    return torch.get_default_dtype() if isinstance(value, float) else None


def _capacity(num_entries: int) -> int:
    # Ranks with different keys still send the same number of rows, so that they can be told apart.
    return -(-(num_entries + 1) // 32) * 32


def _code(keys: list[str]) -> int:
    """A number below 2**20 that stands for the keys; sums and squares of many stay exact in float64."""
    return int.from_bytes(hashlib.sha256("\n".join(keys).encode()).digest()[:4], "little") >> 12


def _is_same(value: Any, loss: Any) -> bool:
    if value is loss:
        return True
    if not isinstance(value, Tensor) or not isinstance(loss, Tensor):
        return False
    # `loss.detach()` is another object over the same number.
    return value.ndim == 0 and loss.ndim == 0 and value.data_ptr() == loss.data_ptr()


def _different(keys: list[str]) -> str:
    return (
        f"Ranks logged different keys in one step; this rank logged {keys or 'none'}. Every rank must call "
        "`self.log` with the same keys in the same order, or values of different keys would be mixed. Log "
        "a neutral value where a rank has none."
    )

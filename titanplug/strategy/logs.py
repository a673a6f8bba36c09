"""``self.log``, made exact over ranks and cheap.

Every logged value is that of all ranks together, as one process would log it, whether ``sync_dist`` is set
or not; ``rank_zero_only`` and a ``sync_dist_group`` of the caller's are left alone.

- What a step logs is held back until the step is done, because only then the weight of its loss (the number
  of targets) is known. Other hooks of a batch log at once.
- Each value gets its weight: the number of targets for the loss, else ``batch_size``, else the samples that
  count. A batch that doesn't count gives neutral values, so that every rank has the same keys.
- Values of a step are reduced over ranks where somebody reads them: on steps that are logged, for the
  progress bar, and for keys that a callback or a scheduler monitors. All keys go in one collective, at
  points that every rank comes to: the end of the step, and the end of the batch for what other hooks logged.
- Values of an epoch are reduced by Lightning at its end, after the ranks have agreed on the keys.
"""

from __future__ import annotations

import numbers
from collections.abc import Callable
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from lightning.pytorch.trainer.connectors.logger_connector.fx_validator import _FxValidator
from torch import Tensor
from torchmetrics import Metric

from titanplug.parallel.sharded_tensor import ShardedTensor
from titanplug.strategy.log_reduction import LogEntry, reduce_entries, require_same_keys

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
# Points where ranks meet.
_STEP_END, _BATCH_END = "step", "batch"


class StepLogs:
    """Records, weighs, reduces and passes on what one LightningModule and its callbacks log.

    Args:
        module: the LightningModule, attached to its Trainer.
        group: process group of the ``batch`` view.
        size: number of ranks in it.
        device: where values are reduced.
        is_log_step: whether the values of the running training step are written.
    """

    def __init__(
        self,
        module: LightningModule,
        group: dist.ProcessGroup | None,
        size: int,
        device: torch.device,
        is_log_step: Callable[[], bool],
    ) -> None:
        self._module = module
        self._trainer: Any = module.trainer
        self._group, self._size, self._device = group, size, device
        self._is_log_step = is_log_step
        self._log: Callable[..., None] = module.log
        self._entries: list[LogEntry] | None = None
        self._samples = 1
        self._in_parts = False
        """A step runs in parts, of which other ranks will learn: all that it logs is recorded."""
        self.replaying: LogEntry | None = None
        """The entry that is being passed on to Lightning, which needs no reduction now."""
        self._unreduced: dict[int, LogEntry] = {}
        self._keys: set[str] = set()
        self._every_batch: dict[tuple[str, bool], bool] = {}
        self._install()

    def _install(self) -> None:
        module, connector = self._module, self._trainer._logger_connector
        module.__dict__["log"] = self.record
        # Callbacks hold the module's method.
        self._trainer._callback_connector._attach_model_logging_functions()
        end_batch, end_epoch = connector.on_batch_end, connector.on_epoch_end
        reach_epoch_end = connector.epoch_end_reached

        def on_batch_end() -> None:
            self._end_batch()
            end_batch()

        def epoch_end_reached() -> None:
            self._end_steps()
            reach_epoch_end()

        def on_epoch_end() -> None:
            self.check_keys()
            end_epoch()

        connector.__dict__.update(
            on_batch_end=on_batch_end,
            epoch_end_reached=epoch_end_reached,
            on_epoch_end=on_epoch_end,
        )

    def uninstall(self) -> None:
        """Give the module and Lightning their own methods back."""
        self._module.__dict__.pop("log", None)
        for name in ("on_batch_end", "epoch_end_reached", "on_epoch_end"):
            self._trainer._logger_connector.__dict__.pop(name, None)

    # ---------------------------------------------------------------- recording

    def start(self, samples: int) -> None:
        """A step begins, on a batch of which ``samples`` rows count on this rank."""
        self._entries, self._samples = [], samples

    def record(self, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        """Stands in for ``LightningModule.log``; the same arguments."""
        options = {**dict(zip(_ARGUMENTS, args, strict=False)), **kwargs}
        part = self._entries if self._in_parts else None
        if part is not None and isinstance(value, Metric):
            part.append(LogEntry(self._module._current_fx_name or "", name, value, options))
            return
        if part is None and (options.get("rank_zero_only") or options.get("sync_dist_group") is not None):
            self._log(name, value, **options)
            return
        hook = self._module._current_fx_name or ""
        self._keys.add(f"{hook}.{name}")
        if isinstance(value, ShardedTensor):
            value = value.whole()
        one_number = isinstance(value, Tensor) and value.numel() == 1
        if isinstance(value, Metric) or not (one_number or isinstance(value, numbers.Number)):
            self._log(name, value, **options)  # what is no number is refused there
            return
        if isinstance(value, Tensor) and not options.get("enable_graph"):
            value = value.detach()
        entry = LogEntry(hook, name, value, options)
        if self._entries is not None:
            self._entries.append(entry)
        elif _is_of_batch(hook):
            entry.weigh(self._samples, self._device)
            self._pass_on(entry)
        else:
            self._log(name, value, **{**options, "sync_dist": True})

    # ---------------------------------------------------------------- points where ranks meet

    def finish(self, *, loss: Any = None, count: int | Tensor = 0) -> None:
        """The step is done: pass on what it logged.

        Args:
            loss: the loss that the step returned, if any; values equal to it weigh ``count``.
            count: what the loss is a mean over.
        """
        entries, self._entries = self._entries or [], None
        for entry in entries:
            entry.weigh(self._samples, self._device, loss, count)
        self._reduce(entries, _STEP_END)
        for entry in entries:
            self._pass_on(entry)

    def expect(self, samples: int) -> None:
        """Hooks and steps that follow are of a batch of which ``samples`` rows count on this rank."""
        self._samples = samples

    def start_part(self) -> None:
        """A microbatch of a step begins."""
        self._entries, self._in_parts = [], True

    def take_part(self, samples: int, loss: Any = None, count: int | Tensor = 0) -> list[LogEntry]:
        """What the microbatch logged, weighed; see :meth:`finish`."""
        entries, self._entries, self._in_parts = self._entries or [], None, False
        for entry in entries:
            if not isinstance(entry.value, Metric):
                entry.weigh(samples, self._device, loss, count)
        return entries

    def finish_parts(self, entries: list[LogEntry]) -> None:
        """The step is done on all stages: pass on what its microbatches logged together, on every rank."""
        self._keys.update(f"{entry.hook}.{entry.name}" for entry in entries)
        numbers = [entry for entry in entries if not isinstance(entry.value, Metric) and not entry.is_own]
        self._reduce(numbers, _STEP_END)
        for entry in entries:
            self._pass_on(entry)

    def discard(self) -> None:
        """Forget what was recorded, after an error in a step."""
        self._entries, self._in_parts = None, False

    def _end_batch(self) -> None:
        """Before Lightning writes the values of the batch: reduce what hooks and earlier steps logged."""
        for entry in self._reduce(list(self._unreduced.values()), _BATCH_END):
            entry.result._forward_cache = entry.reduced
            del self._unreduced[id(entry.result)]

    def _end_steps(self) -> None:
        """The steps of an epoch are over."""
        self._unreduced = {}
        if not self._training:
            for point in (_STEP_END, _BATCH_END):  # another evaluation may log other keys
                self._every_batch.pop((point, False), None)
        self.check_keys()

    def check_keys(self) -> None:
        """Agree that all ranks logged the same keys since the last call.

        Raises:
            TitanplugError: they did not; on every rank, with the keys of all.
        """
        keys, self._keys = sorted(self._keys), set()
        if self._size > 1:
            require_same_keys(keys, self._group, self._size, self._device)

    def _reduce(self, entries: list[LogEntry], point: str) -> list[LogEntry]:
        """Reduce those of ``entries`` that somebody reads; returns them.

        Whether ranks meet at a point must not depend on what one of them logged. They always do at the
        first batch and on training steps that are logged; and once they found values there that are read
        at every batch, they do at every batch.
        """
        if self._size == 1:
            return []
        training = self._training
        place = (point, training)
        first = place not in self._every_batch
        every_batch = first or self._every_batch[place]
        logged = self._is_log_step() if training else every_batch
        if not (logged or every_batch):
            return []
        chosen = [e for e in entries if e.on_step(training) and (logged or self.is_read(e))]
        reduce_entries(chosen, self._group, self._size, self._device)
        found = any(self.is_read(entry) for entry in chosen) if training else bool(chosen)
        self._every_batch[place] = found or (every_batch and not first)
        return chosen

    def _pass_on(self, entry: LogEntry) -> None:
        """Hand an entry to Lightning, as logged by the hook that logged it."""
        module, results = self._module, self._trainer._results
        hook, module._current_fx_name = module._current_fx_name, entry.hook
        if isinstance(entry.value, Metric) or entry.is_own:
            self._log(entry.name, entry.value, **{**entry.options, "batch_size": entry.weight})
            module._current_fx_name = hook
            return
        self.replaying = entry
        try:
            options = {**entry.options, "sync_dist": True, "batch_size": entry.weight}
            self._log(entry.name, entry.value, **options)
        finally:
            self.replaying, module._current_fx_name = None, hook
        if self._size > 1 and entry.on_step(self._training):
            key = f"{entry.hook}.{entry.name}"
            if entry.options.get("add_dataloader_idx", True) and results.dataloader_idx is not None:
                key += f".{results.dataloader_idx}"
            entry.result = results.get(key)
            self._unreduced.pop(id(entry.result), None)
            if entry.reduced is None and entry.result is not None:
                self._unreduced[id(entry.result)] = entry

    # ---------------------------------------------------------------- who reads

    @property
    def _training(self) -> bool:
        return bool(self._trainer.training)

    def is_read(self, entry: LogEntry) -> bool:
        """Whether somebody reads the entry's value at every step."""
        return bool(entry.options.get("prog_bar")) or entry.name in self._monitored

    @cached_property
    def _monitored(self) -> set[str]:
        """Keys whose values decide something at any step."""
        configs = self._trainer.strategy.lr_scheduler_configs
        watchers = [*self._trainer.callbacks, *configs]
        monitors = [getattr(watcher, "monitor", None) for watcher in watchers]
        return {name for key in monitors if key for name in (key, key.removesuffix("_step"))}


def _is_of_batch(hook: str) -> bool:
    """Whether a hook runs for each batch, so that it may log values of a step."""
    rules: Any = _FxValidator.functions.get(hook)
    return rules is not None and True in rules["allowed_on_step"]

"""Continuing a run where its checkpoint stands: the same batches, in the same order.

Lightning's checkpoint counts batches. What it doesn't know is kept beside it: the seed that orders the
samples, and how many rows all data-parallel ranks read for a batch. With these a run continues under
another number of ranks as long as the rows of a batch stay the same.
"""

from __future__ import annotations

import warnings
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.loops.loop import _Loop

from titanplug.errors import ConfigError
from titanplug.strategy.loaders import LockstepLoader, ShardedBatches, sharded_batches
from titanplug.strategy.read_ahead import has_state

STATE_KEY = "titanplug"
"""Where a checkpoint keeps what :func:`data_state` returns."""


def data_state(trainer: Trainer, seed: int) -> dict[str, Any]:
    """What a checkpoint has to know of the data beyond Lightning's counts."""
    loaders = _loaders(trainer)
    batches = [sharded_batches(loader) for loader in loaders]
    return {"seed": seed, "global_batches": [b and list(b.global_batch) for b in batches]}


def reopen_epoch(checkpoint: dict[str, Any]) -> None:
    """Let an epoch that ``max_steps`` or a callback cut off go on, in a loaded checkpoint.

    Lightning counts it as processed when a run ends in the middle of it.
    """
    loop = checkpoint.get("loops", {}).get("fit_loop", {})
    if "epoch_loop.batch_progress" not in loop:
        return
    batches, epochs = loop["epoch_loop.batch_progress"], loop["epoch_progress"]
    has_batches_left = batches["current"]["processed"] > 0 and not batches["is_last_batch"]
    if has_batches_left and epochs["current"]["processed"] == epochs["current"]["ready"]:
        for counts in epochs.values():
            counts["processed"] -= 1
            counts["completed"] = min(counts["completed"], counts["processed"])


def continue_epoch(trainer: Trainer, saved: dict[str, Any], loader_states: list[Any]) -> None:
    """Start the training of a resumed run at the batch after the last one that was run.

    Called when loaders and loops are set up, before the first batch. Does nothing where no checkpoint
    was loaded.

    Args:
        trainer: the Trainer.
        saved: what :func:`data_state` returned when the checkpoint was written.
        loader_states: the states of loaders that have one.

    Raises:
        ConfigError: in the middle of an epoch, where a batch has another number of rows than it had.
    """
    fit: Any = trainer.fit_loop
    if fit._combined_loader is None or not fit.is_resuming:
        return
    progress = fit.epoch_loop.batch_progress
    # A batch that an exception cut off is run again, with the random numbers it had.
    progress.total.ready = progress.total.started = progress.total.processed
    consumed: int = progress.current.processed
    is_over: bool = progress.is_last_batch and consumed == progress.current.ready
    if not is_over:
        _require_same_batches(trainer, saved, consumed)
        is_over = consumed >= fit.max_batches  # there are fewer batches now than there were
    if is_over and fit.epoch_progress.current.processed >= fit.epoch_progress.current.ready:
        _begin_next_epoch(fit)
    elif is_over:
        _skip_to_epoch_end(fit)
    _seek(trainer, 0 if is_over else consumed, loader_states, is_over)


def _begin_next_epoch(fit: Any) -> None:
    """Let the loops start the epoch after one that was saved when it was over.

    With ``max_steps`` Lightning would go back into that epoch and train one batch too many, and after a
    save at the last batch it would not count the next epoch as started.
    """
    epochs, batches = fit.epoch_progress, fit.epoch_loop
    if epochs.current.completed < epochs.current.processed:
        epochs.increment_completed()
    if batches.restarted_on_train_batch_end:
        batches.batch_progress.increment_completed()
        batches._batches_that_stepped += 1
    fit.reset_restart_stage()
    batches.reset_restart_stage()
    _Loop.restarting.fset(fit, False)  # type: ignore[attr-defined]


def _skip_to_epoch_end(fit: Any) -> None:
    """Where all batches are over and no validation is due, only the epoch's end is left to do."""
    loop = fit.epoch_loop
    if loop.restarting and not loop._should_check_val_fx(fit._data_fetcher):
        loop.val_loop._has_run = True


def _seek(trainer: Trainer, consumed: int, loader_states: list[Any], is_over: bool) -> None:
    """Give every loader the epoch and the place in it, and start it anew."""
    fit: Any = trainer.fit_loop
    loaders = _loaders(trainer)
    for loader in loaders:
        batches = sharded_batches(loader)
        if isinstance(loader, LockstepLoader):
            loader.start = consumed
        if batches is None:
            continue
        batches.sampler.set_epoch(fit.epoch_progress.current.processed)
        if not has_state(loader):
            batches.skip = _skipped(fit, batches, consumed)
    # Lightning has made iterators already, which may have used up a loaded state; and it loads none
    # where an epoch was over.
    stateful = [loader for loader in loaders if has_state(loader)]
    for loader, state in zip(stateful, loader_states, strict=False):
        if not is_over or sharded_batches(loader) is None:
            loader.load_state_dict(state)
    iter(fit._data_fetcher)
    if all(sharded_batches(loader) is not None for loader in loaders):
        warnings.filterwarnings("ignore", message=".*your dataloader is not resumable.*")


def _skipped(fit: Any, batches: ShardedBatches, consumed: int) -> int:
    # The shorter of several loaders starts again and again within an epoch.
    cycles = fit._combined_loader._mode == "max_size_cycle" and len(batches) > 0
    return consumed % len(batches) if cycles else consumed


def _require_same_batches(trainer: Trainer, saved: dict[str, Any], consumed: int) -> None:
    then = saved.get("global_batches")
    now = [sharded_batches(loader) for loader in _loaders(trainer)]
    if then is None:
        if consumed and any(now):
            warnings.warn(
                "The checkpoint is of the middle of an epoch and wasn't written by TitanStrategy, so the "
                f"order of its samples isn't known. The epoch goes on at batch {consumed} of an order "
                "of its own: some samples may be seen twice in it, others not at all.",
                stacklevel=2,
            )
        return
    problems = [
        f"The checkpoint was saved after {consumed} batches of an epoch, each of {was[0]} {was[1]} on "
        f"all data-parallel ranks together; now a batch has {batches.global_batch[0]} "
        f"{batches.global_batch[1]} (batch_size={batches.batch_size} on {batches.size} data-parallel "
        "ranks), so the rest of the epoch would repeat or leave out samples. Choose batch_size and "
        f"ranks whose product is {was[0]}, or resume from a checkpoint of an epoch's end."
        for was, batches in zip(then, now, strict=False)
        if was is not None and batches is not None and tuple(was) != batches.global_batch
    ]
    if problems:
        raise ConfigError(problems)


def _loaders(trainer: Trainer) -> list[Any]:
    combined: Any = trainer.fit_loop._combined_loader
    return [] if combined is None else list(combined.flattened)

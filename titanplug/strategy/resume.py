"""Continuing a run where its checkpoint stands: the same batches, in the same order.

Lightning's checkpoint counts batches. What it doesn't know is kept beside it: the seed that orders the
samples, and how many rows all data-parallel ranks read for a batch. With these a run continues under
another number of ranks as long as the rows of a batch stay the same.

A loader that keeps its own position (``state_dict`` and ``load_state_dict``) gets back what it saved on the
same data-parallel rank. One that also has ``load_state_dicts(states)`` gets the states of all data-parallel
ranks that saved, in their order, and can so go on under another number of them.

A checkpoint in the middle of an accumulation window (after a validation there, by time, on an exception) has
no gradients: the run goes on at the window's start. For that it holds what loaders' states were then.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.loops.evaluation_loop import RestartStage
from lightning.pytorch.loops.loop import _Loop

from titanplug.errors import ConfigError
from titanplug.strategy.loader_states import batches_in_window, collect_states, load_states
from titanplug.strategy.loaders import LockstepLoader, ShardedBatches, sharded_batches
from titanplug.strategy.read_ahead import has_state

STATE_KEY = "titanplug"
"""Where a checkpoint keeps what :func:`data_state` returns."""


def data_state(trainer: Trainer, seed: int, size: int) -> dict[str, Any]:
    """What a checkpoint has to know of the data beyond Lightning's counts; ``size`` data-parallel ranks."""
    loaders = _loaders(trainer)
    batches = [sharded_batches(loader) for loader in loaders]
    return {
        "seed": seed,
        "data_parallel": size,
        "global_batches": [b and list(b.global_batch) for b in batches],
        "batches_in_window": batches_in_window(trainer),
    }


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


def continue_epoch(
    trainer: Trainer,
    saved: dict[str, Any],
    loader_states: list[Any],
    size: int,
    gather: Callable[[Any], list[Any]],
) -> None:
    """Start the training of a resumed run at the batch after the last one that was run.

    Called when loaders and loops are set up, before the first batch. Does nothing where no checkpoint
    was loaded.

    Args:
        trainer: the Trainer.
        saved: what :func:`data_state` returned when the checkpoint was written. Where the number of
            data-parallel ranks is another one and their loaders' states differ, ``all_loader_states``
            has them, by rank and loader.
        loader_states: what this rank's loaders saved, of those that have a state.
        size: data-parallel ranks.
        gather: collects a value of each of them.

    Raises:
        ConfigError: in the middle of an epoch, where a batch has another number of rows than it had; or
            a loader can't go on under another number of ranks.
    """
    fit: Any = trainer.fit_loop
    if fit._combined_loader is None or not fit.is_resuming:
        return
    progress = fit.epoch_loop.batch_progress
    if batches := saved.get("batches_in_window", 0):
        _go_back(fit, batches)
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
    else:
        _validate_first(fit)
    consumed = 0 if is_over else consumed
    _seek(trainer, consumed)
    everyones = collect_states(_loaders(trainer), saved, loader_states, size, gather)
    load_states(_loaders(trainer), everyones, loader_states, size, begins=consumed == 0)
    iter(fit._data_fetcher)
    if all(sharded_batches(loader) is not None for loader in _loaders(trainer)):
        warnings.filterwarnings("ignore", message=".*your dataloader is not resumable.*")


def _go_back(fit: Any, batches: int) -> None:
    """Let the loops go on some batches before the place where they were saved, in the same epoch."""
    loop = fit.epoch_loop
    progress = loop.batch_progress
    progress.is_last_batch = False
    for counts in (progress.total, progress.current):
        start = counts.processed - batches
        counts.ready = counts.started = counts.processed = counts.completed = start
    # As if it had been saved after a validation: what was due before the window has been done.
    loop.reset_restart_stage()
    loop.val_loop.reset_restart_stage()
    if not loop._should_accumulate():
        loop._batches_that_stepped -= 1  # Lightning counts the batch before once more


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
    if not loop.restarting or loop._should_check_val_fx(fit._data_fetcher):
        return

    def start(data_fetcher: Any) -> None:
        del loop.on_run_start
        loop.on_run_start(data_fetcher)
        # The loop is over before its first batch, where it would note that it goes on no more; then all
        # epochs after this one would be over too.
        _Loop.restarting.fset(loop, False)  # type: ignore[attr-defined]

    loop.on_run_start = start


def _validate_first(fit: Any) -> None:
    """Let a validation run that was due when a batch's end was saved; Lightning would leave it out."""
    loop = fit.epoch_loop
    if loop.restarting and loop.restarted_on_train_batch_end and loop._should_check_val_fx(fit._data_fetcher):
        loop.val_loop._restart_stage = RestartStage.RESTARTED_MID_EVALUATION
        _Loop.restarting.fset(loop.val_loop, False)  # type: ignore[attr-defined]
        if not loop._should_accumulate():
            loop._batches_that_stepped -= 1  # it is counted before and after


def _seek(trainer: Trainer, consumed: int) -> None:
    """Give every loader the epoch, and the place in it where it has no state of its own."""
    fit: Any = trainer.fit_loop
    for loader in _loaders(trainer):
        batches = sharded_batches(loader)
        if isinstance(loader, LockstepLoader):
            loader.start = consumed
        if batches is None:
            continue
        batches.sampler.set_epoch(fit.epoch_progress.current.processed)
        if not has_state(loader):
            batches.skip = _skipped(fit, batches, consumed)


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

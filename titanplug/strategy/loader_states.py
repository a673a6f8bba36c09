"""The states of loaders that keep their own position: at which moment they are saved, and who gets them back.

A checkpoint in the middle of an accumulation window has the states of its start, since the gradients of a
window aren't saved and the window is run again.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Callback
from typing_extensions import override

from titanplug.errors import ConfigError
from titanplug.strategy.loaders import LockstepLoader, sharded_batches
from titanplug.strategy.read_ahead import ReadAhead, has_state, takes_all_states


def reads_ahead(trainer: Trainer) -> bool:
    """Whether Lightning fetches a batch before it is needed, to find out which one is the last."""
    fetcher: Any = trainer.fit_loop._data_fetcher
    return fetcher is None or fetcher.length is None


def keep_window_starts(trainer: Trainer) -> None:
    """Let checkpoints hold the states of loaders at the start of a window; called before the first batch."""
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    callbacks[:] = [callback for callback in callbacks if not isinstance(callback, _WindowStarts)]
    combined: Any = trainer.fit_loop._combined_loader
    if combined is not None and any(map(has_state, combined.flattened)):
        callbacks.insert(0, _WindowStarts(trainer))


class _WindowStarts(Callback):
    """Notes the states of loaders after each optimizer step."""

    def __init__(self, trainer: Trainer) -> None:
        combined: Any = trainer.fit_loop._combined_loader
        self._trainer = trainer
        self._states: Callable[[], list[Any]] = partial(type(combined)._state_dicts, combined)
        self._noted = self._states()
        combined._state_dicts = self._states_to_save

    def _states_to_save(self) -> list[Any]:
        in_window = batches_in_window(self._trainer) > 0 or _is_in_batch(self._trainer)
        return self._noted if in_window else self._states()

    @override
    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if not batches_in_window(trainer):
            self._noted = self._states()


def _is_in_batch(trainer: Trainer) -> bool:
    """Whether an exception has cut off a batch."""
    progress: Any = trainer.fit_loop.epoch_loop.batch_progress.current
    return bool(progress.ready > progress.processed)


def batches_in_window(trainer: Trainer) -> int:
    """Batches that have run since the last optimizer step."""
    progress: Any = trainer.fit_loop.epoch_loop.batch_progress
    if progress.is_last_batch and not _is_in_batch(trainer):
        return 0
    batches: int = progress.current.processed
    return batches % trainer.accumulate_grad_batches if batches < trainer.num_training_batches else 0


def collect_states(
    loaders: list[Any], saved: dict[str, Any], own: list[Any], size: int, gather: Callable[[Any], list[Any]]
) -> list[list[Any]]:
    """The states of the loaders that have one, by the data-parallel rank that saved them."""
    if "all_loader_states" in saved:
        states: list[list[Any]] = saved["all_loader_states"]
        return states
    then: int = saved.get("data_parallel", 1)  # Lightning's own checkpoints have the first rank's
    if own and then == size and any(map(takes_all_states, loaders)):
        return gather(own)
    return [own] * then  # with another number of ranks, each had these


def load_states(
    loaders: list[Any], everyones: list[list[Any]], own: list[Any], size: int, *, begins: bool
) -> None:
    """Load the states of loaders that have one.

    Lightning has made iterators already, which may have used up a loaded state; and it loads none where an
    epoch was over.

    Args:
        loaders: all of them.
        everyones: what :func:`collect_states` found.
        own: what this rank saved, where it did.
        size: data-parallel ranks now.
        begins: the run goes on with a whole epoch.

    Raises:
        ConfigError: a loader can't go on under another number of ranks.
    """
    problems = []
    stateful = [loader for loader in loaders if has_state(loader)]
    for index, (loader, *states) in enumerate(zip(stateful, *everyones, strict=False)):
        by_index = sharded_batches(loader) is not None
        if begins and by_index:
            continue
        if takes_all_states(loader):
            loader.load_state_dicts(states)
        elif len(states) == size:
            loader.load_state_dict(own[index])
        elif by_index and all(map(partial(_equal, states[0]), states)):
            loader.load_state_dict(states[0])
        else:
            problems.append(_tell_degrees(loader, len(states), size))
        if begins and callable(begin := getattr(loader, "begin_epoch", None)):
            begin()
    if problems:
        raise ConfigError(problems)


def _equal(a: Any, b: Any) -> bool:
    try:
        return bool(a == b)
    except (RuntimeError, ValueError):  # they hold tensors or arrays
        return False


def _tell_degrees(loader: Any, then: int, now: int) -> str:
    own = loader
    while isinstance(own, LockstepLoader | ReadAhead):
        own = own.loader
    dataset = getattr(own, "dataset", None)
    of = "" if dataset is None else f" of {type(dataset).__name__}"
    return (
        f"The checkpoint holds the position of {type(own).__name__}{of} on {then} data-parallel ranks, now "
        f"there are {now}, and it can't be handed over: the loader has no method load_state_dicts(states). "
        f"Go on with {then} data-parallel ranks, start a new run from the saved weights, or give the loader "
        f"that method: it gets the states of all {then} ranks, in their order, and goes on where they stood "
        "together."
    )

"""The state of a loader after the batch that was used last, where Lightning reads one ahead."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

_METHODS = ("state_dict", "load_state_dict")


def account_for_read_ahead(loader: Any, reads_ahead: Callable[[], bool]) -> Any:
    """Let the state of a loader without length be that of the batch in use; others are returned as they are.

    Where it can't know the last batch, Lightning fetches the next one while a batch is in use, and a
    checkpoint would hold a state that is one batch too far. With a limit on batches it knows the last one.

    Args:
        loader: the loader.
        reads_ahead: whether Lightning does so with it.
    """
    return ReadAhead(loader, reads_ahead) if has_state(loader) else loader


def has_state(loader: Any) -> bool:
    """Whether a loader's place can be saved and loaded."""
    return all(callable(getattr(loader, name, None)) for name in _METHODS)


def takes_all_states(loader: Any) -> bool:
    """Whether a loader goes on from the states of all data-parallel ranks, however many there were."""
    return callable(getattr(loader, "load_state_dicts", None))


class ReadAhead:
    """Notes the state of a loader before each batch is fetched from it: the one before is in use then."""

    def __init__(self, loader: Any, reads_ahead: Callable[[], bool]) -> None:
        self.loader = loader
        self._reads_ahead = reads_ahead
        self._before: Any = None
        if takes_all_states(loader):  # the strategy looks for it on the object itself
            self.load_state_dicts = self._load_state_dicts

    def __getattr__(self, name: str) -> Any:
        if name == "loader":  # while unpickling
            raise AttributeError(name)
        return getattr(self.loader, name)

    def __iter__(self) -> Iterator[Any]:
        batches = iter(self.loader)
        while True:
            self._before = self.loader.state_dict() if self._reads_ahead() else None
            try:
                batch = next(batches)
            except StopIteration:
                return
            yield batch

    def state_dict(self) -> Any:
        """The loader's state after the batch in use."""
        return self._before if self._before is not None and self._reads_ahead() else self.loader.state_dict()

    def load_state_dict(self, state: Any) -> None:
        """Go on where the state was taken."""
        self._before = None
        self.loader.load_state_dict(state)

    def _load_state_dicts(self, states: list[Any]) -> None:
        self._before = None
        self.loader.load_state_dicts(states)

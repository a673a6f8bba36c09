"""The state of a loader after the batch that was used last, where Lightning reads one ahead."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

_METHODS = ("state_dict", "load_state_dict")


def account_for_read_ahead(loader: Any) -> Any:
    """Let the state of a loader without length be that of the batch in use; others are returned as they are.

    Where it can't know the last batch, Lightning fetches the next one while a batch is in use, and a
    checkpoint would hold a state that is one batch too far.
    """
    return _ReadAhead(loader) if has_state(loader) else loader


def has_state(loader: Any) -> bool:
    """Whether a loader's place can be saved and loaded."""
    return all(callable(getattr(loader, name, None)) for name in _METHODS)


class _ReadAhead:
    """Notes the state of a loader before each batch is fetched from it: the one before is in use then."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader
        self._before: Any = None

    def __getattr__(self, name: str) -> Any:
        if name == "loader":  # while unpickling
            raise AttributeError(name)
        return getattr(self.loader, name)

    def __iter__(self) -> Iterator[Any]:
        batches = iter(self.loader)
        while True:
            self._before = self.loader.state_dict()
            try:
                batch = next(batches)
            except StopIteration:
                return
            yield batch

    def state_dict(self) -> Any:
        """The loader's state after the batch in use."""
        return self.loader.state_dict() if self._before is None else self._before

    def load_state_dict(self, state: Any) -> None:
        """Go on where the state was taken."""
        self._before = None
        self.loader.load_state_dict(state)

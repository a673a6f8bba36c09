"""Writing while the training goes on: what is written is copied first, at most one checkpoint at a time."""

from __future__ import annotations

import logging
import threading
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from titanplug.checkpoint.directory import Snapshot, write
from titanplug.checkpoint.ranks import Ranks
from titanplug.parallel.gradients import local_tensor
from titanplug.parallel.local_parameter import dtensor_like

_log = logging.getLogger(__name__)


class Writer:
    """Writes snapshots, one after the other.

    Args:
        in_background: return when the tensors are copied, and write them in a thread.
    """

    def __init__(self, in_background: bool) -> None:
        self._in_background = in_background
        self._copies = HostCopies()
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._lock = threading.Lock()
        self._is_busy = False
        self._afterwards: list[Callable[[], None]] = []

    def write(self, snapshot: Snapshot, ranks: Ranks) -> None:
        """Write a snapshot; a collective. Waits for the one before it.

        Raises:
            CheckpointError: it can't be written; or, of the one before it, where that was written in the
                background. On all ranks.
        """
        self.wait()
        if not self._in_background:
            write(snapshot, ranks)
            return
        copied, is_copied = self._copies.take(snapshot.tensors)
        snapshot = snapshot.with_tensors(copied)
        self._is_busy = True
        self._thread = threading.Thread(
            target=self._run, args=(snapshot, ranks, is_copied), name="titanplug checkpoint"
        )
        self._thread.start()

    def then(self, action: Callable[[], None]) -> None:
        """Do something once what is being written is there; at once where nothing is.

        It isn't done where the writing fails: a checkpoint is removed, or a link is moved, only when there
        is another one.
        """
        with self._lock:
            if self._is_busy:
                self._afterwards.append(action)
                return
        action()

    def wait(self) -> None:
        """Wait until all is written.

        Raises:
            CheckpointError: it could not be written; on all ranks.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _run(self, snapshot: Snapshot, ranks: Ranks, is_copied: Callable[[], object]) -> None:
        begin = time.monotonic()
        try:
            is_copied()
            write(snapshot, ranks)
            _log.info("%s was written in %.1f s, in the background", snapshot.place, time.monotonic() - begin)
        except BaseException as error:
            self._error = error
        while actions := self._take_actions():
            for action in actions if self._error is None else ():
                try:
                    action()
                except Exception as error:  # this rank's alone: the others must not wait for it
                    warnings.warn(f"After writing {snapshot.place}: {error}", stacklevel=1)

    def _take_actions(self) -> list[Callable[[], None]]:
        with self._lock:
            actions, self._afterwards = self._afterwards, []
            self._is_busy = bool(actions)
            return actions


class HostCopies:
    """Copies of tensors in host memory, which is used again by the next checkpoint of the same tensors."""

    def __init__(self) -> None:
        self._held: dict[tuple[str, ...], Tensor] = {}

    def take(self, tensors: dict[str, Any]) -> tuple[dict[str, Any], Callable[[], object]]:
        """Copy all tensors of nested dicts.

        Returns:
            The same dicts with the copies, and what waits until these are there: copies from a device run
            beside the host.
        """
        used: dict[tuple[str, ...], Tensor] = {}
        sources: list[Tensor] = []
        copied = self._collect(tensors, (), used, sources)
        self._held = used
        with torch.no_grad():
            # Past DTensor: an operation on one costs more than copying a small tensor.
            torch._foreach_copy_([*map(local_tensor, used.values())], sources, non_blocking=True)
        if not torch.cuda.is_available() or not torch.cuda.is_initialized():
            return copied, lambda: None
        event = torch.cuda.Event()
        event.record()
        return copied, event.synchronize

    def _collect(
        self,
        value: Any,
        path: tuple[str, ...],
        used: dict[tuple[str, ...], Tensor],
        sources: list[Tensor],
    ) -> Any:
        """The same dicts with room for the tensors; adds it to ``used``, what goes there to ``sources``."""
        if isinstance(value, dict):
            return {key: self._collect(item, (*path, str(key)), used, sources) for key, item in value.items()}
        if not isinstance(value, Tensor):
            return value
        held = self._held.get(path)
        if held is None or not _fits(held, value):
            held = _room_for(value)
        used[path] = held
        sources.append(local_tensor(value))
        return held


def _room_for(value: Tensor) -> Tensor:
    local = local_tensor(value)
    room = torch.empty(local.shape, dtype=local.dtype, pin_memory=local.is_cuda)
    return dtensor_like(room, value._spec) if isinstance(value, DTensor) else room


def _fits(held: Tensor, value: Tensor) -> bool:
    same_layout = getattr(held, "_spec", None) == getattr(value, "_spec", None)
    return same_layout and held.dtype == value.dtype and local_tensor(held).shape == local_tensor(value).shape

"""Ranks that write or read a checkpoint together: where one fails, all of them do."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from titanplug.errors import CheckpointError, TitanplugError

_TIMEOUT_S = 3600.0  # a rank may write its shards long before another one does


@dataclass(frozen=True)
class Ranks:
    """Who takes part.

    Args:
        group: a group of all ranks; None: the process group, if there is one.
        alone: this process by itself, whether there are others or not.
    """

    group: dist.ProcessGroup | None = None
    alone: bool = False

    @property
    def size(self) -> int:
        """Number of ranks."""
        return 1 if self.alone or not dist.is_initialized() else dist.get_world_size()

    @property
    def is_first(self) -> bool:
        """Whether this is global rank 0, which makes and publishes directories."""
        return self.alone or not dist.is_initialized() or dist.get_rank() == 0

    @contextmanager
    def agreed(self, what: str) -> Iterator[None]:
        """Let all ranks fail together where one fails inside; a collective.

        Raises:
            CheckpointError: on all ranks, with the reason of the first rank that failed.
        """
        failure: BaseException | None = None
        try:
            yield
        except (Exception, CheckpointException) as error:
            failure = error
        reasons = [None if failure is None else _reason(failure)]
        if self.size > 1:
            gathered: list[Any] = [None] * self.size
            dist.all_gather_object(gathered, reasons[0], group=self.group)
            reasons = gathered
        if reasons[0] is not None and isinstance(failure, CheckpointError) and len(set(reasons)) == 1:
            raise failure
        for rank, reason in enumerate(reasons):
            if reason is not None:
                named_rank, text = reason
                failed_on = rank if named_rank is None else named_rank
                raise CheckpointError(f"{what} failed on rank {failed_on}: {text}") from failure


_host_groups: dict[int, tuple[dist.ProcessGroup, dist.ProcessGroup]] = {}


def host_ranks() -> Ranks:
    """All ranks, over a group of their own for what happens beside the training; a collective.

    Made once for each process group.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return Ranks()
    world = dist.group.WORLD
    assert world is not None
    if id(world) not in _host_groups:
        own = dist.new_group(backend="gloo", timeout=timedelta(seconds=_TIMEOUT_S))
        _host_groups[id(world)] = world, own  # the first entry keeps the number from being used again
    return Ranks(_host_groups[id(world)][1])


def _reason(failure: BaseException) -> tuple[int | None, str]:
    """The rank that failed, where the error names one, and its message."""
    if isinstance(failure, CheckpointException) and failure.failures:
        rank, (error, _) = min(failure.failures.items())
        return rank, str(error) if isinstance(error, TitanplugError) else f"{type(error).__name__}: {error}"
    if isinstance(failure, TitanplugError):
        return None, str(failure)
    return None, f"{type(failure).__name__}: {failure}"

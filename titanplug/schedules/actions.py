"""The words of a pipeline schedule: what an action does, and a schedule as a table of actions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple, TypeAlias


class Work(StrEnum):
    """What an action does. The letters are torch's."""

    FORWARD = "F"
    BACKWARD = "B"
    """The whole backward: gradients of the input and of the weights."""
    BACKWARD_INPUT = "I"
    """The gradient of the input alone, which the stage before waits for."""
    BACKWARD_WEIGHT = "W"
    """The gradients of the weights, some time after the gradient of the input."""
    SEND_F = "SEND_F"
    """Sends the output of this stage to the next stage."""
    RECV_F = "RECV_F"
    """Receives the output of the stage before."""
    SEND_B = "SEND_B"
    """Sends the gradient of this stage's input to the stage before."""
    RECV_B = "RECV_B"
    """Receives the gradient of this stage's output from the next stage."""


COMPUTE = frozenset({Work.FORWARD, Work.BACKWARD, Work.BACKWARD_INPUT, Work.BACKWARD_WEIGHT})
SENDS = frozenset({Work.SEND_F, Work.SEND_B})


class Action(NamedTuple):
    """One thing that a rank does.

    Args:
        stage: the stage that does it, counted over all ranks.
        work: what it does.
        microbatch: with which microbatch.
    """

    stage: int
    work: Work
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.work}{self.microbatch}"


def stages_of(stage_to_rank: Sequence[int], rank: int) -> list[int]:
    """The stages that a rank holds, ascending."""
    return [stage for stage, holder in enumerate(stage_to_rank) if holder == rank]


Rows: TypeAlias = tuple[tuple[Action, ...], ...]


@dataclass(frozen=True)
class ScheduleTable:
    """A schedule as data: what each rank does, in order.

    Args:
        name: of the schedule, or the path of its file.
        num_ranks: ranks of the pipeline.
        num_stages: stages over all ranks.
        num_microbatches: microbatches of a step.
        stage_to_rank: by stage, the rank that holds it.
        rows: for each rank its actions in order, messages included. All messages of a pair of ranks are
            in one order at both ends.
    """

    name: str
    num_ranks: int
    num_stages: int
    num_microbatches: int
    stage_to_rank: tuple[int, ...]
    rows: Rows

    def stages_of(self, rank: int) -> list[int]:
        """The stages that a rank holds, ascending."""
        return stages_of(self.stage_to_rank, rank)

    @property
    def compute_rows(self) -> Rows:
        """The rows without messages."""
        return _kept(self.rows, COMPUTE)

    @property
    def num_messages(self) -> int:
        """How many messages are sent in a step, over all ranks."""
        return sum(action.work in SENDS for row in self.rows for action in row)


def _kept(rows: Rows, works: Iterable[Work]) -> Rows:
    return tuple(tuple(action for action in row if action.work in works) for row in rows)

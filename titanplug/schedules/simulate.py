"""What a schedule costs: its timeline with given costs, its bubble, and how much is alive at once.

Measured computations are of the same kind as simulated ones, so both are drawn and counted alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from titanplug.schedules.actions import ScheduleTable, Work
from titanplug.schedules.lowering import simulate_rows


@dataclass(frozen=True)
class TimedAction:
    """A computation with its time.

    Args:
        stage: the stage that did it.
        work: which of F, B, I, W.
        microbatch: with which microbatch.
        start_s: when it started.
        end_s: when it ended.
    """

    stage: int
    work: Work
    microbatch: int
    start_s: float
    end_s: float


@dataclass(frozen=True)
class Timeline:
    """The computations of all ranks in time.

    Args:
        rows: for each rank its computations in order.
        name: what is drawn or measured; may be empty.
    """

    rows: tuple[tuple[TimedAction, ...], ...]
    name: str = ""

    @property
    def start_s(self) -> float:
        """When the first computation of all ranks starts."""
        return min((event.start_s for row in self.rows for event in row), default=0.0)

    @property
    def duration_s(self) -> float:
        """From the first start to the last end of all ranks."""
        return max((event.end_s for row in self.rows for event in row), default=0.0) - self.start_s

    @property
    def idle_s(self) -> list[float]:
        """For each rank, how long it computes nothing."""
        return [self.duration_s - sum(event.end_s - event.start_s for event in row) for row in self.rows]

    @property
    def bubble_fraction(self) -> float:
        """Idle time of all ranks over the time of all ranks: 0 is always computing.

        With p ranks, m microbatches and v stages on each rank it is (p-1)/(m+p-1) for GPipe and 1F1B and
        (p-1)/(vm+p-1) for the interleaved ones (https://arxiv.org/abs/2104.04473, which gives idle time over
        the time without idling, (p-1)/m and (p-1)/(vm)).
        """
        total = self.duration_s * len(self.rows)
        return sum(self.idle_s) / total if total else 0.0


def simulate(
    table: ScheduleTable,
    forward: float = 1.0,
    backward_input: float = 1.0,
    backward_weight: float = 1.0,
    send: float = 0.0,
) -> Timeline:
    """Run a table with costs for each stage; each rank starts its next computation as early as it can.

    Args:
        table: with or without messages.
        forward: seconds of a forward of one microbatch through one stage.
        backward_input: seconds of the backward for its input.
        backward_weight: seconds of the backward for its weights. A whole backward takes both.
        send: seconds that a message takes to another rank, while both go on computing.
    """
    costs = {
        Work.FORWARD: forward,
        Work.BACKWARD_INPUT: backward_input,
        Work.BACKWARD_WEIGHT: backward_weight,
        Work.BACKWARD: backward_input + backward_weight,
    }
    rows = table.compute_rows
    times = simulate_rows(rows, table.stage_to_rank, costs, send, table.name)
    return Timeline(
        tuple(
            tuple(
                TimedAction(*action, start_s=start, end_s=end)
                for action, (start, end) in zip(row, spans, strict=True)
            )
            for row, spans in zip(rows, times, strict=True)
        ),
        table.name,
    )


def peak_live(table: ScheduleTable) -> list[int]:
    """For each rank, the most (stage, microbatch) pairs whose activations it holds at once.

    They are held from the forward until the gradients of the weights are there.
    """
    return [_peak(row) for row in ([action.work for action in row] for row in table.compute_rows)]


def _peak(works: Sequence[Work]) -> int:
    live = peak = 0
    for work in works:
        if work is Work.FORWARD:
            live += 1
            peak = max(peak, live)
        elif work in (Work.BACKWARD, Work.BACKWARD_WEIGHT):
            live -= 1
    return peak

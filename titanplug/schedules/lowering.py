"""From the order of computations to a program with messages, by running the order in simulated time.

A message is put into both rows at the moment when its sender has computed it, so there is one global order
of all computations and messages that every row agrees with. Whoever works through the rows can't get stuck:
neither with operations that are serialised for each pair of ranks (NCCL), nor with sends and receives that
block until the other end is there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import islice
from typing import TypeAlias

from titanplug.errors import ConfigError
from titanplug.schedules.actions import Action, Rows, Work

UNIT_COSTS: Mapping[Work, float] = {
    Work.FORWARD: 1,
    Work.BACKWARD_INPUT: 1,
    Work.BACKWARD_WEIGHT: 1,
    Work.BACKWARD: 2,
}
"""Costs under which the published schedules are drawn."""

_Result: TypeAlias = tuple[int, Work, int]


def simulate_rows(
    rows: Rows,
    stage_to_rank: Sequence[int],
    costs: Mapping[Work, float] = UNIT_COSTS,
    send: float = 0,
    name: str = "schedule",
) -> list[list[tuple[float, float]]]:
    """When each computation starts and ends if every rank starts its next one as early as it can.

    Args:
        rows: for each rank its computations in order, without messages.
        stage_to_rank: by stage, the rank that holds it.
        costs: what each kind of computation takes.
        send: how long a message takes to another rank; computing goes on meanwhile.
        name: of the schedule, for the error.

    Returns:
        For each rank the (start, end) of its computations.

    Raises:
        ConfigError: the order can't run; the message says what waits for what.
    """
    num_stages = len(stage_to_rank)
    ends: dict[_Result, float] = {}
    times: list[list[tuple[float, float]]] = [[] for _ in rows]
    free = [0.0 for _ in rows]
    remaining = sum(map(len, rows))
    while remaining:
        before = remaining
        for rank, row in enumerate(rows):
            for action in islice(row, len(times[rank]), None):
                needed = _needs(action, num_stages)
                if any(result not in ends for result in needed):
                    break
                arrivals = [
                    ends[result] + (send if stage_to_rank[result[0]] != rank else 0) for result in needed
                ]
                start = max(free[rank], *arrivals) if arrivals else free[rank]
                free[rank] = ends[_result(action)] = start + costs[action.work]
                times[rank].append((start, free[rank]))
                remaining -= 1
        if remaining == before:
            raise ConfigError(_stuck(name, rows, times, ends, stage_to_rank))
    return times


def add_messages(rows: Rows, stage_to_rank: Sequence[int], name: str = "schedule") -> Rows:
    """The rows with a SEND after each computation whose result another rank needs, and its RECV there.

    Neighbouring stages on one rank exchange no message. The gradient of the input is sent after the backward
    for the input, before the one for the weights.

    Args:
        rows: for each rank its computations in order.
        stage_to_rank: by stage, the rank that holds it.
        name: of the schedule, for the error.

    Raises:
        ConfigError: the order can't run; the message says what waits for what.
    """
    times = simulate_rows(rows, stage_to_rank, name=name)
    # Sorted by time; at one time messages come before the computations that start then. Messages of one time
    # are in the order of their senders everywhere, and a sender's are apart in time.
    timed: list[list[tuple[float, int, int, Action]]] = [[] for _ in rows]
    for rank, row in enumerate(rows):
        for action, (start, end) in zip(row, times[rank], strict=True):
            timed[rank].append((start, 1, rank, action))
            for holder, message in _messages(action, stage_to_rank):
                timed[holder].append((end, 0, rank, message))
    return tuple(tuple(action for *_, action in sorted(events, key=lambda e: e[:3])) for events in timed)


def _messages(action: Action, stage_to_rank: Sequence[int]) -> list[tuple[int, Action]]:
    """The two ends of the message that follows a computation, each with its rank."""
    stage, work, microbatch = action
    if work is Work.FORWARD:
        peer, send, receive = stage + 1, Work.SEND_F, Work.RECV_F
    elif work in (Work.BACKWARD, Work.BACKWARD_INPUT):
        peer, send, receive = stage - 1, Work.SEND_B, Work.RECV_B
    else:
        return []
    if not 0 <= peer < len(stage_to_rank) or stage_to_rank[peer] == stage_to_rank[stage]:
        return []
    return [
        (stage_to_rank[stage], Action(stage, send, microbatch)),
        (stage_to_rank[peer], Action(peer, receive, microbatch)),
    ]


def _result(action: Action) -> _Result:
    """What an action leaves for others; both backwards leave the gradient of the input."""
    work = Work.BACKWARD_INPUT if action.work is Work.BACKWARD else action.work
    return action.stage, work, action.microbatch


def _needs(action: Action, num_stages: int) -> list[_Result]:
    stage, work, microbatch = action
    if work is Work.FORWARD:
        return [(stage - 1, Work.FORWARD, microbatch)] if stage else []
    if work is Work.BACKWARD_WEIGHT:
        return [(stage, Work.BACKWARD_INPUT, microbatch)]
    needed = [(stage, Work.FORWARD, microbatch)]
    if stage < num_stages - 1:
        needed.append((stage + 1, Work.BACKWARD_INPUT, microbatch))
    return needed


def _stuck(
    name: str,
    rows: Rows,
    times: list[list[tuple[float, float]]],
    ends: Mapping[_Result, float],
    stage_to_rank: Sequence[int],
) -> str:
    waits = []
    for rank, row in enumerate(rows):
        if len(times[rank]) < len(row):
            action = row[len(times[rank])]
            missing = next(item for item in _needs(action, len(stage_to_rank)) if item not in ends)
            holder = stage_to_rank[missing[0]]
            where = (
                "comes later in its row" if holder == rank else f"is further on in the row of rank {holder}"
            )
            waits.append(f"rank {rank} waits at {action} for {_shown(missing, rows[holder])}, which {where}")
    return (
        f"{name} can't run in this order: {'; '.join(waits)}. A forward needs the forward of the stage "
        "before, a backward its own forward and the backward of the next stage, W its I. Put these first."
    )


def _shown(result: _Result, row: Sequence[Action]) -> str:
    # The one of B and I that the table has.
    return next((str(action) for action in row if _result(action) == result), str(Action(*result)))

"""Simulated pipelines against the published formulas for bubbles and for what is alive at once."""

from __future__ import annotations

from fractions import Fraction
from itertools import pairwise

import pytest

from titanplug.schedules.catalogue import SCHEDULES, Action, ScheduleTable, Work, build_table
from titanplug.schedules.evaluation import forward_table
from titanplug.schedules.simulate import TimedAction, Timeline, peak_live, simulate

SIZES = [(2, 8), (4, 8), (4, 16), (8, 32)]  # ranks, microbatches
ZERO_BUBBLE = ("InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")


def bubble(table: ScheduleTable, *costs: int) -> Fraction:
    """The bubble fraction of whole-numbered costs as the fraction that it is."""
    return Fraction(simulate(table, *costs).bubble_fraction).limit_denominator(10_000)


def over_ideal(fraction: Fraction) -> Fraction:
    """Idle over working time from idle over all time."""
    return fraction / (1 - fraction)


@pytest.mark.parametrize(("p", "m"), SIZES)
@pytest.mark.parametrize("costs", [(1, 1, 1), (2, 3, 1), (1, 2, 2)])
def test_bubble_of_one_stage_on_each_rank(p: int, m: int, costs: tuple[int, int, int]) -> None:
    for name in ("GPipe", "1F1B"):
        assert bubble(build_table(name, p, m), *costs) == Fraction(p - 1, m + p - 1)


@pytest.mark.parametrize(("p", "m"), SIZES)
@pytest.mark.parametrize("v", [2, 3, 4])
def test_bubble_of_interleaved_stages(p: int, m: int, v: int) -> None:
    for name in ("Interleaved1F1B", "LoopedBFS"):
        assert bubble(build_table(name, p, m, v)) == Fraction(p - 1, v * m + p - 1)
        assert bubble(build_table(name, p, m, v), 2, 3, 1) == Fraction(p - 1, v * m + p - 1)


@pytest.mark.parametrize(("p", "m"), SIZES)
def test_bubble_of_zero_bubble_schedules(p: int, m: int) -> None:
    one_f_one_b = bubble(build_table("1F1B", p, m))
    interleaved = bubble(build_table("Interleaved1F1B", p, m, 2))
    for name in ZERO_BUBBLE:
        table = build_table(name, p, m)
        assert over_ideal(bubble(table)) == Fraction(p - 1, 3 * 2 * m)
        assert bubble(table) < interleaved < one_f_one_b
        assert bubble(table, 2, 3, 1) < bubble(build_table("1F1B", p, m), 2, 3, 1)
    for name in ZERO_BUBBLE[:2]:
        f, i, w = 2, 3, 1
        expected = Fraction((p - 1) * (f + i - w), 2 * m * (f + i + w))
        assert over_ideal(bubble(build_table(name, p, m), f, i, w)) == expected
    # One stage on each rank is the ZB1P of the paper.
    assert over_ideal(bubble(build_table("InterleavedZeroBubble", p, m, 1))) == Fraction(p - 1, 3 * m)


@pytest.mark.parametrize(("p", "m"), SIZES)
def test_alive_at_once(p: int, m: int) -> None:
    assert peak_live(build_table("GPipe", p, m)) == [m] * p
    assert peak_live(build_table("LoopedBFS", p, m, 2)) == [2 * m] * p
    assert peak_live(build_table("1F1B", p, m)) == [p - rank for rank in range(p)]
    for v in (2, 3):
        expected = [2 * (p - rank - 1) + (v - 1) * p + 1 for rank in range(p)]
        assert peak_live(build_table("Interleaved1F1B", p, m, v)) == [min(n, v * m) for n in expected]
    # Activations are kept until the weights are done.
    assert peak_live(build_table("InterleavedZeroBubble", p, m, 2)) == [2 * p] * p
    assert peak_live(build_table("ZBVZeroBubble", p, m)) == [2 * p] * p
    assert peak_live(build_table("DualPipeV", p, m)) == [2 * p + 1] * p


def test_a_timeline_in_full() -> None:
    timeline = simulate(build_table("1F1B", 2, 2), forward=1, backward_input=2, backward_weight=1)
    assert timeline.rows == (
        (
            TimedAction(0, Work.FORWARD, 0, 0, 1),
            TimedAction(0, Work.FORWARD, 1, 1, 2),
            TimedAction(0, Work.BACKWARD, 0, 5, 8),
            TimedAction(0, Work.BACKWARD, 1, 9, 12),
        ),
        (
            TimedAction(1, Work.FORWARD, 0, 1, 2),
            TimedAction(1, Work.BACKWARD, 0, 2, 5),
            TimedAction(1, Work.FORWARD, 1, 5, 6),
            TimedAction(1, Work.BACKWARD, 1, 6, 9),
        ),
    )
    assert timeline.name == "1F1B"
    assert (timeline.start_s, timeline.duration_s, timeline.idle_s) == (0, 12, [4, 4])
    assert timeline.bubble_fraction == pytest.approx(1 / 3)


def test_messages_take_time_between_ranks_only() -> None:
    # There and back over one border, for the first microbatch and after the last.
    assert simulate(build_table("1F1B", 2, 1 + 1), send=0.5).duration_s == 6 + 3 + 2 * 0.5
    v_shaped = simulate(build_table("ZBVZeroBubble", 1, 4), send=100)
    assert v_shaped.bubble_fraction == 0
    for name in SCHEDULES:
        table = build_table(name, 4, 8)
        assert simulate(table, send=0.25).duration_s > simulate(table).duration_s
        assert simulate(table, send=0.0).rows == simulate(table).rows


@pytest.mark.parametrize("name", SCHEDULES)
def test_simulated_ranks_do_one_thing_at_a_time_in_order(name: str) -> None:
    table = build_table(name, 4, 8)
    ends: dict[Action, float] = {}
    rows = simulate(table, 1.5, 1.0, 0.5, send=0.1).rows
    for row, actions in zip(rows, table.compute_rows, strict=True):
        assert [(event.stage, event.work, event.microbatch) for event in row] == [*actions]
        for before, event in pairwise(row):
            assert event.start_s >= before.end_s
        ends |= {Action(event.stage, event.work, event.microbatch): event.end_s for event in row}
    for row in rows:
        for event in row:
            if event.work is Work.FORWARD and event.stage:
                assert event.start_s >= ends[Action(event.stage - 1, Work.FORWARD, event.microbatch)]


def test_an_evaluation_is_simulated_too() -> None:
    stage_to_rank = build_table("Interleaved1F1B", 4, 8).stage_to_rank
    timeline = simulate(forward_table(stage_to_rank, 8))
    assert {event.work for row in timeline.rows for event in row} == {Work.FORWARD}
    assert timeline.duration_s >= 2 * 8 + 3


def test_measured_timelines_count_like_simulated_ones() -> None:
    first = (TimedAction(0, Work.FORWARD, 0, 100.0, 101.0), TimedAction(0, Work.BACKWARD, 0, 103.0, 104.0))
    second = (TimedAction(1, Work.FORWARD, 0, 101.0, 102.0), TimedAction(1, Work.BACKWARD, 0, 102.0, 103.0))
    timeline = Timeline((first, second))
    assert (timeline.start_s, timeline.duration_s, timeline.idle_s) == (100, 4, [2, 2])
    assert timeline.bubble_fraction == 0.5
    assert Timeline(()).bubble_fraction == Timeline(((), ())).bubble_fraction == 0

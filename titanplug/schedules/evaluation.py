"""The order in which an evaluation runs through the stages: forwards only, any number of microbatches."""

from __future__ import annotations

from functools import cache

from titanplug.schedules.actions import Action, ScheduleTable, Work, stages_of
from titanplug.schedules.lowering import add_messages


@cache
def forward_table(stage_to_rank: tuple[int, ...], num_microbatches: int) -> ScheduleTable:
    """Every rank runs all microbatches through a stage, then through its next one (breadth first).

    Without backwards nothing has to be freed early, so this leaves ranks idle as little as any order, and
    the rules of training schedules for the number of microbatches don't apply.

    Args:
        stage_to_rank: by stage, the rank that holds it.
        num_microbatches: parts of a batch, at least 1.
    """
    num_ranks = max(stage_to_rank) + 1
    rows = tuple(
        tuple(
            Action(stage, Work.FORWARD, microbatch)
            for stage in stages_of(stage_to_rank, rank)
            for microbatch in range(num_microbatches)
        )
        for rank in range(num_ranks)
    )
    messages = add_messages(rows, stage_to_rank, "evaluation")
    return ScheduleTable(
        "evaluation", num_ranks, len(stage_to_rank), num_microbatches, stage_to_rank, messages
    )

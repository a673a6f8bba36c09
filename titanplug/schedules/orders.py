"""The order of computations of each schedule, without messages.

GPipe, 1F1B and LoopedBFS are generated here. The others are taken from torch's schedule classes, which need
neither a process group nor a module for that.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

from titanplug.schedules.actions import Action, Rows, Work


def compute_order(name: str, num_ranks: int, num_microbatches: int, num_chunks: int) -> Rows:
    """For each rank its computations in order.

    Args:
        name: of the schedule, as torch spells it.
        num_ranks: ranks of the pipeline.
        num_microbatches: microbatches of a step, a number that the schedule can run.
        num_chunks: stages on each rank.
    """
    if name == "1F1B":
        return tuple(_one_f_one_b_row(rank, num_ranks, num_microbatches) for rank in range(num_ranks))
    if name in ("GPipe", "LoopedBFS"):
        return tuple(
            _breadth_first_row(range(rank, num_ranks * num_chunks, num_ranks), num_microbatches)
            for rank in range(num_ranks)
        )
    return _torch_rows(name, num_ranks, num_microbatches, num_chunks)


def _breadth_first_row(stages: range, num_microbatches: int) -> tuple[Action, ...]:
    # Backwards start with the microbatch whose forward was last: what it needs was used most recently.
    return (
        *(Action(stage, Work.FORWARD, item) for stage in stages for item in range(num_microbatches)),
        *(
            Action(stage, Work.BACKWARD, item)
            for stage in reversed(stages)
            for item in reversed(range(num_microbatches))
        ),
    )


def _one_f_one_b_row(stage: int, num_ranks: int, num_microbatches: int) -> tuple[Action, ...]:
    warmup = num_ranks - 1 - stage
    row = [Action(stage, Work.FORWARD, item) for item in range(warmup)]
    for item in range(num_microbatches):
        if item + warmup < num_microbatches:
            row.append(Action(stage, Work.FORWARD, item + warmup))
        row.append(Action(stage, Work.BACKWARD, item))
    return tuple(row)


def _torch_rows(name: str, num_ranks: int, num_microbatches: int, num_chunks: int) -> Rows:
    """The order of computations of one of torch's schedule classes."""
    from torch.distributed.pipelining.schedules import get_schedule_class

    # What the classes read of a stage before they work out the order.
    stages: list[Any] = [
        SimpleNamespace(
            num_stages=num_ranks * num_chunks,
            group_size=num_ranks,
            group_rank=0,
            stage_index=chunk * num_ranks,
            is_last=False,
            submod=None,
        )
        for chunk in range(num_chunks)
    ]
    with _quiet("torch.distributed.pipelining.schedules"):
        order = get_schedule_class(name)(stages, num_microbatches).pipeline_order
    return tuple(
        tuple(
            _action(part) for cell in order[rank] if cell is not None for part in cell.sub_actions or (cell,)
        )
        for rank in range(num_ranks)
    )


def _action(cell: Any) -> Action:
    return Action(cell.stage_index, Work(cell.computation_type.value), cell.microbatch_index)


@contextmanager
def _quiet(logger_name: str) -> Iterator[None]:
    logger = logging.getLogger(logger_name)
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)

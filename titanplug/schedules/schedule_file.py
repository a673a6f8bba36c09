"""Schedules as files in torch's format: a line for each rank, cells like ``0F0``, ``1B2``, ``0I3``."""

from __future__ import annotations

import csv
import functools
import io
import re
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

from titanplug.errors import ConfigError
from titanplug.schedules.actions import Action, Rows, ScheduleTable, Work
from titanplug.schedules.lowering import add_messages

_CELL = re.compile(r"([0-9]{1,9})(F|B|I|W)([0-9]{1,9})")
_OVERLAPPED = re.compile(r"\((.*)\)OVERLAP_F_B")
_EACH_ONCE = (Work.FORWARD, Work.BACKWARD_INPUT, Work.BACKWARD_WEIGHT)
_SHOWN_PROBLEMS = 8


class _Cell(NamedTuple):
    line: int
    column: int
    action: Action

    def __str__(self) -> str:
        return f"line {self.line}, cell {self.column} ({self.action})"


def write_csv(table: ScheduleTable, path: str | Path) -> None:
    """Write the computations of a table in torch's format; the messages follow from them.

    Args:
        table: to write.
        path: of the file, which is replaced.
    """
    with Path(path).open("w", newline="") as file:
        csv.writer(file).writerows([str(action) for action in row] for row in table.compute_rows)


@functools.cache
def parse_csv(text: str, name: str) -> ScheduleTable:
    """The table of a file. Its stages and microbatches are those of its cells.

    Args:
        text: content of the file.
        name: of the table, and of the file in errors.

    Raises:
        ConfigError: a cell isn't a computation, a stage is on two ranks, a microbatch is missing or there
            twice, or the order can't run.
    """
    rows, problems = _read_cells(text)
    if not problems:
        problems = _count_problems(rows) if any(rows) else ["it has no cells"]
    if problems:
        shown = problems[:_SHOWN_PROBLEMS]
        more = len(problems) - len(shown)
        raise ConfigError(
            f"{name}: {'; '.join(shown)}{f'; and {more} more' if more else ''}. A schedule has a line for "
            "each rank with cells like 0F0 (stage, F, B, I or W, microbatch): each stage on one rank, as "
            "many on each rank, with one F for each microbatch and one B, or one I and one W. Correct "
            "the file."
        )
    actions: Rows = tuple(tuple(cell.action for cell in row) for row in rows)
    holders = {cell.action.stage: rank for rank, row in enumerate(rows) for cell in row}
    stage_to_rank = tuple(holders[stage] for stage in range(len(holders)))
    num_microbatches = 1 + max(cell.action.microbatch for row in rows for cell in row)
    return ScheduleTable(
        name,
        len(rows),
        len(holders),
        num_microbatches,
        stage_to_rank,
        add_messages(actions, stage_to_rank, name),
    )


def _read_cells(text: str) -> tuple[list[list[_Cell]], list[str]]:
    """The cells of each line, and what can't be read."""
    lines = list(csv.reader(io.StringIO(text)))
    while lines and not any(cell.strip() for cell in lines[-1]):
        lines.pop()  # empty lines at the end are no ranks
    rows: list[list[_Cell]] = []
    problems = []
    for line, cells in enumerate(lines, start=1):
        row: list[_Cell] = []
        for column, written in enumerate(map(str.strip, cells), start=1):
            overlapped = _OVERLAPPED.fullmatch(written)  # what torch writes for DualPipeV
            for part in overlapped[1].split(";") if overlapped else [written] if written else []:
                match = _CELL.fullmatch(part.strip())
                if match is None:
                    problems.append(f"line {line}, cell {column} ({written!r}) isn't a computation")
                    break
                row.append(_Cell(line, column, Action(int(match[1]), Work(match[2]), int(match[3]))))
        rows.append(row)
    return rows, problems


def _count_problems(rows: list[list[_Cell]]) -> list[str]:
    """What is there twice, on two ranks or missing."""
    problems = []
    holders: dict[int, int] = {}
    first: dict[tuple[int, Work, int], _Cell] = {}
    stages: dict[int, set[int]] = defaultdict(set)
    for rank, row in enumerate(rows):
        for cell in row:
            stage, work, microbatch = cell.action
            if holders.setdefault(stage, rank) != rank:
                problems.append(f"{cell}: stage {stage} is already on rank {holders[stage]}")
            # A whole backward is the one for the input and the one for the weights.
            for part in _EACH_ONCE[1:] if work is Work.BACKWARD else (work,):
                known = first.setdefault((stage, part, microbatch), cell)
                if known is not cell:
                    problems.append(f"{cell} does again what {known} does")
                    break
            stages[rank].add(stage)
    microbatches = {microbatch for *_, microbatch in first}
    for what, numbers in (("stage", set(holders)), ("microbatch", microbatches)):
        gap = next(number for number in range(len(numbers) + 1) if number not in numbers)
        if gap < len(numbers):
            problems.append(f"{what} {gap} is missing, {what} {max(numbers)} is there")
    for stage in sorted(holders):
        for microbatch in sorted(microbatches):
            done = [work for work in _EACH_ONCE if (stage, work, microbatch) in first]
            missing = [work.value for work in _EACH_ONCE if work not in done]
            if missing[-2:] == ["I", "W"]:
                missing[-2:] = ["B"]
            problems += [f"{stage}{letter}{microbatch} is missing" for letter in missing]
    counts = {len(stages[rank]) for rank in range(len(rows))}
    if len(counts) > 1 and not problems:
        problems.append("ranks have different numbers of stages")
    return problems

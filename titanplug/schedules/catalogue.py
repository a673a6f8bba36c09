"""The pipeline schedules: their names, what each can run, and their tables.

A schedule is named as in torch; a path that ends in ``.csv`` is a schedule of one's own.
"""

from __future__ import annotations

import functools
from itertools import count, islice
from pathlib import Path

from titanplug.errors import ConfigError
from titanplug.schedules.actions import COMPUTE, SENDS, Action, ScheduleTable, Work
from titanplug.schedules.lowering import add_messages
from titanplug.schedules.orders import compute_order
from titanplug.schedules.schedule_file import parse_csv, write_csv

__all__ = [
    "COMPUTE",
    "SCHEDULES",
    "SENDS",
    "Action",
    "ScheduleTable",
    "Work",
    "build_table",
    "chunks_per_rank",
    "default_microbatches",
    "resolve_schedule",
    "schedule_problems",
    "stage_to_rank",
    "write_csv",
]

SCHEDULES = (
    "GPipe",  # https://arxiv.org/abs/1811.06965
    "1F1B",  # https://arxiv.org/abs/1806.03377
    "Interleaved1F1B",  # https://arxiv.org/abs/2104.04473
    "LoopedBFS",  # https://arxiv.org/abs/2211.05953
    "InterleavedZeroBubble",  # https://arxiv.org/abs/2401.10241
    "ZBVZeroBubble",  # the same, section 6
    "DualPipeV",  # https://arxiv.org/abs/2412.19437
)
"""The schedules by torch's names."""

_ONE_CHUNK = ("GPipe", "1F1B")
_V_SHAPED = ("ZBVZeroBubble", "DualPipeV")
_IN_ROUNDS = ("Interleaved1F1B", "InterleavedZeroBubble")
_ALIASES = {"onefoneb": "1F1B", "zbv": "ZBVZeroBubble", "interleavedonefoneb": "Interleaved1F1B"}


def resolve_schedule(name: str) -> str:
    """The name of a schedule in torch's spelling.

    Args:
        name: in any spelling: case, ``_``, ``-``, spaces and a leading "Schedule" make no difference. A path
            that ends in ``.csv`` stays as it is.

    Raises:
        ConfigError: there is no such schedule; the message lists the names.
    """
    if _is_file(name):
        return name
    known = {schedule.lower(): schedule for schedule in SCHEDULES} | _ALIASES
    plain = "".join(letter for letter in str(name).lower() if letter not in "_- ").removeprefix("schedule")
    if plain not in known:
        raise ConfigError(
            f"pp_schedule={name!r}: there is no such schedule. Use one of {', '.join(SCHEDULES)} (case, '_' "
            "and '-' make no difference), or the path of a table that ends in .csv."
        )
    return known[plain]


def chunks_per_rank(name: str, given: int | None) -> int:
    """How many stages each rank holds.

    Args:
        name: of the schedule, in any spelling.
        given: the number asked for; None is the usual one, 2 where the schedule leaves a choice.

    Raises:
        ConfigError: the schedule can't have that many.
    """
    name = resolve_schedule(name)
    problems = _chunk_problems(name, given)
    if problems:
        raise ConfigError(problems)
    return _fixed_chunks(name) or given or 2


def stage_to_rank(name: str, num_ranks: int, num_chunks: int) -> tuple[int, ...]:
    """By stage, the rank that holds it: in turn, or down and up again for the V-shaped schedules.

    Args:
        name: of the schedule, in any spelling.
        num_ranks: ranks of the pipeline.
        num_chunks: stages on each rank.
    """
    name = resolve_schedule(name)
    if _is_file(name):
        return _file_table(name).stage_to_rank
    if name in _V_SHAPED:
        return (*range(num_ranks), *reversed(range(num_ranks)))
    return tuple(stage % num_ranks for stage in range(num_ranks * num_chunks))


def schedule_problems(
    name: str, num_ranks: int, num_chunks: int | None, num_microbatches: int | None
) -> list[str]:
    """What keeps a schedule from running, one message for each wrong value. No table is built.

    Args:
        name: of the schedule, in any spelling.
        num_ranks: ranks of the pipeline.
        num_chunks: stages on each rank; None is the usual number.
        num_microbatches: microbatches of a step; None is not checked.
    """
    try:
        name = resolve_schedule(name)
        table = _file_table(name) if _is_file(name) else None
    except ConfigError as error:
        return list(error.problems)
    if not _is_count(num_ranks):
        return [f"pp={num_ranks!r}: a pipeline has at least one rank. Set pp to a number from 1."]
    problems = _chunk_problems(name, num_chunks)
    if table is not None and table.num_ranks != num_ranks:
        problems.append(
            f"pp={num_ranks} with {name}: the table has a row for each of {table.num_ranks} ranks. Use "
            f"pp={table.num_ranks} or another table."
        )
    if num_microbatches is not None:
        problems += _microbatch_problems(name, num_ranks, num_microbatches)
    return problems


def default_microbatches(name: str, num_ranks: int) -> int:
    """A number of microbatches that the schedule can run and that keeps the pipeline fairly full."""
    name = resolve_schedule(name)
    # Two for each rank is allowed everywhere, and the least that DualPipeV takes.
    return _file_table(name).num_microbatches if _is_file(name) else 2 * num_ranks


def build_table(
    schedule: str, num_ranks: int, num_microbatches: int, num_chunks: int | None = None
) -> ScheduleTable:
    """The table of a schedule. Equal arguments give the same object.

    Args:
        schedule: its name in any spelling, or the path of a ``.csv`` file.
        num_ranks: ranks of the pipeline.
        num_microbatches: microbatches of a step.
        num_chunks: stages on each rank; None is the usual number.

    Raises:
        ConfigError: the schedule can't run with these numbers, or the file isn't a schedule.
    """
    problems = schedule_problems(schedule, num_ranks, num_chunks, num_microbatches)
    if problems:
        raise ConfigError(problems)
    name = resolve_schedule(schedule)
    if _is_file(name):
        return _file_table(name)
    return _named_table(name, num_ranks, num_microbatches, chunks_per_rank(name, num_chunks))


@functools.cache
def _named_table(name: str, num_ranks: int, num_microbatches: int, num_chunks: int) -> ScheduleTable:
    holders = stage_to_rank(name, num_ranks, num_chunks)
    order = compute_order(name, num_ranks, num_microbatches, num_chunks)
    rows = add_messages(order, holders, name)
    return ScheduleTable(name, num_ranks, len(holders), num_microbatches, holders, rows)


def _is_file(name: str) -> bool:
    return str(name).lower().endswith(".csv")


def _file_table(path: str) -> ScheduleTable:
    # Read each time, so a file that was changed is another table; the text is the key of the cache.
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"pp_schedule={path!r}: the file can't be read ({error}). Give the path of a table as text, one "
            "row for each rank with cells like 0F0, 0B0."
        ) from error
    return parse_csv(text, path)


def _is_count(number: object) -> bool:
    return isinstance(number, int) and not isinstance(number, bool) and number >= 1


def _fixed_chunks(name: str) -> int | None:
    """Stages on each rank where the schedule leaves no choice."""
    if _is_file(name):
        table = _file_table(name)
        return table.num_stages // table.num_ranks
    return 1 if name in _ONE_CHUNK else 2 if name in _V_SHAPED else None


def _chunk_problems(name: str, given: int | None) -> list[str]:
    fixed = _fixed_chunks(name)
    if given is None or given == fixed:
        return []
    if fixed is not None:
        other = ", or Interleaved1F1B or LoopedBFS for several" if name in _ONE_CHUNK else ""
        return [
            f"pp_chunks={given!r} with {name}: it has exactly {fixed} stage{'s' * (fixed > 1)} on each rank. "
            f"Use pp_chunks={fixed} or leave it out{other}."
        ]
    if not _is_count(given):
        return [
            f"pp_chunks={given!r} with {name}: it is the number of stages on each rank, an integer of at "
            "least 1. The usual one is 2."
        ]
    return []


def _microbatch_problems(name: str, num_ranks: int, given: int) -> list[str]:
    asked = f"pp_microbatches={given!r} with {name} and pp={num_ranks}"
    if not _is_count(given):
        return [f"{asked}: a step has at least one microbatch. Use {default_microbatches(name, num_ranks)}."]
    if _is_file(name):
        only = _file_table(name).num_microbatches
        return [] if given == only else [f"{asked}: the table is for {only} microbatches. Use {only}."]
    least = {"1F1B": num_ranks, "DualPipeV": 2 * num_ranks}.get(name, 1)
    if given < least:
        return [
            f"{asked}: it needs at least as many microbatches as stages, here {least}. Use {least} or more, "
            "or GPipe, which takes any number."
        ]
    if name in _IN_ROUNDS and not _fits_rounds(given, num_ranks):
        # A multiple of pp is never far, so these stop soon.
        below = islice((n for n in range(given, 0, -1) if _fits_rounds(n, num_ranks)), 2)
        above = islice((n for n in count(given) if _fits_rounds(n, num_ranks)), 2)
        return [
            f"{asked}: microbatches run in {given // num_ranks} rounds here (microbatches // pp) of equal "
            f"size, so that number must divide them; multiples of pp always fit. Allowed near {given}: "
            f"{', '.join(map(str, [*reversed([*below]), *above]))}."
        ]
    return []


def _fits_rounds(num_microbatches: int, num_ranks: int) -> bool:
    return num_microbatches % max(1, num_microbatches // num_ranks) == 0

"""``titanplug schedule``: what pipeline schedules cost, as a table, pictures and tables to change."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from titanplug.errors import ConfigError
from titanplug.schedules.catalogue import (
    SCHEDULES,
    build_table,
    default_microbatches,
    resolve_schedule,
    write_csv,
)
from titanplug.schedules.simulate import peak_live, simulate

_EXAMPLES = """\
examples:
  titanplug schedule --pp 4 --microbatches 8                   compare all schedules
  titanplug schedule 1f1b --pp 4 --microbatches 8 --picture 1f1b.svg
  titanplug schedule 1f1b --pp 4 --microbatches 8 --csv mine.csv   a table to change: pp_schedule=mine.csv
"""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(
        prog="titanplug schedule",
        description="What pipeline schedules cost: bubble, messages, live activations. Starts nothing.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("names", nargs="*", help=f"{', '.join(SCHEDULES)}, or a CSV file; all by default")
    parser.add_argument("--pp", type=int, default=4, help="ranks of the pipeline (4)")
    parser.add_argument("--microbatches", type=int, help="parts of a batch; about twice pp by default")
    parser.add_argument("--chunks", type=int, help="stages of a rank, where the schedule leaves a choice")
    parser.add_argument(
        "--costs",
        type=float,
        nargs=3,
        default=(1.0, 1.0, 1.0),
        metavar=("F", "I", "W"),
        help="time of forward, backward of the input, backward of the weights (1 1 1)",
    )
    parser.add_argument("--picture", type=Path, help="draw the timeline here, .png or .svg (one schedule)")
    parser.add_argument("--csv", type=Path, help="write the table here (one schedule)")
    given = parser.parse_args(arguments)
    names = given.names or list(SCHEDULES)
    if len(names) > 1 and (given.picture or given.csv):
        parser.error("--picture and --csv are for one schedule: name it.")
    try:
        _show(names, given)
    except ConfigError as error:
        parser.exit(2, f"titanplug schedule: {error}\n")


def _show(names: Sequence[str], given: argparse.Namespace) -> None:
    columns = f"{'schedule':22} {'stages':>6} {'microbatches':>12} {'bubble':>7} {'messages':>8}"
    print(f"{columns}  live chunks by rank")
    for name in names:
        resolved = resolve_schedule(name)
        number = given.microbatches or default_microbatches(resolved, given.pp)
        try:
            table = build_table(resolved, given.pp, number, given.chunks)
        except ConfigError as error:
            if len(names) == 1:
                raise
            print(f"{resolved:22} {error.problems[0]}")
            continue
        timeline = simulate(table, *given.costs)
        live = ", ".join(map(str, peak_live(table)))
        print(
            f"{resolved:22} {table.num_stages:6d} {number:12d} {timeline.bubble_fraction:7.1%} "
            f"{table.num_messages:8d}  {live}"
        )
        if given.picture:
            from titanplug.report.timeline import draw_timeline

            draw_timeline(timeline, given.picture, title=f"{resolved}, pp={given.pp}, {number} microbatches")
        if given.csv:
            write_csv(table, given.csv)


if __name__ == "__main__":
    main()

"""Finished and other runs in their folders, as a table. Needs neither torch nor matplotlib."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from titanplug.config.layout import AXES
from titanplug.resume import METRICS_FILE
from titanplug.run_status import STATUS_FILE, Status, read_status

CURVE_FILE = "loss_curve.csv"

MEASURED = ("tokens_per_s", "memory_gib", "seconds", "steps")
"""Values of every run, beside its final ones."""

_SIGNS = (STATUS_FILE, METRICS_FILE, CURVE_FILE)
"""Any of these files makes a folder that of a run."""
_JUDGED_BY = ("val_loss", "test_loss", "train_loss", "loss")
_LAST_TO_GO = ("run", "state")
_FIRST_TO_GO = ("memory", "time", "steps", "layout", "tokens/s")
_SHORTENED = 14
"""Characters of an override's value that are shown where there is little room."""


@dataclass(frozen=True)
class Run:
    """A run in its folder.

    Args:
        folder: absolute.
        status: how it stands; of an older run what can be known.
        name: what it is called among the others.
    """

    folder: Path
    status: Status
    name: str

    @property
    def state(self) -> str:
        """As in the status; a run that was killed says "killed"."""
        if self.status.state == "running" and self.status.is_alive is False:
            return "killed"
        return self.status.state

    @property
    def overrides(self) -> dict[str, str]:
        """Values by key, as given."""
        parts = (item.partition("=") for item in self.status.overrides)
        return {key.lstrip("+"): value for key, _, value in parts}

    def value(self, name: str) -> float | None:
        """A final value, or what the status tells of speed, memory and time."""
        value = getattr(self.status, name) if name in MEASURED else self.status.metrics.get(name)
        return None if value is None else float(value)


def find_runs(paths: Sequence[Path]) -> list[Run]:
    """The runs in folders: of runs, of sweeps, or of both at any depth; in the order of their names."""
    folders = list(dict.fromkeys(folder for path in paths for folder in _folders(path.absolute())))
    names = _names(folders)
    return [Run(folder, _status(folder), name) for folder, name in zip(folders, names, strict=True)]


def _folders(path: Path) -> Iterator[Path]:
    if any((path / sign).is_file() for sign in _SIGNS):
        yield path
        return
    with contextlib.suppress(OSError):
        below = [item for item in path.iterdir() if _is_below(item)]
        for folder in sorted(below, key=lambda item: _natural(item.name)):
            yield from _folders(folder)


def _is_below(item: Path) -> bool:
    """Whether runs are looked for in it; links would lead to the same ones, or round in a circle."""
    return item.is_dir() and not item.is_symlink() and not item.name.startswith(".")


def _natural(name: str) -> list[Any]:
    """So that 10 comes after 9."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]


def _names(folders: Sequence[Path]) -> list[str]:
    """What tells folders apart: without the part of the path that all have."""
    if len(folders) < 2:
        return [folder.name for folder in folders]
    common = Path(os.path.commonpath(folders))
    names = [folder.relative_to(common) for folder in folders]
    last = {name.parts[-1] for name in names}
    first = {name.parts[0] for name in names}
    if len(first) == len(names) and len(last) < len(names):
        return [name.parts[0] for name in names]  # runs of other names
    return [str(name) for name in names]


def _status(folder: Path) -> Status:
    status = read_status(folder)
    if status is not None:
        return status
    metrics: dict[str, float] = {}
    with contextlib.suppress(OSError, ValueError):
        found = json.loads((folder / METRICS_FILE).read_text())
        metrics = found if isinstance(found, dict) else {}
    return Status(state="finished" if metrics else "unknown", metrics=metrics)


# --------------------------------------------------------------------------------------
# What runs are judged by
# --------------------------------------------------------------------------------------


def judged_by(runs: Iterable[Run]) -> str | None:
    """The value that runs are compared by, where none is asked for."""
    names = dict.fromkeys(name for run in runs for name in run.status.metrics)
    return next((name for name in _JUDGED_BY if name in names), next(iter(names), None))


def ordered(runs: Sequence[Run], key: str | None, descending: bool = False) -> list[Run]:
    """Finished runs by a value, the best first; then those that don't have it."""

    def place(run: Run) -> tuple[bool, bool, float]:
        value = None if key is None else run.value(key)
        known = value is not None and value == value  # NaN is no value to be ordered by
        number = 0.0 if value is None or not known else value
        return run.state != "finished", not known, -number if descending else number

    return sorted(runs, key=place)


def best(runs: Sequence[Run], key: str | None, descending: bool = False) -> Run | None:
    """The finished run with the best value."""
    first = next(iter(ordered(runs, key, descending)), None)
    if first is None or key is None or first.state != "finished":
        return None
    value = first.value(key)
    return first if value is not None and value == value else None


# --------------------------------------------------------------------------------------
# The table
# --------------------------------------------------------------------------------------


def print_table(folder: Path) -> None:
    """Print the runs below a folder; for the end of a sweep."""
    runs = find_runs([folder])
    if runs:
        print(f"\n{render(runs, judged_by(runs))}", flush=True)


def render(
    runs: Sequence[Run],
    key: str | None,
    *,
    metrics: Sequence[str] = (),
    descending: bool = False,
    width: int | None = None,
) -> str:
    """A table of runs, the best first, below it the errors and the best run.

    Args:
        runs: at least one.
        key: name of the value they are ordered by.
        metrics: names of further values.
        descending: the largest value is the best.
        width: characters of a line; None: as many as the terminal has; 0: as many as it takes.
    """
    common, varied = _split_overrides(runs)
    shown = ordered(runs, key, descending)
    rows = [_row(run, varied, [name for name in (key, *metrics) if name is not None]) for run in shown]
    limit = shutil.get_terminal_size((120, 24)).columns if width is None else width
    rows, left_out = _fit(rows, varied, limit)
    counts: dict[str, int] = {}
    for run in runs:
        counts[run.state] = counts.get(run.state, 0) + 1
    told = ", ".join(f"{number} {state}" for state, number in counts.items())
    lines = [f"{len(runs)} runs: {told}" if len(runs) > 1 else f"1 run: {told}"]
    if common and len(runs) > 1:
        lines.append(_cut("all with " + " ".join(f"{k}={v}" for k, v in common.items()), limit))
    lines += ["", *_lines(rows)]
    if left_out:
        lines.append(f"(without {', '.join(left_out)}: --wide shows all)")
    lines += _errors(shown, limit)
    winner = best(runs, key, descending)
    if winner is not None and len(runs) > 1:
        value = winner.value(str(key))
        lines += ["", f"Best {key}: {value:.6g}, run {winner.name}, in {_shown(winner.folder)}"]
        if winner.status.overrides:
            lines.append(f"  titanplug train {' '.join(map(_shell, winner.status.overrides))}")
    return "\n".join(lines)


def _split_overrides(runs: Sequence[Run]) -> tuple[dict[str, str], list[str]]:
    """Overrides that all runs have, and the keys of those that differ."""
    keys = dict.fromkeys(key for run in runs for key in run.overrides)
    same = {key for key in keys if len({run.overrides.get(key) for run in runs}) == 1}
    return {key: runs[0].overrides[key] for key in keys if key in same}, [k for k in keys if k not in same]


def label(run: Run, runs: Sequence[Run]) -> str:
    """What to call a run in a picture: its name, and what it was given that others weren't."""
    _, varied = _split_overrides(runs)
    values = [run.overrides[key] for key in varied if key in run.overrides]
    return f"{run.name}: {_cut(' '.join(values), 40)}" if values else run.name


def _row(run: Run, varied: Sequence[str], metrics: Sequence[str]) -> dict[str, str]:
    status = run.status
    row = {"run": run.name}
    row |= {key: run.overrides.get(key, "-") for key in varied}
    row |= {"state": run.state, "layout": _layout(status)}
    row["steps"] = "-" if status.steps is None else str(status.steps)
    for name in metrics:
        value = run.value(name)
        row[name] = "-" if value is None else f"{value:.5g}"
    row["tokens/s"] = "-" if status.tokens_per_s is None else f"{status.tokens_per_s:,.0f}"
    row["memory"] = "-" if status.memory_gib is None else f"{status.memory_gib:.2f} GiB"
    row["time"] = "-" if status.seconds is None else f"{status.seconds:.0f} s"
    return row


def _layout(status: Status) -> str:
    if status.layout is None:
        return "-"
    split = [f"{axis}{status.layout[axis]}" for axis in AXES if status.layout.get(axis, 1) != 1]
    return " ".join(split) or "1 process"


def _fit(
    rows: list[dict[str, str]], varied: Sequence[str], limit: int
) -> tuple[list[dict[str, str]], list[str]]:
    """Make rows as narrow as the terminal: shorten overrides, then leave columns out."""
    left_out: list[str] = []
    if limit and _width(rows) > limit:
        rows = [
            {key: _cut(value, _SHORTENED) if key in varied else value for key, value in row.items()}
            for row in rows
        ]
    for column in (*_FIRST_TO_GO, *[name for name in rows[0] if name not in (*_LAST_TO_GO, *varied)]):
        if not limit or _width(rows) <= limit:
            break
        if column in rows[0]:
            rows = [{key: value for key, value in row.items() if key != column} for row in rows]
            left_out.append(column)
    return rows, left_out


def _widths(rows: Sequence[dict[str, str]]) -> dict[str, int]:
    return {column: max(len(column), *(len(row[column]) for row in rows)) for column in rows[0]}


def _width(rows: Sequence[dict[str, str]]) -> int:
    return sum(_widths(rows).values()) + 2 * (len(rows[0]) - 1)


def _lines(rows: Sequence[dict[str, str]]) -> list[str]:
    widths = _widths(rows)
    numeric = {column for column in widths if all(re.match(r"[-\d]|nan|inf", row[column]) for row in rows)}

    def line(cells: dict[str, str]) -> str:
        parts = (
            cells[column].rjust(width) if column in numeric else cells[column].ljust(width)
            for column, width in widths.items()
        )
        return "  ".join(parts).rstrip()

    return [line({column: column for column in widths}), *(line(row) for row in rows)]


def _errors(runs: Sequence[Run], limit: int) -> list[str]:
    lines = []
    for run in runs:
        if run.state not in ("finished", "running") and run.status.error:
            text = " ".join(run.status.error.split())
            lines.append(_cut(f"  {run.name} {run.state}: {text}", 2 * limit))
    return ["", *lines] if lines else []


def _cut(text: str, width: int) -> str:
    return text if not width or len(text) <= width else f"{text[: width - 1]}…"


def _shell(override: str) -> str:
    return (
        override if re.fullmatch(r"[\w@%+=:,./-]+", override) else "'" + override.replace("'", "'\\''") + "'"
    )


def _shown(folder: Path) -> str:
    with contextlib.suppress(ValueError):
        return str(folder.relative_to(Path.cwd()))
    return str(folder)

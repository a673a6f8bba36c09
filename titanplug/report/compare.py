"""``titanplug compare``: runs, sweeps or folders of them in one table, one picture, and by numbers."""

from __future__ import annotations

import argparse
import csv
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from titanplug.errors import ConfigError
from titanplug.report.loss_curve import COLOURS, GREY, Curve
from titanplug.report.runs import CURVE_FILE, MEASURED, Run, find_runs, judged_by, label, ordered, render

_EXAMPLES = """\
  titanplug compare runs/quickstart/multirun_*                     a sweep, the best job first
  titanplug compare runs/a/* runs/b/* --picture both.png           loss curves over each other
  titanplug compare runs/layouts --sort tokens_per_s --descending
  titanplug compare runs/layouts --assert-close val_loss           exit code 1 where runs differ
"""

_FEW = 4
"""Runs whose curves are compared one by one."""
_COLOURED = 8
"""Curves that can be told apart by colour."""
_PALETTE = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000", "#8c6d1f")
"""Colours that people who see fewer can tell apart (Okabe and Ito 2008)."""
_BEST = 5


def read_curve(run: Path) -> Curve:
    """The first curve that a run has written, its training loss.

    Args:
        run: the folder of the run.

    Raises:
        ConfigError: the folder has no ``loss_curve.csv``, or one without values.
    """
    path = run / CURVE_FILE
    if not path.is_file():
        raise ConfigError(
            f"{run} has no {CURVE_FILE}: it is written at the end of a run by the callback loss_curve. Give "
            "the folders of runs that have ended."
        )
    with path.open(newline="") as file:
        head, *rows = [*csv.reader(file)] or [[]]
    if len(head) < 2:
        raise ConfigError(f"{path} is no table of a loss. Give the folder of another run.")
    _, title, *_ = head
    name, _, unit = title.removesuffix(")").partition(" (")
    curve = Curve(name, unit)
    for step, value, *_ in rows:
        curve.add(int(step), float(value) if value else None)
    if not curve.values:
        raise ConfigError(f"{path} has no values of {name!r}. Give the folder of another run.")
    return curve


def differences(curve: Curve, reference: Curve) -> Curve:
    """How far ``curve`` lies from ``reference``, at the steps that both have."""
    known = dict(zip(reference.steps, reference.values, strict=True))
    result = Curve("difference", curve.unit)
    for step, value in zip(curve.steps, curve.values, strict=True):
        if step in known:
            result.add(step, value - known[step])
    return result


# --------------------------------------------------------------------------------------
# Pictures
# --------------------------------------------------------------------------------------


def draw_comparison(curves: dict[str, Curve], path: Path) -> None:
    """Draw curves over each other; a few with how far each lies from the last, many with the best in colour.

    Args:
        curves: by what they are called; of many the best first.
        path: of the picture; its ending names the format.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.2, 5.2), layout="constrained")
    FigureCanvasAgg(figure)
    if 2 <= len(curves) <= _FEW:
        _draw_few(figure, curves)
    else:
        _draw_many(figure, curves)
    figure.savefig(path, dpi=130)


def _draw_few(figure: Any, curves: dict[str, Curve]) -> None:
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    *others, last = curves
    styles: dict[str, Any] = {"linewidth": 3.6, "alpha": 0.45}
    for i, (name, curve) in enumerate(curves.items()):
        colour = (*COLOURS, *_PALETTE[2:])[i]
        above.plot(curve.steps, curve.values, color=colour, label=name, **styles)
        styles = {"linewidth": 1.4, "linestyle": ("-", "--", ":")[(i + 1) % 3]}
    for i, name in enumerate(others):
        difference = differences(curves[name], curves[last])
        colour = (*COLOURS, *_PALETTE[2:])[i]
        below.plot(difference.steps, difference.values, color=colour, linewidth=1.4)
    above.set_ylabel(f"{curves[last].name}, {curves[last].unit}", color=GREY)
    above.legend(frameon=False)
    below.set_ylabel(f"difference to\n{last}", color=GREY)
    below.set_xlabel("optimizer step", color=GREY)
    for panel in (above, below):
        _clean(panel)


def _draw_many(figure: Any, curves: dict[str, Curve]) -> None:
    panel = figure.subplots()
    in_colour = list(curves)[: _COLOURED if len(curves) <= _COLOURED else _BEST]
    for name, curve in reversed(curves.items()):  # the best on top
        if name in in_colour:
            colour = _PALETTE[in_colour.index(name)]
            panel.plot(curve.steps, curve.values, color=colour, linewidth=1.8, label=name)
        else:
            panel.plot(curve.steps, curve.values, color="#b9c0c7", linewidth=0.8, alpha=0.7)
    first = next(iter(curves.values()))
    panel.set_ylabel(f"{first.name}, {first.unit}", color=GREY)
    panel.set_xlabel("optimizer step", color=GREY)
    handles, labels = panel.get_legend_handles_labels()
    rest = len(curves) - len(in_colour)
    title = f"the best {len(in_colour)}, grey: {rest} more" if rest else None
    panel.legend(
        handles[::-1],
        labels[::-1],
        frameon=False,
        fontsize=8,
        title=title,
        title_fontsize=8,
        alignment="left",
    )
    _clean(panel)


def _clean(panel: Any) -> None:
    panel.grid(axis="y", color="#dfe3e8", linewidth=0.8)
    panel.tick_params(colors=GREY, length=0)
    for side in ("top", "right", "left"):
        panel.spines[side].set_visible(False)


# --------------------------------------------------------------------------------------
# Files, and closeness
# --------------------------------------------------------------------------------------


def write_csv(runs: Sequence[Run], path: Path) -> None:
    """One row for each run; overrides and metrics are columns."""
    overrides = dict.fromkeys(key for run in runs for key in run.overrides)
    metrics = dict.fromkeys(key for run in runs for key in run.status.metrics)
    axes = dict.fromkeys(key for run in runs for key in run.status.layout or {})
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(
            ["run", "folder", "state", *overrides, *axes, *MEASURED, *metrics, "objective", "error"]
        )
        for run in runs:
            status = run.status
            cells = [run.name, run.folder, run.state]
            cells += [run.overrides.get(key, "") for key in overrides]
            cells += [(status.layout or {}).get(key, "") for key in axes]
            cells += [getattr(status, key) for key in MEASURED]
            cells += [status.metrics.get(key, "") for key in metrics]
            writer.writerow(
                ["" if cell is None else cell for cell in (*cells, status.objective, status.error)]
            )


def write_json(runs: Sequence[Run], path: Path) -> None:
    """The status of each run, with its folder; NaN and infinities are null."""
    rows = [
        {"run": run.name, "folder": str(run.folder), **asdict(run.status), "state": run.state} for run in runs
    ]
    path.write_text(json.dumps(_finite(rows), indent=2, allow_nan=False) + "\n")


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def not_close(runs: Sequence[Run], key: str, tolerance: float) -> str | None:
    """Why the runs don't agree on a final value, or None where they do.

    Args:
        runs: all must have finished and have the value.
        key: name of the value.
        tolerance: largest difference of two, as part of the larger.
    """
    missing = [run.name for run in runs if run.state != "finished" or run.value(key) is None]
    if missing:
        return f"{len(missing)} of {len(runs)} runs have no final {key}: {_listed(missing)}"
    values = {run.name: run.value(key) or 0.0 for run in runs}
    broken = [name for name, value in values.items() if not math.isfinite(value)]
    if broken:
        return f"{key} is {values[broken[0]]} in run {broken[0]}"
    low, high = min(values, key=lambda name: values[name]), max(values, key=lambda name: values[name])
    apart = abs(values[high] - values[low]) / max(abs(values[high]), abs(values[low]), 1e-300)
    if apart <= tolerance:
        return None
    return (
        f"{key} is {values[low]!r} in run {low} and {values[high]!r} in run {high}: they differ by "
        f"{apart:.2e} of the larger, more than {tolerance:g}"
    )


# --------------------------------------------------------------------------------------
# The command
# --------------------------------------------------------------------------------------


def build_parser() -> argparse.ArgumentParser:
    """What the command takes."""
    parser = argparse.ArgumentParser(
        prog="titanplug compare",
        description=__doc__,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("runs", nargs="+", type=Path, help="folders of runs, of sweeps, or above them")
    parser.add_argument(
        "--sort", metavar="NAME", help="value to order by; default: val_loss, else another loss"
    )
    parser.add_argument("--descending", action="store_true", help="the largest value is the best")
    parser.add_argument("--metrics", metavar="NAMES", default="", help="further values, with commas between")
    parser.add_argument("--wide", action="store_true", help="all columns, whatever the terminal's width")
    parser.add_argument("--picture", type=Path, help="where to draw the loss curves (.png or .svg)")
    parser.add_argument("--csv", type=Path, help="where to write all values as a table")
    parser.add_argument("--json", type=Path, help="where to write all that is known")
    parser.add_argument(
        "--assert-close",
        metavar="NAME",
        help="exit code 1 unless all runs have finished with this value alike",
    )
    parser.add_argument(
        "--tolerance", type=float, default=1e-5, help="how far apart they may be, as part of the value"
    )
    return parser


def main(arguments: Sequence[str]) -> None:
    """Run the command. Exit code 2 where the arguments can't be, 1 where runs aren't close."""
    parser = build_parser()
    given = parser.parse_args(arguments)
    runs = find_runs(given.runs)
    if not runs:
        parser.error(
            f"{', '.join(map(str, given.runs))}: no runs there. A run's folder has a status.json, "
            f"metrics.json or {CURVE_FILE}; give such folders, or one above them."
        )
    if given.picture is not None and given.picture.suffix not in (".png", ".svg", ".pdf"):
        parser.error(f"--picture {given.picture}: its ending names the format. Give .png, .svg or .pdf.")
    names = {name for run in runs for name in run.status.metrics}
    names |= {name for name in MEASURED if any(run.value(name) is not None for run in runs)}
    for name in (given.sort, given.assert_close, *filter(None, given.metrics.split(","))):
        if name is not None and name not in names:
            parser.error(f"{name}: no run has such a value. There are: {', '.join(sorted(names)) or 'none'}.")
    key = given.sort or judged_by(runs)
    metrics = [name for name in given.metrics.split(",") if name]
    width = 0 if given.wide else None
    print(render(runs, key, metrics=metrics, descending=given.descending, width=width))
    order = [run.name for run in runs]
    runs = ordered(runs, key, given.descending)
    found = {run.name: curve for run in runs if (curve := _curve_of(run)) is not None}
    drawn = [run for run in runs if run.name in found]
    if 2 <= len(drawn) <= _FEW:
        drawn.sort(key=lambda run: order.index(run.name))  # as given: the last is the reference
        print("\n" + "\n".join(_distances({run.name: found[run.name] for run in drawn})))
    if given.csv is not None:
        write_csv(runs, given.csv)
    if given.json is not None:
        write_json(runs, given.json)
    if given.picture is not None:
        if not drawn:
            parser.error(f"--picture: no run has a {CURVE_FILE}; the callback loss_curve writes it.")
        draw_comparison({label(run, runs): found[run.name] for run in drawn}, given.picture)
        without = [run.name for run in runs if run.name not in found]
        told = f", without {_listed(without)}, which left no curve" if without else ""
        print(f"Drawn in {given.picture}{told}")
    if given.assert_close is not None:
        if len(runs) < 2:
            parser.error("--assert-close: give two runs or more.")
        problem = not_close(runs, given.assert_close, given.tolerance)
        if problem is not None:
            print(f"titanplug compare: {problem}.", file=sys.stderr)
            sys.exit(1)
        print(f"{given.assert_close} is the same in all {len(runs)} runs, to {given.tolerance:g}")


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")


def _curve_of(run: Run) -> Curve | None:
    """Its curve, where it has come so far as to leave one."""
    try:
        return read_curve(run.folder)
    except (ConfigError, ValueError):
        return None


def _distances(curves: dict[str, Curve]) -> list[str]:
    """How far each curve lies from the last."""
    *others, last = curves
    lines = []
    for name in others:
        difference = differences(curves[name], curves[last])
        if not difference.values:
            lines.append(f"{name} - {last}: no step in common")
            continue
        largest = max(range(len(difference.values)), key=lambda i: abs(difference.values[i]))
        lines.append(
            f"{name} - {last}: at most {abs(difference.values[largest]):.2e} {difference.unit} in step "
            f"{difference.steps[largest]}, {difference.values[-1]:+.2e} in step {difference.steps[-1]}"
        )
    return lines

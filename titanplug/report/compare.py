"""``titanplug compare``: the loss curves of several runs, in one picture and by numbers."""

from __future__ import annotations

import argparse
import csv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from titanplug.errors import ConfigError
from titanplug.report.loss_curve import COLOURS, GREY, Curve

_TABLE = "loss_curve.csv"
_EXAMPLES = """\
  titanplug compare runs/4d/2026-11-30_22-47-10_ab12 runs/one_process/2026-11-30_22-40-01_cd34
  titanplug compare runs/a/* runs/b/* --picture both.png

The first curve of each run's loss_curve.csv is drawn; differences are to the last run.
"""


def read_curve(run: Path) -> Curve:
    """The first curve that a run has written, its training loss.

    Args:
        run: the folder of the run.

    Raises:
        ConfigError: the folder has no ``loss_curve.csv``, or one without values.
    """
    path = run / _TABLE
    if not path.is_file():
        raise ConfigError(
            f"{run} has no {_TABLE}: it is written at the end of a run by the callback loss_curve. Give the "
            "folders of runs that have ended."
        )
    with path.open(newline="") as file:
        (_, title, *_), *rows = csv.reader(file)
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


def draw_comparison(curves: dict[str, Curve], path: Path) -> None:
    """Draw curves over each other, and below how far each lies from the last.

    Args:
        curves: by what they are called.
        path: of the picture; its ending names the format.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.2, 5.2), layout="constrained")
    FigureCanvasAgg(figure)
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    *others, last = curves
    styles: dict[str, Any] = {"linewidth": 3.6, "alpha": 0.45}
    for i, (name, curve) in enumerate(curves.items()):
        colour = COLOURS[i % len(COLOURS)]
        above.plot(curve.steps, curve.values, color=colour, label=name, **styles)
        styles = {"linewidth": 1.4, "linestyle": ("-", "--", ":")[(i + 1) % 3]}
    for i, name in enumerate(others):
        difference = differences(curves[name], curves[last])
        below.plot(difference.steps, difference.values, color=COLOURS[i % len(COLOURS)], linewidth=1.4)
    above.set_ylabel(f"{curves[last].name}, {curves[last].unit}", color=GREY)
    above.legend(frameon=False)
    below.set_ylabel(f"difference to\n{last}", color=GREY)
    below.set_xlabel("optimizer step", color=GREY)
    for panel in (above, below):
        panel.grid(axis="y", color="#dfe3e8", linewidth=0.8)
        panel.tick_params(colors=GREY, length=0)
        for side in ("top", "right", "left"):
            panel.spines[side].set_visible(False)
    figure.savefig(path, dpi=130)


def main(arguments: Sequence[str]) -> None:
    """Run the command. Exit code 2 where the arguments can't be."""
    parser = argparse.ArgumentParser(
        prog="titanplug compare",
        description=__doc__,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("runs", nargs="+", type=Path, help="folders of runs")
    parser.add_argument("--picture", type=Path, help="where to draw them (.png or .svg)")
    given = parser.parse_args(arguments)
    if len(given.runs) < 2:
        parser.error("give the folders of two runs or more")
    try:
        curves = {_called(run, given.runs): read_curve(run) for run in given.runs}
    except ConfigError as error:
        parser.error(str(error))
    *others, last = curves
    for name in others:
        difference = differences(curves[name], curves[last])
        if not difference.values:
            parser.error(f"{name} and {last} have no step in common")
        largest = max(range(len(difference.values)), key=lambda i: abs(difference.values[i]))
        print(
            f"{name} - {last}: at most {abs(difference.values[largest]):.2e} {difference.unit} in step "
            f"{difference.steps[largest]}, {difference.values[-1]:+.2e} in step {difference.steps[-1]}"
        )
    if given.picture is not None:
        draw_comparison(curves, given.picture)
        print(f"Drawn in {given.picture}")


def _called(run: Path, runs: Sequence[Path]) -> str:
    """The name of a run, with the id of its folder where two have the name."""
    run = run.resolve()
    same = [other for other in runs if other.resolve().parent.name == run.parent.name]
    return run.parent.name if len(same) == 1 else f"{run.parent.name}/{run.name}"

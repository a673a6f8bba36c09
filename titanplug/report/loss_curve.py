"""The loss curve of a run: a picture, and its values as a table."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

COLOURS = ("#2563a8", "#c2571a")
GREY = "#5f6b76"


@dataclass
class Curve:
    """Values over optimizer steps.

    Args:
        name: what they are.
        unit: of the values.
        steps: optimizer steps, counted from 1.
        values: as many.
    """

    name: str
    unit: str
    steps: list[int] = field(default_factory=list)
    values: list[float] = field(default_factory=list)

    def add(self, step: int, value: float | None) -> None:
        """Add a point; one that is not known is left out."""
        if value is not None:
            self.steps.append(step)
            self.values.append(value)


def write_table(curves: Sequence[Curve], path: Path) -> None:
    """Write one row for each step, one column for each curve; a cell without value is empty."""
    columns = [dict(zip(curve.steps, curve.values, strict=True)) for curve in curves]
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["step", *(f"{curve.name} ({curve.unit})" for curve in curves)])
        for step in sorted({step for curve in curves for step in curve.steps}):
            writer.writerow([step, *(column.get(step, "") for column in columns)])


def draw_loss_curve(curves: Sequence[Curve], path: Path, title: str) -> None:
    """Draw the curves side by side, each in a panel with its own scale.

    Args:
        curves: with points.
        path: of the picture; its ending names the format.
        title: of the picture.
    """
    # Not pyplot: it keeps figures and may look for a display.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.2 * len(curves), 3.9), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title, fontsize=11, color=GREY, x=0.01, ha="left")
    panels = figure.subplots(1, len(curves), squeeze=False)[0]
    for panel, curve, colour in zip(panels, curves, COLOURS, strict=False):
        _draw_panel(panel, curve, colour)
    figure.savefig(path, dpi=160)


def _draw_panel(panel: Any, curve: Curve, colour: str) -> None:
    # Few points are measurements to be seen one by one, many are a line.
    marker = "o" if len(curve.steps) <= 40 else ""
    panel.plot(curve.steps, curve.values, color=colour, linewidth=1.8, marker=marker, markersize=4)
    panel.annotate(
        f"{curve.values[-1]:.3f}",
        (curve.steps[-1], curve.values[-1]),
        textcoords="offset points",
        xytext=(8, 0),
        va="center",
        color=colour,
        fontweight="bold",
    )
    panel.set_title(curve.name, loc="left", fontsize=12, fontweight="bold")
    panel.set_xlabel("optimizer step", color=GREY)
    panel.set_ylabel(curve.unit, color=GREY)
    panel.set_xlim(0, curve.steps[-1] * 1.14)  # room for the last value
    panel.margins(y=0.12)
    panel.grid(axis="y", color="#dfe3e8", linewidth=0.8)
    panel.set_axisbelow(True)
    panel.tick_params(colors=GREY, length=0)
    for side in ("top", "right", "left"):
        panel.spines[side].set_visible(False)
    panel.spines["bottom"].set_color("#aab2ba")

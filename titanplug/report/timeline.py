"""A picture of a pipeline's timeline: a row for each rank, a box for each computation."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from titanplug.report.loss_curve import GREY
from titanplug.schedules.actions import Work
from titanplug.schedules.simulate import TimedAction, Timeline

COLOURS = {
    Work.FORWARD: "#2563a8",
    Work.BACKWARD: "#c2571a",
    Work.BACKWARD_INPUT: "#d18f00",
    Work.BACKWARD_WEIGHT: "#2e7d4f",
}
LABELS = {
    Work.FORWARD: "F forward",
    Work.BACKWARD: "B backward",
    Work.BACKWARD_INPUT: "I backward, input",
    Work.BACKWARD_WEIGHT: "W backward, weights",
}
IDLE = "#e6e9ed"
DARK = "#1d2630"
_DIGIT_INCHES = 0.06  # width of a digit of a microbatch number
_BOX_HEIGHT = 0.82


def draw_timeline(timeline: Timeline | Sequence[Sequence[TimedAction]], path: Path, title: str = "") -> None:
    """Draw when each rank computed what; grey is the bubble.

    Args:
        timeline: simulated, or for each rank what was measured, on one clock.
        path: of the picture; its ending names the format, ``.png`` or ``.svg``.
        title: of the picture; empty is the name of the timeline. The bubble fraction is added.
    """
    # Not pyplot: it keeps figures and may look for a display.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    measured = not isinstance(timeline, Timeline)
    shown = timeline if isinstance(timeline, Timeline) else Timeline(tuple(map(tuple, timeline)))
    num_ranks, duration_s = len(shown.rows), shown.duration_s or 1.0
    width = _width_inches(shown)
    figure = Figure(figsize=(width, 1.7 + 0.42 * num_ranks), layout="constrained")
    FigureCanvasAgg(figure)
    heading = f"{title or shown.name or 'pipeline'}: bubble {shown.bubble_fraction:.1%}"
    figure.suptitle(heading, fontsize=11, color=GREY, x=0.01, ha="left")
    panel = figure.subplots()
    panel.set_xlim(0, duration_s)
    panel.set_ylim(max(num_ranks, 1) - 0.5, -0.5)  # the first rank on top
    for rank, row in enumerate(shown.rows):
        _draw_row(panel, rank, row, shown, inches_per_s=0.92 * width / duration_s)
    panel.set_yticks(range(num_ranks), [f"rank {rank}" for rank in range(num_ranks)])
    panel.set_xlabel("time (s)" if measured else "time (units of the costs)", color=GREY)
    panel.tick_params(colors=GREY, length=0)
    for side in ("top", "right", "left"):
        panel.spines[side].set_visible(False)
    panel.spines["bottom"].set_color("#aab2ba")
    _draw_legend(figure, shown)
    figure.savefig(path, dpi=160)


def shade(work: Work, chunk: int, num_chunks: int) -> tuple[float, float, float]:
    """The colour of a computation: later chunks of a rank are lighter."""
    from matplotlib.colors import to_rgb

    red, green, blue = to_rgb(COLOURS[work])
    white = 0.55 * chunk / max(1, num_chunks - 1) if chunk else 0.0
    return red + (1 - red) * white, green + (1 - green) * white, blue + (1 - blue) * white


def _chunks(row: Sequence[TimedAction]) -> dict[int, int]:
    """By stage of a rank, which of the rank's stages it is."""
    return {stage: chunk for chunk, stage in enumerate(sorted({event.stage for event in row}))}


def _width_inches(timeline: Timeline) -> float:
    """Wide enough for the numbers in short boxes, within what a page takes."""
    durations = sorted(event.end_s - event.start_s for row in timeline.rows for event in row)
    short = durations[len(durations) // 10] if durations else 0
    boxes = timeline.duration_s / short if short > 0 else 0
    return min(24.0, max(9.0, 0.175 * boxes))


def _draw_row(
    panel: Any, rank: int, row: Sequence[TimedAction], timeline: Timeline, inches_per_s: float
) -> None:
    chunks = _chunks(row)
    colours = [shade(event.work, chunks[event.stage], len(chunks)) for event in row]
    spans = [(event.start_s - timeline.start_s, event.end_s - event.start_s) for event in row]
    extent = (rank - _BOX_HEIGHT / 2, _BOX_HEIGHT)
    panel.broken_barh([(0, timeline.duration_s)], extent, facecolors=IDLE)
    panel.broken_barh(spans, extent, facecolors=colours, edgecolors="white", linewidth=0.5)
    for event, (start, duration), colour in zip(row, spans, colours, strict=True):
        number = str(event.microbatch)
        if duration * inches_per_s > _DIGIT_INCHES * (len(number) + 0.5):
            panel.text(
                start + duration / 2,
                rank,
                number,
                ha="center",
                va="center_baseline",
                fontsize=7,
                color="white" if _luminance(colour) < 0.5 else DARK,
                clip_on=True,
            )


def _luminance(colour: tuple[float, float, float]) -> float:
    return 0.299 * colour[0] + 0.587 * colour[1] + 0.114 * colour[2]


def _draw_legend(figure: Any, timeline: Timeline) -> None:
    from matplotlib.patches import Patch

    there = {event.work for row in timeline.rows for event in row}
    works = [work for work in LABELS if work in there]
    num_chunks = max((len(_chunks(row)) for row in timeline.rows), default=1)
    handles = [
        Patch(
            color=shade(work, chunk, num_chunks),
            label=LABELS[work] + (f", chunk {chunk}" if num_chunks > 1 else ""),
        )
        for work in works
        for chunk in range(num_chunks)
    ]
    handles.append(Patch(color=IDLE, label="idle (bubble)"))
    # Blank entries fill up the last column, so that each kind of work has a column of its own.
    handles += [Patch(alpha=0, label=" ") for _ in range(num_chunks - 1)]
    figure.legend(
        handles=handles,
        loc="outside lower left",
        ncols=len(works) + 1,
        frameon=False,
        fontsize=8,
        labelcolor=GREY,
    )

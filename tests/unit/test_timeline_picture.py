"""Pictures of pipelines: what is in them, as far as text in an SVG can tell."""

from __future__ import annotations

import re
import struct
from dataclasses import replace
from pathlib import Path

import matplotlib
import pytest

from titanplug.report.timeline import COLOURS, draw_timeline, shade
from titanplug.schedules.catalogue import Work, build_table
from titanplug.schedules.simulate import TimedAction, Timeline, simulate


def texts(path: Path) -> list[str]:
    """The texts of an SVG, which matplotlib notes beside their outlines."""
    return re.findall(r"<text[^>]*>([^<]*)</text>", path.read_text())


def placed_texts(path: Path) -> list[str]:
    """The texts of an SVG with their places."""
    return re.findall(r"<text[^>]*>[^<]*</text>", path.read_text())


def draw(timeline: Timeline | list[list[TimedAction]], path: Path, **options: str) -> list[str]:
    with matplotlib.rc_context({"svg.fonttype": "none"}):
        draw_timeline(timeline, path, **options)
    return texts(path)


def test_a_row_for_each_rank_and_the_bubble(tmp_path: Path) -> None:
    shown = draw(simulate(build_table("1F1B", 4, 8)), tmp_path / "timeline.svg", title="my pipeline")
    assert "my pipeline: bubble 27.3%" in shown
    for rank in range(4):
        assert shown.count(f"rank {rank}") == 1
    assert "F forward" in shown and "B backward" in shown and "idle (bubble)" in shown
    assert not any(label.startswith(("I ", "W ")) for label in shown)
    # Forward and backward of each microbatch on each rank; 0 to 8 may be ticks of the axis, too.
    assert all(shown.count(str(item)) >= 8 for item in range(8))


def test_chunks_and_split_backwards_have_their_own_colours(tmp_path: Path) -> None:
    path = tmp_path / "timeline.svg"
    shown = draw(simulate(build_table("ZBVZeroBubble", 2, 4)), path)
    assert any(label.startswith("ZBVZeroBubble: bubble ") for label in shown)
    for label in ("F forward", "I backward, input", "W backward, weights"):
        assert f"{label}, chunk 0" in shown and f"{label}, chunk 1" in shown
    picture = path.read_text()
    for work in (Work.FORWARD, Work.BACKWARD_INPUT, Work.BACKWARD_WEIGHT):
        assert COLOURS[work] in picture
    assert COLOURS[Work.BACKWARD] not in picture


def test_shades_differ() -> None:
    shades = {shade(work, chunk, 3) for work in COLOURS for chunk in range(3)}
    assert len(shades) == 12
    assert shade(Work.FORWARD, 0, 1) == shade(Work.FORWARD, 0, 3)


def test_measured_events(tmp_path: Path) -> None:
    # A clock that started somewhere.
    rows = [
        [TimedAction(0, Work.FORWARD, 17, 5000.0, 5001.0), TimedAction(0, Work.BACKWARD, 17, 5003.0, 5004.0)],
        [TimedAction(1, Work.FORWARD, 17, 5001.0, 5002.0), TimedAction(1, Work.BACKWARD, 17, 5002.0, 5003.0)],
    ]
    shown = draw(rows, tmp_path / "timeline.svg", title="step 3")
    assert "step 3: bubble 50.0%" in shown
    assert "time (s)" in shown
    assert shown.count("17") == 4
    assert "0.0" in shown and "4.0" in shown
    moved = [
        [replace(event, start_s=event.start_s - 5000, end_s=event.end_s - 5000) for event in row]
        for row in rows
    ]
    draw(moved, tmp_path / "moved.svg", title="step 3")
    assert placed_texts(tmp_path / "timeline.svg") == placed_texts(tmp_path / "moved.svg")


def test_numbers_that_do_not_fit_are_left_out(tmp_path: Path) -> None:
    long = TimedAction(0, Work.FORWARD, 111, 0.0, 1.0)
    short = TimedAction(0, Work.FORWARD, 222, 1.0, 1.0001)
    others = [TimedAction(0, Work.FORWARD, 333, 2.0 + item, 2.9 + item) for item in range(20)]
    shown = draw([[long, short, *others]], tmp_path / "timeline.svg")
    assert "111" in shown and "333" in shown
    assert "222" not in shown


@pytest.mark.parametrize("rows", [[], [[], []]])
def test_nothing_is_a_picture_too(rows: list[list[TimedAction]], tmp_path: Path) -> None:
    assert "pipeline: bubble 0.0%" in draw(rows, tmp_path / "timeline.svg")


def test_a_png(tmp_path: Path) -> None:
    path = tmp_path / "timeline.png"
    draw_timeline(simulate(build_table("DualPipeV", 4, 8)), path)
    head = path.read_bytes()[:24]
    assert head[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", head[16:])
    assert 1000 < width < 4000 and 200 < height < 2000

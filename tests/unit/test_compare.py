"""Comparing the loss curves of runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from titanplug.report.compare import differences, main, read_curve
from titanplug.report.loss_curve import Curve, write_table


def write_run(folder: Path, values: list[float]) -> Path:
    folder.mkdir(parents=True)
    loss = Curve("training loss", "nats per token", [5 * (i + 1) for i in range(len(values))], values)
    write_table([loss, Curve("validation", "bits per byte", [7], [2.0])], folder / "loss_curve.csv")
    return folder


def test_runs_are_compared_by_numbers_and_in_a_picture(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = [write_run(tmp_path / "4d" / "x", [8.0, 7.0, 6.5]), write_run(tmp_path / "one" / "y", [8.0, 7.25])]
    picture = tmp_path / "both.png"
    main([*map(str, runs), "--picture", str(picture)])
    shown = capsys.readouterr().out
    assert "4d - one: at most 2.50e-01 nats per token in step 10, -2.50e-01 in step 10" in shown
    assert picture.stat().st_size > 10_000


def test_values_that_a_step_does_not_have_are_left_out(tmp_path: Path) -> None:
    curve = read_curve(write_run(tmp_path / "a" / "x", [3.0, 2.0]))
    assert (curve.name, curve.unit, curve.steps, curve.values) == (
        "training loss",
        "nats per token",
        [5, 10],
        [3.0, 2.0],
    )
    assert differences(curve, Curve("", "", [10, 20], [1.5, 1.0])).values == [0.5]


def test_runs_of_one_name_are_told_apart(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [write_run(tmp_path / "a" / name, [1.0]) for name in "xy"]
    main([*map(str, runs)])
    assert capsys.readouterr().out.startswith("a/x - a/y: at most 0.00e+00")


@pytest.mark.parametrize("given", [1, 2])
def test_wrong_folders_say_what_to_give(
    tmp_path: Path, given: int, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main([str(tmp_path)] * given)
    assert ended.value.code == 2
    wanted = "folders of two runs or more" if given == 1 else "has no loss_curve.csv"
    assert wanted in capsys.readouterr().err

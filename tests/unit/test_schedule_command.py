"""`titanplug schedule`."""

from __future__ import annotations

from pathlib import Path

import pytest

from titanplug.report.schedules import main
from titanplug.schedules.catalogue import SCHEDULES, build_table


def test_compares_all(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--pp", "4", "--microbatches", "8"])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[1:]] == list(SCHEDULES)
    assert "27.3%" in lines[2] and "4, 3, 2, 1" in lines[2] and " 48 " in lines[2]


def test_says_what_cannot_run_and_goes_on(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--pp", "4", "--microbatches", "6"])
    out = capsys.readouterr().out
    assert "DualPipeV              pp_microbatches=6" in out and "GPipe" in out


def test_draws_and_writes_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["zbv", "--pp", "2", "--picture", str(tmp_path / "a.svg"), "--csv", str(tmp_path / "a.csv")])
    assert "ZBVZeroBubble" in capsys.readouterr().out
    assert (tmp_path / "a.svg").read_text().count("<path") > 20
    assert build_table(str(tmp_path / "a.csv"), 2, 4).num_messages == build_table("zbv", 2, 4).num_messages


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["2f2b"], "there is no such schedule"),
        (["1f1b", "--microbatches", "2"], "it needs at least as many microbatches as stages"),
        (["1f1b", "gpipe", "--csv", "x.csv"], "are for one schedule"),
    ],
)
def test_wrong_arguments(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2 and message in capsys.readouterr().err

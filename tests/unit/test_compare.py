"""`titanplug compare`: runs and sweeps in one table, one picture, and by numbers."""

from __future__ import annotations

import csv
import json
import math
import socket
from pathlib import Path
from typing import Any

import pytest

from titanplug.report.compare import differences, main, read_curve
from titanplug.report.loss_curve import Curve, write_table
from titanplug.report.runs import find_runs, judged_by, label, ordered, render
from titanplug.run_status import Status, write_status

LAYOUT = {"pp": 1, "dp_replicate": 1, "dp_shard": 2, "cp": 1, "tp": 1, "world_size": 2}


def write_run(folder: Path, values: list[float], **status: Any) -> Path:
    folder.mkdir(parents=True)
    loss = Curve("training loss", "nats per token", [5 * (i + 1) for i in range(len(values))], values)
    write_table([loss, Curve("validation", "bits per byte", [7], [2.0])], folder / "loss_curve.csv")
    if status:
        write_status(folder, Status(**{"state": "finished", "layout": LAYOUT, **status}))
    return folder


def write_sweep(folder: Path) -> None:
    """88 jobs: 3 layouts and 2 more settings; six of them have failed."""
    for number in range(88):
        layout, lr = ("fsdp", "tp", "fsdp_tp")[number % 3], f"{(number + 1) * 1e-4:.1e}"
        failed = number % 15 == 7
        final = 5.0 + math.cos(number) / 3
        write_run(
            folder / str(number),
            [8 - (8 - final) * (1 - math.exp(-step / 12)) for step in range(60)],
            state="failed" if failed else "finished",
            overrides=["experiment=quickstart", f"parallelism={layout}", f"optim.lr={lr}", "seed=0"],
            metrics={} if failed else {"val_loss": final, "train_loss": final - 0.1},
            error="rank 1 of 2 failed: OSError: No space left on device" if failed else None,
            steps=60,
            tokens_per_s=1000.0 + number,
            memory_gib=0.5,
            seconds=60.0,
        )


def shown(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    main([str(item) for item in arguments])
    return capsys.readouterr().out


def refused(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int | str | None, str]:
    with pytest.raises(SystemExit) as ended:
        main([str(item) for item in arguments])
    return ended.value.code, capsys.readouterr().err


def test_88_jobs_are_a_readable_table_and_picture(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    write_sweep(tmp_path / "sweep")
    out = shown(capsys, tmp_path / "sweep", "--picture", tmp_path / "all.png")
    lines = out.splitlines()
    assert lines[0] == "88 runs: 82 finished, 6 failed"
    assert lines[1] == "all with experiment=quickstart seed=0"
    assert lines[3].split()[:6] == ["run", "parallelism", "optim.lr", "state", "layout", "steps"]
    rows = lines[4:92]
    assert all(len(row) <= 100 for row in lines[:92])
    values = [float(row.split()[6]) for row in rows if " finished " in row]
    assert len(values) == 82 and values == sorted(values)
    assert all(" failed " in row for row in rows[82:])
    assert sum("No space left on device" in line for line in lines) == 6
    best = min(range(88), key=lambda n: (n % 15 == 7, math.cos(n)))
    assert f"run {best}, in" in out
    assert lines[-2].startswith("  titanplug train experiment=quickstart parallelism=")
    assert (tmp_path / "all.png").stat().st_size > 20_000


def test_narrow_terminals_lose_columns_and_say_which(tmp_path: Path) -> None:
    write_sweep(tmp_path)
    runs = find_runs([tmp_path])
    narrow, wide = render(runs, "val_loss", width=60), render(runs, "val_loss", width=0)
    assert "(without memory" in narrow and "--wide shows all" in narrow
    assert max(len(line) for line in narrow.splitlines()[3:92]) <= 60
    assert "0.50 GiB" in wide and "without" not in wide


def test_order_direction_and_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, loss in (("a", 2.0), ("b", 1.0), ("c", math.nan)):
        write_run(tmp_path / "runs" / name, [3.0], overrides=[f"x={name}"], metrics={"val_loss": loss})
    write_run(tmp_path / "runs" / "d", [3.0], state="failed", overrides=["x=d"], metrics={"val_loss": 0.1})
    out = shown(capsys, tmp_path / "runs", "--csv", tmp_path / "t.csv", "--json", tmp_path / "t.json")
    assert [line.split()[0] for line in out.splitlines()[3:7]] == ["b", "a", "c", "d"]
    with (tmp_path / "t.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert (rows[0]["run"], rows[0]["x"], rows[0]["state"]) == ("b", "b", "finished")
    told = json.loads((tmp_path / "t.json").read_text())
    assert told[2]["metrics"]["val_loss"] is None and told[0]["layout"]["dp_shard"] == 2
    out = shown(capsys, tmp_path / "runs", "--descending")
    assert out.splitlines()[3].split()[0] == "a" and "Best val_loss: 2, run a" in out


def test_speed_can_be_what_runs_are_ordered_by(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, speed in (("slow", 10.0), ("fast", 30.0)):
        write_run(tmp_path / name, [1.0], metrics={"val_loss": 1.0}, tokens_per_s=speed)
    out = shown(capsys, tmp_path, "--sort", "tokens_per_s", "--descending")
    assert "Best tokens_per_s: 30, run fast" in out


@pytest.mark.parametrize(
    ("values", "states", "told"),
    [
        ([1.0, 1.0 + 5e-6], ["finished"] * 2, None),
        ([1.0, 1.001], ["finished"] * 2, "they differ by 9.99e-04 of the larger, more than 1e-05"),
        ([1.0, math.nan], ["finished"] * 2, "val_loss is nan in run b"),
        ([1.0, 1.0], ["finished", "failed"], "1 of 2 runs have no final val_loss: b"),
    ],
)
def test_runs_can_be_required_to_agree(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    values: list[float],
    states: list[str],
    told: str | None,
) -> None:
    for name, value, state in zip("ab", values, states, strict=True):
        write_run(tmp_path / name, [1.0], state=state, metrics={"val_loss": value})
    if told is None:
        assert "is the same in all 2 runs" in shown(capsys, tmp_path, "--assert-close", "val_loss")
    else:
        code, errors = refused(capsys, tmp_path, "--assert-close", "val_loss")
        assert code == 1 and told in errors


def test_two_runs_are_compared_step_by_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [write_run(tmp_path / "4d" / "x", [8.0, 7.0, 6.5]), write_run(tmp_path / "one" / "y", [8.0, 7.25])]
    picture = tmp_path / "both.png"
    out = shown(capsys, *runs, "--picture", picture)
    assert "4d/x - one/y: at most 2.50e-01 nats per token in step 10, -2.50e-01 in step 10" in out
    assert picture.stat().st_size > 10_000
    assert "one/y - 4d/x: at most" in shown(capsys, *runs[::-1])


def test_values_that_a_step_does_not_have_are_left_out(tmp_path: Path) -> None:
    curve = read_curve(write_run(tmp_path / "a" / "x", [3.0, 2.0]))
    assert (curve.name, curve.unit, curve.steps, curve.values) == (
        "training loss",
        "nats per token",
        [5, 10],
        [3.0, 2.0],
    )
    assert differences(curve, Curve("", "", [10, 20], [1.5, 1.0])).values == [0.5]


def test_a_killed_run_and_an_older_one_are_listed(tmp_path: Path) -> None:
    write_run(tmp_path / "killed", [1.0], state="running", host=socket.gethostname(), pid=1)
    write_run(tmp_path / "far", [1.0], state="running", host="elsewhere", pid=1)
    write_run(tmp_path / "old", [1.0])
    (tmp_path / "old" / "metrics.json").write_text('{"val_loss": 3.0}')
    runs = find_runs([tmp_path])
    assert [(run.name, run.state) for run in runs] == [
        ("far", "running"),
        ("killed", "killed"),
        ("old", "finished"),
    ]
    assert judged_by(runs) == "val_loss" and ordered(runs, "val_loss")[0].name == "old"


def test_jobs_come_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    for number in (10, 9, 1):
        write_run(tmp_path / "s" / str(number), [1.0], overrides=[], metrics={})
    (tmp_path / "s" / "1" / "checkpoints" / "x").mkdir(parents=True)
    assert [run.name for run in find_runs([tmp_path / "s", tmp_path / "s" / "1"])] == ["1", "9", "10"]


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (["empty"], "no runs there"),
        (["runs", "--sort", "val_los"], "no run has such a value. There are:"),
        (["runs", "--assert-close", "val_loss"], "give two runs or more"),
        (["runs", "--metrics", "a,b"], "a: no run has such a value"),
        ([], "the following arguments are required: runs"),
    ],
)
def test_wrong_arguments_say_what_to_give(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    given: list[str],
    told: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "runs" / "a", [1.0], metrics={"val_loss": 1.0})
    code, errors = refused(capsys, *given)
    assert code == 2 and told in errors


def test_broken_files_and_links_spoil_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Long overrides keep their runs apart in the picture, and curves without values are left out."""
    for number in range(12):
        overrides = [f"a={'x' * 60}", f"b={number}", f"c={'y' * 60}{number}"]
        write_run(tmp_path / "runs" / str(number), [1.0], overrides=overrides, metrics={"val_loss": 1.0})
    for name, text in (("12", ""), ("13", "step,loss (nats)\n")):
        write_run(tmp_path / "runs" / name, [1.0], overrides=["a=x"], metrics={"val_loss": 1.0})
        (tmp_path / "runs" / name / "loss_curve.csv").write_text(text)
    (write_run(tmp_path / "runs" / "14", [1.0]) / "metrics.json").write_text("[1]")
    (tmp_path / "runs" / "loop").symlink_to(".")
    (tmp_path / "runs" / "latest").symlink_to("1")
    runs = find_runs([tmp_path / "runs"])
    assert len(runs) == 15 and len({label(run, runs) for run in runs}) == 15
    out = shown(capsys, tmp_path / "runs", "--picture", tmp_path / "a.svg")
    assert "15 runs: 14 finished, 1 unknown" in out and (tmp_path / "a.svg").exists()
    code, errors = refused(capsys, tmp_path / "runs", "--picture", tmp_path / "a.gift")
    assert code == 2 and "Give .png, .svg or .pdf" in errors

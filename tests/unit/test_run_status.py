"""``status.json``: how a run stands, in every state, also of one that was killed."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from titanplug.errors import TitanplugError
from titanplug.launch import RankError
from titanplug.run_status import (
    RunStatus,
    Status,
    end_for,
    one_line,
    read_status,
    write_results,
    write_status,
)

CONFIG: dict[str, Any] = {
    "name": "x",
    "trainer": {"devices": 4, "num_nodes": 2, "precision": "bf16-mixed"},
    "parallelism": {"dp_shard": -1, "tp": 2, "pp": 2, "pp_schedule": "1F1B"},
}


def test_a_run_is_described_from_its_start(tmp_path: Path) -> None:
    RunStatus.begin(tmp_path, ["a=1"], CONFIG)
    status = read_status(tmp_path)
    assert status is not None and status.state == "running" and status.is_alive
    assert status.layout == {
        "pp": 2,
        "dp_replicate": 1,
        "dp_shard": 2,
        "cp": 1,
        "tp": 2,
        "world_size": 8,
        "num_nodes": 2,
        "pp_schedule": "1F1B",
    }
    assert (status.overrides, status.precision, status.attempt) == (["a=1"], "bf16-mixed", 1)
    assert status.versions.keys() >= {"titanplug", "torch", "lightning", "hydra", "python"}


def test_its_end_has_what_rank_0_has_measured(tmp_path: Path) -> None:
    run = RunStatus.begin(tmp_path, [], CONFIG)
    write_results(tmp_path, steps=3, metrics={"loss": math.nan, "best": math.inf}, tokens_per_s=5.0)
    run.finish("finished", 0)
    status = read_status(tmp_path)
    assert status is not None and status.state == "finished" and not status.is_alive
    assert status.steps == 3 and status.tokens_per_s == 5.0 and status.seconds is not None
    assert math.isnan(status.metrics["loss"]) and status.metrics["best"] == math.inf
    json.loads((tmp_path / "status.json").read_text(), parse_constant=lambda name: pytest.fail(name))
    assert [path.name for path in tmp_path.iterdir()] == ["status.json"]


def test_results_of_an_attempt_before_are_not_taken_over(tmp_path: Path) -> None:
    write_results(tmp_path, steps=3)
    RunStatus.begin(tmp_path, []).finish("failed", 1, "why")
    status = read_status(tmp_path)
    assert status is not None and (status.steps, status.error) == (None, "why")


def test_a_killed_run_is_not_alive(tmp_path: Path) -> None:
    code = (
        "import sys, os, signal; from pathlib import Path; from titanplug.run_status import RunStatus; "
        "RunStatus.begin(Path(sys.argv[1]), []); os.kill(os.getpid(), signal.SIGKILL)"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False)
    status = read_status(tmp_path)
    assert status is not None and status.state == "running" and not status.is_alive
    write_results(tmp_path, steps=7)
    end_for(tmp_path, "failed", -9, "It was ended by SIGKILL.")
    ended = read_status(tmp_path)
    assert ended is not None and (ended.state, ended.steps, ended.exit_code) == ("failed", 7, -9)


def test_another_process_with_its_number_is_another(tmp_path: Path) -> None:
    RunStatus.begin(tmp_path, [])
    status = read_status(tmp_path)
    assert status is not None
    assert not replace(status, pid_started=status.pid_started - 60).is_alive
    assert replace(status, host="elsewhere").is_alive is None  # only that machine can tell


def test_how_often_it_was_started_comes_from_the_sweep(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TITANPLUG_ATTEMPT", "3")
    RunStatus.begin(tmp_path, [])
    status = read_status(tmp_path)
    assert status is not None and status.attempt == 3


@pytest.mark.parametrize("text", ["", "[]", "{", '{"state": "finished"', '{"no": 1}'])
def test_a_file_that_is_no_status_is_none(tmp_path: Path, text: str) -> None:
    assert read_status(tmp_path) is None
    (tmp_path / "status.json").write_text(text)
    assert read_status(tmp_path) is None


def test_keys_of_a_later_version_are_left_alone(tmp_path: Path) -> None:
    write_status(tmp_path, Status("finished"))
    path = tmp_path / "status.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "later": 1}))
    status = read_status(tmp_path)
    assert status is not None and status.state == "finished"


def test_the_commit_is_that_of_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    project, run = tmp_path / "project", tmp_path / "run"
    run.mkdir()
    project.mkdir()
    monkeypatch.chdir(project)
    identity = {"GIT_AUTHOR_NAME": "a", "GIT_AUTHOR_EMAIL": "a", "GIT_COMMITTER_NAME": "a"}
    environment = {**os.environ, **identity, "GIT_COMMITTER_EMAIL": "a"}
    for command in ("git init -q", "git commit -q --allow-empty -m first"):
        subprocess.run(command.split(), check=True, env=environment)
    RunStatus.begin(run, [])
    status = read_status(run)
    assert status is not None and status.git_commit is not None and len(status.git_commit) == 40


def test_one_line_of_an_error() -> None:
    told = RankError("rank 1 of 2 failed:\nTraceback\n  ...\nValueError: why")
    assert one_line(told) == "rank 1 of 2 failed: ValueError: why"
    assert one_line(ValueError("why")) == "ValueError: why"
    assert one_line(TitanplugError("a\nb")) == "a\nb"

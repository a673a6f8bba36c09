"""``hydra/launcher=titanplug`` with a script that needs no torch: a job takes half a second."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from hydra.core.utils import JobReturn, JobStatus

from tests.processes import processes_in, wait_for
from titanplug.report.runs import find_runs, render
from titanplug.sweep.returned import SaveReturn

ROOT = Path(__file__).parents[2]

APP = """
import json, os, sys, time
from dataclasses import dataclass
import hydra
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig

@dataclass
class App:
    x: int = 0
    processes: int = 1
    fails: str = ""       # numbers of jobs that fail, with commas between
    until: int = 99       # attempt that doesn't fail
    sleep_s: float = 0.0
    ends_with: int = 0

ConfigStore.instance().store("app", App)

@hydra.main(version_base="1.3", config_path=None, config_name="app")
def main(cfg):
    began = time.time()
    print("job", cfg.x, "prints", flush=True)
    folder, number = HydraConfig.get().runtime.output_dir, HydraConfig.get().job.num
    with open(folder + "/ran", "a") as file:
        file.write(f"{os.environ['TITANPLUG_ATTEMPT']} {os.environ.get('CUDA_VISIBLE_DEVICES')} ")
    if os.environ["TITANPLUG_ATTEMPT"] != str(cfg.until) and str(cfg.x) in cfg.fails.split(","):
        raise ValueError(f"{cfg.x} is a bad number")
    if cfg.ends_with:
        os._exit(cfg.ends_with)
    time.sleep(cfg.sleep_s)
    with open(folder + "/times.json", "w") as file:
        json.dump([began, time.time()], file)
    return float(cfg.x) ** 2

if __name__ == "__main__":
    main()
"""

COMMAND = (
    "app.py",
    "-m",
    "hydra/launcher=titanplug",
    "hydra.sweep.dir=sweep",
    "hydra.launcher.processes=${processes}",
)


@pytest.fixture
def sweep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., subprocess.Popen[str]]:
    """Starts a sweep of the script in an empty folder."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "app.py").write_text(APP)

    def start(*arguments: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, *COMMAND, *arguments],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    return start


def finished(process: subprocess.Popen[str], timeout_s: float = 100) -> tuple[int, str]:
    out, _ = process.communicate(timeout=timeout_s)
    return process.returncode, out


def states() -> dict[str, str]:
    """By number of the job."""
    found = {path.parent.name: json.loads(path.read_text()) for path in Path("sweep").glob("*/status.json")}
    return {name: found[name]["state"] for name in sorted(found, key=int)}


def status(number: int) -> dict[str, Any]:
    result: dict[str, Any] = json.loads(Path("sweep", str(number), "status.json").read_text())
    return result


def attempts(number: int) -> int:
    """How often a job has run."""
    path = Path("sweep", str(number), "ran")
    return len(path.read_text().split()) // 2 if path.exists() else 0


def test_24_jobs_run_and_the_parent_keeps_nothing(
    sweep: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> None:
    process = sweep("x=range(24)", "hydra.launcher.slots=2")
    parent, memory = psutil.Process(process.pid), []
    while process.poll() is None:
        done = len(list(Path("sweep").glob("*/.hydra/returned.json")))
        try:
            memory.append((done, parent.memory_info().rss))
        except psutil.NoSuchProcess:
            break
        time.sleep(0.2)
    code, out = finished(process)
    assert code == 0, out
    assert states() == {str(number): "finished" for number in range(24)}
    assert out.splitlines()[0] == "24 jobs in sweep"
    assert "[24/24]" in out and "finished after" in out
    table = render(find_runs([Path("sweep")]), None, width=0)
    assert all(f"\n {number:2d}  {number:2d}  finished" in table for number in range(24)), table
    assert sorted(p.name for p in Path("sweep").iterdir() if not p.is_dir()) == [
        "multirun.yaml",
        "sweep.json",
    ]
    early = max(rss for done, rss in memory if done <= 4)
    assert max(rss for _, rss in memory) < early + 8 * 2**20
    assert (Path("sweep") / "7" / "console.log").read_text().strip() == "job 7 prints"
    assert not processes_in(tmp_path)


def test_as_many_run_at_a_time_as_there_are_slots(sweep: Callable[..., subprocess.Popen[str]]) -> None:
    code, out = finished(
        sweep(
            "x=1,2,3,4,5",
            "processes=2",
            "sleep_s=0.5",
            "hydra.launcher.gpus=[0,3,5,7]",
            "hydra.job.chdir=true",
        )
    )
    assert code == 0, out
    times = [json.loads(Path("sweep", str(n), "times.json").read_text()) for n in range(5)]
    running = [sum(begin <= other[0] < end for begin, end in times) for other in times]
    assert max(running) == 2
    given = {Path("sweep", str(n), "ran").read_text().split()[1] for n in range(5)}
    assert given == {"0,3", "5,7"}


def test_a_failing_job_does_not_stop_the_others(sweep: Callable[..., subprocess.Popen[str]]) -> None:
    code, out = finished(sweep("x=1,2,3", "fails=2"))
    assert code == 1
    assert states() == {"0": "finished", "1": "failed", "2": "finished"}
    assert status(1)["error"] == "ValueError: 2 is a bad number"
    assert "#1 failed after" in out and "    ValueError: 2 is a bad number\n    sweep/1/console.log" in out
    assert "Traceback" in Path("sweep/1/console.log").read_text()


def test_a_failing_job_stops_the_others_where_asked(sweep: Callable[..., subprocess.Popen[str]]) -> None:
    code, _ = finished(sweep("x=1,2,3", "fails=1", "hydra.launcher.stop_on_failure=true"))
    assert code == 1 and states() == {"0": "failed"} and attempts(1) == 0


def test_a_job_is_tried_again(sweep: Callable[..., subprocess.Popen[str]]) -> None:
    code, out = finished(
        sweep("x=1,2", "fails=1,2".replace(",", "\\,"), "until=2", "hydra.launcher.retries=1")
    )
    assert code == 0, out
    assert attempts(0) == attempts(1) == 2 and "attempt 2" in out


def test_a_job_that_takes_too_long_is_ended(
    sweep: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> None:
    code, out = finished(
        sweep(
            "x=1,2",
            "sleep_s=600",
            "hydra.launcher.timeout_s=2",
            "hydra.launcher.grace_s=1",
            "hydra.launcher.slots=2",
        )
    )
    assert code == 1 and states() == {"0": "timeout", "1": "timeout"}
    assert "hydra.launcher.timeout_s" in out and not processes_in(tmp_path)


def test_a_job_that_dies_says_how(sweep: Callable[..., subprocess.Popen[str]]) -> None:
    code, _ = finished(sweep("x=1,2", "ends_with=7"))
    assert code == 1 and states() == {"0": "failed", "1": "failed"}
    assert "job 1 prints" in status(0)["error"]


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_a_signal_ends_all_jobs(
    sweep: Callable[..., subprocess.Popen[str]], tmp_path: Path, name: str
) -> None:
    process = sweep("x=range(6)", "sleep_s=600", "hydra.launcher.slots=3", "hydra.launcher.grace_s=5")
    wait_for(lambda: sum(attempts(n) for n in range(6)) == 3)
    begun = time.monotonic()
    process.send_signal(signal.Signals[name])
    code, _ = finished(process)
    assert code != 0 and time.monotonic() - begun < 20
    assert set(states().values()) == {"interrupted"} and len(states()) == 3
    assert not processes_in(tmp_path)


def test_jobs_end_with_a_sweep_that_is_killed(
    sweep: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> None:
    process = sweep("x=1,2", "sleep_s=600", "hydra.launcher.slots=2")
    wait_for(lambda: attempts(0) == attempts(1) == 1)
    process.kill()
    process.communicate()
    wait_for(lambda: not processes_in(tmp_path), 10)


def test_a_killed_sweep_goes_on_with_the_remaining_jobs(
    sweep: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> None:
    process = sweep("x=range(5)", "sleep_s=1")
    wait_for(lambda: attempts(2) == 1)
    process.kill()
    process.communicate()
    wait_for(lambda: not processes_in(tmp_path), 10)
    code, out = finished(sweep("x=range(5)", "sleep_s=1"))
    assert code == 1 and "holds another sweep" in out  # never over what is there
    code, out = finished(sweep("x=range(5)", "sleep_s=1", "hydra.launcher.resume=true"))
    assert code == 0, out
    assert "5 jobs in sweep; 2 of them have finished before" in out
    assert [attempts(n) for n in range(5)] == [1, 1, 2, 1, 1]
    assert states() == {str(n): "finished" for n in range(5)}


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (["x=1,2", "processes=4", "hydra.launcher.slots=3"], "a job of 4 processes with 3 slots"),
        (["x=1,2", "hydra.launcher.slots=0"], "hydra.launcher.slots=0: a job needs one"),
        (["x=1,2", "hydra.launcher.retries=-1"], "hydra.launcher.retries=-1: it can't be negative"),
        (["x=1,2", "hydra.launcher.gpus=[1,1]"], "a GPU is named twice"),
        (["x=1,2", "hydra.launcher.slots=1", "hydra.launcher.gpus=[1,2]"], "Leave slots out"),
        (["x=1,2", "hydra.launcher.timeouts=3"], "timeouts"),
        (["x=1,2", "hydra.sweep.subdir=same"], "jobs #0 and #1 would both write into"),
    ],
)
def test_what_cannot_be_is_told_before_a_job_starts(
    sweep: Callable[..., subprocess.Popen[str]], given: list[str], told: str
) -> None:
    code, out = finished(sweep(*given))
    assert code != 0 and told in out, out
    assert not list(Path().glob("sweep/*/ran"))


@pytest.mark.parametrize(
    ("value", "told"),
    [(2, 2), ([1.0, 2.0], [1.0, 2.0]), (torch.tensor(1.5), 1.5), (object(), None), (None, None)],
)
def test_what_a_job_returns_comes_back_as_numbers(tmp_path: Path, value: Any, told: Any) -> None:
    job_return = JobReturn(status=JobStatus.COMPLETED)
    job_return.return_value = value
    SaveReturn(str(tmp_path / "x" / "returned.json")).on_job_end(None, job_return)
    assert json.loads((tmp_path / "x" / "returned.json").read_text()) == {"value": told, "error": None}

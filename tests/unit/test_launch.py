"""Starting ranks: they get one configuration, the first error is told, and nothing stays behind."""

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
import yaml

from tests.harness import _free_port
from titanplug import launch
from titanplug.attach import Attached, check_world, find_launcher
from titanplug.errors import ConfigError
from titanplug.rank_errors import ERROR_DIR_VARIABLE, RankReport, first_error, record_error

ROOT = Path(__file__).parents[2]

TASKS = """
import json, os, signal, sys, time
from pathlib import Path
from titanplug.errors import TitanplugError

RANK = int(os.environ.get("RANK", 0))

def note(config):
    names = ("WORLD_SIZE", "LOCAL_RANK", "OMP_NUM_THREADS", "MASTER_PORT")
    seen = {"config": config, **{name: os.environ.get(name) for name in names}}
    (Path(config["paths"]["run_dir"]) / f"seen{RANK}.json").write_text(json.dumps(seen))

def fail(config):
    begun = Path(config["paths"]["run_dir"]) / "begun"
    if RANK == 1:
        begun.touch()
        raise KeyError("the real reason")
    while not begun.exists():
        time.sleep(0.01)
    time.sleep(0.05)
    raise RuntimeError("[gloo] Connection closed by peer")

def fail_while_peers_are_quicker(config):
    begun = Path(config["paths"]["run_dir"]) / "begun"
    if RANK == 0:
        while not begun.exists():
            time.sleep(0.01)
        raise RuntimeError("Connection reset by peer")
    begun.touch()
    try:
        raise KeyError("the real reason")
    finally:
        time.sleep(60)  # a slow clean-up, cut short by the end of the job

def fail_on_purpose(config):
    raise TitanplugError("Three is too many. Give two.")

def die(config):
    if RANK == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)

def leave(config):
    if RANK == 1:
        os._exit(3)
    time.sleep(60)

def save(config):
    def leave(*_):
        time.sleep(1)  # a slow save
        os._exit(75)
    for name in ("SIGTERM", "SIGUSR1"):
        signal.signal(getattr(signal, name), leave if RANK == 0 else signal.SIG_IGN)
    if RANK == 1:
        time.sleep(0.5)
        os.kill(os.getppid(), signal.SIGUSR1)
    time.sleep(8)

def wait(config):
    (Path(config["paths"]["run_dir"]) / f"pid{RANK}").write_text(str(os.getpid()))
    time.sleep(60)
"""


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[str, Path]]:
    (tmp_path / "tasks.py").write_text(TASKS)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), str(ROOT)]))

    def write(name: str, **values: Any) -> tuple[str, Path]:
        path = tmp_path / "config.yaml"
        path.write_text(yaml.safe_dump({"paths": {"run_dir": str(tmp_path)}, **values}))
        return f"tasks:{name}", path

    return write


def failure(task: tuple[str, Path], num_processes: int = 2) -> tuple[str, float]:
    start = time.monotonic()
    with pytest.raises(launch.RankError) as caught:
        launch.launch_ranks(*task, num_processes)
    return str(caught.value), time.monotonic() - start


def test_every_rank_gets_the_configuration_and_a_share_of_the_cores(
    job: Callable[..., tuple[str, Path]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS")
    for name, value in (("RANK", "7"), ("WORLD_SIZE", "9"), ("MASTER_PORT", "1")):
        monkeypatch.setenv(name, value)  # left over from something else
    before, handler = dict(os.environ), signal.getsignal(signal.SIGTERM)
    launch.launch_ranks(*job("note", lr=0.5, when="12:30"), 2)
    assert dict(os.environ) == before and signal.getsignal(signal.SIGTERM) is handler
    seen = [json.loads((tmp_path / f"seen{rank}.json").read_text()) for rank in (0, 1)]
    threads = str(max(1, launch.num_cores() // 2))
    for rank, values in enumerate(seen):
        assert values["config"]["lr"] == 0.5 and values["config"]["when"] == "12:30"
        assert (values["WORLD_SIZE"], values["LOCAL_RANK"]) == ("2", str(rank))
        assert values["OMP_NUM_THREADS"] == threads
    assert seen[0]["MASTER_PORT"] == seen[1]["MASTER_PORT"] != "1"


def test_threads_that_the_user_chose_are_kept(
    job: Callable[..., tuple[str, Path]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    launch.launch_ranks(*job("note"), 1)
    assert json.loads((tmp_path / "seen0.json").read_text())["OMP_NUM_THREADS"] == "5"


@pytest.mark.parametrize("name", ["fail", "fail_while_peers_are_quicker"])
def test_the_cause_is_told_and_not_the_lost_connection(
    job: Callable[..., tuple[str, Path]], name: str
) -> None:
    text, seconds = failure(job(name))
    assert text.startswith("rank 1 of 2 failed:\n") and text.endswith("KeyError: 'the real reason'")
    assert "tasks.py" in text and "Connection" not in text
    assert seconds < 30


def test_an_error_that_explains_itself_needs_no_traceback(
    job: Callable[..., tuple[str, Path]],
) -> None:
    text, _ = failure(job("fail_on_purpose"), 1)
    assert text == "rank 0 of 1 failed:\nThree is too many. Give two."


def test_a_rank_that_is_killed_or_leaves_is_named(job: Callable[..., tuple[str, Path]]) -> None:
    text, _ = failure(job("die"))
    assert text.startswith("rank 1 of 2 was ended by SIGKILL.") and "memory" in text
    text, _ = failure(job("leave"))
    assert text.startswith("rank 1 of 2 ended with exit code 3")


@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1", "SIGINT", "SIGKILL"])
def test_a_signal_to_the_parent_ends_the_ranks(
    job: Callable[..., tuple[str, Path]], tmp_path: Path, name: str
) -> None:
    task, config = job("wait")
    code = "from pathlib import Path; from titanplug.launch import launch_ranks\n"
    code += f"launch_ranks({task!r}, Path({str(config)!r}), 2)"
    parent = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True)
    files = [tmp_path / "pid0", tmp_path / "pid1"]
    deadline = time.monotonic() + 60
    while not all(file.exists() and file.read_text() for file in files):
        assert parent.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    ranks = [psutil.Process(int(file.read_text())) for file in files]
    parent.send_signal(signal.Signals[name])
    _, errors = parent.communicate(timeout=40)
    assert parent.returncode != 0
    assert name == "SIGKILL" or f"Ended by {name}" in errors
    _, alive = psutil.wait_procs(ranks, timeout=5)
    assert not [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]


def test_a_signal_is_passed_on_and_ranks_that_save_take_their_time(
    job: Callable[..., tuple[str, Path]],
) -> None:
    handler = signal.getsignal(signal.SIGUSR1)
    with pytest.raises(launch.Preempted):
        launch.launch_ranks(*job("save"), 2)
    assert signal.getsignal(signal.SIGUSR1) is handler


# --------------------------------------------------------------------------------------
# Errors in files
# --------------------------------------------------------------------------------------


def test_the_first_error_that_is_no_consequence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not record_error(0, ValueError("nobody reads it"))
    monkeypatch.setenv(ERROR_DIR_VARIABLE, str(tmp_path))
    assert first_error(tmp_path) is None
    assert record_error(2, RuntimeError("Broken pipe"))
    found = first_error(tmp_path)
    assert found is not None and found.rank == 2  # better than nothing
    assert record_error(1, ValueError("one"))
    assert record_error(0, ValueError("nought"))
    (tmp_path / "rank5.json").write_text("{")  # cut short
    found = first_error(tmp_path)
    assert found is not None and found.rank == 1 and found.text == "ValueError: one"


def test_consequences_are_known_by_their_words() -> None:
    text = "RuntimeError: [../gloo/transport/tcp/pair.cc:1] Connection closed by peer [::1]:2"
    assert RankReport(0, 0.0, text).is_consequence
    assert not RankReport(0, 0.0, "ValueError: peer").is_consequence


# --------------------------------------------------------------------------------------
# Attaching
# --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, None),
        ({"RANK": "1"}, None),
        ({"RANK": "1", "WORLD_SIZE": "4"}, Attached("torchrun", 1, 4)),
        ({"SLURM_NTASKS": "8", "SLURM_PROCID": "3"}, Attached("srun", 3, 8)),
        ({"SLURM_NTASKS": "8", "SLURM_PROCID": "0", "SLURM_JOB_NAME": "interactive"}, None),
    ],
)
def test_who_started_this_process(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], expected: Attached | None
) -> None:
    for name in list(os.environ):
        if name in ("RANK", "WORLD_SIZE") or name.startswith("SLURM_"):
            monkeypatch.delenv(name)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert find_launcher() == expected


def test_a_world_of_another_size_is_told_with_the_numbers() -> None:
    check_world(Attached("torchrun", 0, 4), devices=2, num_nodes=2)
    with pytest.raises(ConfigError, match=r"devices=2 x trainer.num_nodes=1 = 2.*torchrun.* 4 proc"):
        check_world(Attached("torchrun", 0, 4), devices=2, num_nodes=1)
    with pytest.raises(ConfigError, match=r"srun started 4 processes.*--ntasks-per-node"):
        check_world(Attached("srun", 0, 4), devices=1, num_nodes=1)


FOLLOW = """
import json, os, sys
from titanplug.attach import Channel, find_launcher
attached = find_launcher()
if attached.rank == 0:
    message = json.loads(os.environ["MESSAGE"])
    Channel(attached).send_end() if message is None else Channel(attached).send_config(message)
else:
    print(json.dumps(Channel(attached).receive()))
sys.stdin.read()
"""


PLACES = {
    "torchrun": {"RANK": "{rank}", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"},
    "srun": {"SLURM_PROCID": "{rank}", "SLURM_NTASKS": "2", "SLURM_NTASKS_PER_NODE": "2"}
    | {"SLURM_NODELIST": "127.0.0.1"},
}


@pytest.mark.parametrize(
    ("launcher", "message", "expected"),
    [
        ("torchrun", {"lr": 1}, ('{"lr": 1}\n', 0)),
        ("torchrun", None, ("", 0)),
        pytest.param("srun", {"lr": 1}, ('{"lr": 1}\n', 0), marks=pytest.mark.slow),
    ],
)
def test_followers_get_the_configuration_of_rank_0_or_end(
    launcher: str, message: Any, expected: tuple[str, int]
) -> None:
    environment = {key: value for key, value in os.environ.items() if not key.startswith("SLURM_")}
    environment |= {"MESSAGE": json.dumps(message), "PYTHONPATH": str(ROOT)}
    environment["MASTER_PORT"] = str(_free_port())
    processes = []
    for rank in ("0", "1"):
        place = {name: value.format(rank=rank) for name, value in PLACES[launcher].items()}
        command = [sys.executable, "-c", FOLLOW]
        processes.append(
            subprocess.Popen(
                command,
                env=environment | place,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        )
    output = processes[1].communicate(timeout=100)[0]
    processes[0].communicate(timeout=100)
    assert (output, processes[1].returncode) == expected

"""`titanplug train resume=auto`: the same command goes on where a signal has stopped it."""

from __future__ import annotations

import json
import re
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.recipes.test_quickstart import SMALL, TORCHRUN, finished, start, the_run
from titanplug.launch import EXIT_PREEMPTED

__all__ = ["start"]  # a fixture

Start = Callable[..., subprocess.Popen[str]]

# Sends a signal at a step of a run that starts from nothing: to the ranks' parent, or to one rank.
SEND = """
import os, signal, time
import lightning as L

class Send(L.Callback):
    def __init__(self, rank=0, to="rank", name="SIGTERM", step=3):
        self.rank, self.to, self.name, self.step = rank, to, name, step
        self.fresh = False

    def setup(self, trainer, *_, **__):
        if self.step < 0 and trainer.global_rank == 1:
            os.kill(os.getppid(), getattr(signal, self.name))
            time.sleep(60)

    def on_train_start(self, trainer, _):
        self.fresh = trainer.global_step == 0

    def on_train_batch_start(self, trainer, *_):
        if self.fresh and trainer.global_step == self.step and trainer.global_rank == self.rank:
            pid = os.getpid() if self.to == "rank" else os.getppid()
            os.kill(pid, getattr(signal, self.name))
"""
ONE = [*SMALL, "trainer.devices=1", "parallelism=single", "trainer.max_steps=12", "logger=[tensorboard,csv]"]
SENT = "+callbacks.send._target_=send.Send"
AUTO = "resume=auto"


def losses(folder: Path) -> dict[int, float]:
    events = EventAccumulator(str(folder / "tensorboard")).Reload()
    found = [(event.step, event.value) for event in events.Scalars("train_loss")]
    assert [step for step, _ in found] == sorted({step for step, _ in found}), "each step once"
    return dict(found)


def metrics(folder: Path) -> dict[str, Any]:
    values: dict[str, Any] = json.loads((folder / "metrics.json").read_text())
    return {name: values[name] for name in ("train_loss", "val_loss", "grad_norm")}


def preempted(process: subprocess.Popen[str], name: str = "SIGTERM") -> tuple[str, str]:
    out, errors = process.communicate(timeout=110)
    assert process.returncode == EXIT_PREEMPTED, out + errors
    last = errors.rstrip().splitlines()[-1]
    told = rf"Preempted by {name}: saved runs/quickstart/\S+/checkpoints/preempted\.ckpt at step \d+\. Run "
    assert re.match(told, last), errors
    assert not re.search("Traceback|Error", errors)
    return out, last


def test_the_same_command_again_ends_as_if_nothing_was(start: Start, run_dir: Path) -> None:
    (run_dir / "send.py").write_text(SEND)
    command = ["-m", "titanplug.cli", "train", *ONE, SENT, AUTO]
    out, last = preempted(start(*command))
    folder = the_run()
    assert f"Nothing to continue: a new run, in runs/quickstart/{folder.name}." in out
    assert last in (folder / "run.log").read_text()
    out, _ = finished(start(*command))
    assert the_run() == folder  # the only one
    assert f"Continuing {folder} at step 4 (checkpoints/preempted.ckpt)." in out
    assert yaml.safe_load((folder / "config.yaml").read_text())["ckpt_path"].endswith("preempted.ckpt")
    assert {"metrics_until_step_4.csv", "metrics.csv"} <= {path.name for path in (folder / "csv").iterdir()}
    assert "exists and is not empty" not in (folder / "run.log").read_text()
    out, _ = finished(start(*command))
    assert f"{folder} is finished; its last checkpoint is of step 12. To train it further, raise" in out
    assert the_run() == folder and "tokens/s" not in out
    folder = folder.rename("interrupted")
    finished(start("-m", "titanplug.cli", "train", *ONE, SENT, "+callbacks.send.step=99"))
    assert metrics(folder) == metrics(the_run())
    assert losses(folder) == losses(the_run())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rank", "to", "name"), [(0, "parent", "SIGTERM"), (1, "rank", "SIGUSR1"), (1, "parent", "SIGUSR1")]
)
def test_ranks_of_the_command(start: Start, run_dir: Path, rank: int, to: str, name: str) -> None:
    """And another layout with the same rows in a step goes on with the run; more steps make it longer."""
    (run_dir / "send.py").write_text(SEND)
    send = [SENT, f"callbacks.send.rank={rank}", f"callbacks.send.to={to}", f"callbacks.send.name={name}"]
    send = [send[0], *(f"+{item}" for item in send[1:])]
    command = ["-m", "titanplug.cli", "train", *SMALL, "trainer.max_steps=400", *send, AUTO]
    preempted(start(*command), name)
    folder = the_run()
    more = ["trainer.max_steps=40", "trainer.devices=1", "data.batch_size=4", "parallelism=single"]
    out, _ = finished(start(*command, *more))
    assert "Continuing" in out and the_run() == folder
    out, _ = finished(start(*command, *more))
    assert "is finished; its last checkpoint is of step 39" in out
    out, _ = finished(start(*command, *more, "trainer.max_steps=42"))
    assert "at step 39" in out
    out, _ = finished(start(*command, *more, "optim.lr=1e-3", "trainer.max_steps=2"))  # before the signal
    assert re.search(rf"The newest run of this name, {folder}, has other .*optim.lr", out)
    assert len(list(folder.parent.iterdir())) == 2


@pytest.mark.slow
def test_under_torchrun(start: Start, run_dir: Path) -> None:
    """torchrun itself ends with 1, whatever code its ranks have."""
    (run_dir / "send.py").write_text(SEND)
    command = [*TORCHRUN, "-m", "titanplug.train", *SMALL, "trainer.max_steps=40", SENT, AUTO]
    process = start(*command)
    _, errors = process.communicate(timeout=110)
    assert process.returncode == 1 and "exitcode  : 75" in errors and "Preempted by SIGTERM" in errors
    folder = the_run()
    out, _ = finished(start(*command))
    assert f"Continuing {folder}" in out and the_run() == folder
    out, _ = finished(start(*command))
    assert "is finished; its last checkpoint is of step 39" in out


@pytest.mark.slow
def test_each_job_of_a_sweep_goes_on_with_its_own(start: Start, run_dir: Path) -> None:
    """A signal ends the sweep and not only its job."""
    (run_dir / "send.py").write_text(SEND)
    command = ["-m", "titanplug.cli", "train", *ONE, SENT, AUTO, "trainer.max_steps=12,14", "--multirun"]
    preempted_job = start(*command)
    out, errors = preempted_job.communicate(timeout=110)
    assert preempted_job.returncode == EXIT_PREEMPTED, errors
    assert len(list(Path("runs/quickstart").glob("multirun_*/*/config.yaml"))) == 1
    process = start(*command)
    out, errors = process.communicate(timeout=110)
    assert process.returncode == EXIT_PREEMPTED, errors  # the second job now
    assert "Continuing" in out and "Nothing to continue" in out
    out, _ = finished(start(*command))
    assert "is finished; its last checkpoint is of step 12" in out and out.count("Continuing") == 1
    ends = [metrics(path.parent) for path in Path("runs/quickstart").glob("multirun_*/*/metrics.json")]
    assert len(ends) == 2 and ends[0] != ends[1]


@pytest.mark.slow
def test_a_signal_before_the_first_step_saves_nothing(start: Start, run_dir: Path) -> None:
    (run_dir / "send.py").write_text(SEND)
    send = [SENT, "+callbacks.send.step=-1", "+callbacks.send.name=SIGUSR1"]
    process = start("-m", "titanplug.cli", "train", *SMALL, AUTO, *send)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGUSR1, errors
    assert errors.rstrip().endswith("titanplug: Ended by SIGUSR1.")

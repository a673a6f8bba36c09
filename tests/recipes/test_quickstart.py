"""`titanplug train` from end to end: what it prints and leaves, and how it fails."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from titanplug.launch import EXIT_PREEMPTED

ROOT = Path(__file__).parents[2]
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")

# The quickstart, made small: bytes instead of BPE, a tiny model, a few steps.
SMALL = [
    "experiment=quickstart",
    "model=debug",
    "tokenizer=byte",
    "data=text",
    "data.path=small.txt",
    "data.cache_dir=cache",
    "data.seq_len=32",
    "data.batch_size=2",
    "model.vocab_size=257",
    "model.dim=16",
    "model.hidden_dim=24",
    "model.num_layers=2",
    "trainer.max_steps=6",
    "trainer.val_check_interval=3",
    "trainer.log_every_n_steps=2",
    "trainer.limit_val_batches=2",
]


@pytest.fixture
def start(run_dir: Path) -> Callable[..., subprocess.Popen[str]]:
    """Starts ``python ...`` in an empty folder that holds a small text."""
    lines = (f"line {n} of a text that is easy to learn" for n in range(300))
    (run_dir / "small.txt").write_text("\n".join(lines))

    def run(*arguments: str, **environment: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, *arguments],
            env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    return run


def finished(process: subprocess.Popen[str], timeout_s: float = 110) -> tuple[str, str]:
    out, errors = process.communicate(timeout=timeout_s)
    assert process.returncode == 0, out + errors
    return out, errors


def the_run(name: str = "quickstart") -> Path:
    (folder,) = Path("runs", name).iterdir()
    return folder


def scalars(folder: Path) -> dict[str, list[float]]:
    events = EventAccumulator(str(folder / "tensorboard")).Reload()
    return {tag: [e.value for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def check_run(out: str) -> dict[str, Any]:
    """What every run prints and leaves. Returns the final values."""
    folder, lines = the_run(), out.splitlines()
    assert lines[0] == "Layout     2 processes on cpu: dp_shard=2"
    assert lines[1] == ("Reading    2 shares of the samples (share 0: rank 0; share 1: rank 1)")
    steps = [line for line in lines if line.startswith("step") and "tokens/s" in line]
    pattern = (
        r"step +\d+/\d+ \| loss \d+\.\d+ \| grad norm \d+\.\d+ \| lr \S+ \| [\d,]+ tokens/s \| "
        r"\d+\.\d+ GiB \| \d+\.\d s"
    )
    assert steps and all(re.fullmatch(pattern, line) for line in steps), steps
    values: dict[str, Any] = json.loads((folder / "metrics.json").read_text())
    last = re.fullmatch(
        r"Trained \d+ steps in \d+ s, validation (\S+) bits per byte\. Everything is in (\S+) "
        r"\((checkpoints/step_\d+\.ckpt), loss_curve\.png, tensorboard\)\.",
        lines[-1],
    )
    assert last is not None, lines[-1]
    assert float(last[1]) == pytest.approx(values["val_bits_per_byte"], abs=1e-4)
    assert Path(last[2]).resolve() == folder.resolve() and (folder / last[3]).exists()
    assert (folder / "checkpoints" / "last.ckpt").exists()
    assert (folder / "loss_curve.png").stat().st_size > 10_000
    logged = scalars(folder)
    assert {"train_loss", "grad_norm", "lr", "tokens_per_s", "memory_gib"} <= logged.keys()
    assert logged["val_bits_per_byte"][-1] == pytest.approx(values["val_bits_per_byte"])
    assert (folder / "run.log").read_text().count("Trained ") == 1  # rank 0 alone writes
    assert [path.name for path in (folder / "ranks").iterdir()] == ["rank_1.log"]
    status = json.loads((folder / "status.json").read_text())
    assert status["state"] == "finished" and status["metrics"] == values
    config = yaml.safe_load((folder / "config.yaml").read_text())
    assert Path(config["paths"]["run_dir"]) == folder.resolve()
    assert (folder / ".hydra" / "overrides.yaml").exists()
    return values


def test_two_processes_print_and_leave_what_was_promised(
    start: Callable[..., subprocess.Popen[str]],
) -> None:
    out, errors = finished(start("-m", "titanplug.cli", "train", *SMALL, "test=true"))
    assert "Traceback" not in errors
    *fitted, tested = out.splitlines()
    values = check_run("\n".join(fitted))
    assert re.match(rf"Tested, test {values['test_bits_per_byte']:.4f} bits per byte", tested)
    assert values["val_bits_per_byte"] < 8.1


@pytest.mark.slow
def test_under_torchrun_it_attaches_and_gives_the_same_numbers(
    start: Callable[..., subprocess.Popen[str]],
) -> None:
    first = check_run(finished(start("-m", "titanplug.train", *SMALL))[0])
    the_run().rename("first")
    again = check_run(finished(start(*TORCHRUN, "-m", "titanplug.train", *SMALL))[0])
    exact = ("train_loss", "val_loss", "val_bits_per_byte", "grad_norm")
    assert {key: again[key] for key in exact} == {key: first[key] for key in exact}


@pytest.mark.slow
def test_on_two_nodes_each_torchrun_attaches(start: Callable[..., subprocess.Popen[str]]) -> None:
    """Two agents that meet at one address, with a rank each, are the same run as two ranks of one."""
    first = check_run(finished(start("-m", "titanplug.train", *SMALL))[0])
    the_run().rename("first")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    meet = [f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-backend=c10d", "--rdzv-id=job"]
    torchrun = ["-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1", *meet]
    command = [*torchrun, "-m", "titanplug.train", *SMALL, "trainer.devices=1", "trainer.num_nodes=2"]
    nodes = [start(*command), start(*command)]
    outs = [finished(node)[0] for node in nodes]
    again = json.loads((the_run() / "metrics.json").read_text())  # one folder
    exact = ("train_loss", "val_loss", "val_bits_per_byte", "grad_norm")
    assert {key: again[key] for key in exact} == {key: first[key] for key in exact}
    assert sum("Trained 6 steps" in out for out in outs) == 1


def test_under_torchrun_a_wrong_configuration_ends_every_rank(
    start: Callable[..., subprocess.Popen[str]],
) -> None:
    process = start(
        *TORCHRUN, "-m", "titanplug.train", *SMALL, "trainer.devices=4", "parallelism.dp_shard=-1"
    )
    _, errors = process.communicate(timeout=60)
    assert process.returncode != 0
    told = "trainer.devices=4 x trainer.num_nodes=1 = 4, but torchrun started 2 processes"
    assert told in errors and errors.rstrip().rpartition(told)[2].count("\n") < 8  # it is last
    assert len(list(Path("runs", "quickstart").iterdir())) == 1


FAIL = """
import os
import lightning as L

class Fail(L.Callback):
    def on_train_start(self, *_):
        print("said on every rank")

    def on_train_batch_end(self, trainer, *_):
        if os.environ["RANK"] == "1" and trainer.global_step == 3:
            raise ValueError("the disk of this rank is full")
"""


def test_a_failing_rank_ends_the_job_with_its_own_error_last(
    start: Callable[..., subprocess.Popen[str]], run_dir: Path
) -> None:
    (run_dir / "mine.py").write_text(FAIL)
    begun = time.monotonic()
    process = start("-m", "titanplug.train", *SMALL, "+callbacks.fail._target_=mine.Fail")
    out, errors = process.communicate(timeout=110)
    assert process.returncode == 1
    assert errors.rstrip().endswith("ValueError: the disk of this rank is full")
    assert "rank 1 of 2 failed" in errors and "closed by peer" not in errors
    assert "step 2/6" in out
    assert out.count("said on every rank") == 1
    assert "said on every rank" in (the_run() / "ranks" / "rank_1.log").read_text()
    assert (the_run() / "loss_curve.csv").exists()
    assert time.monotonic() - begun < 100


@pytest.mark.slow
@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_a_signal_ends_all_ranks(start: Callable[..., subprocess.Popen[str]], name: str) -> None:
    process = start("-m", "titanplug.train", *SMALL, "trainer.max_steps=100000")
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("step") and "tokens/s" in line:
            break
    ranks = psutil.Process(process.pid).children(recursive=True)
    assert len(ranks) >= 2
    begun = time.monotonic()
    process.send_signal(signal.Signals[name])
    _, errors = process.communicate(timeout=60)
    assert time.monotonic() - begun < 25  # by themselves: torchrun kills after 30
    if name == "SIGTERM":
        assert process.returncode == EXIT_PREEMPTED
        assert errors.rstrip().splitlines()[-1].startswith("Preempted by SIGTERM: saved runs/quickstart/")
    else:
        assert process.returncode == 128 + signal.Signals[name]
        assert errors.rstrip().endswith(f"titanplug: Ended by {name}.")
    _, alive = psutil.wait_procs(ranks, timeout=5)
    assert not alive


@pytest.mark.slow
def test_each_job_of_a_sweep_has_processes_and_a_folder_of_its_own(
    start: Callable[..., subprocess.Popen[str]],
) -> None:
    finished(start("-m", "titanplug.train", *SMALL, "seed=0,1", "--multirun"))
    sweep = the_run()
    values = [json.loads((sweep / job / "metrics.json").read_text()) for job in ("0", "1")]
    seeds = [yaml.safe_load((sweep / job / "config.yaml").read_text())["seed"] for job in "01"]
    assert seeds == [0, 1] and values[0]["val_loss"] != values[1]["val_loss"]
    assert sorted(path.name for path in sweep.iterdir()) == ["0", "1", "multirun.yaml", "sweep.json"]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_quickstart_learns_the_speeches(start: Callable[..., subprocess.Popen[str]]) -> None:
    out, _ = finished(start("-m", "titanplug.cli", "train", "experiment=quickstart"), timeout_s=850)
    values = check_run(out)
    assert values["val_bits_per_byte"] < 2.0
    recorded = scalars(the_run())["val_bits_per_byte"]
    assert recorded == sorted(recorded, reverse=True)

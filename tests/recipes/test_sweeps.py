"""`titanplug train --multirun`: layouts agree, failing jobs, resuming, other launchers and sweepers."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.processes import processes_in, wait_for

ROOT = Path(__file__).parents[2]

SMALL = [
    "experiment=layouts",
    "model=debug",
    "tokenizer=byte",
    "data=text",
    "data.path=small.txt",
    "data.cache_dir=cache",
    "data.seq_len=32",
    "model.vocab_size=257",
    "model.dim=16",
    "model.hidden_dim=24",
    "model.num_layers=4",
    "global_batch_size=4",
    "trainer.max_steps=4",
    "trainer.val_check_interval=2",
    "trainer.log_every_n_steps=1",
    "trainer.limit_val_batches=2",
]

FAIL = """
import os
import lightning as L

class Fail(L.Callback):
    def __init__(self, when): self.when = when
    def on_train_batch_end(self, trainer, *_):
        if self.when and os.environ.get("RANK") == "1" and trainer.global_step == 3:
            raise ValueError("the disk of this rank is full")

class Wait(L.Callback):
    def on_train_batch_end(self, trainer, *_):
        import time
        time.sleep(600 if os.path.exists("wait") and trainer.global_step == 3 else 0)
"""


@pytest.fixture
def start(run_dir: Path) -> Callable[..., subprocess.Popen[str]]:
    """Starts ``titanplug train -m ...`` in an empty folder that holds a small text."""
    lines = (f"line {n} of a text that is easy to learn" for n in range(300))
    (run_dir / "small.txt").write_text("\n".join(lines))
    (run_dir / "mine.py").write_text(FAIL)

    def run(*arguments: str, **environment: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "titanplug.cli", "train", *SMALL, "-m", *arguments],
            env={**os.environ, "PYTHONPATH": f"{ROOT}:{run_dir}", **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    return run


def finished(process: subprocess.Popen[str], timeout_s: float = 280) -> tuple[int, str, str]:
    out, errors = process.communicate(timeout=timeout_s)
    return process.returncode, out, errors


def the_sweep() -> Path:
    (folder,) = Path("runs", "layouts").iterdir()
    return folder


def statuses() -> dict[str, dict[str, Any]]:
    """By job."""
    found = {path.parent.name: json.loads(path.read_text()) for path in the_sweep().glob("*/status.json")}
    return {name: found[name] for name in sorted(found)}


def wait_until(condition: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    """Wait for what a sweep does while it runs."""

    def holds() -> bool:
        assert process.poll() is None
        return condition()

    wait_for(holds, 100)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_layouts_agree_and_a_wrong_one_stops_nothing(
    start: Callable[..., subprocess.Popen[str]], run_dir: Path
) -> None:
    """Three layouts with the same rows in each step, and one that four heads don't fit."""
    code, out, errors = finished(
        start("parallelism=fsdp,tp,pp_1f1b,llama3_70b_256gpus", "parallelism.meta_init=false")
    )
    assert code == 2, out + errors
    found = statuses()
    assert [status["state"] for status in found.values()] == ["finished", "finished", "finished", "refused"]
    assert "tp=8" in found["3"]["error"] and "tp=8" in out.split("#0 started")[0]  # before a job starts
    losses = [found[job]["metrics"]["val_loss"] for job in "012"]
    assert losses[1:] == pytest.approx([losses[0]] * 2, rel=1e-5)
    status = found["1"]
    assert status["layout"]["tp"] == 2 and status["layout"]["world_size"] == 2 and status["steps"] == 4
    assert status["tokens_per_s"] > 0 and status["memory_gib"] > 0 and status["exit_code"] == 0
    assert status["best"]["monitor"] == "val_loss" and status["versions"]["torch"]
    assert (the_sweep() / "1" / status["best"]["checkpoint"]).exists()
    assert (
        status["objective"]
        == losses[1]
        == json.loads((the_sweep() / "1/metrics.json").read_text())["val_loss"]
    )
    table = out[out.index("4 runs: 3 finished, 1 refused") :]
    assert "parallelism" in table and "Best val_loss" in table
    assert sorted(p.name for p in the_sweep().iterdir()) == [
        "0",
        "1",
        "2",
        "3",
        "multirun.yaml",
        "sweep.json",
    ]
    assert errors.rstrip().splitlines()[-1].startswith("titanplug: 1 of 4 jobs didn't finish: #3.")
    jobs = [str(the_sweep() / job) for job in "012"]
    compare = [sys.executable, "-m", "titanplug.cli", "compare", *jobs, "--assert-close", "val_loss"]
    done = subprocess.run(
        compare, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert not processes_in(run_dir)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_failing_trial_and_world_sizes_in_one_sweep(
    start: Callable[..., subprocess.Popen[str]], run_dir: Path
) -> None:
    code, out, _ = finished(
        start(
            "trainer.devices=2,1",
            "parallelism=fsdp",
            "+callbacks.fail={_target_:mine.Fail,when:false},{_target_:mine.Fail,when:true}",
        )
    )
    found = statuses()
    # The callback fails on rank 1, which a job of one process doesn't have.
    assert [status["state"] for status in found.values()] == ["finished", "failed", "finished", "finished"]
    assert [status["layout"]["world_size"] for status in found.values()] == [2, 2, 1, 1]
    assert (
        code == 1 and found["1"]["error"] == "rank 1 of 2 failed: ValueError: the disk of this rank is full"
    )
    assert found["1"]["steps"] == 3
    assert "#1 failed" in out and "the disk of this rank is full" in out
    values = [found[job]["metrics"]["val_loss"] for job in "023"]
    assert values[1:] == pytest.approx([values[0]] * 2, rel=1e-5)
    assert not processes_in(run_dir)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_killed_sweep_goes_on_where_it_was(
    start: Callable[..., subprocess.Popen[str]], run_dir: Path
) -> None:
    """The second job is killed after its checkpoint of step 2; with --resume it goes on from there."""
    given = ("seed=0,1", "parallelism=fsdp", "+callbacks.wait._target_=mine.Wait")
    process = start(*given)
    wait_until(lambda: bool(list(Path("runs").glob("*/*/1/status.json"))), process)
    (run_dir / "wait").touch()  # the second job stops in its third step
    wait_until(lambda: bool(list(Path("runs").glob("*/*/1/checkpoints/step_2.ckpt"))), process)
    process.kill()
    process.communicate()
    (run_dir / "wait").unlink()
    wait_for(lambda: not processes_in(run_dir), 20)  # they end with it
    sweep = the_sweep()
    assert [status["state"] for status in statuses().values()] == ["finished", "running"]
    code, out, errors = finished(start(*given, "--resume"))
    assert code == 0, out + errors
    assert "1 of them have finished before" in out and "#0 started" not in out and "#1 started" in out
    assert "Continuing" in (sweep / "1" / "console.log").read_text()
    assert len(list(Path("runs/layouts").glob("multirun_*"))) == 1


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_ctrl_c_ends_every_process(start: Callable[..., subprocess.Popen[str]], run_dir: Path) -> None:
    (run_dir / "wait").touch()
    process = start("seed=0,1,2", "parallelism=fsdp", "+callbacks.wait._target_=mine.Wait")
    wait_until(lambda: bool(list(Path("runs").glob("*/*/0/checkpoints/*"))), process)
    process.send_signal(signal.SIGINT)
    code, _, errors = finished(process, 100)
    assert code == 128 + signal.SIGINT
    assert "The sweep was ended by SIGINT" in errors and "--resume" in errors
    assert [status["state"] for status in statuses().values()] == ["interrupted"]
    assert not processes_in(run_dir)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.skipif(find_spec("optuna") is None, reason="needs titanplug[optuna]")
def test_optuna_gets_what_each_trial_reached(start: Callable[..., subprocess.Popen[str]]) -> None:
    given = ("parallelism=fsdp", "trainer.max_steps=2")
    code, out, errors = finished(start("hparams_search=optuna", "hydra.sweeper.n_trials=3", *given))
    assert code == 0, out + errors
    found = statuses()
    reached = {job: status["objective"] for job, status in found.items()}
    best = yaml.safe_load((the_sweep() / "optimization_results.yaml").read_text())
    assert best["best_value"] == min(reached.values()) and len(set(reached.values())) == 3
    rates = {}
    for job in found:
        config = yaml.safe_load((the_sweep() / job / "config.yaml").read_text())
        rates[job] = config["optim"]["lr"]
    winner = min(reached, key=lambda job: reached[job])
    assert best["best_params"]["optim.lr"] == pytest.approx(rates[winner])
    code, out, _ = finished(
        start("hparams_search=optuna", "hydra.sweeper.n_trials=1", "optimized_metric=val_los", *given)
    )
    assert code != 0 and "optimized_metric=val_los: the run has no final value of that name" in out


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("launcher", ["joblib", "submitit_local"])
def test_other_launchers_run_the_same_jobs(
    start: Callable[..., subprocess.Popen[str]], run_dir: Path, launcher: str
) -> None:
    package = {"joblib": "joblib", "submitit_local": "submitit"}[launcher]
    if find_spec(f"hydra_plugins.hydra_{package}_launcher") is None:
        pytest.skip(f"needs titanplug[{package}]")
    code, out, errors = finished(start(f"hydra/launcher={launcher}", "seed=0,1", "parallelism=fsdp"))
    assert code == 0, out + errors
    found = statuses()  # in one folder
    assert [status["state"] for status in found.values()] == ["finished", "finished"]
    assert found["0"]["objective"] != found["1"]["objective"]
    assert not processes_in(run_dir)


SLURM = """
import os
own = {name: os.environ.get("SUBMITIT_LOCAL_" + name) for name in ("JOB_ID", "NTASKS", "LOCALID", "GLOBALID")}
if own["GLOBALID"] is not None:
    os.environ.update(
        SLURM_JOB_ID=own["JOB_ID"], SLURM_NTASKS=own["NTASKS"], SLURM_PROCID=own["GLOBALID"],
        SLURM_LOCALID=own["LOCALID"], SLURM_NODEID="0", SLURM_NODELIST="localhost", SLURM_JOB_NAME="sweep",
        SLURM_NTASKS_PER_NODE=own["NTASKS"], MASTER_ADDR="127.0.0.1",
    )
"""


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_tasks_of_slurm_are_the_ranks_of_a_job(
    start: Callable[..., subprocess.Popen[str]], run_dir: Path
) -> None:
    """submitit's local executor with two tasks, in which a stub sets what srun would."""
    if find_spec("submitit") is None:
        pytest.skip("needs titanplug[submitit]")
    (run_dir / "sitecustomize.py").write_text(SLURM)
    given = ("hydra/launcher=submitit_local", "hydra.launcher.tasks_per_node=2")
    code, out, errors = finished(
        start(*given, "~hydra.callbacks.titanplug_check", "seed=0,1", "parallelism=fsdp")
    )
    assert code == 0, out + errors
    found = statuses()
    assert [status["state"] for status in found.values()] == ["finished", "finished"]
    assert [status["layout"]["world_size"] for status in found.values()] == [2, 2]
    assert sorted(path.name for path in (the_sweep() / "0" / "ranks").iterdir()) == ["rank_1.log"]
    assert not processes_in(run_dir)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (
            ["hydra/launcher=submitit_slurm"],
            "hydra.launcher.tasks_per_node=1 and nodes=1 with trainer.devices=2",
        ),
        (
            ["hydra/launcher=submitit_local", "hydra.launcher.tasks_per_node=2"],
            "Give hydra.launcher.tasks_per_node=1",
        ),
    ],
)
def test_tasks_of_slurm_are_compared_with_ranks_before_anything_is_sent(
    start: Callable[..., subprocess.Popen[str]], given: list[str], told: str
) -> None:
    if find_spec("submitit") is None:
        pytest.skip("needs titanplug[submitit]")
    code, _, errors = finished(start("seed=0,1", "parallelism=fsdp", *given))
    assert code == 2 and told in errors

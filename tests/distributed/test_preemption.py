"""A signal ends all ranks after the same step with a checkpoint, and the same command goes on from there."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint

import titanplug.strategy.signals as signals
from tests.distributed.checkpoint_case import Module, assert_equal, loader, trainer_for
from tests.distributed.test_launch import finish, script, started
from tests.harness import _free_port, run_ranks
from titanplug import latest_checkpoint
from titanplug.launch import EXIT_PREEMPTED

STEPS = 12  # 5 an epoch


class Send(Callback):
    """Sends this process a signal on one rank, at a step; and more while the checkpoint is written."""

    def __init__(self, name: str, rank: int, step: int, where: str = "step") -> None:
        self.number = getattr(signal, name)
        self.rank, self.step, self.where = rank, step, where
        self.seen = -1

    def _send(self, trainer: L.Trainer, where: str) -> None:
        if (trainer.global_rank, trainer.global_step, where) == (self.rank, self.step, self.where):
            os.kill(os.getpid(), self.number)
            time.sleep(0.05 * trainer.global_rank)  # the others shall be ahead, or behind

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        self.seen = trainer.global_step
        self._send(trainer, "step")

    def on_validation_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        self._send(trainer, "validation")

    def on_save_checkpoint(self, *_: Any) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGUSR1)


def fit(
    world_size: int, degrees: Any, options: dict[str, Any], callbacks: list[Any], path: Path | None = None
) -> tuple[Module, L.Trainer, int]:
    """Train to the end or to a signal; returns the exit code too."""
    L.seed_everything(7, verbose=False)
    options = {"max_epochs": -1, "max_steps": STEPS, "enable_checkpointing": bool(callbacks), **options}
    trainer = trainer_for(world_size, degrees, callbacks=callbacks, **options)
    module = Module(noise=world_size == 1 or "pp" not in degrees)
    code = 0
    try:
        trainer.fit(module, loader(trainer.strategy, shuffle=True), loader(trainer.strategy), ckpt_path=path)
    except SystemExit as stop:
        code = stop.code  # type: ignore[assignment]
    return module, trainer, code


def interrupted(
    rank: int, world_size: int, degrees: Any, folder: Path, send: tuple[Any, ...], options: dict[str, Any]
) -> tuple[int, int, list[str]]:
    """A run that gets a signal, the same again from its checkpoint, and one without; all must agree."""
    signals._LOOK_EVERY_S = 0.0
    sender = Send(*send)
    _, _, code = fit(world_size, degrees, options, [ModelCheckpoint(folder, save_top_k=0), sender])
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_IGN  # until the process ends
    found = latest_checkpoint(folder)
    assert found == folder / "preempted.ckpt"
    step = int(torch.load(found / "meta.pt", weights_only=False)["global_step"])
    assert step == sender.seen + 1 and send[2] < step <= send[2] + (1 if world_size == 1 else 5)
    resumed, again, _ = fit(world_size, degrees, options, [], found)
    whole, straight, _ = fit(world_size, degrees, options, [])
    assert again.global_step == straight.global_step == STEPS
    assert_equal(resumed.state(), whole.state())
    expected = {at: loss for at, loss in whole.run.losses.items() if at >= step}
    seen = {at: loss for at, loss in resumed.run.losses.items() if at >= step}
    assert seen == expected and len(expected) == STEPS - step
    assert resumed.run.validations == [v for v in whole.run.validations if v[0] > step]
    return code, step, sorted(os.listdir(folder))


CASES: dict[str, tuple[Any, tuple[Any, ...], dict[str, Any]]] = {
    "SIGTERM to rank 0": ({"dp_shard": 2}, ("SIGTERM", 0, 4), {}),
    "SIGUSR1 to rank 1, at the end of an epoch": ({"dp_shard": 2}, ("SIGUSR1", 1, 2), {}),
    "in a validation": ({"dp_shard": 2}, ("SIGTERM", 1, 5, "validation"), {}),
    "in an accumulation window": ({"tp": 2}, ("SIGUSR1", 0, 2), {"accumulate_grad_batches": 2}),
    "in a pipeline": ({"pp": 2}, ("SIGTERM", 1, 3), {}),
    "validating often": ({"dp_shard": 2}, ("SIGTERM", 0, 3), {"val_check_interval": 2}),
}


def check(world_size: int, name: str, folder: Path) -> None:
    degrees, send, options = CASES[name]
    results = run_ranks(interrupted, world_size, degrees, folder, send, options, init_process_group=False)
    assert len(set(map(str, results))) == 1
    code, _, files = results[0]
    assert code == EXIT_PREEMPTED and files == ["preempted.ckpt"]


@pytest.mark.parametrize("name", list(CASES)[:2])
def test_all_ranks_stop_after_the_same_step_and_go_on_as_if_nothing_was(name: str, tmp_path: Path) -> None:
    check(2, name, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", list(CASES)[2:])
def test_wherever_the_signal_comes(name: str, tmp_path: Path) -> None:
    check(2, name, tmp_path)


@pytest.mark.parametrize(
    "step", [pytest.param(3, marks=pytest.mark.slow), 4, pytest.param(5, marks=pytest.mark.slow)]
)
def test_one_process_stops_after_the_step(step: int, tmp_path: Path) -> None:
    """The fifth step ends an epoch."""
    results = run_ranks(interrupted, 1, {}, tmp_path, ("SIGTERM", 0, step), {}, init_process_group=False)
    assert results == [(EXIT_PREEMPTED, step + 1, ["preempted.ckpt"])]


# --------------------------------------------------------------------------------- other endings


def without_checkpoints(rank: int, world_size: int) -> tuple[int, int]:
    signals._LOOK_EVERY_S = 0.0
    sender = Send("SIGUSR1", 1, 2)
    _, trainer, code = fit(world_size, {}, {"enable_checkpointing": False}, [sender])
    return code, trainer.global_step


def test_without_checkpoints_nothing_is_saved_and_the_code_says_so(run_dir: Path) -> None:
    results = run_ranks(without_checkpoints, 2, init_process_group=False)
    assert results[0] == results[1] and results[0][0] == 128 + signal.SIGUSR1
    assert not list(run_dir.iterdir())


def with_own_handler(rank: int, world_size: int, folder: Path) -> tuple[int, int, bool]:
    called = []
    signal.signal(signal.SIGUSR1, lambda *_: called.append(1))
    sender = Send("SIGUSR1", 0, 2)
    _, trainer, code = fit(world_size, {}, {}, [ModelCheckpoint(folder, save_top_k=0), sender])
    return code, trainer.global_step, called == [1] and (folder / "preempted.ckpt").exists()


def test_a_handler_of_the_user_is_left_alone(tmp_path: Path) -> None:
    assert run_ranks(with_own_handler, 1, tmp_path, init_process_group=False) == [(0, STEPS, False)]


def found_by(rank: int, world_size: int, folder: Path, finder: int) -> int:
    """Only one rank finds the checkpoint."""
    fit(world_size, {}, {"max_steps": 3}, [ModelCheckpoint(folder, every_n_train_steps=3)])
    path = latest_checkpoint(folder)
    assert path is not None
    module, _, _ = fit(world_size, {}, {}, [], path if rank == finder else None)
    return min(module.run.losses)


@pytest.mark.parametrize("finder", [0, 1])
def test_all_ranks_load_what_rank_0_has_found(finder: int, tmp_path: Path) -> None:
    first_step = {0: 3, 1: 0}[finder]
    assert run_ranks(found_by, 2, tmp_path, finder, init_process_group=False) == [first_step] * 2


# --------------------------------------------------------------------------------- Slurm

UNDER_SLURM = """
    import titanplug.strategy.signals as signals
    from lightning.pytorch.callbacks import ModelCheckpoint
    signals._LOOK_EVERY_S = 0.0
    class Slow(Net):
        first = None
        def step(self, batch_idx):
            self.first = self.trainer.global_step if self.first is None else self.first
            if self.first == 0 and self.trainer.global_step == 3 and os.environ["SLURM_PROCID"] == "1":
                os.kill(os.getpid(), signal.SIGUSR1)
    net = Slow()
    t = trainer(enable_checkpointing=True, callbacks=[ModelCheckpoint(HERE / "kept", save_top_k=0)],
                max_steps=40, max_epochs=-1, default_root_dir=HERE)
    t.fit(net, rows(64))
    print(f"from {net.first} to {t.global_step}", flush=True)
"""


@pytest.mark.slow
def test_slurm_requeues_as_lightning_does(tmp_path: Path) -> None:
    """The signal comes to one rank of two that srun has started; what it then calls is a stand-in."""
    (tmp_path / "bin").mkdir()
    scontrol = tmp_path / "bin" / "scontrol"
    scontrol.write_text(f"#!/bin/sh\necho $@ >> {tmp_path}/called\n")
    scontrol.chmod(0o755)
    path = script(tmp_path, UNDER_SLURM)
    base = {
        "SLURM_JOB_ID": "4711",
        "SLURM_NTASKS": "2",
        "SLURM_NTASKS_PER_NODE": "2",
        "SLURM_NODEID": "0",
        "SLURM_NODELIST": "127.0.0.1",
    }
    base |= {"SLURM_JOB_NAME": "test", "PATH": f"{tmp_path}/bin:{os.environ['PATH']}"}
    for outcome in (EXIT_PREEMPTED, 0):
        port = str(_free_port())
        with contextlib.ExitStack() as stack:
            ranks = [
                stack.enter_context(
                    started(
                        [sys.executable, str(path)],
                        **base,
                        SLURM_PROCID=str(rank),
                        SLURM_LOCALID=str(rank),
                        MASTER_PORT=port,
                    )
                )
                for rank in (0, 1)
            ]
            ended = [finish(process) for process in ranks]
        assert [end.code for end in ended] == [outcome] * 2, ended[0].err + ended[1].err
        if outcome:
            assert "saved hpc_ckpt_1.ckpt" in ended[0].last_line or "hpc_ckpt_1.ckpt" in ended[0].last_line
            assert (tmp_path / "called").read_text() == "requeue 4711\n"
            assert not (tmp_path / "kept" / "preempted.ckpt").exists()
    first = int(ended[0].out.split("from ")[1].split()[0])
    assert first > 3 and f"from {first} to 40" in ended[1].out


def test_one_process_ends_an_accumulation_window_first(tmp_path: Path) -> None:
    """The signal comes in the window's first batch; its gradients aren't saved."""
    options = {"accumulate_grad_batches": 2}
    results = run_ranks(interrupted, 1, {}, tmp_path, ("SIGUSR1", 0, 1), options, init_process_group=False)
    assert results == [(EXIT_PREEMPTED, 2, ["preempted.ckpt"])]

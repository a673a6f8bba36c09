"""The launcher of the distributed tests, and the check for processes left behind."""

from __future__ import annotations

import faulthandler
import logging
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import numpy as np
import psutil
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.utilities import rank_zero_only
from torch.utils.data import DataLoader

from tests import conftest, rank_process
from tests.harness import RankTimeout, reference, run_ranks
from tests.rank_process import RANK_VARIABLES, RankFailure
from titanplug.errors import ConfigError


def children() -> list[psutil.Process]:
    """Children of this process, ended but not yet reaped ones included."""
    return psutil.Process().children(recursive=True)


def test_results_come_by_rank() -> None:
    def sum_over_ranks(rank: int, world_size: int, start: float) -> tuple[int, int, torch.Tensor]:
        value = torch.tensor(start + rank, requires_grad=True)
        (value * 2).backward()  # autograd works in a fork
        total = value.detach().clone()
        dist.all_reduce(total)
        assert value.grad is not None
        return rank, world_size, torch.stack([total, value.grad])

    results = run_ranks(sum_over_ranks, 3, 10.0)
    assert [entry[:2] for entry in results] == [(0, 3), (1, 3), (2, 3)]
    for entry in results:
        torch.testing.assert_close(entry[2], torch.tensor([33.0, 2.0]))
    assert children() == []


def test_environment_of_a_rank() -> None:
    def environment(rank: int, world_size: int) -> dict[str, str]:
        assert torch.get_num_threads() == 1
        assert dist.get_backend() == "gloo"
        return {name: os.environ[name] for name in (*RANK_VARIABLES, "OMP_NUM_THREADS")}

    first, second = run_ranks(environment, 2)
    assert (first.pop("RANK"), second.pop("RANK")) == ("0", "1")
    assert (first.pop("LOCAL_RANK"), second.pop("LOCAL_RANK")) == ("0", "1")
    assert first == second
    assert first["WORLD_SIZE"] == first["LOCAL_WORLD_SIZE"] == "2"
    assert first["NODE_RANK"] == first["GROUP_RANK"] == "0"
    assert not set(RANK_VARIABLES) & set(os.environ)


def test_generators_start_equal_whatever_ran_before(seed: int) -> None:
    def draw(*_: Any) -> tuple[float, float, float]:
        return random.random(), float(np.random.rand()), float(torch.rand(()))

    first, second = run_ranks(draw, 2)
    draw()
    assert first == second == reference(draw)


@pytest.mark.parametrize("init_process_group", [True, False])
def test_a_trainer_attaches(init_process_group: bool, tmp_path: Path) -> None:
    def fit(rank: int, world_size: int) -> tuple[int, int, float]:
        assert rank_zero_only.rank == rank  # even before there is a Trainer
        assert dist.is_initialized() == init_process_group
        trainer = pl.Trainer(
            devices=world_size,
            accelerator="cpu",
            strategy="ddp",
            default_root_dir=tmp_path,
            max_steps=2,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            limit_val_batches=0,
        )
        torch.manual_seed(rank)
        model = BoringModel()
        trainer.fit(model)
        weight = next(model.parameters()).detach()
        return trainer.global_rank, trainer.world_size, float(weight.sum())

    results = run_ranks(fit, 2, init_process_group=init_process_group)
    assert [entry[:2] for entry in results] == [(0, 2), (1, 2)]
    assert results[0][2] == results[1][2]


# -------------------------------------------------------------------------------------- errors


def test_the_cause_is_raised_with_its_traceback() -> None:
    def one_fails(rank: int, world_size: int) -> None:
        if rank == 1:
            raise ConfigError(["first wrong", "second wrong"])
        dist.barrier()

    started = time.monotonic()
    with pytest.raises(ConfigError, match="2 problems") as raised:
        run_ranks(one_fails, 3)
    assert raised.value.problems == ("first wrong", "second wrong")
    (note,) = raised.value.__notes__
    assert "rank 1 of 3" in note
    assert "in one_fails" in note
    assert time.monotonic() - started < 30
    assert children() == []


def test_the_cause_comes_before_a_lost_peer_that_is_told_earlier() -> None:
    def fail(rank: int, world_size: int) -> None:
        if rank == 0:
            raise RuntimeError("[pair.cc:534] Connection closed by peer [127.0.0.1]:1")
        time.sleep(0.5)
        raise ZeroDivisionError("the cause")

    with pytest.raises(ZeroDivisionError, match="the cause"):
        run_ranks(fail, 2, init_process_group=False)


def test_a_death_comes_before_a_lost_peer() -> None:
    def die(rank: int, world_size: int) -> None:
        if rank == 1:
            faulthandler.disable()  # its report would only be noise here
            os.abort()
        dist.barrier()

    with pytest.raises(RankFailure, match=r"rank 1 of 2 ended .* no result \(SIGABRT\)"):
        run_ranks(die, 2)


class TwoArgumentsError(Exception):
    """Can be pickled, but not unpickled: Exception keeps the one argument it was given."""

    def __init__(self, field: str, value: int) -> None:
        super().__init__(f"{field}={value}")


def test_an_error_that_cannot_be_pickled_keeps_name_and_text() -> None:
    class LocalError(Exception):
        pass

    def fail(rank: int, world_size: int, error: Exception) -> None:
        raise error

    with pytest.raises(RankFailure, match="LocalError: only known here"):
        run_ranks(fail, 1, LocalError("only known here"))
    with pytest.raises(RankFailure, match="TwoArgumentsError: tp=3"):
        run_ranks(fail, 1, TwoArgumentsError("tp", 3))


def test_a_result_that_cannot_be_pickled_is_an_error_of_that_rank() -> None:
    with pytest.raises(Exception, match="pickle") as raised:
        run_ranks(lambda rank, world_size: lambda: None, 1)
    assert "rank 0 of 1" in raised.value.__notes__[0]


def test_a_hang_tells_where_each_rank_stands() -> None:
    def hang(rank: int, world_size: int) -> None:
        if rank == 1:
            time.sleep(1000)

    started = time.monotonic()
    with pytest.raises(RankTimeout, match=r"did not end within 2 s") as raised:
        run_ranks(hang, 2, timeout_s=2.0, init_process_group=False)
    assert time.monotonic() - started < 10
    assert "rank 0: had returned" in str(raised.value)
    assert "rank 1: still running" in str(raised.value)
    assert "in hang" in str(raised.value)
    assert children() == []


def test_ranks_that_wait_for_each_other_are_ended() -> None:
    def wait_for_the_other(rank: int, world_size: int) -> None:
        dist.recv(torch.zeros(1), src=1 - rank)

    with pytest.raises(RankTimeout) as raised:
        run_ranks(wait_for_the_other, 2, timeout_s=5.0)
    assert str(raised.value).count("in wait_for_the_other") == 2


def test_a_rank_that_is_done_stays_for_the_others(tmp_path: Path) -> None:
    def return_early(rank: int, world_size: int) -> bool:
        if rank == 0:
            (tmp_path / "pid").write_text(str(os.getpid()))
            return True
        time.sleep(0.5)  # if rank 0 went now, a slower rank could not connect to it any more
        first = psutil.Process(int((tmp_path / "pid").read_text()))
        return first.status() != psutil.STATUS_ZOMBIE

    assert run_ranks(return_early, 2) == [True, True]


def test_waiting_for_a_rank_that_is_done_names_that_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_process, "LINGER_S", 0.5)

    def wait_in_vain(rank: int, world_size: int) -> None:
        if rank == 1:
            dist.recv(torch.zeros(1), src=0)

    with pytest.raises(RuntimeError, match="by peer") as raised:
        run_ranks(wait_in_vain, 2)
    assert "rank 0 had returned" in raised.value.__notes__[-1]


def test_a_failure_does_not_wait_for_ranks_that_hang() -> None:
    def fail_or_hang(rank: int, world_size: int) -> None:
        if rank == 0:
            raise ValueError("stop")
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(100)

    started = time.monotonic()
    with pytest.raises(ValueError, match="stop"):
        run_ranks(fail_or_hang, 2)
    assert time.monotonic() - started < 20
    assert children() == []


def test_what_a_rank_started_ends_with_it() -> None:
    def start_and_fail(rank: int, world_size: int) -> None:
        subprocess.Popen(["sleep", "1000"])
        raise ValueError("stop")

    with pytest.raises(ValueError, match="stop"):
        run_ranks(start_and_fail, 1)
    _, running = psutil.wait_procs(children(), timeout=5)
    assert running == []


def test_data_workers_run_in_a_rank() -> None:
    def load(rank: int, world_size: int) -> list[int]:
        return [int(batch) for batch in DataLoader(range(4), batch_size=1, num_workers=1)]

    assert run_ranks(load, 1) == [[0, 1, 2, 3]]


# -------------------------------------------------------------------------------------- reference


def test_reference_runs_in_another_process_without_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "7")  # a test run under a launcher

    def gradient(factor: float) -> tuple[int, torch.Tensor | None]:
        assert not dist.is_initialized()
        assert not set(RANK_VARIABLES) & set(os.environ)
        weight = torch.ones(2, requires_grad=True)
        (weight * factor).sum().backward()
        return os.getpid(), weight.grad

    pid, grad = reference(gradient, 3.0)
    assert pid != os.getpid()
    torch.testing.assert_close(grad, torch.full((2,), 3.0))
    assert children() == []


@pytest.mark.skipif(torch.version.cuda is not None, reason="autograd then has device threads")
def test_a_fork_survives_a_backward_of_the_test_process() -> None:
    def backward(*_: Any) -> torch.Tensor | None:
        weight = torch.ones(64, 64, requires_grad=True)
        (weight @ weight).sum().backward()
        return weight.grad

    expected = backward()
    for grad in (*run_ranks(backward, 2), reference(backward)):
        assert expected is not None
        torch.testing.assert_close(grad, expected, rtol=0, atol=0)


def test_reference_raises_the_error() -> None:
    with pytest.raises(ZeroDivisionError):
        reference(lambda: 1 / 0)


def test_noisy_loggers_are_silent() -> None:
    for name in (
        "torch.distributed.pipelining.schedules",
        "torch.distributed.tensor._redistribute",
    ):
        assert not logging.getLogger(name).isEnabledFor(logging.WARNING)


# -------------------------------------------------------------------------------------- conftest

LEAVES_PROCESSES = """
import subprocess, sys
def test_leaves_a_process():
    subprocess.Popen(["sleep", "1000"])
def test_leaves_an_orphan():
    code = "import subprocess; subprocess.Popen(['sleep', '1000'])"
    subprocess.run([sys.executable, "-c", code], check=True)
def test_leaves_nothing():
    subprocess.run(["true"], check=True)
    subprocess.Popen(["true"])
"""


@pytest.mark.skipif(sys.platform != "linux", reason="orphans are only seen on Linux")
def test_a_test_that_leaves_a_process_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conftest, "LEFT_BEHIND_GRACE_S", 0.5)
    reports = run_pytest(tmp_path, LEAVES_PROCESSES)
    failed = {name: text for name, (outcome, text) in reports.items() if outcome == "failed"}
    assert set(failed) == {"test_leaves_a_process", "test_leaves_an_orphan"}
    for text in failed.values():
        assert "The test left processes behind:" in text
        assert "sleep 1000" in text


MARKED = """
import pytest
order = []
@pytest.mark.slow
def test_slow(): assert order == ["fast"]
@pytest.mark.gpu
def test_gpu(): pass
def test_fast(): order.append("fast")
"""


@pytest.mark.parametrize(
    ("options", "slow"),
    [
        ([], "skipped"),
        (["--slow"], "passed"),
        (["--slow-budget-s=100"], "passed"),
        (["--slow-budget-s=1e-9"], "skipped"),
    ],
)
def test_slow_and_gpu_tests(options: list[str], slow: str, tmp_path: Path) -> None:
    reports = run_pytest(tmp_path, MARKED, *options)
    assert {name: outcome for name, (outcome, _) in reports.items()} == {
        "test_fast": "passed",
        "test_gpu": "passed" if torch.cuda.is_available() else "skipped",
        "test_slow": slow,
    }


def test_on_a_cuda_build_forks_come_before_autograd_and_both_before_cuda(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")

    def item(name: str, *marks: str, **module: Any) -> Any:
        marked = SimpleNamespace(name=name, module=SimpleNamespace(**module))
        marked.get_closest_marker = lambda mark: mark if mark in marks else None
        return marked

    items = [
        item("gpu", "gpu", run_ranks=None),
        item("autograd"),
        item("slow fork", "slow", reference=None),
        item("fork", run_ranks=None),
    ]
    conftest.pytest_collection_modifyitems(items)
    assert [marked.name for marked in items] == ["fork", "slow fork", "autograd", "gpu"]


def run_pytest(folder: Path, source: str, *options: str) -> dict[str, tuple[str, str]]:
    """Run tests in a session of their own with our conftest: (outcome, text) by name."""
    reports: dict[str, tuple[str, str]] = {}

    class Recorder:
        def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
            if report.when == "call" or report.outcome != "passed":
                reports[report.nodeid.split("::")[-1]] = (report.outcome, report.longreprtext)

    test_file = folder / f"test_{folder.name}.py"  # a module of its own each time
    test_file.write_text(source)
    (folder / "pytest.ini").write_text("[pytest]\nmarkers =\n  slow\n  gpu\n")
    # The plugins that are left out act on the whole process: they belong to the outer session.
    left_out = ["-pno:timeout", "-pno:faulthandler", "-pno:cacheprovider"]
    arguments = [f"--rootdir={folder}", f"-c{folder / 'pytest.ini'}", "--import-mode=importlib"]
    pytest.main([*left_out, *arguments, *options, str(test_file)], plugins=[conftest, Recorder()])
    return reports

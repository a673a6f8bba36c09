"""A user's own script: it starts its other ranks, and all of them end together."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from titanplug.checkpoint.latest import step_of
from titanplug.launch import EXIT_PREEMPTED

ROOT = Path(__file__).parents[2]

HEAD = """
import os, signal, sys, time
from pathlib import Path
import lightning as L
import torch
from torch.utils.data import DataLoader, TensorDataset
from lightning.pytorch.callbacks import OnExceptionCheckpoint
from titanplug import TitanStrategy

RANK = int(os.environ.get("LOCAL_RANK", 0))
HERE = Path(__file__).parent

class Net(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(4, 4)
    def training_step(self, batch, batch_idx):
        self.step(batch_idx)
        return self.net(batch[0]).square().mean()
    def step(self, batch_idx):
        pass
    def validation_step(self, batch, batch_idx):
        self.log("loss", self.net(batch[0]).square().mean())
    test_step = validation_step
    def predict_step(self, batch, batch_idx):
        return self.net(batch[0])
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

def rows(count=16):
    return DataLoader(TensorDataset(torch.ones(count, 4)), batch_size=2)

def fail():
    (HERE / "failing").touch()
    raise ValueError(f"own error of rank {RANK}")

def trainer(**options):
    quiet = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False,
                 enable_model_summary=False, num_sanity_val_steps=0, max_epochs=1)
    options = {"devices": 2, **quiet, **options}
    return L.Trainer(accelerator="cpu", strategy=TitanStrategy(), **options)
"""


@dataclass
class Ended:
    """``seconds`` is counted from the failure, which a script tells by :data:`FAIL`, or from its start."""

    code: int
    out: str
    err: str
    seconds: float

    @property
    def last_line(self) -> str:
        """Without the prefix by which torch tells the rank that prints."""
        return re.sub(r"^\[rank\d+\]: ", "", self.err.strip().splitlines()[-1])


def script(folder: Path, body: str) -> Path:
    path = folder / "script.py"
    path.write_text(HEAD + textwrap.dedent(body))
    return path


def environment(**more: str) -> dict[str, str]:
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "NODE_RANK")
    env = {key: value for key, value in os.environ.items() if key not in names}
    return {**env, "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo", **more}


@contextlib.contextmanager
def started(command: list[str], **env: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(**env),
        start_new_session=True,
        # A shell's background jobs ignore it, and so would the script.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def finish(process: subprocess.Popen[str], timeout_s: float = 110.0, folder: Path | None = None) -> Ended:
    """Wait for the end; nothing of the process's session may be left."""
    begin = time.time()
    out, err = process.communicate(timeout=timeout_s)
    if folder is not None and (folder / "failing").exists():
        begin = (folder / "failing").stat().st_mtime
    seconds = time.time() - begin
    left = [p for p in psutil.process_iter() if _session(p.pid) == process.pid and p.is_running()]
    left = [p for p in left if p.status() != psutil.STATUS_ZOMBIE]
    assert not left, f"left behind: {left}\n{err}"
    return Ended(process.returncode, out, err, seconds)


def _session(pid: int) -> int:
    try:
        return os.getsid(pid)
    except ProcessLookupError:
        return -1


def run(path: Path, *arguments: str, **env: str) -> Ended:
    with started([sys.executable, str(path), *arguments], **env) as process:
        return finish(process, folder=path.parent)


def wait_for(process: subprocess.Popen[str], *paths: Path) -> None:
    deadline = time.monotonic() + 60
    while not all(path.exists() for path in paths):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.05)


WHOLE = """
    net, t = Net(), trainer()
    t.fit(net, rows(), rows())
    assert "OMP_NUM_THREADS" in os.environ and torch.get_num_threads() == 1, "threads"
    t.test(net, rows(), verbose=False)
    predicted = t.predict(net, rows(10))
    again = trainer()
    again.fit(Net(), rows())
    again.fit(Net(), rows())
    own = len(predicted)
    print(f"rank {t.global_rank} of {t.world_size}: {again.global_step} steps, {own} batches", flush=True)
"""


EXPECTED = ["rank 0 of 2: 4 steps, 5 batches", "rank 1 of 2: 4 steps, 2 batches"]


def reports(ended: Ended) -> list[str]:
    # Two processes write to one pipe: lines may run together.
    return sorted(re.findall(r"rank \d of 2: \d steps, \d batches", ended.out))


def test_fit_test_predict_and_fit_again(tmp_path: Path) -> None:
    """In one script, by its own launcher."""
    ended = run(script(tmp_path, WHOLE), OMP_NUM_THREADS="1")
    assert ended.code == 0, ended.err
    assert reports(ended) == EXPECTED


@pytest.mark.slow
def test_under_torchrun(tmp_path: Path) -> None:
    """The same file attaches to the processes that are there."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    with started([sys.executable, *torchrun, str(script(tmp_path, WHOLE))]) as process:
        ended = finish(process)
    assert ended.code == 0, ended.err
    assert reports(ended) == EXPECTED


LAST = """
import sys
import torch
import torch.distributed as dist
from titanplug.compat import let_collectives_end_before_exit
let_collectives_end_before_exit()
store = dist.FileStore(sys.argv[1], 2)
dist.init_process_group("gloo", store=store, rank=int(sys.argv[2]), world_size=2)
for _ in range(20):
    dist.all_reduce(torch.ones(4))
"""


def test_a_collective_may_be_the_last_thing_of_a_process(tmp_path: Path) -> None:
    """Without the shim three of four such pairs abort on torch 2.13."""
    command = [sys.executable, "-c", LAST, str(tmp_path / "store")]
    with started([*command, "0"]) as first, started([*command, "1"]) as second:
        codes = [finish(process).code for process in (first, second)]
    assert codes == [0, 0]


FAILURES = {
    "in a step": """
        class Failing(Net):
            def step(self, batch_idx):
                if RANK == {rank} and batch_idx == 2:
                    fail()
        trainer().fit(Failing(), rows())
    """,
    "before the first collective": """
        if RANK == {rank} and "LOCAL_RANK" in os.environ:
            fail()
        trainer().fit(Net(), rows())
    """,
    "with a callback that saves": """
        class Failing(Net):
            def on_train_start(self):
                if RANK == {rank}:
                    fail()
        saves = OnExceptionCheckpoint(HERE)
        trainer(callbacks=[saves], enable_checkpointing=True).fit(Failing(), rows())
    """,
    "between two calls": """
        net, t = Net(), trainer()
        t.fit(net, rows())
        if RANK == {rank}:
            fail()
        t.test(net, rows(), verbose=False)
    """,
    "after the last call": """
        t = trainer()
        t.fit(Net(), rows())
        if RANK == {rank}:
            time.sleep(1)
            fail()
    """,
    "while the other hangs": """
        class Hanging(Net):
            def step(self, batch_idx):
                if batch_idx == 2 and RANK == {rank}:
                    fail()
                if batch_idx == 2:
                    time.sleep(600)
        trainer().fit(Hanging(), rows())
    """,
}


def check_failure(where: str, rank: int, folder: Path) -> None:
    ended = run(script(folder, FAILURES[where].format(rank=rank)))
    assert ended.code not in (0, None)
    assert ended.last_line == f"ValueError: own error of rank {rank}", ended.err
    assert ended.seconds < 30
    assert not list(folder.glob("*.ckpt"))


@pytest.mark.parametrize("where", ["in a step"])
def test_a_failing_rank_ends_all(where: str, tmp_path: Path) -> None:
    """Within half a minute, exit code not 0, its own error last."""
    check_failure(where, 1, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("where", FAILURES)
@pytest.mark.parametrize("rank", [0, 1])
def test_wherever_it_fails(where: str, rank: int, tmp_path: Path) -> None:
    if (where, rank) == ("before the first collective", 0):
        pytest.skip("then rank 0 has started no other rank yet")
    if (where, rank) == ("in a step", 1):
        pytest.skip("that is tested above")
    check_failure(where, rank, tmp_path)


LONG = """
    class Slow(Net):
        def step(self, batch_idx):
            if batch_idx == 3:
                (HERE / f"ready{RANK}").touch()
            time.sleep(0.05 * (1 + RANK))
        def on_train_batch_start(self, batch, batch_idx):
            (HERE / f"step{RANK}").write_text(str(self.trainer.global_step))
    net = Slow()
    t = trainer(callbacks=[OnExceptionCheckpoint(HERE)], enable_checkpointing=True, **OPTIONS)
    t.fit(net, rows(4000))
    print("went on", flush=True)
"""


SIGNALS = [
    ("SIGUSR1", 1),
    pytest.param("SIGUSR1", 0, marks=pytest.mark.slow),
    pytest.param("SIGTERM", 0, marks=pytest.mark.slow),
    pytest.param("SIGTERM", 1, marks=pytest.mark.slow),
    pytest.param("SIGINT", 0, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("signum", "target"), SIGNALS)
def test_signals(signum: str, target: int, tmp_path: Path) -> None:
    """SIGTERM or SIGUSR1 to a rank stops all after the same step, and they save; SIGINT just ends them."""
    path = script(tmp_path, "OPTIONS = {}\n" + textwrap.dedent(LONG))
    with started([sys.executable, str(path)]) as process:
        wait_for(process, tmp_path / "ready0", tmp_path / "ready1")
        (child,) = [p for p in psutil.Process(process.pid).children() if "script.py" in p.cmdline()[-1]]
        os.kill([process.pid, child.pid][target], getattr(signal, signum))
        ended = finish(process, 80)  # 10 on idle cores
    assert "went on" not in ended.out
    saved = tmp_path / "preempted.ckpt"
    if signum == "SIGINT":
        assert ended.code not in (0, EXIT_PREEMPTED)
        assert not saved.exists()
    else:
        assert ended.code == EXIT_PREEMPTED, ended.err
        assert saved.is_dir() and (tmp_path / "on_exception.ckpt").is_dir()
        steps = [int((tmp_path / f"step{rank}").read_text()) for rank in (0, 1)]
        assert steps[0] == steps[1]
        assert step_of(saved) == steps[0] + 1
        told = rf"Preempted by {signum}: saved .*preempted\.ckpt at step {steps[0] + 1}\. Run the same"
        assert re.match(told, ended.last_line), ended.err


@pytest.mark.slow
@pytest.mark.parametrize("call", ["fit", "test"])  # neither has anything to save
def test_sigterm_with_one_process(call: str, tmp_path: Path) -> None:
    body = """
        def wait(batch_idx):
            (HERE / f"ready{RANK}").touch()
            time.sleep(0.05)
        class Slow(Net):
            def step(self, batch_idx):
                wait(batch_idx)
            def test_step(self, batch, batch_idx):
                wait(batch_idx)
        getattr(trainer(devices=1), CALL)(Slow(), rows(4000))
        print("went on", flush=True)
    """
    path = script(tmp_path, f"CALL = {call!r}\n" + textwrap.dedent(body))
    with started([sys.executable, str(path)]) as process:
        wait_for(process, tmp_path / "ready0")
        process.send_signal(signal.SIGTERM)
        ended = finish(process, 20)
    assert ended.code == 128 + signal.SIGTERM and "went on" not in ended.out
    assert ended.last_line.startswith("Ended by SIGTERM")


@pytest.mark.slow
def test_killed_parent_leaves_nobody(tmp_path: Path) -> None:
    path = script(tmp_path, "OPTIONS = {}\n" + textwrap.dedent(LONG))
    with started([sys.executable, str(path)]) as process:
        wait_for(process, tmp_path / "ready0", tmp_path / "ready1")
        process.kill()
        finish(process, 10)


@pytest.mark.slow
def test_devices_unlike_the_processes(tmp_path: Path) -> None:
    body = """
        try:
            trainer(devices=int(sys.argv[1]), num_nodes=int(sys.argv[2]))
        except Exception as error:
            print(type(error).__name__, error, flush=True)
    """
    path = script(tmp_path, body)
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(path), "2", "2"]
    with started([sys.executable, *torchrun]) as process:
        attached = finish(process)
    assert attached.out.count("ConfigError devices=2 x num_nodes=2 = 4, but 2 processes") == 2
    by_hand = run(path, "4", "1", LOCAL_RANK="0", WORLD_SIZE="3")
    assert "ConfigError devices=4 x num_nodes=1 = 4, but 3 processes" in by_hand.out

"""Starts one torchrun for a job, and is what torchrun starts on each rank.

The process that the user starts resolves the configuration once and writes it to a file. Every rank
reads that file, so no rank decides anything by itself::

    titanplug train ...  ->  torchrun  ->  python -m titanplug.launch titanplug.train:train FILE
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import signal
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from pathlib import Path
from types import FrameType
from typing import Any

import psutil
import yaml

from titanplug.compat import on_import
from titanplug.errors import TitanplugError
from titanplug.rank_errors import ERROR_DIR_VARIABLE, first_error, record_error

RANK_VARIABLES = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "GROUP_WORLD_SIZE",
    "ROLE_RANK",
    "ROLE_WORLD_SIZE",
    "ROLE_NAME",
    "NODE_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
    "PL_GLOBAL_SEED",
)
"""What tells a process which rank it is; a job that is started anew must not inherit it."""

EXIT_PREEMPTED = 75
"""Exit code of a run that a signal has ended, with a checkpoint: start the same command again to go on.

75 is EX_TEMPFAIL of sysexits.h, "try again later"; a scheduler that starts jobs again by their exit code
can be told this one (Slurm: RequeueExit=75). 128 + the signal's number tells that nothing was saved.
"""

LOG_FILE = "run.log"
RANK_LOGS = "ranks"
"""Folder in that of the run for what ranks other than 0 log and print."""
RANK_MODULE = "titanplug.launch"
PR_SET_PDEATHSIG = 1


class RankError(TitanplugError):
    """A rank failed; the message is its own error."""


class Preempted(TitanplugError):
    """The ranks have saved after a signal, told where, and ended with :data:`EXIT_PREEMPTED`."""


class Interrupted(TitanplugError):
    """The job was ended by a signal, and nothing was saved.

    Args:
        signum: number of the signal.
    """

    def __init__(self, signum: int) -> None:
        self.signum = signum
        super().__init__(f"Ended by {signal.Signals(signum).name}.")


# --------------------------------------------------------------------------------------
# In the process that the user started
# --------------------------------------------------------------------------------------


def launch_ranks(task: str, config_path: Path, num_processes: int) -> None:
    """Run a task on new processes of this machine and wait for them; none of them is left behind.

    Args:
        task: ``"module:function"``, called on each rank with the configuration, a dict.
        config_path: the resolved configuration (YAML).
        num_processes: how many.

    Raises:
        RankError: a rank failed; the others have been ended.
        Preempted: a rank or this process got SIGTERM or SIGUSR1, and the ranks have saved.
        Interrupted: this process got a signal; it was passed on, and the ranks have ended.
    """
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import parse_args, run

    with tempfile.TemporaryDirectory(prefix="titanplug-") as folder:
        arguments = ["--standalone", "--nproc-per-node", str(num_processes)]
        # It kills ranks half a minute after it has passed a signal on, and a save may take longer.
        arguments += ["--signals-to-handle", "SIGINT,SIGHUP,SIGQUIT"]
        arguments += ["--log-dir", f"{folder}/logs", "--module", RANK_MODULE]
        with (
            _environment(num_processes, folder),
            _signal_handlers_kept(),
            _signals_passed_on() as received,
            _quiet_torchrun(),
        ):
            try:
                run(parse_args([*arguments, task, str(config_path)]))
            except ChildFailedError as error:
                codes = {rank: failure.exitcode for rank, failure in error.failures.items()}
                if EXIT_PREEMPTED in codes.values():
                    raise Preempted("All ranks have saved after a signal and ended.") from None
                if received:
                    raise Interrupted(received[0]) from None
                raise RankError(_describe_failure(Path(folder), codes, num_processes)) from None
            except SignalException as error:
                raise Interrupted(int(error.sigval)) from None


def _describe_failure(folder: Path, codes: Mapping[int, int], num_processes: int) -> str:
    cause = first_error(folder)
    killed = {rank: -code for rank, code in codes.items() if code < 0 and code != -signal.SIGTERM}
    if killed and (cause is None or cause.is_consequence):
        rank, signum = next(iter(killed.items()))
        hint = " The system may have run out of memory." if signum == signal.SIGKILL else ""
        return f"rank {rank} of {num_processes} was ended by {signal.Signals(signum).name}.{hint}"
    if cause is not None:
        return f"rank {cause.rank} of {num_processes} failed:\n{cause.text}"
    rank, code = next(iter(codes.items()))
    return f"rank {rank} of {num_processes} ended with exit code {code}; its output is above."


@contextlib.contextmanager
def _environment(num_processes: int, error_dir: str) -> Iterator[None]:
    saved = dict(os.environ)
    for name in [*RANK_VARIABLES, *(key for key in saved if key.startswith("TORCHELASTIC_"))]:
        os.environ.pop(name, None)
    # Ranks share the cores of the machine; torch would give each of them all.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, num_cores() // num_processes)))
    os.environ[ERROR_DIR_VARIABLE] = error_dir
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(saved)


def num_cores() -> int:
    """Processor cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@contextlib.contextmanager
def _signal_handlers_kept() -> Iterator[None]:
    """Keep what torchrun replaces: a later job in this process must find the old handlers."""
    names = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
    saved = {name: signal.getsignal(name) for name in names}
    try:
        yield
    finally:
        for name, handler in saved.items():
            signal.signal(name, handler)


@contextlib.contextmanager
def _signals_passed_on() -> Iterator[list[int]]:
    """Pass SIGTERM and SIGUSR1 on to the ranks, and let these take their time. Yields those that came."""
    received: list[int] = []

    def pass_on(signum: int, _: FrameType | None) -> None:
        ranks = [child for child in psutil.Process().children() if RANK_MODULE in _command(child)]
        if not ranks and not received:
            raise Interrupted(signum)  # nothing has started
        received.append(signum)
        for rank in ranks:
            with contextlib.suppress(psutil.NoSuchProcess):
                rank.send_signal(signum)

    for name in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(name, pass_on)
    yield received


def _command(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []  # it has ended


@contextlib.contextmanager
def _quiet_torchrun() -> Iterator[None]:
    # It reports at length that a rank failed; the rank's own error is what tells why.
    logger = logging.getLogger("torch.distributed.elastic")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)


# --------------------------------------------------------------------------------------
# On each rank
# --------------------------------------------------------------------------------------


def run_task(task: str, config: dict[str, Any], rank: int) -> None:
    """Call ``"module:function"`` with a configuration, with logging set up for this rank."""
    configure_logging(Path(config["paths"]["run_dir"]), rank)
    module, _, name = task.partition(":")
    function: Callable[[dict[str, Any]], object] = getattr(import_module(module), name)
    try:
        function(config)
    except SystemExit as error:
        if rank == 0 and hasattr(error, "text"):
            write_log(Path(config["paths"]["run_dir"]), error.text)  # it is on stderr already
        raise


def write_log(run_dir: Path, text: str) -> None:
    """Add a line to ``run.log`` that was printed in another way."""
    handler = _log_file(run_dir / LOG_FILE)
    handler.emit(logging.LogRecord("titanplug", logging.INFO, __file__, 0, text, None, None))
    handler.close()


def _log_file(path: Path) -> logging.FileHandler:
    handler = logging.FileHandler(path)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    return handler


def configure_logging(run_dir: Path, rank: int) -> None:
    """Rank 0 logs to standard output and to ``run.log``; the others to files, and errors to the console.

    Args:
        run_dir: folder of the run.
        rank: global rank.
    """
    console = logging.StreamHandler(sys.stdout)
    console.setFormatter(logging.Formatter("%(message)s" if rank == 0 else f"[rank {rank}] %(message)s"))
    if rank == 0:
        file = _log_file(run_dir / LOG_FILE)
    else:
        console.setLevel(logging.ERROR)
        (run_dir / RANK_LOGS).mkdir(parents=True, exist_ok=True)  # a node may have a disk of its own
        file = _log_file(run_dir / RANK_LOGS / f"rank_{rank}.log")
        sys.stdout = file.stream  # what is printed on every rank is read once
    # Lightning's own use of torch, which its user can't change.
    warnings.filterwarnings("ignore", message=r".*isinstance\(treespec, LeafSpec\)")
    logging.basicConfig(level=logging.INFO, handlers=[console, file], force=True)
    logging.captureWarnings(True)
    on_import("lightning", _calm_lightning)


def _calm_lightning() -> None:
    # It prints by itself, and tells what the layout summary tells better.
    logging.getLogger("lightning").handlers.clear()
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)


def end_with_parent() -> None:
    """Have the system end this process when the one that started it is gone (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def _stop(signum: int, frame: FrameType | None) -> None:
    composed = signal.getsignal(signum) is not _stop
    if composed and sys.exception() is None:
        return  # called by Lightning's handler, which ends the ranks after the same step
    # An error that is on its way out becomes the context of this, and is recorded all the same.
    raise SystemExit(128 + signum)


def _cause(error: BaseException | None) -> BaseException | None:
    """The error behind a request to stop, if there is one."""
    while isinstance(error, SystemExit | KeyboardInterrupt):
        error = error.__context__
    return error


def main() -> None:
    """What torchrun starts: ``python -m titanplug.launch MODULE:FUNCTION CONFIG.yaml``."""
    task, config_path = sys.argv[1:]
    end_with_parent()
    signal.signal(signal.SIGTERM, _stop)
    rank = int(os.environ["RANK"])
    try:
        run_task(task, yaml.safe_load(Path(config_path).read_text()), rank)
    except BaseException as error:
        cause = _cause(error)
        if cause is None:  # asked to stop
            raise
        if record_error(rank, cause):
            raise SystemExit(1) from None
        raise


if __name__ == "__main__":
    main()

"""Starts the other processes of a script on this machine, or finds those that were started.

Lightning's own launcher starts the script once more for each further device. When a rank fails, the
others lose their connection and report that, or hang. Here each rank leaves its error in a file, and the
process that the user started ends with the error of the rank that failed first, last on stderr.

In a Hydra app the others run the job that this process runs (:mod:`titanplug.strategy.hydra_job`), and end
with it: the next job of a sweep starts from where this one has started.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.plugins import ClusterEnvironment
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.fabric.strategies.launchers.subprocess_script import _basic_subprocess_cmd
from lightning.pytorch import LightningModule
from lightning.pytorch.strategies.launchers.subprocess_script import _SubprocessScriptLauncher
from lightning.pytorch.utilities.rank_zero import rank_zero_only

from titanplug.errors import ConfigError, TitanplugError
from titanplug.rank_errors import CONSEQUENCES, ERROR_DIR_VARIABLE, record_error
from titanplug.script import remember_script
from titanplug.strategy.children import (
    PARENT_VARIABLE,
    Children,
    RankError,
    end_with_parent,
    new_folder,
)
from titanplug.strategy.hydra_job import HydraJob, current_job

_is_child = PARENT_VARIABLE in os.environ
_children: Children | None = None
"""The other ranks of this script. A script, or a job of one, starts them once; all its Trainers use them."""
_job: HydraJob | None = None
"""The job that they run, and whose end is waited for."""
_outside = {
    name: os.environ.get(name)
    for name in (
        "MASTER_ADDR",
        "MASTER_PORT",
        "NODE_RANK",
        "LOCAL_RANK",
        "WORLD_SIZE",
        "OMP_NUM_THREADS",
        "PL_GLOBAL_SEED",
        "PL_SEED_WORKERS",
        ERROR_DIR_VARIABLE,
    )
}
"""What a job changes in the environment, as it was before."""
_num_threads = torch.get_num_threads()
remember_script()


class ScriptLauncher(_SubprocessScriptLauncher):
    """Runs the script on all devices of this machine; ends all ranks when one fails.

    Under torchrun, Slurm and their like it starts nothing.
    """

    def __init__(
        self,
        cluster_environment: ClusterEnvironment,
        num_processes: int,
        num_nodes: int,
        check_module: Callable[[LightningModule], None] | None = None,
    ) -> None:
        super().__init__(cluster_environment, num_processes, num_nodes)
        self._check_module = check_module
        self.weights_only: bool | None = None
        """What the running Trainer call was given; Lightning loses it on the way to the strategy."""
        self.is_child = _is_child
        """Whether the script on another rank has started this process, and tells how all of them ended."""
        self._require_world()
        end_with_parent()

    def launch(self, function: Callable[..., Any], *args: Any, trainer: Any = None, **kwargs: Any) -> Any:
        """Start the other processes once, then run ``function`` in this one.

        Raises:
            ConfigError: the module can't be laid out; before any process starts.
            RankError: another rank failed first.
            TitanplugError: the other processes have ended, after an error in an earlier call.
        """
        given = inspect.signature(function).bind(*args, **kwargs).arguments
        self.weights_only = given.get("weights_only")
        if self._check_module is not None and isinstance(given.get("model"), LightningModule):
            self._check_module(given["model"])
        _note_job()
        _limit_threads(self.num_processes)
        if not self.cluster_environment.creates_processes_externally and self.num_processes > 1:
            self._start_children()
        if _children is not None and _children.ended.is_set():
            raise TitanplugError(
                "The other ranks of this script have ended, after an error or a signal in an earlier "
                "call, and a script (or a job of one) starts them once. Start a script of its own for each "
                "run."
            )
        try:
            return function(*args, **kwargs)
        except Exception as error:
            _record(error)
            if _children is not None and is_consequence(error):
                _children.end()
                cause = _children.find_cause()
                if cause is not None:
                    raise cause from None
            raise

    def end_children(self) -> None:
        """End the other processes that this one has started, if it has."""
        if _children is not None and not _children.ended.is_set():
            _children.end()

    def kill(self, signum: Any) -> None:
        """Pass a signal on to the other processes."""
        if _children is not None:
            _children.send_signal(signum)

    def _start_children(self) -> None:
        global _children
        cluster = self.cluster_environment
        os.environ.update(
            MASTER_ADDR=cluster.main_address,
            MASTER_PORT=str(cluster.main_port),
            NODE_RANK=str(cluster.node_rank()),
            LOCAL_RANK=str(cluster.local_rank()),
            WORLD_SIZE=str(self.num_processes * self.num_nodes),
        )
        first = cluster.node_rank() * self.num_processes
        ranks = range(first + 1, first + self.num_processes)
        folder = new_folder()
        if _job is None:
            commands = {rank: list(_basic_subprocess_cmd()) for rank in ranks}
        else:
            commands = {rank: _job.command(rank, folder) for rank in ranks}
        common = os.environ if _job is None else os.environ | _job.environment()
        environments = {rank: {**common, "LOCAL_RANK": str(rank - first)} for rank in ranks}
        _children = Children(commands, environments, None, self.num_processes * self.num_nodes, folder)

    def _require_world(self) -> None:
        """Compare devices and nodes with the processes that were started.

        Raises:
            ConfigError: they differ; with the numbers.
        """
        wanted = self.num_processes * self.num_nodes
        started = _num_started(self.cluster_environment)
        if started is not None and started != wanted:
            raise ConfigError(
                f"devices={self.num_processes} x num_nodes={self.num_nodes} = {wanted}, but {started} "
                "processes were started (WORLD_SIZE): both must be the same. Change devices or "
                f"num_nodes, or start {wanted} processes."
            )


def is_consequence(error: BaseException) -> bool:
    """Whether an error only tells that another rank has gone."""
    return isinstance(error, RankError) or any(sign in str(error) for sign in CONSEQUENCES)


def _record(error: BaseException) -> None:
    record_error(getattr(rank_zero_only, "rank", 0), error)
    if "TORCHELASTIC_ERROR_FILE" in os.environ and not is_consequence(error):
        from torch.distributed.elastic.multiprocessing.errors import get_error_handler

        get_error_handler().record_exception(error)  # torchrun repeats it last


def _num_started(cluster: ClusterEnvironment) -> int | None:
    """How many processes there are; None where this one will start the others."""
    if dist.is_initialized():
        return dist.get_world_size()
    if not cluster.creates_processes_externally:
        return None
    if isinstance(cluster, LightningEnvironment):  # knows only what a strategy tells it
        return int(os.environ["WORLD_SIZE"]) if "WORLD_SIZE" in os.environ else None
    return cluster.world_size()


def _note_job() -> None:
    """Wait for the end of the Hydra job that this call is part of, unless that is done already."""
    global _job
    job = None if _is_child else current_job()
    if job is not None and (_job is None or _job.given is not job.given):
        _job = job
        job.at_end(_end_job)


def _end_job(job_return: Any) -> None:
    """Leave this process as the job has found it, and let its ranks end with it."""
    global _children, _job
    from hydra.core.utils import JobStatus

    children, _children, _job = _children, None, None
    if children is not None:
        error = children.close(has_failed=job_return.status == JobStatus.FAILED)
        if error is not None:
            job_return.status, job_return.return_value = JobStatus.FAILED, error
    elif dist.is_initialized():
        dist.destroy_process_group()
    for name, value in _outside.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    torch.set_num_threads(_num_threads)


def _limit_threads(num_processes: int) -> None:
    # Ranks on one machine share its cores; torch would give each of them all.
    if num_processes > 1 and "OMP_NUM_THREADS" not in os.environ:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        threads = max(1, (cores or 1) // num_processes)
        torch.set_num_threads(threads)
        os.environ["OMP_NUM_THREADS"] = str(threads)

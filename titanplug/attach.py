"""Running under a torchrun or srun that the user started: one rank decides, the others follow.

Every rank runs the same command there. Rank 0 composes the configuration and chooses the folder of the
run; the others get both from it through a store, and evaluate nothing by themselves.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from titanplug.errors import ConfigError, TitanplugError

if TYPE_CHECKING:
    from torch.distributed import Store

WAIT = timedelta(minutes=5)
"""How long a rank waits for the configuration."""


@dataclass(frozen=True)
class Attached:
    """This process's place in a job that something else has started.

    Args:
        launcher: ``"torchrun"`` or ``"srun"``.
        rank: global rank.
        world_size: number of processes.
    """

    launcher: str
    rank: int
    world_size: int


def find_launcher() -> Attached | None:
    """The job that this process belongs to, or None where the user started it alone."""
    environment = os.environ
    if "RANK" in environment and "WORLD_SIZE" in environment:
        return Attached("torchrun", int(environment["RANK"]), int(environment["WORLD_SIZE"]))
    # As Lightning has it: a shell inside an allocation is not a task.
    interactive = environment.get("SLURM_JOB_NAME") in ("bash", "interactive")
    if "SLURM_NTASKS" in environment and "SLURM_PROCID" in environment and not interactive:
        rank, world_size = int(environment["SLURM_PROCID"]), int(environment["SLURM_NTASKS"])
        return Attached("srun", rank, world_size)
    return None


def check_world(attached: Attached, devices: int, num_nodes: int) -> None:
    """Compare the configuration with the processes that are there.

    Raises:
        ConfigError: they differ; with the numbers.
    """
    if devices * num_nodes != attached.world_size:
        flag = {"torchrun": "--nproc-per-node", "srun": "--ntasks-per-node"}[attached.launcher]
        raise ConfigError(
            f"trainer.devices={devices} x trainer.num_nodes={num_nodes} = {devices * num_nodes}, but "
            f"{attached.launcher} started {attached.world_size} processes: both must be the same. "
            f"Change trainer.devices or trainer.num_nodes, or {flag}."
        )


class Channel:
    """Passes one message from rank 0 to the other ranks of a job.

    Args:
        attached: this process's place in the job.
    """

    _hosted: Store | None = None  # must outlive the message: others may read it late

    def __init__(self, attached: Attached) -> None:
        self._attached = attached
        self._sent = False
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        self._key = f"titanplug/config/{attempt}"

    def send_config(self, config: dict[str, Any]) -> None:
        """Rank 0: give the others the configuration to run."""
        self._send({"config": config})

    def send_end(self) -> None:
        """Rank 0: tell the others that there is nothing to run, unless they got a configuration."""
        if not self._sent:
            self._send({"config": None})

    def receive(self) -> dict[str, Any]:
        """Other ranks: wait for rank 0.

        Returns:
            The configuration to run.

        Raises:
            SystemExit: there is nothing to run. With exit code 0: rank 0 tells why, by its own.
            TitanplugError: rank 0 didn't answer.
        """
        try:
            message = json.loads(self._open().get(self._key))
        except RuntimeError as error:
            raise TitanplugError(
                f"rank {self._attached.rank} got no configuration from rank 0 ({error}). See the error "
                "of rank 0, and whether this machine reaches it."
            ) from error
        if message["config"] is None:
            sys.exit(0)
        config: dict[str, Any] = message["config"]
        return config

    def _send(self, message: dict[str, Any]) -> None:
        self._sent = True
        if self._attached.world_size > 1:
            self._open().set(self._key, json.dumps(message))

    def _open(self) -> Store:
        from torch.distributed import TCPStore

        agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        address, port = _main_address(self._attached)
        hosts = self._attached.rank == 0 and not agent
        # A store of our own takes the next port: the process group will need this one.
        store = TCPStore(
            address,
            port if agent else port + 1,
            is_master=hosts,
            timeout=WAIT,
            wait_for_workers=False,
        )
        if hosts:
            Channel._hosted = store
        return store


def _main_address(attached: Attached) -> tuple[str, int]:
    if attached.launcher == "torchrun":
        return os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    from lightning.fabric.plugins.environments import SLURMEnvironment

    environment = SLURMEnvironment(auto_requeue=False)
    return environment.main_address, environment.main_port


def report_to_torchrun(error: BaseException) -> None:
    """Have a torchrun that the user started repeat this error at the end of its own report."""
    if "TORCHELASTIC_ERROR_FILE" in os.environ:
        from torch.distributed.elastic.multiprocessing.errors import get_error_handler

        get_error_handler().record_exception(error)

"""``titanplug doctor``: what this machine and this environment can do, and common faults of both."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

_EXAMPLES = """\
examples:
  titanplug doctor
  titanplug doctor --quick       without starting processes
  titanplug doctor --json
"""
_GIB = 2**30
_TIMEOUT_S = 60
_EXTRAS = {
    "data": "datasets",
    "hf": "transformers",
    "wandb": "wandb",
    "mlflow": "mlflow",
    "optuna": "optuna",
    "joblib": "joblib",
    "submitit": "submitit",
    "int8": "torchao",
}
_CHECK_GROUP = """
import os, sys, torch, torch.distributed as dist
backend = sys.argv[1]
device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if backend == "nccl" else torch.device("cpu")
dist.init_process_group(backend)
value = torch.ones(1 << 16, device=device)
dist.all_reduce(value)
assert value[0].item() == dist.get_world_size()
dist.destroy_process_group()
"""


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at.

    Args:
        level: ok, warning or fault.
        what: was looked at.
        text: what was found; of a warning or fault also the rule, and what to do.
    """

    level: str
    what: str
    text: str


def look(quick: bool = False) -> Iterator[Finding]:
    """Look at one thing after the other.

    Args:
        quick: start no processes.
    """
    yield from _packages()
    yield from _machine()
    yield from _environment()
    yield from _folder(Path.cwd())
    if not quick:
        yield from _groups()


def _packages() -> Iterator[Finding]:
    yield Finding("ok" if sys.version_info >= (3, 11) else "fault", "python", platform.python_version())
    from packaging.requirements import Requirement

    ranges = {}
    for line in requires("titanplug") or []:
        requirement = Requirement(line)
        if requirement.marker is None:
            ranges[requirement.name] = requirement.specifier
    for name in ("torch", "lightning", "hydra-core", "omegaconf", "torchmetrics"):
        try:
            found = version(name)
        except PackageNotFoundError:
            yield Finding("fault", name, f"it isn't installed, and titanplug needs {ranges.get(name, '')}")
            continue
        fits = name not in ranges or ranges[name].contains(found, prereleases=True)
        told = found if fits else f"{found} is not {ranges[name]}: install a version in that range"
        yield Finding("ok" if fits else "fault", name, told)
    there = [extra for extra, module in _EXTRAS.items() if importlib.util.find_spec(module) is not None]
    missing = [extra for extra in _EXTRAS if extra not in there]
    told = f"{', '.join(there) or 'none'}; not installed: {', '.join(missing) or 'none'}"
    yield Finding("ok", "extras", told)


def _machine() -> Iterator[Finding]:
    import psutil
    import torch

    from titanplug.launch import num_cores

    memory = psutil.virtual_memory()
    told = (
        f"{num_cores()} cores, {memory.available / _GIB:.1f} of {memory.total / _GIB:.1f} GiB of memory free"
    )
    yield Finding("ok", "processor", told)
    number = torch.cuda.device_count() if torch.cuda.is_available() else 0
    for index in range(number):
        properties = torch.cuda.get_device_properties(index)
        yield Finding("ok", f"GPU {index}", f"{properties.name}, {properties.total_memory / _GIB:.0f} GiB")
    if not number and shutil.which("nvidia-smi"):
        yield Finding(
            "fault",
            "GPU",
            f"nvidia-smi is here, but torch {torch.__version__} sees no GPU: install a torch build for CUDA, "
            "and check the driver and CUDA_VISIBLE_DEVICES",
        )
    elif not number:
        yield Finding("ok", "GPU", "none: runs are on the processor (trainer.accelerator=cpu)")


def _environment() -> Iterator[Finding]:
    from titanplug.launch import RANK_VARIABLES

    left = [name for name in RANK_VARIABLES if name in os.environ]
    if left:
        yield Finding(
            "warning",
            "ranks",
            f"{', '.join(left)} are set: a command takes itself for a rank of a job that is there. In a "
            f"shell of your own, unset {' '.join(left)}",
        )
    threads = os.environ.get("OMP_NUM_THREADS")
    if threads is not None:
        yield Finding("ok", "OMP_NUM_THREADS", f"{threads}, for each rank")
    if "SLURM_JOB_ID" in os.environ:
        tasks = os.environ.get("SLURM_NTASKS", "?")
        yield Finding("ok", "Slurm", f"job {os.environ['SLURM_JOB_ID']} with {tasks} tasks")
    name = socket.gethostname()
    try:
        address = socket.gethostbyname(name)
        with socket.socket() as probe:
            probe.bind((address, 0))
        yield Finding("ok", "host name", f"{name} is {address}")
    except OSError as error:
        yield Finding(
            "warning",
            "host name",
            f"{name} doesn't lead to this machine ({error}), and ranks may wait for each other for ever: "
            "add it to /etc/hosts, or set GLOO_SOCKET_IFNAME (and NCCL_SOCKET_IFNAME) to an interface",
        )


def _folder(folder: Path) -> Iterator[Finding]:
    free = shutil.disk_usage(folder).free / _GIB
    told = f"{free:.1f} GiB free in {folder}" + ("" if free > 1 else ": checkpoints need more. Make room")
    yield Finding("ok" if free > 1 else "warning", "disk", told)
    if not os.access(folder, os.W_OK):
        yield Finding(
            "fault", "folder", f"{folder} can't be written to: runs go to ./runs. Go to another folder"
        )
    shm = Path("/dev/shm")
    if shm.is_dir():
        size = shutil.disk_usage(shm).total / _GIB
        if size < 0.5:
            yield Finding(
                "warning",
                "/dev/shm",
                f"{size:.2f} GiB: loaders with workers pass batches through it and fail when it is full. "
                "Give a container more (--shm-size=8g), or use data.num_workers=0",
            )
        else:
            yield Finding("ok", "/dev/shm", f"{size:.1f} GiB")


def _groups() -> Iterator[Finding]:
    import torch

    yield _try_group("gloo", 2)
    if torch.cuda.is_available() and torch.cuda.device_count() > 1:
        yield _try_group("nccl", torch.cuda.device_count())


def _try_group(backend: str, number: int) -> Finding:
    """Let processes add a number over the backend."""
    from titanplug.launch import RANK_VARIABLES

    environment = {name: value for name, value in os.environ.items() if name not in RANK_VARIABLES}
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    begin = time.monotonic()
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", _CHECK_GROUP, backend],
            env={
                **environment,
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": port,
                "WORLD_SIZE": str(number),
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
            },
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(number)
    ]
    errors = []
    for process in processes:
        try:
            _, text = process.communicate(timeout=max(1.0, _TIMEOUT_S - (time.monotonic() - begin)))
            if process.returncode:
                errors.append((text.strip().splitlines() or [f"exit code {process.returncode}"])[-1])
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            errors.append(f"no answer within {_TIMEOUT_S} s")
    if errors:
        return Finding(
            "fault",
            backend,
            f"{number} processes don't reach each other ({errors[0]}). Check the host name above, firewalls, "
            f"and {backend.upper()}_SOCKET_IFNAME",
        )
    return Finding("ok", backend, f"{number} processes added up in {time.monotonic() - begin:.1f} s")


def main(arguments: Sequence[str]) -> None:
    """Run the command. Exit code 1 where there is a fault."""
    parser = argparse.ArgumentParser(
        prog="titanplug doctor",
        description=__doc__,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--quick", action="store_true", help="start no processes")
    parser.add_argument("--json", action="store_true", help="the same for programs")
    given = parser.parse_args(arguments)
    findings = []
    for finding in look(given.quick):
        findings.append(finding)
        if not given.json:
            mark = {"ok": "  ", "warning": "? ", "fault": "! "}[finding.level]
            print(f"{mark}{finding.what.ljust(16)} {finding.text}", flush=True)
    if given.json:
        print(json.dumps([asdict(finding) for finding in findings], indent=2))
    else:
        faults = sum(finding.level == "fault" for finding in findings)
        warnings = sum(finding.level == "warning" for finding in findings)
        print(f"\n{faults} faults (!), {warnings} warnings (?)")
    if any(finding.level == "fault" for finding in findings):
        sys.exit(1)

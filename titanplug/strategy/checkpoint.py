"""Checkpoints as directories that any layout can load.

A checkpoint is a directory of torch's distributed checkpoint format: every rank writes its shards, under the
names of the one-process model; optimizer states are flattened to one entry for each parameter and value.
``meta.pt`` holds the rest of Lightning's checkpoint as plain containers. It is written aside and published by
a rename, so a checkpoint that can be seen is whole.
"""

from __future__ import annotations

import os
import pickle
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.optim import Optimizer

from titanplug.errors import TitanplugError

META_FILE = "meta.pt"
_SHARDED = StateDictOptions(flatten_optimizer_state_dict=True)
_WHOLE = StateDictOptions(full_state_dict=True)


class CheckpointError(TitanplugError):
    """A checkpoint can't be written or read."""


def model_state(module: nn.Module) -> dict[str, Any]:
    """Parameters and persistent buffers by name, sharded as they are."""
    return get_model_state_dict(module, options=_SHARDED)


def optimizer_state(module: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """State and settings of an optimizer by parameter name, sharded as they are."""
    return get_optimizer_state_dict(module, optimizer, options=_SHARDED)  # type: ignore[return-value]


def save(checkpoint: dict[str, Any], path: Path, position: str) -> None:
    """Write Lightning's ``checkpoint`` as the directory ``path``; a collective.

    Args:
        checkpoint: what ``Trainer.save_checkpoint`` gathered on this rank.
        path: where it shall appear; equal on all ranks. What is there is replaced.
        position: this rank's data-parallel position, "rank of size", for loaders with a state.

    Raises:
        CheckpointError: a rank could not write; on all ranks. What was at ``path`` is still there.
    """
    rest = dict(checkpoint)
    state: dict[str, Any] = {"state_dict": rest.pop("state_dict")}
    for index, optimizer in enumerate(rest.pop("optimizer_states", [])):
        state[f"optimizer_{index}"] = optimizer
    loaders = _take_loader_states(rest)
    if loaders is not None:
        state[_loader_key(position)] = pickle.dumps(loaders)
    aside = path.with_name(f".{path.name}.writing")
    with _agreed(f"writing {path}"):
        if _is_first():
            shutil.rmtree(aside, ignore_errors=True)
            aside.mkdir(parents=True)
            torch.save(_plain(rest), aside / META_FILE)
    with _agreed(f"writing {path}"):
        dcp.save(state, storage_writer=dcp.FileSystemWriter(aside, single_file_per_rank=True))
    with _agreed(f"publishing {path}"):
        if _is_first():
            _publish(aside, path)


def load(
    path: Path,
    module: nn.Module,
    optimizers: list[Optimizer],
    position: str,
    *,
    strict: bool,
    weights_only: bool | None,
) -> dict[str, Any]:
    """Read ``path`` into ``module`` and ``optimizers``, whatever layout wrote it; a collective.

    Args:
        path: a directory that :func:`save` wrote, or a file of one process's Lightning.
        module: the laid-out module.
        optimizers: whose states to load; empty for evaluation.
        position: as in :func:`save`.
        strict: every entry of the module must be in the checkpoint.
        weights_only: False allows any Python object in the rest of the checkpoint; only for files that
            you trust.

    Returns:
        The rest of Lightning's checkpoint.

    Raises:
        CheckpointError: there is no checkpoint, or it isn't whole.
    """
    if path.is_file():
        return _load_file(path, module, optimizers, strict=strict, weights_only=weights_only)
    if not (path / ".metadata").is_file() or not (path / META_FILE).is_file():
        raise CheckpointError(
            f"{path} is not a checkpoint: a directory with .metadata and {META_FILE}, or a Lightning "
            "checkpoint file, is needed. Check the path; an interrupted save never gets its final name."
        )
    rest: dict[str, Any] = _load_plain(path / META_FILE, weights_only)
    reader = dcp.FileSystemReader(path)
    planner = DefaultLoadPlanner(allow_partial_load=not strict)
    wanted: dict[str, Any] = {"state_dict": model_state(module)}
    dcp.load(wanted, storage_reader=reader, planner=planner)
    set_model_state_dict(
        module, wanted["state_dict"], options=StateDictOptions(strict=strict)
    )
    for index, optimizer in enumerate(optimizers):
        key = f"optimizer_{index}"
        wanted = {key: optimizer_state(module, optimizer)}
        dcp.load(wanted, storage_reader=reader)
        set_optimizer_state_dict(module, optimizer, wanted[key], options=_SHARDED)
    key = _loader_key(position)
    if key in reader.read_metadata().state_dict_metadata:
        found = {key: b""}
        dcp.load(found, storage_reader=reader)
        rest["loops"]["fit_loop"]["state_dict"]["combined_loader"] = pickle.loads(found[key])
    return rest


def _load_file(
    path: Path,
    module: nn.Module,
    optimizers: list[Optimizer],
    *,
    strict: bool,
    weights_only: bool | None,
) -> dict[str, Any]:
    rest: dict[str, Any] = _load_plain(path, weights_only)
    options = StateDictOptions(full_state_dict=True, strict=strict)
    set_model_state_dict(module, rest["state_dict"], options=options)
    states = rest.get("optimizer_states", [])
    for optimizer, state in zip(optimizers, states, strict=False):
        set_optimizer_state_dict(
            module, optimizer, _by_name(module, optimizer, state), options=_WHOLE
        )
    return rest


def _load_plain(path: Path, weights_only: bool | None) -> dict[str, Any]:
    try:
        return torch.load(path, map_location="cpu", weights_only=weights_only is not False)  # type: ignore[no-any-return]
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{path} holds Python objects beyond tensors and plain containers, which could run code when "
            "loaded. If you trust the file, pass weights_only=False. "
            f"({str(error).splitlines()[0]})"
        ) from error


def _by_name(module: nn.Module, optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
    """An optimizer state that counts parameters, as one that names them."""
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    order = [names[id(p)] for group in optimizer.param_groups for p in group["params"]]
    groups = [
        {**group, "params": [order[index] for index in group["params"]]}
        for group in state["param_groups"]
    ]
    return {
        "state": {order[index]: values for index, values in state["state"].items()},
        "param_groups": groups,
    }


def _take_loader_states(rest: dict[str, Any]) -> Any:
    fit = rest.get("loops", {}).get("fit_loop", {}).get("state_dict", {})
    states: Any = fit.pop("combined_loader", None)
    return states or None


def _loader_key(position: str) -> str:
    return f"loaders of data-parallel rank {position}"


def _plain(value: Any) -> Any:
    """Configuration containers as plain ones, which can be loaded without running code."""
    if type(value).__module__.startswith("omegaconf."):
        from omegaconf import OmegaConf

        return OmegaConf.to_container(value, resolve=True)
    if isinstance(value, Path):
        return str(value)
    if type(value) in (dict, list, tuple):
        items: Any = value.items() if isinstance(value, dict) else value
        if isinstance(value, dict):
            return {key: _plain(item) for key, item in items}
        return type(value)(_plain(item) for item in items)
    return value


def _publish(aside: Path, path: Path) -> None:
    old = path.with_name(f".{path.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if path.is_dir() and not path.is_symlink():
        os.replace(path, old)
    elif path.exists() or path.is_symlink():
        path.unlink()
    os.replace(aside, path)
    shutil.rmtree(old, ignore_errors=True)


def _is_first() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0


@contextmanager
def _agreed(what: str) -> Iterator[None]:
    """Let all ranks fail together, with the first rank's reason, where one fails inside."""
    failure: Exception | None = None
    try:
        yield
    except Exception as error:
        failure = error
    reasons: list[Any] = [None if failure is None else f"{type(failure).__name__}: {failure}"]
    if dist.is_initialized() and dist.get_world_size() > 1:
        gathered: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, reasons[0])
        reasons = gathered
    for rank, reason in enumerate(reasons):
        if reason is not None:
            raise CheckpointError(f"{what} failed on rank {rank}: {reason}") from failure

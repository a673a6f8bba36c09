"""Checkpoints as directories that any layout can load.

A checkpoint is a directory of torch's distributed checkpoint format: every rank writes its shards of
parameters and of the optimizers' tensors, under the names of the one-process model. ``meta.pt`` holds
the rest of Lightning's checkpoint, and of the optimizers, as plain containers. It is written aside and
published by a rename, so a checkpoint that can be seen is whole.
"""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.optim import Optimizer

from titanplug.strategy import checkpoint_state as states
from titanplug.strategy.checkpoint_files import (
    META_FILE,
    CheckpointError,
    agreed,
    discard,
    is_first,
    load_plain,
    publish,
    require_checkpoint,
    write_meta,
    writing_path,
)
from titanplug.strategy.checkpoint_reader import MODEL_KEY, CheckpointReader, Position
from titanplug.strategy.checkpoint_stages import CheckpointNames
from titanplug.strategy.checkpoint_state import loader_states, model_state, optimizer_state

__all__ = [
    "CheckpointError",
    "CheckpointNames",
    "consolidate",
    "load",
    "loader_states",
    "model_state",
    "optimizer_state",
    "save",
]

_EXTRA = "extra_states"
_ALIASES = "shared_weights"
LIKE_PARAMETERS = "parameter_like"
"""Where callbacks put tensors that are laid out as parameters are: ``{group: {parameter name: tensor}}``."""
_OPTIMIZERS = "optimizer_states"


def save(checkpoint: dict[str, Any], path: Path, position: Position, names: CheckpointNames) -> None:
    """Write Lightning's ``checkpoint`` as the directory ``path``; a collective.

    Args:
        checkpoint: what ``Trainer.save_checkpoint`` gathered on this rank.
        path: where it shall appear; equal on all ranks. What is there is replaced.
        position: this rank's, for loaders with a state.
        names: of the module's parameters.

    Raises:
        CheckpointError: a rank could not write; on all ranks. What was at ``path`` is still there.
    """
    with agreed(f"preparing {path}"):
        aside = writing_path(path)
    try:
        with agreed(f"preparing {path}"):
            rest = states.without_loader_states(checkpoint)
            model = rest.pop(MODEL_KEY)
            tensors: dict[str, Any] = {MODEL_KEY: states.tensors_of(model)}
            aliases = {alias: name for alias, name in names.aliases.items() if alias in model}
            extra = {name: model[name] for name in model.keys() - tensors[MODEL_KEY].keys()}
            for alias in aliases:  # a shared weight is saved once
                tensors[MODEL_KEY].pop(alias, None)
            split = [states.split_tensors(state) for state in rest.get(_OPTIMIZERS, [])]
            tensors |= {_optimizer_key(i): state for i, (_, state) in enumerate(split)}
            for group, values in rest.get(LIKE_PARAMETERS, {}).items():
                tensors[_like_key(group)] = names.with_whole_names(values)
            if loaders := states.loader_states(checkpoint):
                tensors[states.loader_key(*position)] = states.pack(loaders)
        with agreed(f"preparing {path}"):
            rest[_EXTRA] = names.whole_dict(extra)
            rest[_ALIASES] = names.whole_dict(aliases)
            if _OPTIMIZERS in rest:
                rest[_OPTIMIZERS] = [names.whole_optimizer(plain) for plain, _ in split]
            if LIKE_PARAMETERS in rest:
                rest[LIKE_PARAMETERS] = list(rest[LIKE_PARAMETERS])
            if is_first():
                discard(aside)
                aside.mkdir(parents=True)
                write_meta(rest, aside / META_FILE)
        with agreed(f"writing {path}"):
            writer = dcp.FileSystemWriter(aside)
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="torch.distributed is disabled")
                dcp.save(tensors, storage_writer=writer, no_dist=not dist.is_initialized())
        with agreed(f"publishing {path}"):
            if is_first():
                publish(aside, path)
    except CheckpointError:
        if is_first():
            discard(aside)
        raise


def load(
    path: Path,
    module: nn.Module,
    optimizers: list[Optimizer],
    position: Position,
    names: CheckpointNames,
    *,
    strict: bool = True,
    weights_only: bool | None = None,
) -> dict[str, Any]:
    """Read ``path`` into ``module`` and ``optimizers``, whatever layout wrote it; a collective.

    Args:
        path: a directory that :func:`save` wrote, or a file of one process's Lightning.
        module: the laid-out module.
        optimizers: whose states to load; empty for evaluation.
        position: as in :func:`save`.
        names: as in :func:`save`.
        strict: the checkpoint must have every entry of the module and no others.
        weights_only: False allows any Python object in the checkpoint; only for files that you
            trust.

    Returns:
        The rest of Lightning's checkpoint.

    Raises:
        CheckpointError: on all ranks. There is no checkpoint, or it isn't whole, or it doesn't fit.
    """
    with agreed(f"reading {path}"):
        if path.is_file():
            return _load_file(path, module, optimizers, names, strict, weights_only)
        require_checkpoint(path)
        rest: dict[str, Any] = load_plain(path / META_FILE, weights_only)
        reader = CheckpointReader(path, weights_only)
    # Every rank has found the same files: from here on they fail alike, or torch tells them.
    with agreed(f"loading {path}"):
        reader.read_model(module, names, rest.pop(_EXTRA), rest.pop(_ALIASES, {}), strict)
        saved = rest.pop(_OPTIMIZERS, None)
        if optimizers:
            _require_optimizers(path, saved, len(optimizers))
        for index, optimizer in enumerate(optimizers):
            reader.read_optimizer(_optimizer_key(index), saved[index], names, optimizer)
        if LIKE_PARAMETERS in rest:
            groups = rest[LIKE_PARAMETERS]
            rest[LIKE_PARAMETERS] = {
                g: names.with_own_names(reader.read_like_parameters(_like_key(g), names)) for g in groups
            }
        loaders = reader.read_loaders(position)
        if loaders is not None:
            states.put_loader_states(rest, loaders)
    return rest


def consolidate(path: Path | str, output: Path | str) -> Path:
    """Turn a checkpoint directory into the one file that Lightning on one process would have written.

    ``torch.load(output, weights_only=True)``, ``LightningModule.load_from_checkpoint`` and a plain
    ``Trainer`` read it. Needs no process group, and memory for the whole checkpoint.

    Args:
        path: the directory.
        output: the file; replaced if it is there.

    Returns:
        ``output``.

    Raises:
        CheckpointError: ``path`` is no checkpoint directory.
    """
    path, output = Path(path), Path(output)
    require_checkpoint(path)
    whole: dict[str, Any] = load_plain(path / META_FILE, weights_only=True)
    reader = CheckpointReader(path, weights_only=True, alone=True)
    whole[MODEL_KEY] = reader.read_whole(MODEL_KEY) | whole.pop(_EXTRA)
    for alias, name in whole.pop(_ALIASES, {}).items():
        whole[MODEL_KEY][alias] = whole[MODEL_KEY][name]
    for index, plain in enumerate(whole.get(_OPTIMIZERS, [])):
        tensors = {
            name: reader.read_whole(f"{_optimizer_key(index)}.{name}", keys)
            for name, keys in plain["tensors"].items()
        }
        groups = [group["params"] for group in plain["param_groups"]]
        named = states.join_tensors(plain, tensors)
        whole[_OPTIMIZERS][index] = states.count_parameters(named, groups)
    if LIKE_PARAMETERS in whole:
        whole[LIKE_PARAMETERS] = {g: reader.read_whole(_like_key(g)) for g in whole[LIKE_PARAMETERS]}
    loaders = reader.read_loaders((0, 1), required=False)
    if loaders is not None:
        states.put_loader_states(whole, loaders)
    output.parent.mkdir(parents=True, exist_ok=True)
    aside = output.with_name(f".{output.name}.writing")
    torch.save(whole, aside)
    os.replace(aside, output)
    return output


def _load_file(
    path: Path,
    module: nn.Module,
    optimizers: list[Optimizer],
    names: CheckpointNames,
    strict: bool,
    weights_only: bool | None,
) -> dict[str, Any]:
    rest: dict[str, Any] = load_plain(path, weights_only, mapped=True)
    whole = rest.pop(MODEL_KEY)
    wanted = states.model_state(module)
    if strict:
        states.require_same_names([*wanted, *names.entries], whole, path)
    found: dict[str, Any] = {
        name: states.shard_like(value, wanted[name], name) for name, value in whole.items() if name in wanted
    }
    set_model_state_dict(module, found, options=StateDictOptions(strict=strict))
    saved = rest.pop(_OPTIMIZERS, None)
    if optimizers:
        _require_optimizers(path, saved, len(optimizers))
    for optimizer, counted in zip(optimizers, saved or [], strict=False):
        own = names.own_counted(counted, states.group_names(names, optimizer))
        optimizer.load_state_dict(states.shard_state(own, optimizer))
    for group, values in rest.get(LIKE_PARAMETERS, {}).items():
        own = {
            name: states.shard_like(values[name], parameter, name)
            for name, parameter in names.parameters.items()
            if name in values
        }
        rest[LIKE_PARAMETERS][group] = names.with_own_names(own)
    return rest


def _require_optimizers(path: Path, saved: list[Any] | None, number: int) -> None:
    if saved is None:
        raise CheckpointError(
            f"{path} holds weights only, so training can't continue from it. Save with "
            "save_weights_only=False, or load the weights into the module before fit and leave out "
            "ckpt_path."
        )
    if len(saved) != number:
        raise CheckpointError(
            f"{path} holds the states of {len(saved)} optimizers, the module has {number}. Return the "
            "optimizers from configure_optimizers that it had when it was saved."
        )


def _like_key(group: str) -> str:
    return f"{LIKE_PARAMETERS}.{group}"


def _optimizer_key(index: int) -> str:
    return f"optimizer_{index}"

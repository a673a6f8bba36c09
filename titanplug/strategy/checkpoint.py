"""Checkpoints as directories that any layout can load.

A checkpoint is a directory of torch's distributed checkpoint format: every rank writes its shards of
parameters and of the optimizers' tensors, under the names of the one-process model. ``meta.pt`` holds
the rest of Lightning's checkpoint, and of the optimizers, as plain containers. It is written aside and
published by a rename, so a checkpoint that can be seen is whole.
"""

from __future__ import annotations

import io
import os
import pickle
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.optim import Optimizer
from typing_extensions import override

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

loader_states, model_state, optimizer_state = (
    states.loader_states,
    states.model_state,
    states.optimizer_state,
)

__all__ = [
    "CheckpointError",
    "consolidate",
    "load",
    "loader_states",
    "model_state",
    "optimizer_state",
    "save",
]

_MODEL = "state_dict"
_OPTIMIZERS = "optimizer_states"
Position = tuple[int, int]
"""A data-parallel rank and the number of such ranks."""


def save(checkpoint: dict[str, Any], path: Path, position: Position) -> None:
    """Write Lightning's ``checkpoint`` as the directory ``path``; a collective.

    Args:
        checkpoint: what ``Trainer.save_checkpoint`` gathered on this rank.
        path: where it shall appear; equal on all ranks. What is there is replaced.
        position: this rank's, for loaders with a state.

    Raises:
        CheckpointError: a rank could not write; on all ranks. What was at ``path`` is still there.
    """
    aside = writing_path(path)
    try:
        with agreed(f"preparing {path}"):
            rest = states.without_loader_states(checkpoint)
            tensors: dict[str, Any] = {_MODEL: rest.pop(_MODEL)}
            if _OPTIMIZERS in rest:
                split = [states.split_tensors(state) for state in rest[_OPTIMIZERS]]
                rest[_OPTIMIZERS] = [plain for plain, _ in split]
                tensors |= {_optimizer_key(i): state for i, (_, state) in enumerate(split)}
            if loaders := states.loader_states(checkpoint):
                tensors[states.loader_key(*position)] = states.pack(loaders)
            if is_first():
                discard(aside)
                aside.mkdir(parents=True)
                write_meta(rest, aside / META_FILE)
        with agreed(f"writing {path}"):
            dcp.save(tensors, storage_writer=dcp.FileSystemWriter(aside))
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
            return _load_file(path, module, optimizers, strict, weights_only)
        require_checkpoint(path)
        rest: dict[str, Any] = load_plain(path / META_FILE, weights_only)
        reader = _Reader(path, weights_only)
    # Every rank has found the same files: from here on they fail alike, or torch tells them.
    with agreed(f"loading {path}"):
        reader.read_model(module, strict)
        saved = rest.pop(_OPTIMIZERS, None)
        if optimizers:
            _require_optimizers(path, saved, len(optimizers))
        for index, optimizer in enumerate(optimizers):
            reader.read_optimizer(_optimizer_key(index), saved[index], module, optimizer)
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
    reader = _Reader(path, weights_only=True, alone=True)
    whole[_MODEL] = reader.read_whole(_MODEL)
    for index, plain in enumerate(whole.get(_OPTIMIZERS, [])):
        tensors = {
            name: reader.read_whole(f"{_optimizer_key(index)}.{name}", keys)
            for name, keys in plain["tensors"].items()
        }
        groups = [group["params"] for group in plain["param_groups"]]
        named = states.join_tensors(plain, tensors)
        whole[_OPTIMIZERS][index] = states.count_parameters(named, groups)
    loaders = reader.read_loaders((0, 1), required=False)
    if loaders is not None:
        states.put_loader_states(whole, loaders)
    output.parent.mkdir(parents=True, exist_ok=True)
    aside = output.with_name(f".{output.name}.writing")
    torch.save(whole, aside)
    os.replace(aside, output)
    return output


class _Reader:
    """Reads the entries of one checkpoint directory."""

    def __init__(self, path: Path, weights_only: bool | None, alone: bool = False) -> None:
        self._path = path
        self._weights_only = weights_only is not False
        self._alone = alone
        self._files = dcp.FileSystemReader(path)
        self._metadata: Metadata = self._files.read_metadata()

    def read_model(self, module: nn.Module, strict: bool) -> None:
        wanted = states.model_state(module)
        found = states.names_under(_MODEL, self._metadata)
        if strict:
            states.require_same_names(wanted, found, self._path)
        wanted = {name: value for name, value in wanted.items() if name in set(found)}
        self._fill({_MODEL: wanted})
        set_model_state_dict(module, wanted, options=StateDictOptions(strict=strict))

    def read_optimizer(
        self, key: str, plain: dict[str, Any], module: nn.Module, optimizer: Optimizer
    ) -> None:
        names = states.parameter_names(module)
        groups = [[names[id(p)] for p in group["params"]] for group in optimizer.param_groups]
        states.require_same_groups([group["params"] for group in plain["param_groups"]], groups)
        parameters = {names[id(p)]: p for g in optimizer.param_groups for p in g["params"]}
        tensors = {
            name: {entry: self._room_beside(f"{key}.{name}.{entry}", parameters[name]) for entry in entries}
            for name, entries in plain["tensors"].items()
        }
        self._fill({key: tensors})
        named = states.join_tensors(plain, tensors)
        optimizer.load_state_dict(states.count_parameters(named, groups))

    def read_loaders(self, position: Position, required: bool = True) -> Any:
        """The states of this rank's loaders; None where none were saved."""
        keys = states.loader_keys(self._metadata)
        own = states.loader_key(*position)
        if own in keys:
            return self._unpack(own)
        saved = [self._unpack(key) for key in keys]
        if all(state == saved[0] for state in saved):
            return saved[0] if saved else None  # they don't tell ranks apart
        if not required:
            return None
        raise CheckpointError(
            f"{self._path} holds the positions of the data loaders of {len(keys)} data-parallel ranks, "
            f"now there are {position[1]}: each rank reads a share of its own, so the positions "
            f"can't be handed over. Use {len(keys)} data-parallel ranks, or start a new run from the "
            "saved weights."
        )

    def read_whole(self, key: str, names: list[str] | None = None) -> dict[str, Any]:
        """Entries below ``key`` as whole values, by name."""
        names = states.names_under(key, self._metadata) if names is None else names
        entries = {f"{key}.{name}": self._room(f"{key}.{name}") for name in names}
        self._fill(entries)
        return {name: entries[f"{key}.{name}"] for name in names}

    def _unpack(self, key: str) -> Any:
        packed = self._room(key)
        self._fill({key: packed})
        buffer = io.BytesIO(packed.numpy().tobytes())
        try:
            return torch.load(buffer, weights_only=self._weights_only)
        except pickle.UnpicklingError as error:
            raise CheckpointError(
                f"The states of the data loaders in {self._path} hold Python objects beyond tensors "
                "and plain containers, which could run code when loaded. If you trust the "
                "checkpoint, pass weights_only=False."
            ) from error

    def _room(self, key: str) -> Any:
        """Where an entry is read to: a tensor, or a place for any other value."""
        entry = self._metadata.state_dict_metadata[key]
        if not isinstance(entry, TensorStorageMetadata):
            return None
        return torch.empty(entry.size, dtype=entry.properties.dtype)

    def _room_beside(self, key: str, parameter: nn.Parameter) -> Any:
        """The same, sharded as the parameter is where it has its shape."""
        entry = self._metadata.state_dict_metadata[key]
        assert isinstance(entry, TensorStorageMetadata)
        if entry.size != parameter.shape:
            return self._room(key)
        return torch.empty_like(parameter, dtype=entry.properties.dtype, requires_grad=False)

    def _fill(self, wanted: dict[str, Any]) -> None:
        planner = _Planner(self._weights_only)
        dcp.load(wanted, storage_reader=self._files, planner=planner, no_dist=self._alone)


class _Planner(DefaultLoadPlanner):
    """Reads entries that aren't tensors (extra states of modules) as safely as the rest."""

    def __init__(self, weights_only: bool) -> None:
        super().__init__()
        self._weights_only = weights_only

    @override
    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        torch.load(value, weights_only=self._weights_only)  # raises where it could run code
        value.seek(0)
        super().load_bytes(read_item, value)


def _load_file(
    path: Path,
    module: nn.Module,
    optimizers: list[Optimizer],
    strict: bool,
    weights_only: bool | None,
) -> dict[str, Any]:
    rest: dict[str, Any] = load_plain(path, weights_only, mapped=True)
    whole = rest.pop(_MODEL)
    wanted = states.model_state(module)
    if strict:
        states.require_same_names(wanted, whole, path)
    found: dict[str, Any] = {
        name: states.shard_like(value, wanted[name], name) for name, value in whole.items() if name in wanted
    }
    set_model_state_dict(module, found, options=StateDictOptions(strict=strict))
    saved = rest.pop(_OPTIMIZERS, None)
    if optimizers:
        _require_optimizers(path, saved, len(optimizers))
    for optimizer, counted in zip(optimizers, saved or [], strict=False):
        optimizer.load_state_dict(states.shard_state(counted, optimizer))
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


def _optimizer_key(index: int) -> str:
    return f"optimizer_{index}"

"""Checkpoint directories without their layout: the weights one at a time, and one plain file of all.

Nothing here needs a process group.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from titanplug.checkpoint import state as states
from titanplug.checkpoint.contents import pack_meta
from titanplug.checkpoint.directory import (
    ALIASES,
    EXTRA,
    LIKE_PARAMETERS,
    OPTIMIZERS,
    Snapshot,
    like_key,
    optimizer_key,
    place_to_read,
    read_file,
    write,
)
from titanplug.checkpoint.files import PathOrUrl, Place, place_of
from titanplug.checkpoint.ranks import Ranks
from titanplug.checkpoint.reader import MODEL_KEY, CheckpointReader
from titanplug.compat import require_extra
from titanplug.errors import CheckpointError

_ALONE = Ranks(alone=True)
_HYPER_PARAMETERS = "hyper_parameters"


class SavedWeights(Mapping[str, Tensor]):
    """The tensors of a checkpoint's model by name; each is read when it is asked for.

    Args:
        path: a checkpoint directory, or a file of one process's Lightning.
        average: the averaged weights where a WeightAverage callback kept some.

    Raises:
        CheckpointError: it is no checkpoint, or it is damaged, or it holds no averages.
    """

    def __init__(self, path: PathOrUrl, average: bool = False) -> None:
        self._place = place_to_read(path)
        self._whole: dict[str, Any] | None = None
        if self._place.is_file():
            self._whole = read_file(self._place, True)
            self.rest = {key: value for key, value in self._whole.items() if key != MODEL_KEY}
            groups = self._whole.get(LIKE_PARAMETERS, {})
            self._names = {name: name for name in self._whole[MODEL_KEY]}
            if average:
                self._whole = {MODEL_KEY: {**self._whole[MODEL_KEY], **_average_of(groups, self._place)}}
            return
        self._reader = CheckpointReader(self._place, True, _ALONE)
        self.rest = self._reader.read_rest()
        self._names = {name: f"{MODEL_KEY}.{name}" for name in self._reader.names_under(MODEL_KEY)}
        if average:
            section = like_key(_only(self.rest.get(LIKE_PARAMETERS, ()), self._place))
            self._names |= {name: f"{section}.{name}" for name in self._reader.names_under(section)}
        for alias, name in self.rest.get(ALIASES, {}).items():
            self._names[alias] = self._names[name]

    @property
    def hyper_parameters(self) -> dict[str, Any]:
        """What ``save_hyperparameters`` kept."""
        found: dict[str, Any] = self.rest.get(_HYPER_PARAMETERS, {})
        return found

    def __getitem__(self, name: str) -> Tensor:
        """Read a tensor; a KeyError where there is none of that name."""
        if self._whole is not None:
            tensor: Tensor = self._whole[MODEL_KEY][name]
            return tensor
        key = self._names[name]
        with _ALONE.agreed(f"reading {self._place}"):
            return self._reader.read_tensor(key)

    def __contains__(self, name: object) -> bool:
        """Whether there is a tensor of this name; it isn't read."""
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        """The names."""
        return iter(self._names)

    def __len__(self) -> int:
        """Number of tensors."""
        return len(self._names)


def read_weights(path: PathOrUrl, average: bool = False) -> SavedWeights:
    """The tensors of a checkpoint's model, under the names of the LightningModule; read one at a time."""
    return SavedWeights(path, average)


def read_hyper_parameters(path: PathOrUrl) -> dict[str, Any]:
    """What ``save_hyperparameters`` kept.

    Raises:
        CheckpointError: it is no checkpoint, or it is damaged.
    """
    return read_weights(path).hyper_parameters


def write_weights(path: PathOrUrl, tensors: Mapping[str, Tensor], hyper_parameters: dict[str, Any]) -> None:
    """Write a checkpoint directory that holds weights only, from this process alone.

    Args:
        path: where it shall appear; a checkpoint that is there is replaced.
        tensors: by the names of the LightningModule; memory-mapped ones stay in their file until they are
            written. One under several names is written once.
        hyper_parameters: for ``load_from_checkpoint``.

    Raises:
        CheckpointError: it can't be written there.
    """
    place = place_of(path)
    place.require_free()
    whole = dict(tensors)
    firsts: dict[int, str] = {}
    aliases = {
        name: firsts[id(tensor)]
        for name, tensor in whole.items()
        if firsts.setdefault(id(tensor), name) != name
    }
    distinct = {name: tensor for name, tensor in whole.items() if name not in aliases}
    rest = {
        "epoch": 0,
        "global_step": 0,
        "pytorch-lightning_version": version("lightning"),
        "loops": {},
        "hparams_name": "kwargs",
        _HYPER_PARAMETERS: hyper_parameters,
        EXTRA: {},
        ALIASES: aliases,
    }
    write(Snapshot(place, {MODEL_KEY: distinct}, pack_meta(rest)), _ALONE)


def read_checkpoint(
    path: PathOrUrl, weights_only: bool | None = True, map_location: Any = None
) -> dict[str, Any]:
    """A whole checkpoint directory as Lightning on one process would have written it, in memory.

    Args:
        path: the directory.
        weights_only: False allows any Python object; only for checkpoints that you trust.
        map_location: a device for the weights; None and functions: host memory.

    Raises:
        CheckpointError: ``path`` is no checkpoint directory, or it is damaged.
    """
    with _ALONE.agreed(f"reading {path}"):
        reader = CheckpointReader(place_to_read(path), weights_only, _ALONE)
        whole = reader.read_rest()
        whole[MODEL_KEY] = reader.read_whole(MODEL_KEY) | whole.pop(EXTRA)
        for alias, name in whole.pop(ALIASES, {}).items():
            whole[MODEL_KEY][alias] = whole[MODEL_KEY][name]
        for index, plain in enumerate(whole.get(OPTIMIZERS, [])):
            keys = [f"{name}.{key}" for name, found in plain["tensors"].items() for key in found]
            read = reader.read_whole(optimizer_key(index), keys)
            tensors = {
                name: {key: read[f"{name}.{key}"] for key in found}
                for name, found in plain["tensors"].items()
            }
            groups = [group["params"] for group in plain["param_groups"]]
            named = states.join_tensors(plain, tensors)
            whole[OPTIMIZERS][index] = states.count_parameters(named, groups)
        if LIKE_PARAMETERS in whole:
            whole[LIKE_PARAMETERS] = {g: reader.read_whole(like_key(g)) for g in whole[LIKE_PARAMETERS]}
        loaders, _ = reader.read_loaders((0, 1))
        if loaders is not None:
            states.put_loader_states(whole, loaders)
    if isinstance(map_location, str | torch.device):
        whole[MODEL_KEY] = {
            name: value.to(map_location) if isinstance(value, Tensor) else value
            for name, value in whole[MODEL_KEY].items()
        }
    return whole


def consolidate(
    path: PathOrUrl, output: PathOrUrl, *, weights_only: bool = False, average: bool = False
) -> Path:
    """Turn a checkpoint directory into one plain file.

    Either the file that Lightning on one process would have written, for
    ``LightningModule.load_from_checkpoint`` and a plain ``Trainer``, or with ``weights_only`` a state dict
    for ``torch.load`` and ``load_state_dict``. Needs no process group, and memory for what is written.

    Args:
        path: the directory.
        output: the file; replaced if it is there. With the ending ``.safetensors`` it is one (weights only).
        weights_only: a plain state dict of the model.
        average: of the averaged weights, where a WeightAverage callback kept some.

    Returns:
        ``output``.

    Raises:
        CheckpointError: ``path`` is no checkpoint directory, or it is damaged, or it holds no averages.
    """
    output = Path(output)
    as_safetensors = output.suffix == ".safetensors"
    content: dict[str, Any]
    if weights_only or as_safetensors:
        content = dict(read_weights(path, average))
    else:
        content = read_checkpoint(path)
        if average:
            content[MODEL_KEY] |= _average_of(content.get(LIKE_PARAMETERS, {}), place_of(path))
    output.parent.mkdir(parents=True, exist_ok=True)
    aside = output.with_name(f".{output.name}.writing")
    try:
        if as_safetensors:
            distinct = {name: value.clone() for name, value in content.items()}  # it takes no shared memory
            require_extra("safetensors.torch", "hf").save_file(distinct, aside, metadata={"format": "pt"})
        else:
            torch.save(content, aside)
        os.replace(aside, output)
    finally:
        aside.unlink(missing_ok=True)
    return output


def _average_of(groups: Mapping[str, dict[str, Tensor]], place: Place) -> dict[str, Tensor]:
    return groups[_only(groups, place)]


def _only(groups: Any, place: Place) -> str:
    names = list(groups)
    if len(names) != 1:
        raise CheckpointError(
            f"{place} holds {len(names)} sets of averaged weights, one is needed. Train with "
            "callbacks=[default,weight_average] (titanplug.callbacks.WeightAverage), or leave out average."
        )
    return str(names[0])

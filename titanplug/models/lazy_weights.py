"""Weights that stay in their files until one of them is asked for, under the Transformer's names."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from titanplug.compat import require_extra
from titanplug.errors import ConfigError
from titanplug.models.config import TransformerConfig
from titanplug.models.hf import entries_from_hf, is_computed

EMBEDDING, OUTPUT = "tok_embeddings.weight", "output.weight"
_HF_EMBEDDING = "model.embed_tokens.weight"
_PREFIX = "model."  # of a LightningModule's names
_DTYPES = ("F64", "F32", "F16", "BF16")
_NUM_SHOWN = 8


@dataclass(frozen=True)
class Entry:
    """One tensor of a file.

    Args:
        read: gives the tensor, on the CPU.
        shape: None where only reading tells it.
    """

    read: Callable[[], Tensor]
    shape: tuple[int, ...] | None = None


class LazyWeights(Mapping[str, Tensor]):
    """Tensors by name; each is read when it is asked for and kept by nobody.

    Args:
        entries: where they are.
        dtype: what they are converted to; None: as they are stored.
    """

    def __init__(self, entries: Mapping[str, Entry], dtype: torch.dtype | None = None) -> None:
        self._entries = entries
        self._dtype = dtype

    def __getitem__(self, name: str) -> Tensor:
        """Read a tensor; a KeyError where there is none of that name."""
        entry = self._entries[name]
        with torch.device("cpu"):  # a model that is built on another device must not move the files there
            tensor = entry.read()
        return tensor if self._dtype is None else tensor.to(self._dtype)

    def __contains__(self, name: object) -> bool:
        """Whether there is a tensor of that name; nothing is read."""
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        """The names."""
        return iter(self._entries)

    def __len__(self) -> int:
        """Number of tensors."""
        return len(self._entries)


# --------------------------------------------------------------------------------------
# Entries of files
# --------------------------------------------------------------------------------------


def safetensors_entries(path: Path) -> dict[str, Entry]:
    """What a .safetensors file holds; only its header is read.

    Raises:
        ConfigError: the file is missing, cut off or damaged, or holds numbers that aren't of 16 to 64 bits.
    """
    if not path.is_file():
        raise ConfigError(f"{path}: there is no such file. Check the path, or get the file anew.")
    safetensors = require_extra("safetensors", "hf")
    entries, odd = {}, []
    try:
        with safetensors.safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118  # it is no mapping
                part = file.get_slice(name)
                if part.get_dtype() not in _DTYPES and not is_computed(name):
                    odd.append(f"{name} ({part.get_dtype()})")
                entries[name] = Entry(_SafetensorsReader(path, name), tuple(part.get_shape()))
    except safetensors.SafetensorError as error:
        raise ConfigError(
            f"{path} is no whole safetensors file ({error}). It may have been cut off: get it anew."
        ) from error
    if odd:
        raise ConfigError(
            f"{path} holds {shown(odd)}: weights are numbers of the types {', '.join(_DTYPES)}. Use a model "
            "that isn't quantised."
        )
    return entries


@dataclass(frozen=True)
class _SafetensorsReader:
    path: Path
    name: str

    def __call__(self) -> Tensor:
        with require_extra("safetensors", "hf").safe_open(self.path, "pt") as file:
            tensor: Tensor = file.get_tensor(self.name)
        return tensor


def torch_entries(path: Path) -> dict[str, Entry]:
    """What a state dict of ``torch.save`` holds; the tensors stay in the file until they are read.

    Raises:
        ConfigError: it is none, or holds more than tensors.
    """
    try:
        with torch.device("cpu"):
            state: Any = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except pickle.UnpicklingError as error:
        raise ConfigError(
            f"{path} holds Python objects beyond tensors and plain containers, which could run code when "
            "loaded. Save the model's state_dict() alone."
        ) from error
    except (RuntimeError, EOFError, OSError) as error:
        raise ConfigError(f"{path} can't be read as a file of torch.save ({error}). Get it anew.") from error
    if not isinstance(state, dict) or not all(isinstance(value, Tensor) for value in state.values()):
        raise ConfigError(
            f"{path} is no state dict, which holds tensors by name and nothing else. Save the model's "
            "state_dict(), or give a checkpoint of titanplug."
        )
    return {name: Entry(_Value(value), tuple(value.shape)) for name, value in state.items()}


@dataclass(frozen=True)
class _Value:
    tensor: Tensor

    def __call__(self) -> Tensor:
        return self.tensor


# --------------------------------------------------------------------------------------
# For a model
# --------------------------------------------------------------------------------------


def fit_to_model(entries: Mapping[str, Entry], config: TransformerConfig, where: str) -> dict[str, Entry]:
    """The entries under the Transformer's names, exactly those of its ``state_dict``.

    Names may be the Transformer's, the same after ``model.``, or those of Hugging Face. Of tied
    embeddings one is enough; where both are there the input's counts.

    Args:
        entries: of the files.
        config: the model's.
        where: what the entries are from, for messages.

    Raises:
        ConfigError: tensors are missing, unknown or of other shapes; all of them are named.
    """
    found, unknown = _own_names(entries)
    if config.tie_embeddings:
        tied = found.get(EMBEDDING) or found.get(OUTPUT)
        if tied is not None:
            found[EMBEDDING] = found[OUTPUT] = tied
    shapes = model_shapes(config)
    missing = [name for name in shapes if name not in found]
    unknown += [name for name in found if name not in shapes]
    problems = []
    if missing:
        problems.append(
            f"{where} lacks {len(missing)} of the model's {len(shapes)} tensors: {shown(missing)}. Give all "
            "weights of the model, or change the model's configuration to what the weights are of."
        )
    if unknown:
        problems.append(
            f"{where} holds {len(unknown)} tensors that the model has no place for: {shown(unknown)}. Give "
            "the weights of this model, or change its configuration to what they are of."
        )
    for name, shape in shapes.items():
        given = found[name].shape if name in found else None
        if given is not None and given != shape:
            problems.append(
                f"{where}: {name} has the shape {given}, the model's is {shape}. Change the model's "
                "configuration to what the weights are of."
            )
    if problems:
        raise ConfigError(problems)
    return {name: found[name] for name in shapes}


def _own_names(entries: Mapping[str, Entry]) -> tuple[dict[str, Entry], list[str]]:
    """The entries under the Transformer's names, and the names that have none."""
    found: dict[str, Entry] = {}
    unknown: list[str] = []
    if _HF_EMBEDDING in entries:
        return entries_from_hf(entries)
    if EMBEDDING in entries:
        return dict(entries), unknown
    for name, entry in entries.items():
        if name.startswith(_PREFIX):
            found[name.removeprefix(_PREFIX)] = entry
        else:
            unknown.append(name)
    return found, unknown


def model_shapes(config: TransformerConfig) -> dict[str, tuple[int, ...]]:
    """Shape by name of a Transformer's ``state_dict``, in its order. Nothing is allocated."""
    from titanplug.models.transformer import Transformer

    with torch.device("meta"):
        model = Transformer(replace(config, init_from=None))
    return {name: tuple(value.shape) for name, value in model.state_dict().items()}


def shown(names: Sequence[str]) -> str:
    """The first few names."""
    more = f" and {len(names) - _NUM_SHOWN} more" if len(names) > _NUM_SHOWN else ""
    return ", ".join(names[:_NUM_SHOWN]) + more

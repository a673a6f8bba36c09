"""Reads what a checkpoint directory holds into a module and its optimizers, however they are laid out."""

from __future__ import annotations

import io
import pickle
import warnings
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.optim import Optimizer

from titanplug.checkpoint import state as states
from titanplug.checkpoint.contents import load_plain
from titanplug.checkpoint.files import META_FILE, Place
from titanplug.checkpoint.names import CheckpointNames
from titanplug.checkpoint.quantized import quantize_state
from titanplug.checkpoint.ranks import Ranks
from titanplug.checkpoint.storage import ChecksumReader
from titanplug.errors import CheckpointError

MODEL_KEY = "state_dict"
Position = tuple[int, int]
"""A data-parallel rank and the number of such ranks."""


class CheckpointReader:
    """Reads the entries of one checkpoint directory.

    Args:
        place: the directory.
        weights_only: False allows any Python object.
        ranks: who reads; alone, this process doesn't wait for others.

    Raises:
        CheckpointError: it is no checkpoint, or files are missing, cut off or altered.
    """

    def __init__(self, place: Place, weights_only: bool | None, ranks: Ranks) -> None:
        place.require_checkpoint()
        self._place = place
        self._weights_only = weights_only is not False
        self._files = ChecksumReader(place)
        if ranks.is_first:
            self._files.require_whole()
        self._metadata: Metadata = self._files.read_metadata()

    def read_rest(self) -> dict[str, Any]:
        """What isn't tensors."""
        content, path = self._files.read_file(META_FILE), self._place.file(META_FILE)
        rest: dict[str, Any] = load_plain(io.BytesIO(content), path, self._weights_only)
        return rest

    def read_model(
        self,
        module: nn.Module,
        names: CheckpointNames,
        extra: dict[str, Any],
        aliases: dict[str, str],
        strict: bool,
    ) -> None:
        """Read parameters and buffers into ``module``.

        Args:
            module: the laid-out module.
            names: of its parameters.
            extra: states that aren't tensors.
            aliases: other names of saved weights.
            strict: the checkpoint must have every entry of the module and no others.
        """
        wanted = states.model_state(module)
        found = set(states.names_under(MODEL_KEY, self._metadata)) | aliases.keys()
        if strict:
            states.require_same_names([*wanted, *names.entries], found | extra.keys(), str(self._place))
        tensors = {name: value for name, value in wanted.items() if name in found}
        self._fill({MODEL_KEY: {name: value for name, value in tensors.items() if name not in aliases}})
        for alias, name in aliases.items():
            if alias in tensors:
                self._fill({MODEL_KEY: {name: tensors[alias]}})
        rest = {name: value for name, value in extra.items() if name in wanted}
        set_model_state_dict(module, tensors | rest, options=StateDictOptions(strict=strict))

    def read_optimizer(
        self, key: str, plain: dict[str, Any], names: CheckpointNames, optimizer: Optimizer
    ) -> None:
        """Read a state into ``optimizer``; ``plain`` is what isn't tensors of it."""
        groups = states.group_names(names, optimizer)
        plain = names.own_optimizer(plain)
        states.require_same_groups([group["params"] for group in plain["param_groups"]], groups)
        parameters = names.parameters
        tensors = {
            name: {entry: self._room(f"{key}.{name}.{entry}", parameters[name]) for entry in entries}
            for name, entries in plain["tensors"].items()
        }
        self._fill({key: tensors})
        named = states.join_tensors(plain, tensors)
        optimizer.load_state_dict(states.count_parameters(named, groups))
        quantize_state(optimizer)

    def read_like_parameters(self, key: str, names: CheckpointNames) -> dict[str, Tensor]:
        """Entries below ``key``, each laid out as this rank's parameter of that name."""
        parameters = names.parameters
        found = [name for name in states.names_under(key, self._metadata) if name in parameters]
        entries = {name: self._room(f"{key}.{name}", parameters[name]) for name in found}
        self._fill({key: entries})
        return entries

    def read_loaders(self, position: Position) -> tuple[Any, list[Any]]:
        """The states of the training loaders.

        Returns:
            Those of this rank, None where they can't be told; and where another number of data-parallel
            ranks wrote them, those of all these ranks in order, else none.
        """
        keys = states.loader_keys(self._metadata)
        own = states.loader_key(*position)
        if own in keys:
            return self._unpack(self.read_tensor(own)), []
        packed = [self.read_tensor(key) for key in keys]
        saved = [self._unpack(value) for value in packed]
        if packed and all(torch.equal(value, packed[0]) for value in packed):
            return saved[0], []  # they don't tell ranks apart
        return None, saved

    def read_whole(self, key: str, names: list[str] | None = None) -> dict[str, Any]:
        """Entries below ``key`` as whole values, by name."""
        names = states.names_under(key, self._metadata) if names is None else names
        entries = {f"{key}.{name}": self._room(f"{key}.{name}") for name in names}
        self._fill(entries)
        return {name: entries[f"{key}.{name}"] for name in names}

    def names_under(self, section: str) -> list[str]:
        """Names of the entries below a section."""
        return states.names_under(section, self._metadata)

    def read_tensor(self, key: str) -> Tensor:
        """One entry, whole."""
        room = self._room(key)
        self._fill({key: room})
        return room

    def _unpack(self, packed: Tensor) -> Any:
        buffer = io.BytesIO(packed.numpy().tobytes())
        try:
            return torch.load(buffer, weights_only=self._weights_only)
        except pickle.UnpicklingError as error:
            raise CheckpointError(
                f"The states of the data loaders in {self._place} hold Python objects beyond tensors "
                "and plain containers, which could run code when loaded. If you trust the "
                "checkpoint, pass weights_only=False."
            ) from error

    def _room(self, key: str, beside: nn.Parameter | None = None) -> Tensor:
        """Where an entry is read to: sharded as the parameter ``beside`` it, where it has its shape."""
        entry = self._metadata.state_dict_metadata[key]
        if not isinstance(entry, TensorStorageMetadata):
            raise CheckpointError(
                f"{self._place}: {key} is not a tensor, but titanplug writes only tensors there. Use a "
                "checkpoint that it wrote."
            )
        dtype = entry.properties.dtype
        if beside is not None and entry.size == beside.shape:
            return torch.empty_like(beside, dtype=dtype, requires_grad=False)
        return torch.empty(entry.size, dtype=dtype)

    def _fill(self, wanted: dict[str, Any]) -> None:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            # Each rank knows what is where: nobody has to be asked.
            dcp.load(wanted, storage_reader=self._files, no_dist=True)

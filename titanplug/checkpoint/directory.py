"""Writes and reads a whole checkpoint, with all ranks."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace
from typing import Any

import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.optim import Optimizer

from titanplug.checkpoint import state as states
from titanplug.checkpoint.contents import load_plain, pack_meta, warn_of_objects
from titanplug.checkpoint.files import PathOrUrl, Place, place_of
from titanplug.checkpoint.names import CheckpointNames
from titanplug.checkpoint.quantized import quantize_state
from titanplug.checkpoint.ranks import Ranks
from titanplug.checkpoint.reader import MODEL_KEY, CheckpointReader, Position
from titanplug.checkpoint.storage import ChecksumWriter
from titanplug.errors import CheckpointError

EXTRA = "extra_states"
ALIASES = "shared_weights"
OPTIMIZERS = "optimizer_states"
LIKE_PARAMETERS = "parameter_like"
"""Where callbacks put tensors that are laid out as parameters are: ``{group: {parameter name: tensor}}``."""


@dataclass(frozen=True)
class Snapshot:
    """What a rank writes of a checkpoint.

    Args:
        place: where it shall appear; equal on all ranks.
        tensors: this rank's shards of tensors, by section and name.
        meta: what isn't tensors, as bytes; on rank 0 only.
    """

    place: Place
    tensors: dict[str, Any]
    meta: bytes

    def with_tensors(self, tensors: dict[str, Any]) -> Snapshot:
        """The same with copies of the tensors."""
        return replace(self, tensors=tensors)


def take_snapshot(
    checkpoint: dict[str, Any], path: PathOrUrl, position: Position, names: CheckpointNames, ranks: Ranks
) -> Snapshot:
    """Sort what Lightning gathered on this rank into what is written; a collective.

    Args:
        checkpoint: what ``Trainer.save_checkpoint`` gathered; it stays as it is.
        path: where it shall appear; equal on all ranks. What is there will be replaced.
        position: this rank's, for loaders with a state.
        names: of the module's parameters.
        ranks: who takes part.

    Raises:
        CheckpointError: what is in its place is no checkpoint, or a state can't be saved.
    """
    with ranks.agreed(f"preparing {path}"):
        place = place_of(path)
        if ranks.is_first:
            place.require_free()
        rest = states.without_loader_states(checkpoint)
        model = rest.pop(MODEL_KEY)
        tensors: dict[str, Any] = {MODEL_KEY: states.tensors_of(model)}
        aliases = {alias: name for alias, name in names.aliases.items() if alias in model}
        extra = {name: model[name] for name in model.keys() - tensors[MODEL_KEY].keys()}
        for alias in aliases:  # a shared weight is saved once
            tensors[MODEL_KEY].pop(alias, None)
        split = [states.split_tensors(state) for state in rest.get(OPTIMIZERS, [])]
        tensors |= {optimizer_key(i): state for i, (_, state) in enumerate(split)}
        for group, values in rest.get(LIKE_PARAMETERS, {}).items():
            tensors[like_key(group)] = names.with_whole_names(values)
        if loaders := states.loader_states(checkpoint):
            tensors[states.loader_key(*position)] = states.pack(loaders)
        if not names.has_stages:
            return Snapshot(place, tensors, _pack(rest, extra, aliases, split, names, ranks))
    with ranks.agreed(f"preparing {path}"):  # stages speak with each other, once all have come here
        return Snapshot(place, tensors, _pack(rest, extra, aliases, split, names, ranks))


def _pack(
    rest: dict[str, Any],
    extra: dict[str, Any],
    aliases: dict[str, str],
    split: list[Any],
    names: CheckpointNames,
    ranks: Ranks,
) -> bytes:
    """What isn't tensors, of all stages, as bytes on rank 0."""
    rest[EXTRA] = names.whole_dict(extra)
    rest[ALIASES] = names.whole_dict(aliases)
    if OPTIMIZERS in rest:
        rest[OPTIMIZERS] = [names.whole_optimizer(plain) for plain, _ in split]
    if LIKE_PARAMETERS in rest:
        rest[LIKE_PARAMETERS] = list(rest[LIKE_PARAMETERS])
    return pack_meta(rest) if ranks.is_first else b""


def write(snapshot: Snapshot, ranks: Ranks) -> None:
    """Write a snapshot and publish it; a collective.

    Raises:
        CheckpointError: a rank could not write; on all ranks. What was in its place is still there.
    """
    place = snapshot.place
    try:
        with ranks.agreed(f"writing {place}"):
            if ranks.is_first:
                warn_of_objects(snapshot.meta)
                place.begin()
        with ranks.agreed(f"writing {place}"), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            dcp.save(
                snapshot.tensors,
                storage_writer=ChecksumWriter(place, snapshot.meta),
                process_group=ranks.group,
                no_dist=ranks.size == 1,
            )
        with ranks.agreed(f"publishing {place}"):
            if ranks.is_first:
                place.publish()
    except CheckpointError:
        if ranks.is_first:
            place.discard()
        raise


def load(
    path: PathOrUrl,
    module: nn.Module,
    optimizers: list[Optimizer],
    position: Position,
    names: CheckpointNames,
    ranks: Ranks,
    *,
    strict: bool = True,
    weights_only: bool | None = None,
) -> tuple[dict[str, Any], list[Any]]:
    """Read a checkpoint into ``module`` and ``optimizers``, whatever layout wrote it; a collective.

    Args:
        path: a directory that :func:`write` made, or a file of one process's Lightning.
        module: the laid-out module.
        optimizers: whose states to load; empty for evaluation.
        position: as in :func:`take_snapshot`.
        names: as in :func:`take_snapshot`.
        ranks: who takes part.
        strict: the checkpoint must have every entry of the module and no others.
        weights_only: False allows any Python object in the checkpoint; only for files that you
            trust.

    Returns:
        The rest of Lightning's checkpoint; and where another number of data-parallel ranks wrote the states
        of their loaders, those states by rank.

    Raises:
        CheckpointError: on all ranks. There is no checkpoint, or it isn't whole, or it doesn't fit.
    """
    with ranks.agreed(f"reading {path}"):
        place = place_to_read(path)
        if place.is_file():
            return _load_file(place, module, optimizers, names, strict, weights_only), []
        reader = CheckpointReader(place, weights_only, ranks)
        rest = reader.read_rest()
    # Every rank has found the same files: from here on they fail alike, or torch tells them.
    with ranks.agreed(f"loading {place}"):
        reader.read_model(module, names, rest.pop(EXTRA), rest.pop(ALIASES, {}), strict)
        saved = rest.pop(OPTIMIZERS, None)
        if optimizers:
            _require_optimizers(place, saved, len(optimizers))
        for index, optimizer in enumerate(optimizers):
            reader.read_optimizer(optimizer_key(index), saved[index], names, optimizer)
        if LIKE_PARAMETERS in rest:
            groups = rest[LIKE_PARAMETERS]
            rest[LIKE_PARAMETERS] = {
                g: names.with_own_names(reader.read_like_parameters(like_key(g), names)) for g in groups
            }
        own, of_all = reader.read_loaders(position)
        if own is not None:
            states.put_loader_states(rest, own)
    return rest, of_all


def place_to_read(path: PathOrUrl) -> Place:
    """Where a checkpoint is, once what a kill has cut off there is finished."""
    place = place_of(path)
    place.settle()
    return place


def read_file(place: Place, weights_only: bool | None) -> dict[str, Any]:
    """A checkpoint that is one file, as Lightning on one process writes it; tensors stay in a local one.

    Raises:
        CheckpointError: it is none, or it is damaged.
    """
    with place.open(place.name, "rb") as stream:
        source = stream if "://" in place.name else place.name
        whole = load_plain(source, place.name, weights_only, mapped=True)
    if not isinstance(whole, dict) or not isinstance(whole.get(MODEL_KEY), dict):
        raise CheckpointError(
            f"{place} is no checkpoint of Lightning: it has no {MODEL_KEY!r}. Give a checkpoint directory, "
            "or a file that Trainer.save_checkpoint wrote."
        )
    return whole


def _load_file(
    place: Place,
    module: nn.Module,
    optimizers: list[Optimizer],
    names: CheckpointNames,
    strict: bool,
    weights_only: bool | None,
) -> dict[str, Any]:
    rest = read_file(place, weights_only)
    whole = rest.pop(MODEL_KEY)
    wanted = states.model_state(module)
    if strict:
        states.require_same_names([*wanted, *names.entries], whole, place.name)
    found: dict[str, Any] = {
        name: states.shard_like(value, wanted[name], name) for name, value in whole.items() if name in wanted
    }
    set_model_state_dict(module, found, options=StateDictOptions(strict=strict))
    saved = rest.pop(OPTIMIZERS, None)
    if optimizers:
        _require_optimizers(place, saved, len(optimizers))
    for optimizer, counted in zip(optimizers, saved or [], strict=False):
        own = names.own_counted(counted, states.group_names(names, optimizer))
        optimizer.load_state_dict(states.shard_state(own, optimizer))
        quantize_state(optimizer)
    for group, values in rest.get(LIKE_PARAMETERS, {}).items():
        own = {
            name: states.shard_like(values[name], parameter, name)
            for name, parameter in names.parameters.items()
            if name in values
        }
        rest[LIKE_PARAMETERS][group] = names.with_own_names(own)
    return rest


def _require_optimizers(place: Place, saved: list[Any] | None, number: int) -> None:
    if saved is None:
        raise CheckpointError(
            f"{place} holds weights only, so training can't continue from it. Save with "
            "save_weights_only=False, or load the weights into the module before fit and leave out "
            "ckpt_path."
        )
    if len(saved) != number:
        raise CheckpointError(
            f"{place} holds the states of {len(saved)} optimizers, the module has {number}. Return the "
            "optimizers from configure_optimizers that it had when it was saved."
        )


def like_key(group: str) -> str:
    """Section of the tensors of a group that are laid out as parameters are."""
    return f"{LIKE_PARAMETERS}.{group}"


def optimizer_key(index: int) -> str:
    """Section of the tensors of an optimizer."""
    return f"optimizer_{index}"

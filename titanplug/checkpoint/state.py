"""What a checkpoint says of parameters, optimizers and loaders, by names that no layout changes."""

from __future__ import annotations

import io
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer

from titanplug.checkpoint.names import CheckpointNames
from titanplug.checkpoint.quantized import plain_tensor
from titanplug.errors import CheckpointError
from titanplug.parallel.names import plain_name

_LOADER_KEY = "loaders of data-parallel rank "


# ---------------------------------------------------------------------------------------
# Model
# ---------------------------------------------------------------------------------------


def model_state(module: nn.Module) -> dict[str, Any]:
    """Parameters and persistent buffers by name, sharded as they are.

    (torch's own function walks through the whole module for each name.)
    """
    return {plain_name(name): value for name, value in module.state_dict().items()}


def tensors_of(state: dict[str, Any]) -> dict[str, Tensor]:
    """The tensors of a state; the rest are what modules return from ``get_extra_state``."""
    return {name: value for name, value in state.items() if isinstance(value, Tensor)}


def shard_like(whole: Tensor, target: Any, name: str) -> Tensor:
    """This rank's part of a whole tensor, laid out as ``target`` is.

    Raises:
        CheckpointError: the shapes differ.
    """
    if isinstance(target, Tensor) and whole.shape != target.shape:
        raise CheckpointError(
            f"{name} has shape {tuple(whole.shape)} in the checkpoint and {tuple(target.shape)} in the "
            "module. Build the module as it was when it was saved."
        )
    if not isinstance(target, DTensor):
        return whole
    whole = whole.to(target.device)
    return distribute_tensor(whole, target.device_mesh, target.placements, src_data_rank=None)


def require_same_names(wanted: Iterable[str], found: Iterable[str], path: str) -> None:
    """Check that a checkpoint has the entries of a module and no others.

    Raises:
        CheckpointError: with the names that are missing and those that are too many.
    """
    wanted, found = set(wanted), set(found)
    problems = [
        f"{what}: {', '.join(sorted(names)[:8])}{', ...' if len(names) > 8 else ''}"
        for what, names in (("missing", wanted - found), ("not in the module", found - wanted))
        if names
    ]
    if problems:
        raise CheckpointError(
            f"{path} doesn't fit the module. {'; '.join(problems)}. Build the module as it was when it was "
            "saved, or set strict_loading=False on the LightningModule to load what fits."
        )


def names_under(key: str, metadata: Metadata) -> list[str]:
    """Names of the entries of a checkpoint below ``key``."""
    prefix = f"{key}."
    saved = metadata.state_dict_metadata
    return [name.removeprefix(prefix) for name in saved if name.startswith(prefix)]


# ---------------------------------------------------------------------------------------
# Optimizers
# ---------------------------------------------------------------------------------------


def optimizer_state(names: CheckpointNames, optimizer: Optimizer) -> dict[str, Any]:
    """State and groups of an optimizer as torch writes them, but with names for numbers.

    Nothing is made up for parameters that have no state yet, and the optimizer is left alone.
    (torch's own function takes a step with zero gradients to find out, and Adam counts it.)
    """
    groups = zip(optimizer.param_groups, group_names(names, optimizer), strict=True)
    return {
        "state": {
            names.name_of(p): {key: plain_tensor(value) for key, value in state.items()}
            for p, state in optimizer.state.items()
        },
        "param_groups": [{**group, "params": own} for group, own in groups],
    }


def group_names(names: CheckpointNames, optimizer: Optimizer) -> list[list[str]]:
    """Names of this rank's parameters in each of an optimizer's groups."""
    return [[names.name_of(p) for p in group["params"]] for group in optimizer.param_groups]


def split_tensors(named: dict[str, Any]) -> tuple[dict[str, Any], dict[str, dict[str, Tensor]]]:
    """A named state without its tensors, of which it keeps the keys; and the tensors.

    Raises:
        CheckpointError: a value nests tensors, of which each rank may hold another part.
    """
    values: dict[str, dict[str, Any]] = {}
    tensors: dict[str, dict[str, Tensor]] = {}
    for name, state in named["state"].items():
        tensors[name] = {key: value for key, value in state.items() if isinstance(value, Tensor)}
        values[name] = {key: value for key, value in state.items() if key not in tensors[name]}
        for key, value in values[name].items():
            if _holds_tensors(value):
                raise CheckpointError(
                    f"The optimizer keeps tensors inside a {type(value).__name__}, {key!r} of {name}: "
                    "only flat states of tensors and plain values can be saved. Use another "
                    "optimizer, or save the weights alone (save_weights_only=True)."
                )
    keys = {name: list(state) for name, state in tensors.items()}
    groups = named["param_groups"]
    return {"param_groups": groups, "values": values, "tensors": keys}, tensors


def join_tensors(plain: dict[str, Any], tensors: dict[str, dict[str, Tensor]]) -> dict[str, Any]:
    """The reverse of :func:`split_tensors`."""
    state = {name: {**values, **tensors[name]} for name, values in plain["values"].items()}
    return {"state": state, "param_groups": plain["param_groups"]}


def count_parameters(named: dict[str, Any], groups: list[list[str]]) -> dict[str, Any]:
    """A named state as torch's optimizers load it: with numbers for names, in the order of ``groups``."""
    order = [name for group in groups for name in group]
    numbers = {name: number for number, name in enumerate(order)}
    return {
        "state": {numbers[name]: state for name, state in named["state"].items()},
        "param_groups": [
            {**settings, "params": [numbers[name] for name in names]}
            for settings, names in zip(named["param_groups"], groups, strict=True)
        ],
    }


def require_same_groups(saved: list[list[str]], now: list[list[str]]) -> None:
    """Check that an optimizer has the groups of parameters that were saved.

    Raises:
        CheckpointError: with the first group that differs.
    """
    if list(map(set, saved)) == list(map(set, now)):
        return
    pairs = enumerate(zip(saved, now, strict=False))
    index = next((index for index, (a, b) in pairs if set(a) != set(b)), None)
    differing = sorted(set(saved[index]) ^ set(now[index]))[:8] if index is not None else []
    raise CheckpointError(
        f"The optimizer has {len(now)} groups of {list(map(len, now))} parameters, in the checkpoint "
        f"it has {len(saved)} of {list(map(len, saved))}."
        + (f" Group {index} differs in {', '.join(differing)}." if differing else "")
        + " Return the same groups from configure_optimizers, or load the weights alone."
    )


def shard_state(counted: dict[str, Any], optimizer: Optimizer) -> dict[str, Any]:
    """A state of whole tensors with each laid out as its parameter is."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    states = {}
    for number, state in counted["state"].items():
        parameter = parameters[number]
        states[number] = {
            key: _shard_beside(value, parameter) if isinstance(value, Tensor) else value
            for key, value in state.items()
        }
    return {**counted, "state": states}


def _shard_beside(value: Tensor, parameter: nn.Parameter) -> Tensor:
    if isinstance(parameter, DTensor) and value.shape == parameter.shape:
        return shard_like(value, parameter, "state")
    return value.clone()  # the optimizer writes to it, and it may be mapped from the file


def _holds_tensors(value: Any) -> bool:
    if isinstance(value, dict):
        return any(map(_holds_tensors, value.values()))
    if isinstance(value, list | tuple):
        return any(map(_holds_tensors, value))
    return isinstance(value, Tensor)


# ---------------------------------------------------------------------------------------
# Loaders
# ---------------------------------------------------------------------------------------


def loader_key(rank: int, size: int) -> str:
    """Where the states of the loaders of a data-parallel rank are."""
    return f"{_LOADER_KEY}{rank} of {size}"


def loader_keys(metadata: Metadata) -> list[str]:
    """Where all saved states of loaders are, by data-parallel rank."""
    found = [key for key in metadata.state_dict_metadata if key.startswith(_LOADER_KEY)]
    return sorted(found, key=lambda key: int(key.removeprefix(_LOADER_KEY).split()[0]))


def loader_states(rest: dict[str, Any]) -> list[Any]:
    """The states of the training loaders in Lightning's checkpoint, of those that have one."""
    fit = rest.get("loops", {}).get("fit_loop", {}).get("state_dict", {})
    found: list[Any] = fit.get("combined_loader", [])
    return found


def put_loader_states(rest: dict[str, Any], states: Any) -> None:
    """Put the states of the loaders where Lightning looks for them."""
    rest["loops"]["fit_loop"]["state_dict"]["combined_loader"] = states


def without_loader_states(rest: dict[str, Any]) -> dict[str, Any]:
    """Lightning's checkpoint, unchanged, as a copy without the states of the loaders."""
    if not loader_states(rest):
        return dict(rest)
    fit = rest["loops"]["fit_loop"]
    state = {key: value for key, value in fit["state_dict"].items() if key != "combined_loader"}
    return {**rest, "loops": {**rest["loops"], "fit_loop": {**fit, "state_dict": state}}}


def pack(states: Any) -> Tensor:
    """Any value as bytes in a tensor, which is read without running code."""
    buffer = io.BytesIO()
    torch.save(states, buffer)
    return torch.frombuffer(bytearray(buffer.getvalue()), dtype=torch.uint8)

"""Initial weights that don't depend on the layout.

Weights with values are made equal on all ranks. Weights on the meta device get theirs module by module:
the module's own ``init_weights`` or ``reset_parameters`` fills whole tensors, its random numbers seeded by
the run's seed and the module's name, and each rank keeps its shards. So a weight is a function of seed and
name, and no rank ever holds more than one module whole. (A random fill of a sharded tensor would give
every rank the same shard on CPU, where DTensor has no random state of its own.)

A model that has its weights elsewhere says so by a method ``initial_weights``, which returns a mapping from
names relative to it (those of its ``state_dict``) to whole tensors, or None. Its weights on the meta device
come from there, one tensor at a time, best from a mapping that reads each when it is asked for. (Weights
that it was built with stay as they are.)
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor

from titanplug.errors import ConfigError

_WEIGHTS_METHOD = "initial_weights"
_INIT_METHODS = ("init_weights", "reset_parameters", "_reset_parameters")


def named_seed(seed: int, name: str) -> int:
    """A seed that depends on ``seed`` and ``name`` only, the same on every machine."""
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    return int.from_bytes(digest[:8], "little") % 2**63


@torch.no_grad()
def broadcast_values(root: nn.Module, device: torch.device) -> None:
    """Give all ranks the parameters and buffers of rank 0, those on the meta device left out.

    Called before anything is sharded. ``device`` is where the process group communicates.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    for tensor in _distinct([*root.parameters(), *root.buffers()]):
        if tensor.is_meta:
            continue
        moved = tensor.detach().to(device).contiguous()
        dist.broadcast(moved, src=0)
        tensor.copy_(moved)


def _distinct(tensors: list[Tensor]) -> Iterator[Tensor]:
    seen: set[int] = set()
    for tensor in tensors:
        if id(tensor) not in seen:
            seen.add(id(tensor))
            yield tensor


@torch.no_grad()
def materialize(root: nn.Module, device: torch.device, seed: int) -> None:
    """Give every parameter and buffer on the meta device its value, in place, sharded or not.

    Args:
        root: a module after tensor parallel and FSDP were applied to it.
        device: where the values go.
        seed: the run's seed.

    Raises:
        ConfigError: a module has parameters or buffers on the meta device and neither a value of a method
            ``initial_weights`` above it nor one of the methods ``init_weights`` and ``reset_parameters``; or
            ``initial_weights`` gives a mapping that lacks some; all of them are named.
    """
    pending = {
        name: module
        for name, module in root.named_modules()
        if any(tensor.is_meta for tensor in _own_tensors(module))
    }
    if not pending:
        return
    given, problems = _find_given(root)
    missing = {
        name: {
            key
            for key, tensor in [*module._parameters.items(), *module._buffers.items()]
            if tensor is not None and tensor.is_meta
        }
        for name, module in pending.items()
    }
    drawn = {
        name: {key for key in keys if _join(name, key) not in given and _join(name, key) not in problems}
        for name, keys in missing.items()
    }
    told = list(problems.values()) + [
        f"{name or type(module).__name__} ({type(module).__name__}) has weights or buffers on the meta "
        "device and neither `init_weights` nor `reset_parameters`, so nothing can give them values. Add "
        "one of them, or build the model with values (meta_init=False)."
        for name, module in pending.items()
        if drawn[name] and _init_method(module) is None
    ]
    if told:
        raise ConfigError(told)
    shared = _shared_parameters(root)
    root._apply(lambda t: torch.empty_like(t, device=device) if t.is_meta else t)
    _tie(shared)
    done: set[int] = set()
    for name, module in pending.items():
        for key in sorted(missing[name] - drawn[name]):
            _read(module, key, given[_join(name, key)], done)
        if drawn[name]:
            _fill(module, name, drawn[name], device, seed, done)


@dataclass(frozen=True)
class _Given:
    """Where a tensor's value is: a name in what a module's ``initial_weights`` returned."""

    weights: Mapping[str, Tensor]
    name: str
    owner: str


def _find_given(root: nn.Module) -> tuple[dict[str, _Given], dict[str, str]]:
    """By full name, the tensors on meta that a method ``initial_weights`` has, and what it ought to have."""
    sources: dict[str, Mapping[str, Tensor]] = {}
    names: dict[str, set[str]] = {}  # to ask a mapping whether it has a name may read the tensor
    for name, module in root.named_modules():
        method = getattr(type(module), _WEIGHTS_METHOD, None)
        weights = method(module) if callable(method) else None
        if weights is not None:
            sources[name], names[name] = weights, set(weights)
    given: dict[str, _Given] = {}
    wanted: dict[str, tuple[Tensor, str]] = {}
    if not sources:
        return given, {}
    by_tensor: dict[int, _Given] = {}
    for prefix, module in root.named_modules(remove_duplicate=False):
        for key, tensor in [*module._parameters.items(), *module._buffers.items()]:
            name = _join(prefix, key)
            owners = [owner for owner in sources if not owner or name.startswith(f"{owner}.")]
            if tensor is None or not tensor.is_meta or not owners:
                continue
            if key in module._non_persistent_buffers_set:
                continue  # the module computes it
            owner = max(owners, key=len)
            wanted[name] = tensor, owner
            own = name.removeprefix(f"{owner}.") if owner else name
            if own in names[owner]:
                by_tensor.setdefault(id(tensor), _Given(sources[owner], own, owner))
    problems: dict[str, str] = {}
    for name, (tensor, owner) in wanted.items():
        if id(tensor) in by_tensor:
            given[name] = by_tensor[id(tensor)]
        else:
            kind = type(root.get_submodule(owner)).__name__
            problems[name] = (
                f"{name}: `{_WEIGHTS_METHOD}` of {owner or 'the module'} ({kind}) has no value for it. It "
                "gives all parameters and persistent buffers, by the names of its state_dict, or None. Add "
                "it there."
            )
    return given, problems


def _join(prefix: str, key: str) -> str:
    return f"{prefix}.{key}" if prefix else key


def _read(module: nn.Module, key: str, given: _Given, done: set[int]) -> None:
    """Copy this rank's shard of a value that is there."""
    target = module._parameters[key] if key in module._parameters else module._buffers[key]
    assert target is not None
    if id(target) in done:
        return
    done.add(id(target))
    value = given.weights[given.name]
    if value.shape != target.shape:
        raise ConfigError(
            f"{given.name}: `{_WEIGHTS_METHOD}` of {given.owner or 'the module'} gives a tensor of shape "
            f"{tuple(value.shape)}, the model's is {tuple(target.shape)}. Give the weights of this model."
        )
    _copy_shard(target, value.detach().to(target.device))


def _own_tensors(module: nn.Module) -> list[Tensor]:
    own = [*module._parameters.values(), *module._buffers.values()]
    return [tensor for tensor in own if tensor is not None]


def _init_method(module: nn.Module) -> Callable[[nn.Module], object] | None:
    for name in _INIT_METHODS:
        method = getattr(type(module), name, None)
        if callable(method):
            return method  # type: ignore[no-any-return]
    return None


def _shared_parameters(root: nn.Module) -> list[list[tuple[nn.Module, str]]]:
    places: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in root.modules():
        for key, parameter in module._parameters.items():
            if parameter is not None:
                places.setdefault(id(parameter), []).append((module, key))
    return [found for found in places.values() if len(found) > 1]


def _tie(shared: list[list[tuple[nn.Module, str]]]) -> None:
    # Leaving the meta device makes a new parameter in each place that shared one.
    for (first, key), *others in shared:
        for module, other_key in others:
            module._parameters[other_key] = first._parameters[key]


def _fill(
    module: nn.Module,
    name: str,
    keys: set[str],
    device: torch.device,
    seed: int,
    done: set[int],
) -> None:
    """Run the module's own initialisation on whole tensors and keep this rank's shards of ``keys``."""
    whole = _whole_twin(module, device)
    method = _init_method(module)
    assert method is not None
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(named_seed(seed, name))
        method(whole)
    for key in sorted(keys):
        of, whole_of = (
            (module._parameters, whole._parameters)
            if key in module._parameters
            else (module._buffers, whole._buffers)
        )
        target, value = of[key], whole_of[key]
        assert target is not None and value is not None
        if id(target) in done:  # tied: the first module in order decides, in every layout
            continue
        done.add(id(target))
        _copy_shard(target, value.detach())


def _copy_shard(target: Tensor, value: Tensor) -> None:
    if isinstance(target, DTensor):
        shard = distribute_tensor(value, target.device_mesh, target.placements, src_data_rank=None)
        target._local_tensor.copy_(shard._local_tensor)
    else:
        target.copy_(value)


def _whole_twin(module: nn.Module, device: torch.device) -> nn.Module:
    """A module of the same class and settings whose own tensors are whole and uninitialised."""
    cls = next(cls for cls in type(module).__mro__ if not issubclass(cls, FSDPModule))
    twin: Any = cls.__new__(cls)
    twin.__dict__.update(module.__dict__)

    def whole(tensor: Tensor) -> Tensor:
        if device.type == "meta" or tensor.is_meta or isinstance(tensor, DTensor):
            return torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
        return tensor.detach().clone().to(device)

    twin.__dict__["_parameters"] = {
        key: None if value is None else nn.Parameter(whole(value), value.requires_grad)
        for key, value in module._parameters.items()
    }
    twin.__dict__["_buffers"] = {
        key: None if value is None else whole(value) for key, value in module._buffers.items()
    }
    # Children are filled on their own; what the method does to them here falls on the meta device.
    twin.__dict__["_modules"] = {
        key: None if child is None else _whole_twin(child, torch.device("meta"))
        for key, child in module._modules.items()
    }
    return twin  # type: ignore[no-any-return]

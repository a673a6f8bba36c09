"""The axes of parallelism and the one device mesh that holds them.

Axes, outermost to innermost: ``pp`` (pipeline stages), ``dp_replicate`` (copies of the model),
``dp_shard`` (shards of the model, FSDP2), ``cp`` (shards of the sequence), ``tp`` (shards of a layer).
Everything asks for a view of the mesh by name; nothing slices meshes elsewhere:

- ``batch``  = dp_replicate x dp_shard: ranks that read different samples,
- ``tokens`` = batch x cp: ranks that compute on different tokens,
- ``fsdp``   = dp_shard x cp: ranks that share one copy of the parameters.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Literal, TypeAlias, get_args

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from titanplug.compat import one_group_for_equal_ranks
from titanplug.errors import ConfigError

Axis: TypeAlias = Literal["pp", "dp_replicate", "dp_shard", "cp", "tp"]
View: TypeAlias = Literal["batch", "tokens", "fsdp"]
AXES: tuple[Axis, ...] = get_args(Axis)
VIEWS: dict[View, tuple[Axis, ...]] = {
    "batch": ("dp_replicate", "dp_shard"),
    "tokens": ("dp_replicate", "dp_shard", "cp"),
    "fsdp": ("dp_shard", "cp"),
}


@dataclass(frozen=True)
class ParallelDims:
    """Degree of each axis. A degree is at least 1; one may be -1, "the rest of the processes"."""

    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = -1
    cp: int = 1
    tp: int = 1

    def __post_init__(self) -> None:
        """Check each degree alone.

        Raises:
            ConfigError: a degree is neither a positive integer nor -1, or several are -1.
        """
        problems = [
            f"{axis}={degree!r}: a degree is an integer of at least 1, or -1 for the rest of the "
            f"processes. Set {axis} to one of these."
            for axis, degree in self.degrees.items()
            if not isinstance(degree, int) or isinstance(degree, bool) or (degree < 1 and degree != -1)
        ]
        rest = [axis for axis, degree in self.degrees.items() if degree == -1]
        if len(rest) > 1:
            problems.append(
                f"{' and '.join(rest)} are -1: at most one axis can take the rest of the processes. "
                "Give a number to the others."
            )
        if problems:
            raise ConfigError(problems)

    @property
    def degrees(self) -> dict[Axis, int]:
        """Degree by axis, outermost first."""
        return {item.name: getattr(self, item.name) for item in fields(self)}  # type: ignore[misc]

    def resolve(self, world_size: int) -> ParallelDims:
        """The same degrees with -1 replaced, for ``world_size`` processes.

        Raises:
            ConfigError: the product of the degrees isn't ``world_size``; every degree is printed.
        """
        known = math.prod(degree for degree in self.degrees.values() if degree != -1)
        rest, remainder = divmod(world_size, known)
        resolved = {axis: rest if deg == -1 else deg for axis, deg in self.degrees.items()}
        if remainder or math.prod(resolved.values()) != world_size:
            shown = " x ".join(f"{axis}={degree}" for axis, degree in self.degrees.items())
            rule = "must divide" if -1 in self.degrees.values() else "must equal"
            raise ConfigError(
                f"{shown} = {known} for {world_size} processes (devices x num_nodes): the product of "
                f"the given degrees {rule} the number of processes. Change a degree, set one to -1, or "
                f"start {known} processes."
            )
        return ParallelDims(**resolved)

    @property
    def world_size(self) -> int:
        """Number of processes; the degrees must be resolved."""
        return math.prod(self.degrees.values())

    def size(self, view: View) -> int:
        """Number of ranks in a view."""
        return math.prod(self.degrees[axis] for axis in VIEWS[view])

    def __str__(self) -> str:
        return " x ".join(f"{axis}={n}" for axis, n in self.degrees.items() if n != 1) or "1 process"


class Mesh:
    """The device mesh of a run and its named views. Built once, after the process group is up."""

    def __init__(self, dims: ParallelDims, device_type: str) -> None:
        """Build the mesh over all processes of the default group.

        Args:
            dims: resolved degrees, whose product is the world size.
            device_type: ``"cpu"`` or ``"cuda"``.
        """
        self.dims = dims
        with one_group_for_equal_ranks():
            self.device = init_device_mesh(
                device_type, tuple(dims.degrees.values()), mesh_dim_names=tuple(dims.degrees)
            )
            # Flattened views are made here and kept: slicing one from the root later is deprecated.
            self._views: dict[Axis | View, DeviceMesh] = {
                view: self.device[axes]._flatten(view) for view, axes in VIEWS.items()
            }
        # Slicing takes hundreds of calls and reads on the host, too much for a step.
        self._views |= {axis: self.device[axis] for axis in AXES}

    def __getitem__(self, name: Axis | View) -> DeviceMesh:
        """The one-dimensional mesh of an axis or of a view."""
        return self._views[name]

    @cached_property
    def hsdp(self) -> DeviceMesh:
        """What ``fully_shard`` takes: ``fsdp``, or ``(dp_replicate, fsdp)`` where there are copies."""
        if self.dims.dp_replicate == 1:
            return self["fsdp"]
        return DeviceMesh._concatenate([self.device["dp_replicate"], self["fsdp"]])

    def group(self, name: Axis | View) -> dist.ProcessGroup:
        """The process group of an axis or of a view."""
        return self[name].get_group()

    def rank(self, name: Axis | View) -> int:
        """This process's position in an axis or a view."""
        return self[name].get_local_rank()


_shared: dict[tuple[ParallelDims, str], tuple[dist.ProcessGroup | None, Mesh]] = {}


def shared_mesh(dims: ParallelDims, device_type: str) -> Mesh:
    """The mesh of these degrees over the default process group, made once.

    A script with several Trainers of one layout gets the same process groups for all, and a module that
    one of them has laid out fits the others.
    """
    group = dist.group.WORLD
    known = _shared.get((dims, device_type))
    if known is None or known[0] is not group:
        known = _shared[dims, device_type] = group, Mesh(dims, device_type)
    return known[1]

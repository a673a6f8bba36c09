"""The layout that a resolved configuration asks for, without torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")


def world_size(config: Mapping[str, Any]) -> int:
    """Processes of a run."""
    trainer = config["trainer"]
    return max(1, int(trainer["devices"])) * max(1, int(trainer["num_nodes"]))


def degrees(config: Mapping[str, Any]) -> dict[str, int]:
    """Degree by axis, with -1 resolved. What doesn't fit the processes is checked elsewhere."""
    given = config["parallelism"] or {}
    found = {axis: int(given.get(axis, 1)) for axis in AXES}
    known = math.prod(degree for degree in found.values() if degree > 0)
    return {axis: degree if degree > 0 else world_size(config) // known for axis, degree in found.items()}


def data_ranks(config: Mapping[str, Any]) -> int:
    """Shares of the samples: ranks that read other ones."""
    found = degrees(config)
    return max(1, found["dp_replicate"] * found["dp_shard"])

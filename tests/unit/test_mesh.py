"""Degrees of the axes as plain values; the views of a real mesh on four forked ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist

from tests.harness import run_ranks
from titanplug.errors import ConfigError
from titanplug.mesh import AXES, Mesh, ParallelDims


def test_axes_run_from_the_outermost_to_the_innermost() -> None:
    assert AXES == ("pp", "dp_replicate", "dp_shard", "cp", "tp")
    assert tuple(ParallelDims().degrees) == AXES


@pytest.mark.parametrize(
    ("degrees", "world_size", "expected"),
    [
        ({}, 1, {"dp_shard": 1}),
        ({}, 8, {"dp_shard": 8}),
        ({"tp": 2}, 8, {"dp_shard": 4, "tp": 2}),
        ({"dp_replicate": 2, "tp": 2}, 8, {"dp_replicate": 2, "dp_shard": 2, "tp": 2}),
        ({"dp_shard": 2, "tp": -1}, 8, {"dp_shard": 2, "tp": 4}),
        ({"dp_shard": 1, "dp_replicate": -1}, 3, {"dp_replicate": 3}),
        ({"dp_shard": 2, "tp": 2}, 4, {"dp_shard": 2, "tp": 2}),
    ],
)
def test_minus_one_is_the_rest(degrees: dict[str, Any], world_size: int, expected: dict[str, int]) -> None:
    resolved = ParallelDims(**degrees).resolve(world_size)
    assert resolved.degrees == {axis: expected.get(axis, 1) for axis in AXES}
    assert resolved.world_size == world_size


@pytest.mark.parametrize(
    ("degrees", "world_size", "rule"),
    [
        ({"dp_shard": 3, "tp": 2}, 4, "must equal"),
        ({"dp_shard": 2, "tp": 1}, 4, "must equal"),
        ({"dp_shard": -1, "tp": 3}, 4, "must divide"),
        ({"dp_shard": -1, "tp": 8}, 4, "must divide"),  # the rest would be no process at all
    ],
)
def test_product_must_fit_the_processes(degrees: dict[str, Any], world_size: int, rule: str) -> None:
    with pytest.raises(ConfigError) as error:
        ParallelDims(**degrees).resolve(world_size)
    message = str(error.value)
    assert rule in message
    assert f"{world_size} processes" in message
    for axis in AXES:
        assert f"{axis}={degrees.get(axis, 1)}" in message


@pytest.mark.parametrize("degree", [0, -2, 1.5, "2", True, None])
def test_a_degree_is_a_positive_integer_or_minus_one(degree: Any) -> None:
    with pytest.raises(ConfigError, match="tp=.*integer of at least 1, or -1"):
        ParallelDims(tp=degree)


def test_only_one_axis_takes_the_rest() -> None:
    with pytest.raises(ConfigError, match="dp_shard and tp are -1"):
        ParallelDims(dp_shard=-1, tp=-1)


def test_three_wrong_degrees_give_three_messages() -> None:
    with pytest.raises(ConfigError) as error:
        ParallelDims(pp=0, dp_replicate=-3, dp_shard=1, tp="two")  # type: ignore[arg-type]
    assert [problem.split("=")[0] for problem in error.value.problems] == [
        "pp",
        "dp_replicate",
        "tp",
    ]


def test_sizes_of_views_are_products_of_axes() -> None:
    dims = ParallelDims(pp=2, dp_replicate=3, dp_shard=5, cp=7, tp=11)
    assert dims.size("batch") == 15
    assert dims.size("tokens") == 105
    assert dims.size("fsdp") == 35
    assert dims.world_size == 2310


def test_prints_the_axes_in_use() -> None:
    assert str(ParallelDims(dp_shard=2, tp=4)) == "dp_shard=2 x tp=4"
    assert str(ParallelDims(dp_shard=1)) == "1 process"


def _positions(rank: int, world_size: int, dims: ParallelDims) -> dict[str, Any]:
    mesh = Mesh(dims, "cpu")
    hsdp = mesh.hsdp
    return {
        **{name: mesh.rank(name) for name in ("dp_replicate", "dp_shard", "tp")},
        **{view: dist.get_process_group_ranks(mesh.group(view)) for view in ("batch", "tokens", "fsdp")},
        "hsdp": (hsdp.mesh_dim_names, hsdp.mesh.tolist()),
    }


def test_views_of_four_ranks() -> None:
    found = run_ranks(_positions, 4, ParallelDims(dp_shard=2, tp=2))
    assert [(at["dp_shard"], at["tp"]) for at in found] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    # tp is innermost: its peers are neighbours, and each of them has a data-parallel line of its own.
    for view in ("batch", "tokens", "fsdp"):
        assert [at[view] for at in found] == [[0, 2], [1, 3], [0, 2], [1, 3]]
    assert found[1]["hsdp"] == (("fsdp",), [1, 3])


def test_hsdp_mesh_is_copies_by_shards() -> None:
    found = run_ranks(_positions, 4, ParallelDims(dp_replicate=2, dp_shard=2))
    assert [at["fsdp"] for at in found] == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert all(at["batch"] == [0, 1, 2, 3] for at in found)
    assert all(at["hsdp"] == (("dp_replicate", "fsdp"), [[0, 1], [2, 3]]) for at in found)

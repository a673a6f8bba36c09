"""Models without a plan on the data-parallel axes.

Each is trained by plain Lightning on one process and by every layout: weights and gradients are equal.
"""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
from torch.utils.data import DataLoader

from tests.distributed.case import build_trainer, whole
from tests.distributed.without_plan import GLOBAL_BATCH, MODULES, STEPS, CallsPastUnits, Plain, Points
from tests.harness import reference, run_ranks
from titanplug import TitanStrategy

LAYOUTS: dict[str, dict[str, Any]] = {
    "fsdp2": {"dp_shard": 2},
    "hsdp 2x2": {"dp_replicate": 2, "dp_shard": 2},
}


def train(kind: type[Plain], world_size: int, strategy: Any) -> tuple[Any, Any]:
    L.seed_everything(7, verbose=False)
    module = kind()
    batch_size = GLOBAL_BATCH // world_size
    loader = DataLoader(Points(), batch_size=batch_size, collate_fn=getattr(kind, "collate", None))
    build_trainer(world_size, strategy).fit(module, loader)
    return {name: whole(p) for name, p in module.named_parameters()}, module.grads


def train_each(rank: int, world_size: int, degrees: dict[str, Any] | None) -> dict[str, Any]:
    """One after the other in the same processes, which is quicker than a start for each."""
    return {
        name: train(kind, world_size, "auto" if degrees is None else TitanStrategy(**degrees))
        for name, kind in MODULES.items()
    }


@pytest.fixture(scope="module")
def expected() -> dict[str, Any]:
    result: dict[str, Any] = reference(train_each, 0, 1, None)
    return result


@pytest.fixture(scope="module", params=LAYOUTS)
def trained(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    degrees = LAYOUTS[request.param]
    world_size = degrees["dp_shard"] * degrees.get("dp_replicate", 1)
    return run_ranks(train_each, world_size, degrees, init_process_group=False)


@pytest.mark.parametrize("name", MODULES)
def test_equals_one_process(trained: list[dict[str, Any]], expected: dict[str, Any], name: str) -> None:
    weights, grads = expected[name]
    assert len(grads) >= STEPS - 1
    for result in trained:
        torch.testing.assert_close(result[name][0], weights, rtol=1e-12, atol=1e-14)
        torch.testing.assert_close(result[name][1], grads, rtol=1e-12, atol=1e-14)


def test_a_layer_that_is_called_past_its_unit_gets_a_word_on_what_to_do() -> None:
    def run(rank: int, world_size: int) -> list[str]:
        with pytest.raises(RuntimeError, match="mixed") as caught:
            train(CallsPastUnits, world_size, TitanStrategy())
        return caught.value.__notes__

    for [note] in run_ranks(run, 2, init_process_group=False):
        assert (
            note.startswith("training_step used a weight") and "blocks.*" in note and "Call the unit" in note
        )

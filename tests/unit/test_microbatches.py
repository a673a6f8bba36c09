"""Batches in parts, and the outputs of parts as those of the batch."""

from __future__ import annotations

from collections import namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from titanplug.errors import ConfigError
from titanplug.strategy.microbatches import merge_outputs, split_batch

Pair = namedtuple("Pair", "x y")


@dataclass
class Record:
    x: Tensor
    note: str


class Own:
    def split_batch(self, batch: list[int], sizes: list[int]) -> list[list[int]]:
        return [batch[sum(sizes[:i]) : sum(sizes[: i + 1])] for i in range(len(sizes))]


@pytest.mark.parametrize(("rows", "parts", "sizes"), [(8, 4, [2] * 4), (7, 4, [2, 2, 2, 1]), (2, 4, [1, 1])])
def test_rows_are_shared_out_evenly(rows: int, parts: int, sizes: list[int]) -> None:
    batch = {
        "x": torch.arange(rows),
        "pair": Pair(torch.arange(rows * 2).view(rows, 2), None),
        "record": Record(torch.arange(rows), "same"),
        "names": [f"row {i}" for i in range(rows)],
        "scale": torch.tensor(3.0),
        "flag": True,
    }
    found = split_batch(None, batch, parts, rows, fill=False)
    assert [part.rows for part in found] == sizes
    assert torch.cat([part.batch["x"] for part in found]).tolist() == list(range(rows))
    assert torch.cat([part.batch["pair"].x for part in found]).equal(batch["pair"].x)  # type: ignore[attr-defined]
    assert [name for part in found for name in part.batch["names"]] == batch["names"]
    for part in found:
        assert part.batch["scale"] is batch["scale"] and part.batch["flag"] is True
        assert part.batch["record"].note == "same" and len(part.batch["record"].x) == part.rows
        assert type(part.batch["pair"]) is Pair
    assert len({part.signature for part in found}) == len(set(sizes))
    filled = split_batch(None, batch, parts, rows, fill=True)
    assert [part.rows for part in filled] == sizes + [0] * (parts - len(sizes))


def test_a_batch_that_does_not_count() -> None:
    parts = split_batch(None, torch.zeros(1, 3), 4, 0, fill=True)
    assert [part.rows for part in parts] == [0] * 4 and all(part.batch.shape == (1, 3) for part in parts)


def test_a_module_may_split_itself() -> None:
    parts = split_batch(Own(), [1, 2, 3, 4, 5], 2, 5, fill=False)
    assert [part.batch for part in parts] == [[1, 2, 3], [4, 5]]

    class Wrong:
        def split_batch(self, batch: Any, sizes: list[int]) -> Any:
            return [batch]

    with pytest.raises(ConfigError, match="must return a list of 2 batches"):
        split_batch(Wrong(), [1, 2], 2, 2, fill=False)


def test_tensors_have_a_row_for_each_sample() -> None:
    batch = {"x": torch.zeros(4, 2), "inner": [{"positions": torch.arange(2)}]}
    with pytest.raises(ConfigError) as caught:
        split_batch(None, batch, 2, 4, fill=False)
    assert "batch['inner'][0]['positions'] has shape (2,) in a batch of 4 samples" in str(caught.value)


class Fixed(dict[str, Any]):
    def __init__(self) -> None:
        super().__init__(x=torch.zeros(4, 2))


def test_a_mapping_that_cannot_be_built_from_its_parts() -> None:
    with pytest.raises(ConfigError, match="holds a Fixed, which can't be built from a dict"):
        split_batch(None, Fixed(), 2, 4, fill=False)


def test_outputs_are_those_of_the_batch() -> None:
    values = [(1.0, 1, 2, 2.0), (3.0, 3, 1, 5.0), (9.0, 0, 1, 9.0)]
    outputs = [
        {
            "loss": torch.tensor(loss),
            "num_targets": targets,
            "rows": torch.arange(rows),
            "mean": torch.tensor(mean),
            "n": 7,
        }
        for loss, targets, rows, mean in values
    ]
    counts = [torch.tensor(1), torch.tensor(3), torch.tensor(0)]
    merged = merge_outputs(outputs, [2, 1, 0], counts)
    assert merged["loss"] == 2.5 and merged["num_targets"] == 4 and merged["n"] == 7
    assert merged["rows"].tolist() == [0, 1, 0] and merged["mean"] == 3.0
    assert merge_outputs([torch.tensor(1.0), torch.tensor(4.0)], [2, 1], [2, 1]) == 2.0
    assert merge_outputs([None, None], [1, 1]) is None
    assert merge_outputs([(["a"], torch.ones(1)), (["b"], torch.ones(1))], [1, 1])[0] == ["a", "b"]
    nothing = merge_outputs([torch.tensor(float("nan"))], [0], [torch.tensor(0)])
    assert nothing == 0


@dataclass
class Answer:
    logits: Tensor
    name: str


def test_dataclasses_are_merged_field_by_field() -> None:
    parts = [Answer(torch.arange(4.0).view(2, 2), "a"), Answer(torch.ones(1, 2), "a")]
    merged = merge_outputs(parts, [2, 1])
    assert type(merged) is Answer and merged.name == "a"
    assert merged.logits.tolist() == [[0, 1], [2, 3], [1, 1]]

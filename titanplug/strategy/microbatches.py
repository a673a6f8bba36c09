"""A batch as microbatches, and the outputs of microbatches as that of the batch."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from titanplug.errors import ConfigError
from titanplug.strategy.loss_weights import num_rows

SPLIT_HOOK = "split_batch"
_EXAMPLE = "def split_batch(self, batch, sizes): return [part of sizes[0] rows, part of sizes[1] rows, ...]"


@dataclass(frozen=True)
class Microbatch:
    """A part of a batch.

    Args:
        batch: of the same structure as the whole.
        rows: how many of its rows count; 0 where it is there only to keep the schedule full.
        signature: what the shapes in a step depend on.
    """

    batch: Any
    rows: int
    signature: Hashable


def split_batch(
    module: Any, batch: Any, num_parts: int, num_counting: int, *, fill: bool
) -> list[Microbatch]:
    """Split the rows of a batch as evenly as possible, in order.

    Tensors are split along their first dim, which has a row for each sample; lists of one item a sample, too.
    Numbers, strings, None and 0-dim tensors go into each part. A module may split by itself, by a method
    ``split_batch(batch, sizes)``.

    Args:
        module: the LightningModule.
        batch: what a step gets.
        num_parts: the number of microbatches.
        num_counting: rows that count; 0 for a batch that is there only to keep ranks in step.
        fill: where there are fewer rows than parts, add parts of which nothing counts; else return fewer.

    Raises:
        ConfigError: an entry of the batch has no row for each sample.
    """
    rows = num_counting or num_rows(batch)
    num_real = min(num_parts, rows)
    sizes = [rows // num_real + (i < rows % num_real) for i in range(num_real)]
    own = getattr(module, SPLIT_HOOK, None)
    if callable(own):
        batches = own(batch, sizes)
        if not isinstance(batches, Sequence) or len(batches) != len(sizes):
            raise ConfigError(
                f"`split_batch(batch, sizes={sizes})` of {type(module).__name__} must return a list of "
                f"{len(sizes)} batches, one for each size. Return those."
            )
    elif num_real == 1:
        batches = [batch]
    else:
        batches = _split(batch, rows, sizes, "batch")
    if callable(own):
        signatures = [_signature(part) for part in batches]
    else:  # parts of one size are alike
        first = {size: _signature(batches[sizes.index(size)]) for size in dict.fromkeys(sizes)}
        signatures = [first[size] for size in sizes]
    counts = sizes if num_counting else [0] * num_real
    parts = [Microbatch(*part) for part in zip(batches, counts, signatures, strict=True)]
    if fill:
        parts += [replace(parts[0], rows=0)] * (num_parts - num_real)
    return parts


def _split(value: Any, rows: int, sizes: list[int], path: str) -> list[Any]:
    if isinstance(value, Tensor):
        if value.ndim == 0:
            return [value] * len(sizes)
        if value.shape[0] != rows:
            raise ConfigError(
                f"{path} has shape {tuple(value.shape)} in a batch of {rows} samples. Under pp a batch is "
                f"split into microbatches along the first dim of each tensor, so that must be {rows}. Expand "
                "the tensor to one row a sample, or split batches yourself in the LightningModule: "
                f"{_EXAMPLE}."
            )
        return list(value.split(sizes))
    if isinstance(value, Mapping):
        parts = {key: _split(item, rows, sizes, f"{path}[{key!r}]") for key, item in value.items()}
        return [_like(value, {key: part[i] for key, part in parts.items()}) for i in range(len(sizes))]
    if is_dataclass(value) and not isinstance(value, type):
        named = {
            f.name: _split(getattr(value, f.name), rows, sizes, f"{path}.{f.name}") for f in fields(value)
        }
        return [replace(value, **{key: part[i] for key, part in named.items()}) for i in range(len(sizes))]
    if isinstance(value, list | tuple):
        if any(isinstance(leaf, Tensor) for leaf in tree_leaves(value)):
            items = [_split(item, rows, sizes, f"{path}[{i}]") for i, item in enumerate(value)]
            return [_sequence(value, [item[i] for item in items]) for i in range(len(sizes))]
        if len(value) == rows:
            ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
            return [value[end - size : end] for end, size in zip(ends, sizes, strict=True)]
    return [value] * len(sizes)


def _like(mapping: Mapping[Any, Any], items: dict[Any, Any]) -> Any:
    if type(mapping) is dict:
        return items
    try:
        return type(mapping)(items)  # type: ignore[call-arg]
    except TypeError as error:
        raise ConfigError(
            f"the batch holds a {type(mapping).__name__}, which can't be built from a dict of its parts. Use "
            f"a plain dict, or split batches yourself in the LightningModule: {_EXAMPLE}."
        ) from error


def _sequence(value: Any, items: list[Any]) -> Any:
    if isinstance(value, list):
        return items
    return type(value)(*items) if hasattr(value, "_fields") else tuple(items)


def _signature(batch: Any) -> Hashable:
    """Shapes and types of the tensors, and plain values (a flag may change what a step does)."""
    return tuple(
        (tuple(leaf.shape), leaf.dtype) if isinstance(leaf, Tensor) else _plain(leaf)
        for leaf in tree_leaves(batch)
    )


def _plain(leaf: Any) -> Hashable:
    if leaf is None or isinstance(leaf, bool | int | float):
        return repr(leaf)
    return type(leaf).__name__


def merge_outputs(outputs: Sequence[Any], rows: Sequence[int], counts: Sequence[Any] | None = None) -> Any:
    """What one step on the whole batch would have returned.

    Tensors with a row for each sample are put together, means are averaged by rows, and values that are equal
    in all parts are kept.

    Args:
        outputs: of the microbatches.
        rows: how many rows of each count; those of none are left out.
        counts: what the losses of training are means over; they weigh ``loss``, and are summed up as
            ``num_targets``.
    """
    kept = [i for i, n in enumerate(rows) if n] or [0]
    values, weights = [outputs[i] for i in kept], [rows[i] for i in kept]
    if counts is None:
        return _merge(values, weights)
    own = [counts[i] for i in kept]
    if not isinstance(values[0], Mapping):
        return _mean(values, own)
    merged = {key: _merge([value[key] for value in values], weights) for key in values[0]}
    merged["loss"] = _mean([value["loss"] for value in values], own)
    if "num_targets" in merged:
        merged["num_targets"] = sum(torch.as_tensor(value["num_targets"]) for value in values)
    return merged


def _merge(values: list[Any], rows: list[int]) -> Any:
    first = values[0]
    if isinstance(first, Tensor):
        if first.ndim and all(value.shape[0] == n for value, n in zip(values, rows, strict=True)):
            return torch.cat(values)
        if first.ndim == 0 and first.is_floating_point():
            return _mean(values, rows)
        same = all(value.shape == first.shape and torch.equal(value, first) for value in values)
        return first if same else values
    if isinstance(first, Mapping):
        return {key: _merge([value[key] for value in values], rows) for key in first}
    if isinstance(first, list | tuple):
        if not any(isinstance(leaf, Tensor) for leaf in tree_leaves(first)) and all(
            len(value) == n for value, n in zip(values, rows, strict=True)
        ):
            return _sequence(first, [item for value in values for item in value])
        return _sequence(first, [_merge(list(items), rows) for items in zip(*values, strict=True)])
    if is_dataclass(first) and not isinstance(first, type):
        names = [item.name for item in fields(first) if item.init]
        merged = {name: _merge([getattr(value, name) for value in values], rows) for name in names}
        return replace(first, **merged)
    if isinstance(first, float):
        return sum(value * n for value, n in zip(values, rows, strict=True)) / max(sum(rows), 1)
    return first if all(value == first for value in values) else values


def stack_numbers(numbers: Sequence[Any], device: torch.device) -> Tensor:
    """Numbers and 0-dim tensors as one tensor in float64."""
    if not any(isinstance(number, Tensor) for number in numbers):
        return torch.tensor(numbers, dtype=torch.float64, device=device)
    return torch.stack([torch.as_tensor(n, dtype=torch.float64, device=device) for n in numbers])


def _mean(values: list[Any], weights: Sequence[Any]) -> Tensor:
    """Mean of 0-dim tensors, each weighing as much as it is a mean over; 0 over nothing."""
    stacked = torch.stack([torch.as_tensor(value) for value in values])
    shares = stack_numbers(weights, stacked.device)
    total = (stacked.double().where(shares > 0, 0.0) * shares).sum() / shares.sum().clamp_min(1.0)
    return total.to(stacked.dtype)

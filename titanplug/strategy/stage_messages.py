"""What the last pipeline stage knows, on all stages: one packed message for each step.

A value is any nest of dicts, lists and tuples. Its numbers travel in one buffer, its tensors each by
themselves; everything else (keys, names, options) is the value's form. A form is sent as a Python object the
first time and by its number from then on.
"""

from __future__ import annotations

import pickle
from collections.abc import Hashable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from titanplug.strategy.microbatches import stack_numbers

_HEAD = 64  # numbers in the first message, the number of the form among them


class _Number(NamedTuple):
    kind: Any  # bool, int, float, or the dtype of a 0-dim tensor


class _Array(NamedTuple):
    shape: tuple[int, ...]
    dtype: torch.dtype


class _Node(NamedTuple):
    kind: type
    keys: tuple[Any, ...]
    children: tuple[Any, ...]


class _Constant(NamedTuple):
    value: Any


class StageMessages:
    """Shares values of the last stage with the other ranks of the ``pp`` axis.

    Args:
        group: process group of the axis.
        source: rank of the axis that has the last stage.
        device: where the group communicates.
    """

    def __init__(self, group: dist.ProcessGroup, source: int, device: torch.device) -> None:
        self._group, self._source, self._device = group, source, device
        self.is_source = dist.get_rank(group) == source
        self._numbers: dict[Hashable, int] = {}
        self._forms: list[Any] = []
        self._sends: list[tuple[Any, Tensor]] = []

    def share(self, value: Any) -> Any:
        """The last stage's ``value``; a collective. Other stages may pass anything.

        Returns:
            The value, its tensors detached.
        """
        return self._send(value) if self.is_source else self._receive()

    def _send(self, value: Any) -> Any:
        self._finish_sends()
        numbers: list[Any] = []
        arrays: list[Tensor] = []
        form = _take_apart(value, numbers, arrays)
        known = self._numbers.get(key := _key(form))
        index = len(self._numbers) if known is None else known
        slots = torch.zeros(max(_HEAD, 1 + len(numbers)), dtype=torch.float64, device=self._device)
        slots[0] = index
        if numbers:
            slots[1 : 1 + len(numbers)] = stack_numbers(numbers, self._device)
        self._broadcast(slots[:_HEAD])
        if known is None:
            self._numbers[key] = index
            dist.broadcast_object_list([form], group=self._group, group_src=self._source)
        if len(slots) > _HEAD:
            self._broadcast(slots[_HEAD:])
        for array in arrays:
            self._broadcast(array.to(self._device, copy=True))  # the caller's may change meanwhile
        return _put_together(form, iter(slots[1:].tolist()), iter(arrays), self._device)

    def _receive(self) -> Any:
        head = torch.empty(_HEAD, dtype=torch.float64, device=self._device)
        self._broadcast(head)
        values = head.tolist()
        index = int(values[0])
        if index == len(self._forms):
            box: list[Any] = [None]
            dist.broadcast_object_list(box, group=self._group, group_src=self._source)
            self._forms.append(box[0])
        form = self._forms[index]
        rest = _count_numbers(form) + 1 - _HEAD
        if rest > 0:
            tail = torch.empty(rest, dtype=torch.float64, device=self._device)
            self._broadcast(tail)
            values += tail.tolist()
        arrays = [torch.empty(a.shape, dtype=a.dtype, device=self._device) for a in _arrays_of(form)]
        for array in arrays:
            self._broadcast(array)
        return _put_together(form, iter(values[1:]), iter(arrays), self._device)

    def _broadcast(self, tensor: Tensor) -> None:
        work = dist.broadcast(tensor, group=self._group, group_src=self._source, async_op=True)
        if self.is_source:
            # The last stage is done first, and others still run backwards: it doesn't wait for them.
            self._sends.append((work, tensor))
        else:
            work.wait()

    def _finish_sends(self) -> None:
        for work, _ in self._sends:
            work.wait()
        self._sends.clear()


def _key(form: Any) -> Hashable:
    """What equal forms have in common."""
    try:
        hash(form)
    except TypeError:
        return pickle.dumps(form)
    return form  # type: ignore[no-any-return]


def _take_apart(value: Any, numbers: list[Any], arrays: list[Tensor]) -> Any:
    if isinstance(value, Tensor):
        value = value.detach()
        if value.ndim == 0 and not value.is_complex():
            numbers.append(value)
            return _Number(value.dtype)
        arrays.append(value.contiguous())
        return _Array(tuple(value.shape), value.dtype)
    if isinstance(value, bool | int | float) and abs(value) < 2**53:
        numbers.append(value)
        return _Number(type(value))
    if type(value) is dict:
        children = tuple(_take_apart(child, numbers, arrays) for child in value.values())
        return _Node(dict, tuple(value), children)
    if type(value) in (list, tuple):
        return _Node(type(value), (), tuple(_take_apart(child, numbers, arrays) for child in value))
    return _Constant(value)


def _put_together(form: Any, numbers: Any, arrays: Any, device: torch.device) -> Any:
    if isinstance(form, _Number):
        number = next(numbers)
        if isinstance(form.kind, torch.dtype):
            return torch.tensor(number, dtype=form.kind, device=device)
        return form.kind(number)
    if isinstance(form, _Array):
        return next(arrays)
    if isinstance(form, _Constant):
        return form.value
    children = [_put_together(child, numbers, arrays, device) for child in form.children]
    return dict(zip(form.keys, children, strict=True)) if form.kind is dict else form.kind(children)


def _arrays_of(form: Any) -> list[_Array]:
    if isinstance(form, _Node):
        return [array for child in form.children for array in _arrays_of(child)]
    return [form] if isinstance(form, _Array) else []


def _count_numbers(form: Any) -> int:
    if isinstance(form, _Node):
        return sum(map(_count_numbers, form.children))
    return int(isinstance(form, _Number))

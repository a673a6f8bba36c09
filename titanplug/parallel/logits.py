"""Logits that stay sharded over the vocabulary, and the loss on them.

``cross_entropy`` on the whole (B, S, V) logits would need them on every rank of the tensor axis: with a
vocabulary of 128k they are the largest activation. :class:`ShardedLogits` holds only this rank's columns
yet behaves like the whole tensor in ordinary code: ``torch.nn.functional.cross_entropy`` on it gives the
loss of the whole and communicates two numbers a token; shape changes and casts keep it sharded;
everything else first gathers the whole tensor, so nothing gives another result than without it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_map_only

from titanplug.parallel.collectives import AxisGroup, copy_to_shards, gather_blocks
from titanplug.parallel.cross_entropy import sharded_cross_entropy
from titanplug.parallel.sharded_tensor import ELEMENTWISE, ShardedTensor, has_dims, is_slice


class ShardedLogits(ShardedTensor):
    """A tensor (.., V) of which this rank holds ``local`` (.., V_local), its block of the last dim."""

    group: AxisGroup

    @staticmethod
    def __new__(cls, local: Tensor, num_classes: int, group: AxisGroup) -> ShardedLogits:
        """Wrap ``local``; ``num_classes`` is V."""
        self = cls._wrap(local, (*local.shape[:-1], num_classes))
        self.group = group
        # Every rank of the axis has the whole gradient.
        return self._enclosed(partial(_block_of, group, num_classes))

    def whole(self) -> Tensor:
        """The whole tensor, on every rank; a collective over the axis."""
        return gather_blocks(self.local, -1, self.shape[-1], self.group)

    def rewrap(self, local: Tensor) -> ShardedLogits:
        """Other columns, of as many classes."""
        return ShardedLogits(local, self.shape[-1], self.group)

    def enter(self, arguments: Any) -> Any:
        """Numbers that are trained (a temperature): each rank's columns give a part of their gradient."""
        return tree_map_only(
            Tensor, lambda t: copy_to_shards(t, self.group) if t.requires_grad else t, arguments
        )

    def keep(self, whole: Tensor) -> None:
        """Write this rank's columns of ``whole`` into ``local``."""
        start, width = self.group.block(self.shape[-1])
        # What was written may mix columns: each rank's give a part of the gradient of all.
        self.local.copy_(self.enter(whole).narrow(-1, start, width))

    def __repr__(self) -> str:  # type: ignore[override]
        return f"ShardedLogits(shape={tuple(self.shape)}, block {self.group.rank} of {self.group.size})"


def _block_of(group: AxisGroup, num_classes: int, grad: Tensor) -> Tensor:
    start, width = group.block(num_classes)
    return grad.narrow(-1, start, width)


def _same_columns(func: Callable[..., Any], logits: ShardedLogits, *args: Any, **kwargs: Any) -> Any:
    """Casts, copies and other operations on each element: on the local columns."""
    if has_dims(args, kwargs):
        return NotImplemented
    local = func(logits.local, *logits.enter(args), **logits.enter(kwargs))
    # The axis communicates on its own kind of device.
    return logits.rewrap(local) if local.device == logits.device else NotImplemented


def _view(func: Callable[..., Any], logits: ShardedLogits, *shape: Any) -> Any:
    """``view``/``reshape`` that keep the last dim whole."""
    sizes = tuple(shape[0]) if len(shape) == 1 and not isinstance(shape[0], int) else shape
    if not all(isinstance(size, int) for size in sizes):
        return NotImplemented
    meta = torch.empty(logits.shape, device="meta").reshape(sizes)
    if meta.shape[-1] != logits.shape[-1]:
        return NotImplemented
    return logits.rewrap(func(logits.local, (*meta.shape[:-1], logits.local.shape[-1])))


def _flatten(func: Callable[..., Any], logits: ShardedLogits, start_dim: int = 0, end_dim: int = -1) -> Any:
    if end_dim % logits.ndim == logits.ndim - 1:
        return NotImplemented
    return logits.rewrap(func(logits.local, start_dim, end_dim))


def _index(func: Callable[..., Any], logits: ShardedLogits, index: Any) -> Any:
    """Slices of the leading dims, as in ``logits[:, :-1]`` and ``logits[..., :-1, :]``."""
    parts = list(index) if isinstance(index, tuple) else [index]
    if parts and parts[0] is ...:
        parts[:1] = [slice(None)] * (logits.ndim - len(parts) + 1)
    if len(parts) == logits.ndim and is_slice(parts[-1]) and parts[-1] == slice(None):
        parts.pop()
    if len(parts) >= logits.ndim or not all(isinstance(p, int) or is_slice(p) for p in parts):
        return NotImplemented
    return logits.rewrap(func(logits.local, tuple(parts)))


def _cross_entropy(
    func: Callable[..., Any],
    logits: ShardedLogits,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Any:
    unusual = weight is not None or size_average is not None or reduce is not None or label_smoothing
    by_class = not target.is_floating_point() and logits.ndim == 2 and target.ndim == 1
    if unusual or not by_class or reduction not in ("none", "mean", "sum"):
        return NotImplemented
    losses = sharded_cross_entropy(
        logits.local, target, logits.shape[-1], logits.group, ignore_index=ignore_index
    )
    if reduction == "sum":
        losses = losses.sum()
    elif reduction == "mean":
        # 0/0 without targets, as the ordinary loss.
        losses = losses.sum() / (target != ignore_index).sum()
    # Autocast keeps losses in float32; without it a loss has the type of its logits.
    return losses if torch.is_autocast_enabled(logits.device.type) else losses.to(logits.dtype)


ShardedLogits._handlers = {
    F.cross_entropy: _cross_entropy,
    Tensor.view: _view,
    Tensor.reshape: _view,
    torch.reshape: _view,
    Tensor.flatten: _flatten,
    torch.flatten: _flatten,
    Tensor.__getitem__: _index,
    **dict.fromkeys(ELEMENTWISE, _same_columns),
}

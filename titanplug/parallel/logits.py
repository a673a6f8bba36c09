"""Logits that stay sharded over the vocabulary, and the loss on them.

``cross_entropy`` on the whole (B, S, V) logits would need them on every rank of the tensor axis: with a
vocabulary of 128k they are the largest activation. :class:`ShardedLogits` holds only this rank's columns
yet behaves like the whole tensor in ordinary code: ``torch.nn.functional.cross_entropy`` on it gives the
loss of the whole and communicates two numbers a token; shape changes and casts keep it sharded;
everything else first gathers the whole tensor, so nothing gives another result than without it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_map_only

from titanplug.parallel.collectives import AxisGroup, copy_to_shards, gather_blocks
from titanplug.parallel.cross_entropy import sharded_cross_entropy


class ShardedLogits(Tensor):
    """A tensor (.., V) of which this rank holds ``local`` (.., V_local), its block of the last dim."""

    local: Tensor
    group: AxisGroup

    @staticmethod
    def __new__(cls, local: Tensor, num_classes: int, group: AxisGroup) -> ShardedLogits:
        """Wrap ``local``; ``num_classes`` is V."""
        shape = (*local.shape[:-1], num_classes)
        self = Tensor._make_wrapper_subclass(
            cls, shape, dtype=local.dtype, device=local.device, requires_grad=False
        )
        self.local, self.group = local, group
        result: ShardedLogits = self
        return result

    def gather(self) -> Tensor:  # type: ignore[override]
        """The whole tensor, on every rank; a collective over the axis."""
        return gather_blocks(self.local, -1, self.shape[-1], self.group)

    def __repr__(self) -> str:  # type: ignore[override]
        return f"ShardedLogits(shape={tuple(self.shape)}, block {self.group.rank} of {self.group.size})"

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func in _METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if args and isinstance(args[0], cls):
            handler = _HANDLERS.get(func)
            result = NotImplemented if handler is None else handler(func, *args, **kwargs)
            if result is not NotImplemented:
                return result
            if _writes_in_place(func):
                return args[0]._write(func, *args[1:], **kwargs)
        args, kwargs = tree_map_only(cls, cls.gather, (args, dict(kwargs)))
        return func(*args, **kwargs)

    def _write(self, func: Callable[..., Any], *args: Any, **kwargs: Any) -> ShardedLogits:
        """Change the columns in place, also those of other tensors that share their memory."""
        if func is Tensor.__setitem__ or _has_dims(args, kwargs):
            # What is written has its place in the whole.
            whole = self.gather().clone()
            func(whole, *gather_logits(args), **gather_logits(kwargs))
            start, width = self.group.block(self.shape[-1])
            self.local.copy_(whole.narrow(-1, start, width))
        else:
            func(self.local, *_copied(self.group, args), **_copied(self.group, kwargs))
        return self

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        args, kwargs = tree_map_only(cls, cls.gather, (args, kwargs or {}))
        return func(*args, **kwargs)


def _writes_in_place(func: Callable[..., Any]) -> bool:
    name = getattr(func, "__name__", "")
    return func in _INPLACE_OPERATORS or (name.endswith("_") and not name.endswith("__"))


def _has_dims(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether a tensor is among the arguments that isn't just a number."""
    return any(isinstance(arg, Tensor) and arg.ndim for arg in (*args, *kwargs.values()))


def _rewrap(logits: ShardedLogits, local: Tensor) -> ShardedLogits:
    return ShardedLogits(local, logits.shape[-1], logits.group)


def _same_columns(func: Callable[..., Any], logits: ShardedLogits, *args: Any, **kwargs: Any) -> Any:
    """Casts, copies and other operations on each element: on the local columns."""
    if _has_dims(args, kwargs):
        return NotImplemented
    group = logits.group
    return _rewrap(logits, func(logits.local, *_copied(group, args), **_copied(group, kwargs)))


def _copied(group: AxisGroup, arguments: Any) -> Any:
    """Numbers that are trained (a temperature): each rank's columns give a part of their gradient."""
    return tree_map_only(Tensor, lambda t: copy_to_shards(t, group) if t.requires_grad else t, arguments)


def _view(func: Callable[..., Any], logits: ShardedLogits, *shape: Any) -> Any:
    """``view``/``reshape`` that keep the last dim whole."""
    sizes = tuple(shape[0]) if len(shape) == 1 and not isinstance(shape[0], int) else shape
    if not all(isinstance(size, int) for size in sizes):
        return NotImplemented
    meta = torch.empty(logits.shape, device="meta").reshape(sizes)
    if meta.shape[-1] != logits.shape[-1]:
        return NotImplemented
    return _rewrap(logits, func(logits.local, (*meta.shape[:-1], logits.local.shape[-1])))


def _flatten(func: Callable[..., Any], logits: ShardedLogits, start_dim: int = 0, end_dim: int = -1) -> Any:
    if end_dim % logits.ndim == logits.ndim - 1:
        return NotImplemented
    return _rewrap(logits, func(logits.local, start_dim, end_dim))


def _index(func: Callable[..., Any], logits: ShardedLogits, index: Any) -> Any:
    """Slices of the leading dims, as in ``logits[:, :-1]`` and ``logits[..., :-1, :]``."""
    parts = list(index) if isinstance(index, tuple) else [index]
    if parts and parts[0] is ...:
        parts[:1] = [slice(None)] * (logits.ndim - len(parts) + 1)
    if len(parts) == logits.ndim and _is_slice(parts[-1]) and parts[-1] == slice(None):
        parts.pop()
    if len(parts) >= logits.ndim or not all(isinstance(p, int) or _is_slice(p) for p in parts):
        return NotImplemented
    return _rewrap(logits, func(logits.local, tuple(parts)))


def _is_slice(part: Any) -> bool:
    return isinstance(part, slice)


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


def _of_local(func: Callable[..., Any], logits: ShardedLogits, *args: Any, **kwargs: Any) -> Any:
    """What autograd knows of the logits, and hooks on their gradient: of the local columns."""
    return func(logits.local, *args, **kwargs)


def _getters(*names: str) -> list[Callable[..., Any]]:
    return [getattr(Tensor, name).__get__ for name in names]


_METADATA = {
    *_getters("shape", "device", "dtype", "layout", "ndim", "itemsize"),
    *_getters("is_cuda", "is_cpu", "is_meta", "is_sparse", "is_nested", "is_quantized"),
    Tensor.size,
    Tensor.dim,
    Tensor.numel,
    Tensor.__len__,
    Tensor.is_floating_point,
    Tensor.is_complex,
    torch.is_floating_point,
    torch.is_complex,
}

_INPLACE_OPERATORS = {
    Tensor.__setitem__,
    Tensor.__iadd__,
    Tensor.__isub__,
    Tensor.__imul__,
    Tensor.__idiv__,
    Tensor.__ipow__,
}

_HANDLERS: dict[Callable[..., Any], Callable[..., Any]] = {
    F.cross_entropy: _cross_entropy,
    Tensor.view: _view,
    Tensor.reshape: _view,
    torch.reshape: _view,
    Tensor.flatten: _flatten,
    torch.flatten: _flatten,
    Tensor.__getitem__: _index,
    **dict.fromkeys(
        (
            *_getters("requires_grad", "grad_fn", "is_leaf", "_base"),
            Tensor.register_hook,
        ),
        _of_local,
    ),
    **dict.fromkeys(
        (
            Tensor.float,
            Tensor.double,
            Tensor.bfloat16,
            Tensor.to,
            Tensor.contiguous,
            Tensor.detach,
            Tensor.clone,
            Tensor.__truediv__,
            Tensor.div,
            torch.div,
            Tensor.__mul__,
            Tensor.mul,
            torch.mul,
            Tensor.__neg__,
        ),
        _same_columns,
    ),
}


def gather_logits(value: Any) -> Any:
    """A nested value with every :class:`ShardedLogits` in it gathered."""
    return tree_map_only(ShardedLogits, ShardedLogits.gather, value)

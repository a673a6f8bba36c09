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

from titanplug.parallel.collectives import AxisGroup, all_gather_dim, gather_blocks


class ShardedLogits(Tensor):
    """A tensor (.., V) of which this rank holds ``local`` (.., V_local), its block of the last dim."""

    local: Tensor
    group: AxisGroup

    @staticmethod
    def __new__(cls, local: Tensor, num_classes: int, group: AxisGroup) -> ShardedLogits:
        """Wrap ``local``; ``num_classes`` is V."""
        shape = (*local.shape[:-1], num_classes)
        self = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
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
        handler = _HANDLERS.get(func)
        if handler is not None and isinstance(args[0], cls):
            result = handler(func, *args, **kwargs)
            if result is not NotImplemented:
                return result
        if args and isinstance(args[0], cls) and _writes_in_place(func):
            return args[0]._write(func, *args[1:], **kwargs)
        args, kwargs = tree_map_only(cls, cls.gather, (args, dict(kwargs)))
        return func(*args, **kwargs)

    def _write(self, func: Callable[..., Any], *args: Any, **kwargs: Any) -> ShardedLogits:
        if any(isinstance(arg, Tensor) and arg.ndim for arg in (*args, *kwargs.values())):
            raise TypeError(
                f"`{func.__name__}` would write into logits that are sharded over the vocabulary. Write "
                "`logits = logits ...` instead, or use TitanStrategy(loss_parallel=False)."
            )
        func(self.local, *args, **kwargs)
        return self

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map_only(cls, cls.gather, (args, kwargs or {}))
        return func(*args, **kwargs)


def _writes_in_place(func: Callable[..., Any]) -> bool:
    name = getattr(func, "__name__", "")
    return name.endswith("_") and not name.endswith("__")


def _rewrap(logits: ShardedLogits, local: Tensor) -> ShardedLogits:
    return ShardedLogits(local, logits.shape[-1], logits.group)


def _same_columns(func: Callable[..., Any], logits: ShardedLogits, *args: Any, **kwargs: Any) -> Any:
    """Casts, copies and other operations on each element: on the local columns."""
    if any(isinstance(arg, Tensor) and arg.ndim for arg in (*args, *kwargs.values())):
        return NotImplemented
    return _rewrap(logits, func(logits.local, *args, **kwargs))


def _view(func: Callable[..., Any], logits: ShardedLogits, *shape: Any) -> Any:
    """``view``/``reshape`` that keep the last dim whole."""
    sizes = tuple(shape[0]) if len(shape) == 1 and not isinstance(shape[0], int) else shape
    if not all(isinstance(size, int) for size in sizes):
        return NotImplemented
    meta = torch.empty(logits.shape, device="meta").reshape(sizes)
    if meta.shape[-1] != logits.shape[-1]:
        return NotImplemented
    return _rewrap(logits, func(logits.local, (*meta.shape[:-1], logits.local.shape[-1])))


def _flatten(
    func: Callable[..., Any], logits: ShardedLogits, start_dim: int = 0, end_dim: int = -1
) -> Any:
    if end_dim % logits.ndim == logits.ndim - 1:
        return NotImplemented
    return _rewrap(logits, func(logits.local, start_dim, end_dim))


def _index(func: Callable[..., Any], logits: ShardedLogits, index: Any) -> Any:
    """Slices of the leading dims, as in ``logits[:, :-1]``."""
    parts = index if isinstance(index, tuple) else (index,)
    plain = all(isinstance(part, slice | int) for part in parts)
    if not plain or len(parts) >= logits.ndim:
        return NotImplemented
    return _rewrap(logits, func(logits.local, index))


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
        return losses.sum()
    if reduction == "mean":
        # 0/0 without targets, as the ordinary loss.
        return losses.sum() / (target != ignore_index).sum()
    return losses


class _CrossEntropy(torch.autograd.Function):
    """Negative log likelihood (N,) of targets (N,) from this rank's columns (N, V_local).

    Each rank's log-sum-exp and target logit are gathered, two numbers a token; the log-sum-exp of those
    is that of the whole row. Backward is local: softmax minus one-hot on this rank's columns.
    """

    @staticmethod
    def forward(
        ctx: Any, local: Tensor, target: Tensor, num_classes: int, group: AxisGroup, ignore_index: int
    ) -> Tensor:
        start, width = group.block(num_classes)
        column = target - start
        mine = (column >= 0) & (column < width) & (target != ignore_index)
        column = column.masked_fill(~mine, 0)
        if width:
            lse = torch.logsumexp(local, -1)
            picked = local.gather(-1, column.unsqueeze(-1)).squeeze(-1).masked_fill(~mine, 0.0)
        else:
            lse = local.new_full(target.shape, float("-inf"))
            picked = torch.zeros_like(lse)
        parts = all_gather_dim(torch.stack([lse, picked]).unsqueeze(0), 0, group)  # (n, 2, N)
        lse = torch.logsumexp(parts[:, 0], 0)
        ignored = target == ignore_index
        ctx.save_for_backward(local, lse, column, mine, ignored)
        return (lse - parts[:, 1].sum(0)).masked_fill(ignored, 0.0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        local, lse, column, mine, ignored = ctx.saved_tensors
        grad = grads[0].masked_fill(ignored, 0.0).unsqueeze(-1)  # (N, 1)
        result = torch.exp(local - lse.unsqueeze(-1)).mul_(grad)
        if local.shape[-1]:
            result.scatter_add_(-1, column.unsqueeze(-1), -grad * mine.unsqueeze(-1))
        return result, None, None, None, None


def sharded_cross_entropy(
    local: Tensor, target: Tensor, num_classes: int, group: AxisGroup, *, ignore_index: int = -100
) -> Tensor:
    """Loss of each target, 0 where ignored, computed in float32 or better.

    Args:
        local: (N, V_local), this rank's columns of the logits.
        target: (N,) classes from 0 to V - 1, or ``ignore_index``; equal on all ranks of the axis.
        num_classes: V.
        group: the tensor axis.
        ignore_index: target that doesn't count.

    Returns:
        (N,) losses, equal on all ranks.
    """
    half = local.dtype in (torch.bfloat16, torch.float16)
    result: Tensor = _CrossEntropy.apply(  # type: ignore[no-untyped-call]
        local.float() if half else local, target, num_classes, group, ignore_index
    )
    # Autocast keeps losses in float32; without it a loss has the type of its logits.
    return result.to(local.dtype) if half and not torch.is_autocast_enabled(local.device.type) else result


_METADATA = {
    Tensor.shape.__get__,  # type: ignore[attr-defined]
    Tensor.device.__get__,  # type: ignore[attr-defined]
    Tensor.dtype.__get__,  # type: ignore[attr-defined]
    Tensor.layout.__get__,  # type: ignore[attr-defined]
    Tensor.ndim.__get__,  # type: ignore[attr-defined]
    Tensor.is_cuda.__get__,  # type: ignore[attr-defined]
    Tensor.size,
    Tensor.dim,
    Tensor.numel,
    Tensor.__len__,
    Tensor.is_floating_point,
    Tensor.is_complex,
    torch.is_floating_point,
    torch.is_complex,
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

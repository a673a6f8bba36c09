"""What a model gives under context parallel: sharded over the sequence, behaving like the whole.

Ordinary losses of :class:`ShardedSequence` give those of the whole and communicate one number; shapes, casts,
what is done to each token alone and slices of the sequence keep it sharded; all else gathers the whole.

Letters: B batch, S sequence, S_local of its tokens on this rank, N rows (B times S), V classes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_map_only

from titanplug.parallel.sequence_part import SequencePart, sum_over_ranks
from titanplug.parallel.sharded_tensor import ARITHMETIC, ELEMENTWISE, gather_shards, is_slice

_HALF = (torch.bfloat16, torch.float16)


class ShardedSequence(SequencePart):
    """A tensor (*batch, S, *rest) of which this rank holds ``local`` (*batch, S_local, *rest).

    Arguments are those of :class:`SequencePart`.
    """


# ---------------------------------------------------------------- shapes


def _reshape(func: Callable[..., Any], x: SequencePart, *args: Any, **kwargs: Any) -> Any:
    """Shape changes that keep the order of the elements."""
    if any(isinstance(arg, torch.dtype) for arg in (*args, *kwargs.values())):
        return NotImplemented  # `view` of the bits
    shape = func(torch.empty(x.shape, device="meta"), *args, **kwargs).shape
    result = x.reshaped(shape)
    return NotImplemented if result is None else result


def _index(func: Callable[..., Any], x: SequencePart, index: Any) -> Any:
    """Slices of the sequence without a step, as in ``logits[:, :-1]``; any of the dims beside it."""
    parts = list(index) if isinstance(index, tuple) else [index]
    if not all(part is ... or is_slice(part) or type(part) is int for part in parts):
        return NotImplemented
    if ... in parts:
        at = parts.index(...)
        parts[at : at + 1] = [slice(None)] * (x.ndim - len(parts) + 1)
    parts += [slice(None)] * (x.num_lead - len(parts))
    if ... in parts or len(parts) > x.ndim or not is_slice(parts[x.num_lead - 1]):
        return NotImplemented
    length = x.shape[x.num_lead - 1]
    start, stop, step = parts[x.num_lead - 1].indices(length)
    changes: dict[str, Any] = {}
    if (start, stop, step) != (0, length, 1):
        if step != 1 or stop <= start or x.merged:
            return NotImplemented
        changes.update(start=x.start + start, stop=x.start + stop)
    if x.merged:
        parts[:1] = [slice(None)] * (x.sequence_dim + 1)
    parts[x.sequence_dim] = slice(None)
    changes["sequence_dim"] = sum(is_slice(part) for part in parts[: x.sequence_dim])
    local = x.local if all(part == slice(None) for part in parts) else func(x.local, tuple(parts))
    return x.laid_out(local, **changes)


# ---------------------------------------------------------------- each token alone


def _elementwise(func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """With numbers, with what broadcasts over the dims after the sequence, and token by token."""
    like = next((arg for arg in args if isinstance(arg, SequencePart)), None)
    if like is None or any(isinstance(arg, Tensor) for arg in kwargs.values()):
        return NotImplemented
    parts = [_part(like, arg) for arg in args]
    if any(part is NotImplemented for part in parts):
        return NotImplemented
    local = func(*parts, **kwargs)
    # The axis communicates on its own kind of device.
    return like.rewrap(local) if local.device == like.device else NotImplemented


def _part(like: SequencePart, value: Any) -> Any:
    """What stands for an argument beside ``like.local``."""
    if not isinstance(value, Tensor):
        return value
    if isinstance(value, SequencePart):
        return value.local if like.is_aligned(value) else NotImplemented
    if value.ndim <= like.ndim - like.num_lead:
        return like.enter(value)
    return like.take(value) if _covers(like, value) else NotImplemented


def _covers(like: SequencePart, value: Tensor) -> bool:
    """Whether a whole tensor has the tokens of ``like``."""
    lead = like.num_lead
    return value.ndim == like.ndim and value.shape[:lead] == like.shape[:lead]


def _last_dim(position: int, default: int | None = None) -> Callable[..., Any]:
    """A handler for functions along a dim, given by name or as the argument at ``position``: the last."""

    def handle(func: Callable[..., Any], x: SequencePart, *args: Any, **kwargs: Any) -> Any:
        dim = kwargs.get("dim", args[position] if len(args) > position else default)
        if isinstance(dim, tuple | list) and len(dim) == 1:
            dim = dim[0]
        if not _is_last(x, dim):
            return NotImplemented
        if len(args) > position:
            args = (*args[:position], -1, *args[position + 1 :])
        else:
            kwargs = {**kwargs, "dim": -1}
        if any(isinstance(arg, Tensor) for arg in (*args, *kwargs.values())):
            return NotImplemented
        return tree_map_only(Tensor, x.rewrap, func(x.local, *args, **kwargs))

    return handle


def _is_last(x: SequencePart, dim: Any) -> bool:
    return type(dim) is int and x.ndim > x.num_lead and dim in (-1, x.ndim - 1)


def _pick(func: Callable[..., Any], x: SequencePart, dim: int, index: Tensor) -> Any:
    """``gather`` of one or more classes of each token."""
    index = gather_shards(index)
    if not _is_last(x, dim) or not _covers(x, index):
        return NotImplemented
    return x.rewrap(func(x.local, -1, x.take(index)))


# ---------------------------------------------------------------- over all tokens


def _total(func: Callable[..., Any], x: SequencePart, *args: Any, **kwargs: Any) -> Any:
    """``sum`` and ``mean`` of all elements: a collective of one number."""
    if args or kwargs:
        return _last_dim(0)(func, x, *args, **kwargs)
    is_mean = func in (Tensor.mean, torch.mean)
    if is_mean and not (x.is_floating_point() or x.is_complex()):
        return NotImplemented  # refused there
    local, dtype = gather_shards(x.local), None
    if x.dtype in _HALF:
        dtype = torch.float32
    pieces = [local.narrow(x.sequence_dim, *piece).sum(dtype=dtype) for piece in x.stretches()]
    total = sum_over_ranks(sum(pieces[1:], pieces[0]), x.shards.group)
    if is_mean:
        # NaN of no elements, as the ordinary mean.
        total = total / x.numel() if x.numel() else total * math.nan
    # Autocast may let the result be of another type than the elements.
    return total if dtype is None else total.to(func(local.new_empty(1)).dtype)


def _class_loss(
    func: Callable[..., Any],
    logits: SequencePart,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Any:
    """``cross_entropy`` and ``nll_loss`` of rows (N, V) and classes (N,): a collective of one number."""
    target = gather_shards(target)
    in_rows = logits.num_lead == 1 and logits.ndim == 2
    by_class = target.dtype == torch.int64 and target.shape == logits.shape[:1]
    unusual = size_average is not None or reduce is not None or (weight is not None and weight.requires_grad)
    if unusual or not in_rows or not by_class or reduction not in ("none", "mean", "sum"):
        return NotImplemented
    mine = logits.take(target).masked_fill(~logits.counts(), ignore_index)
    rows = logits.local.flatten(0, logits.sequence_dim)
    if rows.dtype in _HALF:
        rows = rows.float()
        weight = None if weight is None else weight.float()
    options: dict[str, Any] = {"label_smoothing": label_smoothing} if label_smoothing else {}
    losses = func(rows, mine.flatten(), weight=weight, ignore_index=ignore_index, reduction="none", **options)
    result: Any
    if reduction == "none":
        result = logits.rewrap(losses.view(mine.shape))
    else:
        result = sum_over_ranks(losses.sum(), logits.shards.group)
        if reduction == "mean":
            # 0/0 without targets, as the ordinary loss.
            result = result / _count(target, weight, ignore_index)
    # Autocast keeps losses in float32; without it a loss has the type of its logits.
    return result if torch.is_autocast_enabled(logits.device.type) else result.to(logits.dtype)


def _count(target: Tensor, weight: Tensor | None, ignore_index: int) -> Tensor:
    """What the mean over all targets is divided by; known without communication."""
    known = target != ignore_index
    if weight is None:
        return known.sum()
    return (weight[target.masked_fill(~known, 0)] * known).sum()


_SHAPES = (
    Tensor.view,
    Tensor.reshape,
    torch.reshape,
    Tensor.flatten,
    torch.flatten,
    Tensor.unflatten,
    torch.unflatten,
    Tensor.squeeze,
    torch.squeeze,
    Tensor.unsqueeze,
    torch.unsqueeze,
)

_OVER_LAST = (
    Tensor.softmax,
    torch.softmax,
    F.softmax,
    Tensor.log_softmax,
    torch.log_softmax,
    F.log_softmax,
    Tensor.logsumexp,
    torch.logsumexp,
    Tensor.argmax,
    torch.argmax,
    Tensor.max,
    torch.max,
    Tensor.amax,
    torch.amax,
)

_COMPARISONS = (
    Tensor.__eq__,
    Tensor.eq,
    torch.eq,
    Tensor.__ne__,
    Tensor.ne,
    torch.ne,
)

ShardedSequence._handlers = {
    **dict.fromkeys(_SHAPES, _reshape),
    Tensor.__getitem__: _index,
    **dict.fromkeys((*ELEMENTWISE, *_COMPARISONS, Tensor.masked_fill, torch.masked_fill), _elementwise),
    **dict.fromkeys(_OVER_LAST, _last_dim(0)),
    **dict.fromkeys((Tensor.topk, torch.topk), _last_dim(1, default=-1)),
    **dict.fromkeys((Tensor.gather, torch.gather), _pick),
    **dict.fromkeys((Tensor.sum, torch.sum, Tensor.mean, torch.mean), _total),
    F.cross_entropy: _class_loss,
    F.nll_loss: _class_loss,
}
ShardedSequence._either_side = frozenset((*ARITHMETIC, *_COMPARISONS))

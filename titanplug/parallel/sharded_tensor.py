"""Tensors of which a rank holds a part, yet that behave like the whole one in ordinary code.

What a class knows to do on its part (a shape change, a cast, a loss) stays sharded; everything else first
gathers the whole tensor, so nothing gives another result than without it. What is done by these functions
goes through the graph of the part; an autograd function that takes the tensor itself gives the gradient of
the whole, of which the part gets its own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Self, TypeAlias

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from titanplug.errors import TitanplugError

Handlers: TypeAlias = Mapping[Callable[..., Any], Callable[..., Any]]
"""From a function of torch to what does it on the part: called with the function and its arguments, may
return NotImplemented, and then the whole is gathered."""


class ShardedTensor(Tensor):
    """A tensor of which this rank holds ``local``; shape, type and device are those of the whole."""

    local: Tensor
    _handlers: ClassVar[Handlers] = {}
    _either_side: ClassVar[frozenset[Callable[..., Any]]] = frozenset()
    """Functions whose handler is asked also where another argument than the first is sharded."""

    @classmethod
    def _wrap(cls, local: Tensor, shape: tuple[int, ...]) -> Self:
        self = Tensor._make_wrapper_subclass(
            cls, shape, dtype=local.dtype, device=local.device, requires_grad=False
        )
        self.local = local
        result: Self = self
        return result

    def _enclosed(self, part_of: Callable[[Tensor], Tensor]) -> Self:
        """This tensor as a result of ``local``, for autograd.

        Args:
            part_of: from the gradient of the whole to that of ``local``; holds no reference to this tensor,
                which would never be freed.
        """
        if not (torch.is_grad_enabled() and self.local.requires_grad):
            return self
        result: Self = _Enclose.apply(self.local, [self], part_of)  # type: ignore[no-untyped-call]
        return result

    def _require_connected(self) -> None:
        """A checkpoint that computes without a graph returns the tensor connected, but not its part."""
        with torch._C.DisableTorchFunctionSubclass():
            connected = self.requires_grad
        if connected and not self.local.requires_grad:
            raise TitanplugError(
                "The output of a model whose layout is sharded came out of a function that computes again in "
                "backward and takes it apart from its graph: its gradient would be lost. Use "
                "torch.utils.checkpoint.checkpoint(..., use_reentrant=False)."
            )

    def whole(self) -> Tensor:
        """The whole tensor, on every rank; a collective. (``gather`` is the ordinary one, by index.)"""
        raise NotImplementedError

    def rewrap(self, local: Tensor) -> Self:
        """Another part of the same layout."""
        raise NotImplementedError

    def enter(self, arguments: Any) -> Any:
        """Arguments, the same on all ranks, for use on the part: their gradient is put together."""
        raise NotImplementedError

    def keep(self, whole: Tensor) -> None:
        """Write this rank's part of ``whole`` into ``local``."""
        raise NotImplementedError

    def is_complete(self) -> bool:
        """Whether ``local`` holds nothing but elements of this tensor (it isn't a slice of another)."""
        return True

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
        first = bool(args) and isinstance(args[0], cls)
        if first:
            args[0]._require_connected()
        if first and func in _CONNECTS and not args[0].local.requires_grad and (*args, True)[1]:
            raise TitanplugError(
                "A tensor of which each rank holds a part (the output of a sharded model) can't be made a "
                "leaf of a graph. Do so with the whole one, logits.whole().detach().requires_grad_(); a "
                "checkpoint around a loss needs torch.utils.checkpoint.checkpoint(..., use_reentrant=False)."
            )
        if first and func in _OF_LOCAL:
            return func(args[0].local, *args[1:], **kwargs)
        handler = cls._handlers.get(func) if first or func in cls._either_side else None
        result = NotImplemented if handler is None else handler(func, *args, **kwargs)
        if result is not NotImplemented:
            return result
        if first and _writes_in_place(func):
            return args[0]._write(func, *args[1:], **kwargs)
        return func(*gather_shards(args), **gather_shards(dict(kwargs)))

    def _write(self, func: Callable[..., Any], *args: Any, **kwargs: Any) -> Self:
        """Change the part in place, also that of other tensors that share its memory."""
        if func in _INPLACE_ELEMENTWISE and self.is_complete() and not has_dims(args, kwargs):
            func(self.local, *self.enter(args), **self.enter(kwargs))
        else:
            # What is written has its place in the whole.
            whole = self.whole().clone()
            func(whole, *gather_shards(args), **gather_shards(kwargs))
            self.keep(whole)
        return self

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return func(*gather_shards(args), **gather_shards(kwargs or {}))


class _Enclose(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, local: Tensor, holder: list[ShardedTensor], part_of: Callable[[Tensor], Tensor]
    ) -> Tensor:
        ctx.part_of = part_of
        return holder[0]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.part_of(gather_shards(grads[0])), None, None


def gather_shards(value: Any) -> Any:
    """A nested value with every :class:`ShardedTensor` in it gathered, also in dataclasses."""
    return tree_map(_gathered, value)


def _gathered(value: Any) -> Any:
    if isinstance(value, ShardedTensor):
        return value.whole()
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        own = {item.name: getattr(value, item.name) for item in dataclasses.fields(value) if item.init}
        gathered = {name: gather_shards(item) for name, item in own.items()}
        if any(gathered[name] is not item for name, item in own.items()):
            return dataclasses.replace(value, **gathered)
    return value


def has_dims(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether a tensor is among the arguments that isn't just a number."""
    return any(isinstance(arg, Tensor) and arg.ndim for arg in (*args, *kwargs.values()))


def is_slice(part: Any) -> bool:
    """Whether a part of an index is a slice."""
    return isinstance(part, slice)


def _writes_in_place(func: Callable[..., Any]) -> bool:
    name = getattr(func, "__name__", "")
    return func in _INPLACE_ELEMENTWISE or func in _INPLACE_OPERATORS or _ends_in_one(name)


def _ends_in_one(name: str) -> bool:
    return name.endswith("_") and not name.endswith("__")


def _getters(*names: str) -> list[Callable[..., Any]]:
    return [getattr(Tensor, name).__get__ for name in names]


_METADATA = {
    *_getters("shape", "device", "dtype", "layout", "ndim", "itemsize"),
    *_getters("is_cuda", "is_cpu", "is_meta", "is_sparse", "is_nested", "is_quantized"),
    Tensor.size,
    Tensor.dim,
    Tensor.numel,
    Tensor.__len__,
    Tensor.is_contiguous,
    Tensor.is_floating_point,
    Tensor.is_complex,
    torch.is_floating_point,
    torch.is_complex,
}

# What autograd knows of the tensor, and hooks on its gradient: of the part.
_OF_LOCAL = {
    *_getters("requires_grad", "grad_fn", "is_leaf", "_base"),
    Tensor.register_hook,
}

# Would make it a leaf.
_CONNECTS = {Tensor.requires_grad_, getattr(Tensor, "requires_grad").__set__}  # noqa: B009

_INPLACE_OPERATORS = {Tensor.__setitem__, Tensor.__ipow__}

_INPLACE_ELEMENTWISE = {
    Tensor.__iadd__,
    Tensor.__isub__,
    Tensor.__imul__,
    Tensor.__idiv__,
    Tensor.add_,
    Tensor.sub_,
    Tensor.mul_,
    Tensor.div_,
    Tensor.clamp_,
    Tensor.fill_,
    Tensor.zero_,
    Tensor.neg_,
    Tensor.tanh_,
}

ARITHMETIC = (
    Tensor.__add__,
    Tensor.__radd__,
    Tensor.add,
    torch.add,
    Tensor.__sub__,
    Tensor.__rsub__,
    Tensor.sub,
    torch.sub,
    Tensor.__mul__,
    Tensor.__rmul__,
    Tensor.mul,
    torch.mul,
    Tensor.__truediv__,
    Tensor.div,
    torch.div,
)
"""On each element, with numbers or other tensors."""

ELEMENTWISE = (
    *ARITHMETIC,
    Tensor.float,
    Tensor.double,
    Tensor.bfloat16,
    Tensor.half,
    Tensor.to,
    Tensor.contiguous,
    Tensor.detach,
    Tensor.clone,
    Tensor.__neg__,
    Tensor.neg,
    Tensor.tanh,
    torch.tanh,
    Tensor.square,
    torch.square,
    Tensor.clamp,
    torch.clamp,
)
"""On each element alone. Of finite elements the derivative is finite: ``log`` isn't here, since 0 times
infinity would be the gradient of elements that don't count (padding, and what a slice has left out)."""

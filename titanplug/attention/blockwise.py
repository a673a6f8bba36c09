"""Attention by blocks of scores: one autograd function, for every backend that gives log-sum-exps.

Kept for backward are this rank's queries, keys and values, its output and one number a query and head; what
came from other ranks is fetched again. In a compiled graph it is one operator, which is not looked into.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar

import torch
from torch import Tensor

from titanplug.attention.kernels import accumulation_dtype
from titanplug.attention.mask import TokenMask
from titanplug.parallel.collectives import named_group
from titanplug.parallel.sequence import SequenceShards


class Blockwise(ABC):
    """A backend that has a forward and a backward of its own, without autograd."""

    name: ClassVar[str]
    can: ClassVar[frozenset[str]]

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        rule: TokenMask | Tensor,
        shards: SequenceShards,
        scale: float,
        dropout_p: float,
    ) -> Tensor:
        """Attention with gradients; see :class:`titanplug.attention.backends.Backend`."""
        if torch.compiler.is_compiling():
            return _attend_compiled(self.name, query, key, value, rule, shards, scale)
        out: Tensor = _Blockwise.apply(  # type: ignore[no-untyped-call]
            query, key, value, self, rule, shards, scale
        )
        return out

    @abstractmethod
    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        rule: TokenMask | Tensor,
        shards: SequenceShards,
        scale: float,
    ) -> tuple[Tensor, Tensor]:
        """Output (B, H, S_local, V) and log-sum-exp (B, H, S_local)."""

    @abstractmethod
    def backward(
        self,
        grad: Tensor,
        saved: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
        rule: TokenMask | Tensor,
        shards: SequenceShards,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of query, key and value. ``saved`` are these, the output and the log-sum-exp."""


class _Blockwise(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        backend: Blockwise,
        rule: TokenMask | Tensor,
        shards: SequenceShards,
        scale: float,
    ) -> Tensor:
        out, lse = backend.forward(query, key, value, rule, shards, scale)
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.given = backend, rule, shards, scale
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        backend, rule, shards, scale = ctx.given
        dq, dk, dv = backend.backward(grads[0], ctx.saved_tensors, rule, shards, scale)
        return dq, dk, dv, None, None, None, None


# ---------------------------------------------------------------- in a compiled graph


def _attend_compiled(
    backend: str,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    rule: TokenMask | Tensor,
    shards: SequenceShards,
    scale: float,
) -> Tensor:
    mask = rule if isinstance(rule, Tensor) else None
    ids, causal, window = (
        (None, False, None) if isinstance(rule, Tensor) else (rule.whole_ids, rule.causal, rule.window)
    )
    layout = [shards.length, shards.padded, int(shards.zigzag)]
    out: Tensor
    out, _ = _attend_op(
        query, key, value, mask, ids, backend, shards.group.name, layout, causal, window, scale
    )
    return out


def _given(
    mask: Tensor | None, ids: Tensor | None, group: str, layout: list[int], causal: bool, window: int | None
) -> tuple[TokenMask | Tensor, SequenceShards]:
    length, padded, zigzag = layout
    shards = SequenceShards(named_group(group), length, padded, bool(zigzag))
    if mask is not None:
        return mask, shards
    return TokenMask.of_whole(causal=causal, window=window, whole_ids=ids), shards


def _owned(x: Tensor) -> Tensor:
    """Contiguous memory of its own: what an operator returns may share none."""
    x = x.contiguous()
    return x if x._base is None else x.clone()


@torch.library.custom_op("titanplug::attend_sharded", mutates_args=())
def _attend_op(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    ids: Tensor | None,
    backend: str,
    group: str,
    layout: list[int],
    causal: bool,
    window: int | None,
    scale: float,
) -> tuple[Tensor, Tensor]:
    rule, shards = _given(mask, ids, group, layout, causal, window)
    out, lse = _backend(backend).forward(query, key, value, rule, shards, scale)
    return _owned(out), _owned(lse)


@_attend_op.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    out = query.new_empty((*query.shape[:-1], value.shape[-1]))
    return out, query.new_empty(query.shape[:-1], dtype=accumulation_dtype(query.dtype))


@torch.library.custom_op("titanplug::attend_sharded_backward", mutates_args=())
def _attend_back_op(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    mask: Tensor | None,
    ids: Tensor | None,
    backend: str,
    group: str,
    layout: list[int],
    causal: bool,
    window: int | None,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    rule, shards = _given(mask, ids, group, layout, causal, window)
    saved = query, key, value, out, lse
    dq, dk, dv = _backend(backend).backward(grad, saved, rule, shards, scale)
    return _owned(dq), _owned(dk), _owned(dv)


@_attend_back_op.register_fake
def _(grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    return query.new_empty(query.shape), key.new_empty(key.shape), value.new_empty(value.shape)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    query, key, value, mask, ids, *ctx.rest = inputs
    ctx.save_for_backward(query, key, value, *output, mask, ids)


def _backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    grads = _attend_back_op(grad, *ctx.saved_tensors, *ctx.rest)
    return *grads, *[None] * 8


_attend_op.register_autograd(_backward, setup_context=_keep)


def _backend(name: str) -> Any:
    from titanplug.attention.backends import BACKENDS  # which is built from the backends that import this

    return BACKENDS[name]

"""A rank's part of a tensor that is sharded over the sequence: its layout, and ways in and out of it.

A step's own code runs alike on every rank of the context axis, on whole tensors; the loss of each rank
goes into backward divided by the number of ranks n. So a gradient of a whole tensor is g/n on each rank,
the gradient of a rank's tokens is g, and gradients of parameters are summed over the ranks.

Letters: B batch, S sequence, S_local of its tokens on this rank, N rows (B times S), V classes.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from titanplug.parallel.collectives import AxisGroup, all_reduce
from titanplug.parallel.sequence import SequenceShards, enter_shards
from titanplug.parallel.sharded_tensor import ShardedTensor


class _SumOverRanks(torch.autograd.Function):
    """Forward all-reduce; backward g from the g/n that every rank has, without communication."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: AxisGroup) -> Tensor:
        ctx.size = group.size
        return all_reduce(x, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return grads[0] * ctx.size, None


def sum_over_ranks(x: Tensor, group: AxisGroup) -> Tensor:
    """Sum what the ranks have of their tokens, for use alike on every rank."""
    result: Tensor = _SumOverRanks.apply(x, group)  # type: ignore[no-untyped-call]
    return result


def _part_of_gradient(
    shards: SequenceShards, dim: int, start: int, merged: torch.Size | None, grad: Tensor
) -> Tensor:
    """From g/n of the whole on each rank to g of this rank's tokens."""
    if merged is not None:
        grad = grad.unflatten(0, (*merged, -1))
    padded = grad.new_zeros(*grad.shape[:dim], shards.padded, *grad.shape[dim + 1 :])
    padded.narrow(dim, start, grad.shape[dim]).copy_(grad)
    return shards.scatter_padded_sum(padded, dim)


class SequencePart(ShardedTensor):
    """A tensor (*batch, S, *rest) of which this rank holds ``local`` (*batch, S_local, *rest).

    ``local`` is never cut along the sequence: a slice ``[:, start:stop]`` is told by its bounds, and that
    batch and sequence lie in one dim, (N, *rest), by ``merged``.

    Args:
        local: this rank's tokens; may itself be sharded over its last dim (``ShardedLogits``).
        shards: how the sequence lies over the ranks.
        sequence_dim: where S stands in ``local``; 1 for (B, S, *rest).
        start: first token of the sequence that counts.
        stop: the one after the last; None for S. Padding never counts.
        merged: whether the dims up to the sequence are one.
    """

    shards: SequenceShards
    sequence_dim: int
    start: int
    stop: int
    merged: bool

    @staticmethod
    def __new__(
        cls,
        local: Tensor,
        shards: SequenceShards,
        *,
        sequence_dim: int = 1,
        start: int = 0,
        stop: int | None = None,
        merged: bool = False,
    ) -> Self:
        """Wrap ``local``.

        Raises:
            ValueError: ``local`` doesn't have this rank's number of tokens.
        """
        if local.shape[sequence_dim] != shards.local_length:
            raise ValueError(
                f"An output of shape {tuple(local.shape)} where dim {sequence_dim} should be this rank's "
                f"{shards.local_length} tokens of the sequence: it isn't sharded over the sequence."
            )
        stop = shards.length if stop is None else stop
        sequence_dim %= local.ndim
        batch, rest = local.shape[:sequence_dim], local.shape[sequence_dim + 1 :]
        lead = (batch.numel() * (stop - start),) if merged else (*batch, stop - start)
        self = cls._wrap(local, (*lead, *rest))
        self.shards, self.sequence_dim = shards, sequence_dim
        self.start, self.stop, self.merged = start, stop, merged and bool(batch)
        return self._enclosed(
            partial(_part_of_gradient, shards, sequence_dim, start, batch if self.merged else None)
        )

    def whole(self) -> Tensor:
        """The whole tensor, on every rank; a collective over the axis."""
        local, dim = self.local, self.sequence_dim
        if isinstance(local, ShardedTensor):
            # The sequence first: fewer numbers over the context axis, whose ranks are further apart.
            whole = local.rewrap(self.shards.gather(local.local, dim)).whole()
        else:
            whole = self.shards.gather(local, dim)
        if not self.is_complete():
            whole = whole.narrow(dim, self.start, self.stop - self.start)
        return whole.flatten(0, dim) if self.merged else whole

    def rewrap(self, local: Tensor) -> Self:
        """The same tokens, with others of what stands before and after the sequence."""
        return self.laid_out(local)

    def laid_out(self, local: Tensor, **changes: Any) -> Self:
        """Like this one but for ``changes``, arguments of the class."""
        layout = {
            "sequence_dim": self.sequence_dim,
            "start": self.start,
            "stop": self.stop,
            "merged": self.merged,
            **changes,
        }
        return type(self)(local, self.shards, **layout)

    @property
    def num_lead(self) -> int:
        """How many dims batch and sequence are in."""
        return 1 if self.merged else self.sequence_dim + 1

    @property
    def batch_shape(self) -> torch.Size:
        """What stands before the sequence, merged or not."""
        return self.local.shape[: self.sequence_dim]

    def is_complete(self) -> bool:
        """Whether this is the whole sequence."""
        return self.stop - self.start == self.shards.length

    def is_aligned(self, other: SequencePart) -> bool:
        """Whether each token of ``other`` lies where the same one of this tensor does."""
        mine, others = (
            (x.sequence_dim, x.start, x.stop, x.merged, x.batch_shape, x.ndim) for x in (self, other)
        )
        return mine == others and self.shards == other.shards

    def counts(self) -> Tensor:
        """Whether each token of this rank is among those from ``start`` to ``stop``, (S_local,) bool."""
        positions = self.shards.positions(self.device)
        return (positions >= self.start) & (positions < self.stop)

    def stretches(self) -> list[tuple[int, int]]:
        """Offset and length of each piece of ``local`` that counts; one of no length where nothing does."""
        found, offset = [], 0
        for first, width in self.shards.chunks_of(self.shards.group.rank):
            low, high = max(first, self.start), min(first + width, self.stop)
            if low < high:
                found.append((offset + low - first, high - low))
            offset += width
        return found or [(0, 0)]

    def take(self, whole: Tensor) -> Tensor:
        """This rank's tokens of a tensor that has this one's dims of batch and sequence.

        Args:
            whole: (*batch, stop - start, ..), or (N, ..) where merged; equal on all ranks.

        Returns:
            (*batch, S_local, ..); any token where this rank's doesn't count.
        """
        whole = self.enter(whole)
        length = self.stop - self.start
        if self.merged:
            whole = whole.unflatten(0, (*self.batch_shape, length))
        index = (self.shards.positions(whole.device) - self.start).clamp(0, length - 1)
        return whole.index_select(self.sequence_dim, index)

    def enter(self, arguments: Any) -> Any:
        """What is trained, in use on this rank's tokens: they give a part of its gradient."""
        if isinstance(arguments, Tensor):
            return self._enter(arguments)
        return tree_map_only(Tensor, self._enter, arguments) if arguments else arguments

    def _enter(self, x: Tensor) -> Tensor:
        if isinstance(x, ShardedTensor):
            x = x.whole()  # autograd doesn't see its part through a function
        if not x.requires_grad:
            return x
        return enter_shards(x, self.shards.group)

    def keep(self, whole: Tensor) -> None:
        """Write this rank's tokens of ``whole`` into ``local``."""
        mine = self.take(whole)
        if not self.is_complete():
            counts = self.counts().view(-1, *[1] * (mine.ndim - self.sequence_dim - 1))
            mine = torch.where(counts, mine, self.local)
        self.local.copy_(mine)

    def reshaped(self, shape: Sequence[int]) -> Self | None:
        """In another shape, where that leaves batch and sequence as they are, or merges or splits them."""
        batch, length = self.batch_shape, self.stop - self.start
        if tuple(shape[: len(batch) + 1]) == (*batch, length):
            merged, rest = False, shape[len(batch) + 1 :]
        elif shape and shape[0] == batch.numel() * length:
            merged, rest = True, shape[1:]
        else:
            return None
        return self.laid_out(self.local.reshape(*batch, self.shards.local_length, *rest), merged=merged)

    def __repr__(self) -> str:  # type: ignore[override]
        group = self.shards.group
        return f"{type(self).__name__}(shape={tuple(self.shape)}, part {group.rank} of {group.size})"

"""How a sequence lies over the ranks of the context axis.

Under a causal mask late tokens see more than early ones. In zigzag order the sequence is cut into 2n chunks
for n ranks, and rank r holds chunks r and 2n - 1 - r, so that all ranks have the same work (Brandon et al.
2023, "Striped Attention"; Llama 3, 2024, section 3.3.2, which this is). Else rank r holds the r-th of n
blocks.

Letters: S tokens of the whole sequence, S' padded to what the ranks share evenly, S_local = S' / n.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from titanplug.parallel.collectives import AxisGroup, all_gather_dim, all_reduce, reduce_scatter_dim
from titanplug.validation import sequence_unit


@dataclass(frozen=True)
class SequenceShards:
    """One sequence over the ranks of an axis.

    Args:
        group: the context axis.
        length: S.
        padded: S', a multiple of n, or of 2n in zigzag order. The padding is at the end.
        zigzag: whether a rank holds one early and one late chunk.
    """

    group: AxisGroup
    length: int
    padded: int
    zigzag: bool
    _positions: dict[torch.device, Tensor] = field(default_factory=dict, compare=False, repr=False)

    @classmethod
    def of(cls, length: int, group: AxisGroup, *, zigzag: bool, multiple: int = 1) -> SequenceShards:
        """The shards of a sequence of ``length``, with padding where it doesn't divide.

        Args:
            length: S.
            group: the context axis.
            zigzag: the order.
            multiple: what must divide S_local besides.
        """
        unit = sequence_unit(group.size, zigzag=zigzag, multiple=multiple)
        return cls(group, length, -(-length // unit) * unit, zigzag)

    @property
    def local_length(self) -> int:
        """S_local."""
        return self.padded // self.group.size

    def chunks_of(self, rank: int) -> tuple[tuple[int, int], ...]:
        """Start and length of each stretch of the sequence that ``rank`` holds, in its order."""
        if not self.zigzag:
            return ((rank * self.local_length, self.local_length),)
        width = self.local_length // 2
        return ((rank * width, width), ((2 * self.group.size - 1 - rank) * width, width))

    def positions(self, device: torch.device) -> Tensor:
        """Where in the sequence each token of this rank stands, (S_local,) int64."""
        known = self._positions.get(device)
        if known is None:
            with torch.inference_mode(False):
                known = torch.cat(
                    [
                        torch.arange(start, start + width, device=device)
                        for start, width in self.chunks_of(self.group.rank)
                    ]
                )
            if type(known) is Tensor and not torch.compiler.is_compiling():
                self._positions[device] = known
        return known

    def shard(self, x: Tensor, dim: int) -> Tensor:
        """This rank's tokens of the whole ``x``, (.., S, ..) to (.., S_local, ..).

        The padding repeats the last token: it is valid wherever that is, and belongs to its document.
        """
        if x.requires_grad:
            x = enter_shards(x, self.group)
        missing = self.padded - self.length
        if missing:
            last = x.narrow(dim, self.length - 1, 1)
            x = torch.cat([x, *[last] * missing], dim)
        parts = [x.narrow(dim, start, width) for start, width in self.chunks_of(self.group.rank)]
        return parts[0].contiguous() if len(parts) == 1 else torch.cat(parts, dim)

    def gather_padded(self, x: Tensor, dim: int) -> Tensor:
        """The whole padded sequence in order, (.., S_local, ..) to (.., S', ..), without a gradient."""
        return self.in_order(all_gather_dim(x.unsqueeze(0), 0, self.group), dim)

    def scatter_padded_sum(self, x: Tensor, dim: int) -> Tensor:
        """Sum over ranks, of which each keeps its tokens, (.., S', ..) to (.., S_local, ..)."""
        return reduce_scatter_dim(self.by_rank(x, dim), 0, self.group).squeeze(0)

    def in_order(self, by_rank: Tensor, dim: int) -> Tensor:
        """What each rank holds, (n, .., S_local, ..), put in the order of the sequence, (.., S', ..)."""
        ranks = by_rank.unbind(0)
        if not self.zigzag:
            return torch.cat(ranks, dim)
        width = self.local_length // 2
        early = [rank.narrow(dim, 0, width) for rank in ranks]
        late = [rank.narrow(dim, width, width) for rank in reversed(ranks)]
        return torch.cat([*early, *late], dim)

    def by_rank(self, ordered: Tensor, dim: int) -> Tensor:
        """The inverse of :meth:`in_order`, contiguous."""
        dim %= ordered.ndim
        local = (*ordered.shape[:dim], self.local_length, *ordered.shape[dim + 1 :])
        ranks = ordered.new_empty(self.group.size, *local)
        for rank, into in enumerate(ranks.unbind(0)):
            at = 0
            for start, width in self.chunks_of(rank):
                into.narrow(dim, at, width).copy_(ordered.narrow(dim, start, width))
                at += width
        return ranks

    def gather(self, x: Tensor, dim: int) -> Tensor:
        """The whole sequence from this rank's tokens, (.., S_local, ..) to (.., S, ..), on every rank.

        Its gradient is the sum of the ranks' gradients of the whole; a collective in each direction.
        """
        whole: Tensor = _GatherSequence.apply(x, dim % x.ndim, self)  # type: ignore[no-untyped-call]
        return whole


class _GatherSequence(torch.autograd.Function):
    """Forward all-gather, put in order and cut; backward reduce-scatter."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, shards: SequenceShards) -> Tensor:
        ctx.dim, ctx.shards = dim, shards
        whole = shards.gather_padded(x, dim)
        if shards.length == shards.padded:
            return whole
        # A copy: the result of an autograd function that is a view could not be written into.
        return whole.narrow(dim, 0, shards.length).clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        shards, dim, grad = ctx.shards, ctx.dim, grads[0]
        missing = shards.padded - shards.length
        if missing:
            shape = (*grad.shape[:dim], missing, *grad.shape[dim + 1 :])
            grad = torch.cat([grad, grad.new_zeros(shape)], dim)
        return shards.scatter_padded_sum(grad, dim), None, None


class _Enter(torch.autograd.Function):
    """Forward identity; backward g/n on every rank from what each rank's tokens give."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: AxisGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return all_reduce(grads[0], ctx.group) / ctx.group.size, None


def enter_shards(x: Tensor, group: AxisGroup) -> Tensor:
    """A trained tensor that all ranks hold, in use on the tokens of each."""
    result: Tensor = _Enter.apply(x, group)  # type: ignore[no-untyped-call]
    return result

"""The weights of a Transformer as one rank of the tensor axis holds them, from the model's numbers.

Letters: D features, F features of the feed-forward layer, H and Hkv query and key-value heads, K features
of a head, V vocabulary, n ranks of an axis.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol


class ModelShape(Protocol):
    """The numbers of a Transformer; :class:`titanplug.models.TransformerConfig` has them by these names."""

    @property
    def vocab_size(self) -> int:
        """V."""

    @property
    def dim(self) -> int:
        """D."""

    @property
    def hidden_dim(self) -> int:
        """F."""

    @property
    def num_layers(self) -> int:
        """Number of blocks."""

    @property
    def num_heads(self) -> int:
        """H."""

    @property
    def kv_heads(self) -> int:
        """Hkv."""

    @property
    def head_size(self) -> int:
        """K."""

    @property
    def qkv_bias(self) -> bool:
        """Whether query, key and value projections have a bias."""

    @property
    def qk_norm(self) -> bool:
        """Whether queries and keys are normed."""

    @property
    def tie_embeddings(self) -> bool:
        """Whether the output layer uses the weight of the token embeddings."""


class Weight(NamedTuple):
    """A weight on one rank of the tensor axis.

    Args:
        rows: length of its first dim, which FSDP shards.
        row_size: elements of one row.
        is_partial: whether each rank of the tensor axis computes a part of its gradient.
    """

    rows: int
    row_size: int = 1
    is_partial: bool = False


def share(length: int, size: int, rank: int) -> int:
    """What ``rank`` has of ``length`` in blocks for ``size`` ranks; the last blocks may be short or empty."""
    width = -(-length // size)
    return max(0, min(width, length - rank * width))


def block_weights(model: ModelShape, tp: int, *, sequence_parallel: bool) -> list[Weight]:
    """The weights of one block.

    Args:
        model: the model.
        tp: n.
        sequence_parallel: whether norms see a shard of the sequence.
    """
    queries = model.num_heads * model.head_size // tp
    keys = model.kv_heads * model.head_size // tp
    hidden = model.hidden_dim // tp
    weights = [Weight(width, model.dim) for width in (queries, keys, keys, hidden, hidden)]
    weights += [Weight(model.dim, queries), Weight(model.dim, hidden)]
    weights += [Weight(model.dim, is_partial=sequence_parallel)] * 2
    if model.qkv_bias:
        weights += [Weight(queries), Weight(keys), Weight(keys)]
    if model.qk_norm:
        weights += [Weight(model.head_size, is_partial=True)] * 2
    return weights


def end_weights(
    model: ModelShape, tp: int, tp_rank: int, *, sequence_parallel: bool, first: bool, last: bool
) -> list[Weight]:
    """The weights outside of blocks.

    Args:
        model: the model.
        tp: n.
        tp_rank: the rank's position.
        sequence_parallel: whether the norm sees a shard of the sequence.
        first: with the token embeddings.
        last: with the final norm and the output layer.
    """
    table = Weight(share(model.vocab_size, tp, tp_rank), model.dim)
    weights = [table] * first
    if last:
        weights.append(Weight(model.dim, is_partial=sequence_parallel))
        weights += [table] * (not (model.tie_embeddings and first))
    return weights

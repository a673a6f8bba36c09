"""What one rank communicates in one training step of the Transformer, from numbers alone.

One convention holds for every kind: **bytes of the tensor that a rank passes into the operation**. That is a
rank's shard for an all-gather, the whole for a reduce-scatter and an all-reduce, the message for a send
(counted where it is sent, not where it arrives), the buffer for a broadcast, on receivers too. What a
backend then moves over the wire depends on its algorithm: a ring over n ranks sends n - 1 times the shard for
an all-gather.

Counted is a step of one batch (no accumulation) after the first ones, when stages know each other's shapes,
and without what other parts of a run send: evaluations, checkpoints, metrics. ``docs/communication.md`` has
the formulas and where they are published.

Letters: B rows, S tokens in a row, S_local of them on this rank of the context axis, D features, H and Hkv
query and key-value heads, K features of a head, V vocabulary, n ranks of an axis.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, NamedTuple, TypeAlias

from titanplug.planner.facts import Place, StepFacts
from titanplug.planner.shapes import share
from titanplug.schedules.actions import SENDS

Group: TypeAlias = Literal["fsdp", "dp_replicate", "tp", "pp", "tied", "cp", "batch", "world"]
"""Who takes part: axes and views of the mesh; the two stages that share the embeddings (``tied``); all."""
Kind: TypeAlias = Literal["all_gather", "reduce_scatter", "all_reduce", "all_to_all", "send", "broadcast"]

_NUMBER = 8
"""Bytes of a number over ranks: counts and norms are float64."""
_LOG_BUFFER = 32 * 2 * _NUMBER
"""Up to 31 logged values with their weights."""
_STAGE_MESSAGE = 64 * _NUMBER
"""What the last stage tells the others: up to 63 numbers of the step's output and logs."""


class Transfer(NamedTuple):
    """Operations that are alike: so many calls with ``size_bytes`` each."""

    group: Group
    kind: Kind
    calls: int
    size_bytes: int


class Volume(NamedTuple):
    """Operations of a kind in one group: how many calls, and the bytes of all together."""

    calls: int
    num_bytes: int


Traffic: TypeAlias = dict[Group, dict[Kind, Volume]]
_FIRST = Place()


def step_traffic(facts: StepFacts, place: Place = _FIRST) -> Traffic:
    """What a rank passes into the operations of one step, by group and kind.

    Args:
        facts: of the step.
        place: which rank.
    """
    traffic: Traffic = {}
    for axis in (_fsdp, _tensor, _pipeline, _context, _numbers):
        for group, kind, calls, size_bytes in axis(facts, place):
            kinds = traffic.setdefault(group, {})
            before = kinds.get(kind, Volume(0, 0))
            kinds[kind] = Volume(before.calls + calls, before.num_bytes + calls * size_bytes)
    return traffic


def pipeline_messages(facts: StepFacts) -> Volume:
    """Messages of one pipeline in a step, over all of its ranks.

    They are 2 m (p v - 1) for m microbatches and v stages on each of p ranks, less those between stages of
    one rank in the V-shaped schedules.
    """
    ranks = [step_traffic(facts, Place(pp=rank)).get("pp", {}) for rank in range(facts.dims.pp)]
    sends = [kinds["send"] for kinds in ranks if "send" in kinds]
    return Volume(sum(send.calls for send in sends), sum(send.num_bytes for send in sends))


def _fsdp(facts: StepFacts, place: Place) -> Iterator[Transfer]:
    """Each unit gathers its parameters and reduces its gradients, all in one flat tensor, in which the first
    dim of each weight is padded to a multiple of n.
    """
    ranks, copies, sizes = facts.dims.size("fsdp"), facts.dims.dp_replicate, facts.sizes
    for index, (count, weights) in enumerate(facts.units_at(place)):
        shard = sum(-(-weight.rows // ranks) * weight.row_size for weight in weights)
        # The root stays gathered, and so does everything while the microbatches of a pipeline run.
        again = facts.reshard_after_forward and index == 0 and facts.table is None
        if ranks > 1:
            yield Transfer("fsdp", "all_gather", count * (2 if again else 1), shard * sizes.gathered)
            yield Transfer("fsdp", "reduce_scatter", count, ranks * shard * sizes.reduced)
        if copies > 1:
            yield Transfer("dp_replicate", "all_reduce", count, shard * sizes.reduced)


def _tensor(facts: StepFacts, place: Place) -> Iterator[Transfer]:
    """Every layer enters the region split over ``tp`` twice and leaves it twice; the embeddings leave it, the
    output layer enters it. A crossing communicates in forward and backward where the sequence is sharded,
    else in one of them.
    """
    ranks = facts.dims.tp
    if ranks == 1:
        return
    first, last = facts.ends_at(place)
    crossings = 4 * facts.layers_at(place) + first + last
    for rows in facts.parts:
        hidden = facts.hidden_bytes(rows)
        if facts.shards_sequence:
            yield Transfer("tp", "all_gather", crossings, hidden // ranks)
            yield Transfer("tp", "reduce_scatter", crossings, hidden)
        else:
            yield Transfer("tp", "all_reduce", crossings, hidden)
        if last:
            yield Transfer("tp", "all_gather", 1, _logits_bytes(facts, rows))
    partial = sum(
        count * share(weight.rows, facts.dims.size("fsdp"), place.fsdp) * weight.row_size
        for count, weights in facts.units_at(place)
        for weight in weights
        if weight.is_partial
    )
    if partial:
        yield Transfer("tp", "all_reduce", 1, partial * max(4, facts.sizes.stored))


def _logits_bytes(facts: StepFacts, rows: int) -> int:
    """The loss gathers two numbers a token, in float32 at least; without loss parallel, the logits."""
    tokens, size = rows * facts.local_length, facts.sizes.activation
    if facts.loss_parallel:
        return 2 * tokens * max(4, size)
    return tokens * -(-facts.model.vocab_size // facts.dims.tp) * size


def _pipeline(facts: StepFacts, place: Place) -> Iterator[Transfer]:
    """Hidden states to the next stage, their gradients to the one before; results to all; shared weights."""
    if facts.table is None:
        return
    for action in facts.table.rows[place.pp]:
        if action.work in SENDS:
            hidden = facts.hidden_bytes(facts.parts[action.microbatch])
            yield Transfer("pp", "send", 1, hidden // facts.dims.tp if facts.shards_sequence else hidden)
    yield Transfer("pp", "broadcast", 1, _STAGE_MESSAGE)
    first, last = facts.ends_at(place)
    if facts.model.tie_embeddings and first != last:
        rows = share(facts.model.vocab_size, facts.dims.tp, place.tp)
        rows = share(rows, facts.dims.size("fsdp"), place.fsdp)
        yield Transfer("tied", "all_reduce", 1, rows * facts.model.dim * facts.sizes.stored)


def _context(facts: StepFacts, place: Place) -> Iterator[Transfer]:
    """Attention of each layer, for each microbatch; and the loss."""
    if facts.dims.cp == 1:
        return
    attention = {"all_gather": _gathered_keys, "ring": _ring, "ulysses": _ulysses}[facts.cp_backend]
    _, last = facts.ends_at(place)
    for rows in facts.parts:
        for transfer in attention(facts, rows):
            yield transfer._replace(calls=transfer.calls * facts.layers_at(place))
        if last:
            yield Transfer("cp", "all_reduce", 1, max(4, facts.sizes.activation))


def _heads_elements(facts: StepFacts, rows: int, heads: int) -> int:
    """This rank's tokens of so many heads of the model: (B, heads / tp, S_local, K)."""
    return rows * heads // facts.dims.tp * facts.local_length * facts.model.head_size


def _gathered_keys(facts: StepFacts, rows: int) -> Iterator[Transfer]:
    """Keys and values, stacked, are gathered in forward and again in backward, which scatters the sums of
    their gradients.
    """
    keys = 2 * _heads_elements(facts, rows, facts.model.kv_heads) * facts.sizes.activation
    yield Transfer("cp", "all_gather", 2, keys)
    yield Transfer("cp", "reduce_scatter", 1, facts.dims.cp * keys)


def _ring(facts: StepFacts, rows: int) -> Iterator[Transfer]:
    """Keys and values go round in both directions of the pass; their gradients come home with one step more,
    in float32 at least.
    """
    elements = 2 * _heads_elements(facts, rows, facts.model.kv_heads)
    yield Transfer("cp", "send", 2 * (facts.dims.cp - 1), elements * facts.sizes.activation)
    yield Transfer("cp", "send", facts.dims.cp, elements * max(4, facts.sizes.activation))


def _ulysses(facts: StepFacts, rows: int) -> Iterator[Transfer]:
    """Queries, keys and values in one exchange, the output in another; backward the same."""
    model, size = facts.model, facts.sizes.activation
    inputs = _heads_elements(facts, rows, model.num_heads + 2 * model.kv_heads)
    yield Transfer("cp", "all_to_all", 2, inputs * size)
    yield Transfer("cp", "all_to_all", 2, _heads_elements(facts, rows, model.num_heads) * size)


def _numbers(facts: StepFacts, place: Place) -> Iterator[Transfer]:
    """Single numbers: how many targets there are, logged values, the gradient norm."""
    if facts.dims.size("batch") > 1:
        if facts.by_targets:
            yield Transfer("batch", "all_reduce", 1, _NUMBER)
        if facts.is_logged:
            # At the end of the step, and at the end of the batch for what other hooks logged.
            yield Transfer("batch", "all_reduce", 2, _LOG_BUFFER)
    if facts.takes_norm and facts.dims.world_size > 1:
        yield Transfer("world", "all_reduce", 1, _NUMBER)

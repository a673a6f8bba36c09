"""The sharded sequence that the running model works on.

A model's border (:mod:`titanplug.parallel.context`) says for the time of its call how the sequence lies over
ranks; attention, positions and masks ask here. Where blocks are computed again in backward (activation
checkpointing), the model's call is over and backward may run on another thread, so the latest sequence of
each length is remembered for that.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from titanplug.parallel.sequence import SequenceShards


@dataclass
class ActiveSequence:
    """A sequence and how attention on it communicates.

    Args:
        shards: how it lies over ranks.
        backend: name of the attention backend.
        num_attentions: calls of attention that have been made on it.
        in_attention: whether such a call is running.
    """

    shards: SequenceShards
    backend: str
    num_attentions: int = field(default=0, compare=False)
    in_attention: bool = field(default=False, compare=False)


class _State:
    running: ActiveSequence | None = None


_state = _State()
_recent: dict[int, ActiveSequence] = {}
_ambiguous: set[int] = set()


@contextmanager
def sequence_active(sequence: ActiveSequence) -> Iterator[None]:
    """Inside, a model runs on ``sequence``."""
    before, _state.running = _state.running, sequence
    length = sequence.shards.local_length
    known = _recent.setdefault(length, sequence)
    if known is not sequence:
        _recent[length] = sequence
        if known.shards != sequence.shards:
            _ambiguous.add(length)
    try:
        yield
    finally:
        _state.running = before


def active_sequence(local_length: int) -> ActiveSequence | None:
    """The sequence of which ``local_length`` tokens are here; None where nothing is sharded."""
    if _state.running is not None or torch.compiler.is_compiling():
        return _state.running
    if _recent and torch._C._current_graph_task_id() != -1:
        return _recent.get(local_length)  # computed again in backward
    return None


def is_ambiguous(local_length: int) -> bool:
    """Whether a computation is repeated in backward, and sequences of two lengths may be meant."""
    return local_length in _ambiguous and _state.running is None


def forget_sequences() -> None:
    """A step begins, or the run is over."""
    _recent.clear()
    _ambiguous.clear()

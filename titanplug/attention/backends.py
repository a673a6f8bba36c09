"""How attention on a sharded sequence communicates: the backends, and what each of them can do.

==========  ===========================================================  =================================
backend     communicates, a layer                                         can't do
==========  ===========================================================  =================================
all_gather  keys and values of all ranks, again in backward               dropout
ring        keys and values from rank to rank while it computes           windows, documents, dropout
ulysses     queries, keys, values and outputs: sequence against heads     fewer heads than ranks
torch       as ring, by torch's context-parallel API                      as ring
==========  ===========================================================  =================================

All are exact. Names are in :data:`titanplug.validation.CONTEXT_BACKENDS`.
"""

from __future__ import annotations

from typing import ClassVar, Protocol

from torch import Tensor

from titanplug.attention.all_gather import AllGather
from titanplug.attention.mask import TokenMask
from titanplug.attention.ring import Ring
from titanplug.attention.torch_ring import TorchRing
from titanplug.attention.ulysses import Ulysses
from titanplug.errors import ConfigError
from titanplug.parallel.sequence import SequenceShards


class Backend(Protocol):
    """A way to compute attention of this rank's queries to the keys of the whole sequence."""

    name: ClassVar[str]
    can: ClassVar[frozenset[str]]
    """Which of "window", "documents", "mask", "padding" and "dropout" it honours."""

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
        """(B, H, S_local, K), (B, Hkv, S_local, K), (B, Hkv, S_local, V) -> (B, H, S_local, V)."""
        ...


_ALL: tuple[Backend, ...] = AllGather(), Ring(), Ulysses(), TorchRing()
BACKENDS = {backend.name: backend for backend in _ALL}
_SHOWN = {
    "window": "a sliding window",
    "documents": "document ids",
    "mask": "a mask tensor",
    "padding": "a sequence that is padded and not causal",
    "dropout": "attention dropout",
}


def require_backend(name: str, rule: TokenMask | Tensor, shards: SequenceShards, dropout_p: float) -> Backend:
    """The backend of that name, if it can do what is asked.

    Raises:
        ConfigError: it can't; the message names those that can.
    """
    needs = _needs(rule, shards, dropout_p)
    backend = BACKENDS[name]
    missing = [need for need in needs if need not in backend.can]
    if missing:
        able = [repr(other) for other, known in BACKENDS.items() if known.can >= set(needs)]
        remedy = f"Use cp_backend={' or '.join(able)}" if able else "No backend can: use cp=1"
        raise ConfigError(
            f"cp_backend={name!r} can't do {' and '.join(_SHOWN[need] for need in missing)}. {remedy}."
        )
    return backend


def _needs(rule: TokenMask | Tensor, shards: SequenceShards, dropout_p: float) -> list[str]:
    needs = []
    if isinstance(rule, Tensor):
        needs.append("mask")
    else:
        if rule.document_ids is not None:
            needs.append("documents")
        if rule.window is not None and rule.window < shards.length:
            needs.append("window")
        if not rule.causal and shards.length < shards.padded:
            needs.append("padding")
    if dropout_p:
        needs.append("dropout")
    return needs

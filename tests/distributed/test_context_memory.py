"""What a rank holds in a step: it falls with the number of ranks that share a sequence.

Counted are the bytes of all tensors that live at once, from the first to the last operation of a step: what
autograd keeps, and what is gathered for a moment. What doesn't grow with the sequence (weights, gradients)
drops out of the difference between a sequence and one of twice the length.
"""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks.loops import Module, Workload, run_trainer
from tests.harness import run_ranks
from titanplug.strategy import TitanStrategy

IDEAL = 1.15
"""At most this much of a share as it should be."""
LENGTH = 128
BACKENDS = ["all_gather", "ring", "ulysses", "torch"]


class _LiveBytes(TorchDispatchMode):
    """Follows every storage that an operation returns, until it is freed."""

    def __init__(self) -> None:
        super().__init__()
        self._known: set[int] = set()
        self.live = self.peak = 0

    def start(self) -> None:
        """Count what comes on top of what is there now."""
        self.live = self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and leaf.device.type == "cpu":
                self._follow(leaf.untyped_storage())
        return result

    def _follow(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self._known:
            return
        size = storage.nbytes()
        self._known.add(key)
        self.live += size
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._release, key, size)

    def _release(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.live -= size


def _peak_bytes(rank: int, world_size: int, seq_len: int, backend: str) -> int:
    """The largest number of bytes at once in the third step, above those at its start."""
    workload = Workload(dim=64, num_layers=8, seq_len=seq_len, batch_size=2, vocab_size=64, num_steps=4)
    live = _LiveBytes()
    peaks: list[int] = []

    def mark(step: int) -> None:
        peaks.append(live.peak)
        live.start()

    strategy = TitanStrategy(cp=world_size, dp_shard=1, cp_backend=backend)
    with live:
        run_trainer(workload, strategy, world_size, 1, mark, Module(workload))
    return peaks[1 + 2]


def peak_bytes(cp: int, seq_len: int, backend: str) -> int:
    return max(run_ranks(_peak_bytes, cp, seq_len, backend, init_process_group=False))


@pytest.mark.parametrize("backend", BACKENDS)
def test_activations_fall_with_the_ranks_of_a_sequence(backend: str) -> None:
    per_token = {}
    for cp in (1, 2, 4):
        short, long = (peak_bytes(cp, length, backend) for length in (LENGTH, 2 * LENGTH))
        per_token[cp] = (long - short) / LENGTH
    shares = {cp: cp * bytes_ / per_token[1] for cp, bytes_ in per_token.items()}
    print(f"{backend}: bytes a token of the sequence on a rank {per_token}, over the ideal share {shares}")
    assert per_token[1] > 8 * 64 * 4  # something was counted
    assert max(shares.values()) <= IDEAL


@pytest.mark.parametrize("backend", BACKENDS)
def test_longer_sequences_on_more_ranks_take_the_same_memory(backend: str) -> None:
    peaks = {cp: peak_bytes(cp, cp * LENGTH, backend) for cp in (1, 2, 4)}
    print(f"{backend}: bytes on a rank with {LENGTH} tokens on each {peaks}")
    assert max(peaks.values()) <= IDEAL * peaks[1]

"""What a schedule keeps for its backwards, and what its ranks tell each other in a step.

The live bytes of a rank are those of the tensors that autograd has saved, each storage once, weights left
out: the activations of the microbatches between their forward and their backward.
"""

from __future__ import annotations

import weakref
from collections import Counter
from itertools import pairwise
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.loops import Module, Workload, run_trainer
from tests.harness import run_ranks
from titanplug.strategy import TitanStrategy

SLACK = 1.02
"""Rotary tables are shared by all microbatches."""
NUM_STEPS = 4
WORKLOAD = Workload(dim=32, num_layers=8, seq_len=16, batch_size=8, vocab_size=64, num_steps=NUM_STEPS)
OBJECT_COLLECTIVES = (
    "all_gather_object",
    "broadcast_object_list",
    "gather_object",
    "recv_object_list",
    "scatter_object_list",
    "send_object_list",
)


def _fit(world_size: int, schedule: str, num_microbatches: int, mark: Any, module: L.LightningModule) -> None:
    strategy = TitanStrategy(
        pp=world_size, dp_shard=1, pp_schedule=schedule, pp_microbatches=num_microbatches
    )
    run_trainer(WORKLOAD, strategy, world_size, 1, mark, module)


# ---------------------------------------------------------------- memory


class _Saved:
    """A tensor that autograd keeps; it lives as long as a backward may need it."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


class _SavedBytes(torch.autograd.graph.saved_tensors_hooks):
    """Counts the bytes saved for backward, and the most there were at once."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__(self._pack, lambda saved: saved.tensor)
        self._module = module
        self._weights: set[int] = set()
        self._users: Counter[int] = Counter()
        self.live = self.peak = 0

    def start(self) -> None:
        """Count the peak from here on."""
        self._weights = {p.untyped_storage().data_ptr() for p in self._module.parameters()}
        self.peak = self.live

    def _pack(self, tensor: Tensor) -> _Saved:
        storage = tensor.untyped_storage()
        place, size = storage.data_ptr(), storage.nbytes()
        saved = _Saved(tensor)
        if place not in self._weights:
            if not self._users[place]:
                self.live += size
                self.peak = max(self.peak, self.live)
            self._users[place] += 1
            weakref.finalize(saved, self._release, place, size)
        return saved

    def _release(self, place: int, size: int) -> None:
        self._users[place] -= 1
        if not self._users[place]:
            self.live -= size


def _peak_bytes(rank: int, world_size: int, schedule: str, num_microbatches: int) -> tuple[int, list[int]]:
    """The largest number of live bytes in the third step, and what was live after each step."""
    module = Module(WORKLOAD)
    saved = _SavedBytes(module)
    left: list[int] = []
    peaks: list[int] = []

    def mark(step: int) -> None:
        left.append(saved.live)
        peaks.append(saved.peak)
        saved.start()

    with saved:
        _fit(world_size, schedule, num_microbatches, mark, module)
    return peaks[1 + 2], left


@pytest.mark.parametrize("pp", [2, 4])
def test_one_f_one_b_keeps_fewer_activations(pp: int) -> None:
    """GPipe keeps m microbatches on every rank, 1F1B p - r on rank r."""
    number = 8
    peaks = {}
    for schedule in ("GPipe", "1F1B"):
        ranks = run_ranks(_peak_bytes, pp, schedule, number, init_process_group=False)
        assert all(bytes_left == 0 for _, left in ranks for bytes_left in left), "kept beyond a step"
        peaks[schedule] = [peak for peak, _ in ranks]
    shares = [one / all_ for one, all_ in zip(peaks["1F1B"], peaks["GPipe"], strict=True)]
    print(f"pp={pp}, {number} microbatches: {peaks} bytes at most, 1F1B / GPipe {shares}")
    for rank, share in enumerate(shares):
        assert share <= (pp - rank) / number * SLACK, (rank, shares, peaks)
    assert min(peaks["GPipe"]) > number * WORKLOAD.seq_len * WORKLOAD.dim * 4  # something was counted


def test_interleaved_keeps_what_its_warm_up_has() -> None:
    """2 (p - r - 1) + (v - 1) p + 1 of the v m halves that GPipe has, v = 2."""
    pp, number, chunks = 2, 8, 2
    peaks = {
        schedule: [peak for peak, _ in run_ranks(_peak_bytes, pp, schedule, number, init_process_group=False)]
        for schedule in ("LoopedBFS", "Interleaved1F1B")
    }
    shares = [one / all_ for one, all_ in zip(peaks["Interleaved1F1B"], peaks["LoopedBFS"], strict=True)]
    print(f"pp={pp}, {number} microbatches: {peaks} bytes at most, Interleaved1F1B / LoopedBFS {shares}")
    for rank, share in enumerate(shares):
        live = 2 * (pp - rank - 1) + (chunks - 1) * pp + 1
        assert share <= live / (chunks * number) * SLACK, (rank, shares, peaks)


# ---------------------------------------------------------------- messages


class _Communication(TorchDispatchMode):
    """Counts what is sent and the collectives, by torch's names of them."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func)
        if name.startswith(("c10d.", "_c10d_functional.")) and "wait" not in name:
            self.counts[name.split(".")[1]] += 1
        return func(*args, **(kwargs or {}))


class _LoggingModule(Module):
    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        return loss


def _count_communication(
    rank: int, world_size: int, schedule: str, num_microbatches: int
) -> list[dict[str, int]]:
    """For each step, what this rank communicates; ``object`` are collectives of Python objects."""
    mode = _Communication()
    marks: list[Counter[str]] = []

    def counted(collective: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            mode.counts["object"] += 1
            return collective(*args, **kwargs)

        return call

    for name in OBJECT_COLLECTIVES:
        wrapped = counted(getattr(distributed_c10d, name))
        setattr(dist, name, wrapped)
        setattr(distributed_c10d, name, wrapped)
    module = _LoggingModule(WORKLOAD)
    with mode:
        _fit(world_size, schedule, num_microbatches, lambda _: marks.append(mode.counts.copy()), module)
    return [dict(after - before) for before, after in pairwise(marks)]


@pytest.mark.parametrize("num_microbatches", [4, 8])
@pytest.mark.parametrize(
    ("schedule", "pp", "chunks"), [("1F1B", 2, 1), ("Interleaved1F1B", 2, 2), ("1F1B", 4, 1)]
)
def test_messages_of_a_step(schedule: str, pp: int, chunks: int, num_microbatches: int) -> None:
    """2 m (p v - 1) messages and one broadcast of the results; the first step tells shapes and forms, too."""
    ranks = run_ranks(_count_communication, pp, schedule, num_microbatches, init_process_group=False)
    borders = pp * chunks - 1
    for step in range(3):
        sends = sum(rank[step].pop("send", 0) for rank in ranks)
        received = sum(rank[step].pop("recv_", 0) for rank in ranks)
        headers = borders if step == 0 else 0
        assert sends == received == 2 * num_microbatches * borders + headers, (step, sends, received)
    assert all(rank[0]["object"] == 1 for rank in ranks), "the form of the results, once"
    for step in (1, 2):
        assert all(rank[step] == {"broadcast_": 1} for rank in ranks), [rank[step] for rank in ranks]

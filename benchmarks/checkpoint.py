"""Checkpoints of Trainer + TitanStrategy(dp_shard=2) against torch's distributed checkpoint alone.

    python -m benchmarks.checkpoint [--rounds 7] [--sizes "0.6 GB"] [--folder /mnt/disk] [--output x.json]

In the same two processes, in turns, with the same parameters and optimizer tensors:

- ``save``: ``trainer.save_checkpoint`` against ``dcp.save`` of the tensors, both synchronous and with fsync;
- ``load``: ``strategy.load_checkpoint`` (into module and optimizer) against ``dcp.load`` into
  the module's and new ones for the optimizer;
- ``blocking``: ``trainer.save_checkpoint`` with ``save_in_background=True``, until it returns, against a copy
  of the tensors into host memory: into new memory for the first, into memory that is there for the others.

Times are those of the slower rank, ratios those of a round; shown are the median and the quartiles.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader
from typing_extensions import override

from benchmarks.loops import Module, RandomTokens, Workload
from tests.harness import run_ranks
from titanplug.checkpoint.directory import optimizer_key
from titanplug.checkpoint.state import split_tensors, tensors_of
from titanplug.strategy import TitanStrategy

SIZES = {
    "0.1 GB": Workload(dim=256, num_layers=8, seq_len=32, batch_size=1, vocab_size=8192, num_steps=2),
    "0.6 GB": Workload(dim=768, num_layers=8, seq_len=32, batch_size=1, vocab_size=8192, num_steps=2),
    "2.4 GB": Workload(dim=1536, num_layers=8, seq_len=32, batch_size=1, vocab_size=8192, num_steps=2),
}
DEMANDED = {"save": 1.1, "load": 1.1, "blocking": 1.2}
"""Time of titan over that of the other, at most."""

Times = dict[str, list[tuple[float, float]]]
"""By what is measured: seconds of titan and of the other, by round."""


class Measure(L.Callback):
    """Takes the times when the optimizer has its state."""

    def __init__(self, folder: Path, rounds: int, in_background: bool) -> None:
        self.folder = folder
        self.rounds = rounds
        self.in_background = in_background
        self.times: Times = {}
        self.num_bytes = 0

    @override
    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        strategy: Any = trainer.strategy
        state = split_tensors(strategy.optimizer_state(strategy.optimizers[0]))[1]
        tensors = {
            "state_dict": tensors_of(strategy.lightning_module_state_dict()),
            optimizer_key(0): state,
        }
        local = [t._local_tensor if isinstance(t, DTensor) else t for t in _leaves(tensors)]
        self.num_bytes = sum(t.nbytes for t in local)
        if self.in_background:
            self._measure_blocking(trainer, strategy, local)
        else:
            self._measure_both(trainer, strategy, tensors)

    def _measure_both(self, trainer: L.Trainer, strategy: Any, tensors: dict[str, Any]) -> None:
        ours, plain = self.folder / "titan.ckpt", self.folder / "plain"
        for _ in range(self.rounds):
            if dist.get_rank() == 0:
                shutil.rmtree(plain, ignore_errors=True)
                shutil.rmtree(ours, ignore_errors=True)
            self._add(
                "save",
                _seconds(lambda: trainer.save_checkpoint(ours)),
                _seconds(lambda: dcp.save(tensors, storage_writer=dcp.FileSystemWriter(plain))),
            )
        for _ in range(self.rounds):
            self._add(
                "load",
                _seconds(lambda: strategy.load_checkpoint(ours)),
                _seconds(lambda: _load_plainly(tensors, plain)),
            )

    def _measure_blocking(self, trainer: L.Trainer, strategy: Any, local: list[Tensor]) -> None:
        path = self.folder / "background.ckpt"
        room: list[Tensor] = []
        for number in range(self.rounds + 1):
            ours = _seconds(lambda: trainer.save_checkpoint(path))
            strategy.finish_saving()
            if number == 0:
                copied = _seconds(lambda: room.extend(t.to("cpu", copy=True) for t in local))
            else:
                copied = _seconds(lambda: torch._foreach_copy_(room, local))
            self._add("blocking, first" if number == 0 else "blocking", ours, copied)

    def _add(self, what: str, ours: float, other: float) -> None:
        self.times.setdefault(what, []).append((ours, other))


def _load_plainly(tensors: dict[str, Any], path: Path) -> None:
    """Into the module, and into new tensors for the optimizer, which has none in a resumed run."""
    wanted = {
        key: section if key == "state_dict" else _map(torch.empty_like, section)
        for key, section in tensors.items()
    }
    dcp.load(wanted, storage_reader=dcp.FileSystemReader(path))


def _map(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _map(function, item) for key, item in value.items()}
    return function(value)


def _leaves(value: Any) -> list[Tensor]:
    if isinstance(value, dict):
        return [leaf for item in value.values() for leaf in _leaves(item)]
    return [value]


def _seconds(action: Callable[[], Any]) -> float:
    dist.barrier()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    begin = time.perf_counter()
    action()
    own = torch.tensor(time.perf_counter() - begin)
    dist.all_reduce(own, op=dist.ReduceOp.MAX)
    return own.item()


def run(rank: int, num_ranks: int, workload: Workload, folder: Path, rounds: int) -> tuple[Times, int]:
    """All measurements, in one of two ranks."""
    times: Times = {}
    num_bytes = 0
    for in_background in (False, True):
        measure = Measure(folder, rounds, in_background)
        trainer = L.Trainer(
            accelerator="cpu",
            devices=num_ranks,
            strategy=TitanStrategy(dp_shard=num_ranks, save_in_background=in_background),
            max_steps=workload.num_steps,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            callbacks=[measure],
        )
        rows = RandomTokens(workload, workload.num_steps * num_ranks)
        trainer.fit(Module(workload), DataLoader(rows, batch_size=workload.batch_size))
        times |= measure.times
        num_bytes = measure.num_bytes
    return times, num_bytes


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--folder", type=Path, help="where to write; default: the system's temporary folder")
    parser.add_argument("--output", type=Path, help="JSON with all times")
    given = parser.parse_args()
    found: dict[str, Times] = {}
    print(f"{'state':<8} {'what':<16} {'titan':>8} {'other':>8} {'ratio':>6}  quartiles   GB/s")
    for size in given.sizes:
        with tempfile.TemporaryDirectory(dir=given.folder) as folder:
            arguments = (SIZES[size], Path(folder), given.rounds)
            times, num_bytes = run_ranks(run, 2, *arguments, timeout_s=1200.0, init_process_group=False)[0]
        found[size] = times
        for what, rounds in times.items():
            ratios = sorted(ours / other for ours, other in rounds)
            low, middle, high = _quartiles(ratios)
            ours, other = (statistics.median(column) for column in zip(*rounds, strict=True))
            limit = DEMANDED.get(what, 0.0)
            mark = "" if not limit else f"  (at most {limit})"
            print(
                f"{size:<8} {what:<16} {ours:>7.3f}s {other:>7.3f}s {middle:>6.2f}  {low:.2f}-{high:.2f}  "
                f"{2 * num_bytes / ours / 1e9:>5.2f}{mark}",
                flush=True,
            )
    if given.output is not None:
        given.output.write_text(json.dumps(found))


def _quartiles(values: list[float]) -> tuple[float, float, float]:
    if len(values) == 1:
        return values[0], values[0], values[0]
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high


if __name__ == "__main__":
    main()

"""Gives each loader of a Trainer its data-parallel coordinate and a place to resume from."""

from __future__ import annotations

import os
import warnings
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.utilities.data import sized_len
from lightning.fabric.utilities.seed import pl_worker_init_function
from lightning.pytorch import Trainer
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from titanplug.mesh import Mesh
from titanplug.parallel.initialise import named_seed
from titanplug.strategy.loader_states import keep_window_starts, reads_ahead
from titanplug.strategy.loaders import LockstepLoader, copied_loader, shard_map_loader
from titanplug.strategy.read_ahead import account_for_read_ahead
from titanplug.strategy.resume import continue_epoch, data_state


class DataSharding:
    """Shards the loaders of one Trainer, unless ``use_distributed_sampler=False`` says they are.

    Args:
        trainer: the Trainer. Its own injection of samplers is switched off: it always shuffles training
            data, and repeats evaluation samples.
        mesh: the mesh.
        seed: the run's seed.
    """

    def __init__(self, trainer: Trainer, mesh: Mesh, seed: int) -> None:
        connector: Any = trainer._accelerator_connector
        wanted = getattr(connector, "_titanplug_shard", connector.use_distributed_sampler)
        connector._titanplug_shard = wanted
        connector.use_distributed_sampler = False
        self._enabled: bool = wanted
        self._trainer = trainer
        self._mesh = mesh
        self.seed = seed
        self._rank, self._size = mesh.rank("batch"), mesh["batch"].size()
        self._host_group: dist.ProcessGroup | None = None
        self._saved: dict[str, Any] = {}
        self._loader_states: list[Any] = []

    def shard(self, loader: Any) -> Any:
        """The loader, limited to the samples of this rank; called alike on all ranks.

        A loader stays as it is: what is changed is a copy.
        """
        dataset = getattr(loader, "dataset", None)
        by_index = isinstance(loader, DataLoader) and not isinstance(dataset, IterableDataset)
        own_generator = loader.generator if isinstance(loader, DataLoader) else None
        if self._enabled and by_index and not _is_sharded(loader):
            loader = shard_map_loader(
                loader,
                training=bool(self._trainer.training),
                seed=self._order_seed(own_generator),
                rank=self._rank,
                size=self._size,
            )
            self._seed_workers(loader)
            return loader
        if isinstance(loader, DataLoader):
            seed = named_seed(self._order_seed(own_generator), f"workers of {self._rank}")
            loader = copied_loader(loader, torch.Generator().manual_seed(seed))
            self._seed_workers(loader)
        if isinstance(loader, LockstepLoader):
            return loader
        if self._size == 1:
            return loader if sized_len(loader) is not None else self._account_for_read_ahead(loader)
        if self._enabled and not by_index:
            self._tell_coordinate(loader, dataset)
        lengths = self._gather(_known_length(loader))
        if lengths[0] is not None and len(set(lengths)) == 1:
            return loader
        return LockstepLoader(self._account_for_read_ahead(loader), self._group())

    def _account_for_read_ahead(self, loader: Any) -> Any:
        return account_for_read_ahead(loader, partial(reads_ahead, self._trainer))

    def _order_seed(self, own: torch.Generator | None) -> int:
        """The run's seed; where the user gave the loader a generator, that of rank 0 decides too."""
        if own is None:
            return self.seed
        seeds = [own.initial_seed()]
        dist.broadcast_object_list(seeds, src=0)
        return named_seed(self.seed, str(seeds[0])) % 2**62

    def _tell_coordinate(self, loader: Any, dataset: Any) -> None:
        for target in (loader, dataset):
            tell = getattr(target, "set_data_parallel", None)
            if callable(tell):
                tell(self._rank, self._size)
                return
        warnings.warn(
            f"{type(dataset if dataset is not None else loader).__name__} can't be sharded from outside "
            f"and has no `set_data_parallel(rank, size)`, so each of the {self._size} data-parallel ranks "
            "reads all of it unless it shards itself. Add that method and yield every size-th sample from "
            "rank on, or pass Trainer(use_distributed_sampler=False) if it is sharded already.",
            stacklevel=2,
        )

    def _seed_workers(self, loader: DataLoader[Any]) -> None:
        # By data-parallel rank: ranks of the other axes must read and augment the same samples.
        if int(os.environ.get("PL_SEED_WORKERS", 0)) and loader.worker_init_fn is None:
            loader.worker_init_fn = partial(pl_worker_init_function, rank=self._rank)

    def _gather(self, value: Any) -> list[Any]:
        """The value of each data-parallel rank, in their order."""
        values = [value] * self._size
        if self._size > 1:
            dist.all_gather_object(values, value, group=self._group())
        return values

    def _group(self) -> dist.ProcessGroup:
        """A group of the ``batch`` view that reduces CPU tensors, so that no device is waited for."""
        group = self._mesh.group("batch")
        if dist.get_backend(group) == "gloo":
            return group
        if self._host_group is None:
            ranks = dist.get_process_group_ranks(group)
            self._host_group = dist.new_subgroups_by_enumeration(_all_lines(ranks), backend="gloo")[0]
        return self._host_group

    def state(self) -> dict[str, Any]:
        """What a checkpoint has to know of the data."""
        return data_state(self._trainer, self.seed, self._size)

    def load_state(self, state: dict[str, Any], loader_states: list[Any]) -> None:
        """Take over from a checkpoint; called before there are loaders.

        Args:
            state: what :meth:`state` returned; empty where another strategy wrote the checkpoint. Where
                the number of data-parallel ranks is another one and their loaders' states differ,
                ``all_loader_states`` in it has them, by rank and loader.
            loader_states: what this rank's loaders saved, of those that have a state.
        """
        self._saved, self._loader_states = state, loader_states
        self.seed = state.get("seed", self.seed)

    def resume(self) -> None:
        """Start the training of a resumed run where it stood; called before the first batch."""
        saved, self._saved = self._saved, {}
        loader_states, self._loader_states = self._loader_states, []
        continue_epoch(self._trainer, saved, loader_states, self._size, self._gather)
        keep_window_starts(self._trainer)


def _is_sharded(loader: DataLoader[Any]) -> bool:
    """Whether the user has put torch's distributed sampler in."""
    samplers = (loader.sampler, getattr(loader.batch_sampler, "sampler", None))
    return any(isinstance(sampler, DistributedSampler) for sampler in samplers)


def _known_length(loader: Any) -> int | None:
    """Number of batches, where it can be relied on.

    A stream's own length is often that of all ranks' samples; a loader that takes the coordinate itself
    knows its length.
    """
    streams = isinstance(getattr(loader, "dataset", None), IterableDataset)
    if streams and not hasattr(type(loader), "set_data_parallel"):
        return None
    try:
        return len(loader)
    except (TypeError, NotImplementedError):
        return None


def _all_lines(own: list[int]) -> list[list[int]]:
    lines: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(lines, own)
    return [list(line) for line in dict.fromkeys(map(tuple, lines))]

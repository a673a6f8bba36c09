"""The loader of training rows that are in memory or in a mapped file: its position can be saved.

The position counts batches that were handed out, not batches that workers have read ahead, so that
a resumed run neither repeats nor loses one. The order is that of torch's ``DistributedSampler``
with the same seed, on one process too, and depends on no global random state.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader, Dataset, RandomSampler, Sampler
from typing_extensions import override

from titanplug.data.packing import Row
from titanplug.errors import ConfigError


class EpochRandomSampler(RandomSampler):
    """All rows in an order that only the seed and the epoch decide.

    The order equals that of ``DistributedSampler(num_replicas=1, seed=seed)``; several replicas
    take turns in it. As a ``RandomSampler``, it is replaced by a distributed sampler where one is
    needed.

    Args:
        data_source: a dataset with a length.
        seed: of the order.

    Attributes:
        epoch: set by ``set_epoch``, which Lightning calls before each epoch.
    """

    def __init__(self, data_source: Dataset[Any], seed: int) -> None:
        super().__init__(data_source)  # type: ignore[arg-type]  # typed as Sized
        self.seed = seed
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of the next iteration."""
        self.epoch = epoch

    @override
    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        yield from torch.randperm(self.num_samples, generator=generator).tolist()


class _Place(NamedTuple):
    """A place in the rows: an epoch, and the batches of it that are over.

    ``trainer_epoch`` is the epoch as the trainer counts. After some checkpoints Lightning counts an
    epoch in which it trained nothing; the order must not jump with it.
    """

    epoch: int = 0
    trainer_epoch: int = 0
    num_batches: int = 0


class _SkippingSampler:
    """The batches of indices of a loader, without the first ones of the running epoch."""

    def __init__(self) -> None:
        self.index_sampler: Any = None
        self.skip = 0

    def __iter__(self) -> Iterator[Any]:
        return islice(iter(self.index_sampler), self.skip, None)

    def __len__(self) -> int:
        return len(self.index_sampler)  # of the whole epoch


class StatefulDataLoader(DataLoader[Row]):
    """A ``DataLoader`` over a dataset with a length whose position within an epoch can be saved.

    The state counts rows of all data-parallel ranks, so a run resumes at the same row with another
    number of ranks or another batch size, if a whole number of batches leads there.

    Args:
        dataset: map-style.
        batch_size: rows of this rank in a batch.
        shuffle: a new order each epoch.
        seed: of the order.
        sampler: instead of ``shuffle``. How many ranks share the rows is told by ``num_replicas``
            of the sampler or ``size`` of a batch sampler that a strategy puts in; else it is 1.
        **kwargs: further arguments of ``DataLoader``.
    """

    def __init__(
        self,
        dataset: Dataset[Row],
        batch_size: int | None = 1,
        shuffle: bool = False,
        seed: int = 0,
        sampler: Sampler[int] | None = None,
        **kwargs: Any,
    ) -> None:
        self._place = _Place()
        self._resume: _Place | None = None  # until the next iteration begins
        self._skipping = _SkippingSampler()
        if shuffle:
            sampler = EpochRandomSampler(dataset, seed)
        if kwargs.get("generator") is None:
            # Seeds of workers come from here; otherwise every epoch draws from the global state.
            kwargs["generator"] = torch.Generator().manual_seed(seed)
        super().__init__(dataset, batch_size=batch_size, sampler=sampler, **kwargs)

    @property
    def _index_sampler(self) -> _SkippingSampler:
        self._skipping.index_sampler = super()._index_sampler
        return self._skipping

    @override
    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        # A generator: nothing happens before the first batch is asked for. Lightning makes the
        # iterator of a resumed run before it tells the sampler the epoch.
        self._place = self._find_start()
        self._resume = None
        self._set_epoch(self._place.epoch)
        self._skipping.skip = self._place.num_batches
        if told := getattr(self.batch_sampler, "skip", 0):
            # A batch sampler that a strategy put in, and told where to go on.
            self._skipping.skip, self._place = 0, self._place._replace(num_batches=told)
        for batch in super().__iter__():
            self._place = self._place._replace(num_batches=self._place.num_batches + 1)
            yield batch
        self._place = _Place(self._place.epoch + 1, self._place.trainer_epoch + 1)
        self._set_epoch(self._place.trainer_epoch)

    def state_dict(self) -> dict[str, int]:
        """The position, the same on every data-parallel rank."""
        place = self._resume or self._place
        return {
            "epoch": place.epoch,
            "trainer_epoch": place.trainer_epoch,
            "num_rows": place.num_batches * self._rows_per_batch,
            "dataset_rows": len(self.dataset),  # type: ignore[arg-type]  # typed without length
        }

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """Go on where ``state_dict`` was taken; takes effect on the next iteration.

        Raises:
            ConfigError: the data has another number of rows, or no whole number of batches leads to
                the position.
        """
        dataset_rows = len(self.dataset)  # type: ignore[arg-type]
        if state_dict["dataset_rows"] != dataset_rows:
            raise ConfigError(
                f"The saved position is in data of {state_dict['dataset_rows']} rows, here are "
                f"{dataset_rows}: a run goes on with the same text, tokenizer and seq_len. Use "
                "those, or start a new run from the saved weights."
            )
        num_batches, rest = divmod(state_dict["num_rows"], self._rows_per_batch)
        if rest:
            raise ConfigError(
                f"The saved position is row {state_dict['num_rows']} of the epoch, and a step now "
                f"reads {self._rows_per_batch} rows (batch_size={self.batch_size} on "
                f"{self._num_replicas} data-parallel ranks): no whole number of steps leads there. "
                "Choose batch_size and data-parallel ranks whose product divides the position."
            )
        place = _Place(state_dict["epoch"], state_dict["trainer_epoch"], num_batches)
        if num_batches >= len(self):
            place = _Place(place.epoch + 1, place.trainer_epoch + 1)
        self._resume = place
        self._set_epoch(place.trainer_epoch)

    def _find_start(self) -> _Place:
        trainer_epoch = getattr(self.sampler, "epoch", self._place.trainer_epoch)
        if self._resume is None:
            ahead = self._place.epoch - self._place.trainer_epoch
            return _Place(trainer_epoch + ahead, trainer_epoch)
        if self._resume.num_batches == 0 or self._resume.trainer_epoch == trainer_epoch:
            return self._resume._replace(trainer_epoch=trainer_epoch)
        # A limit on batches ended the epoch there: its rest is left.
        return _Place(self._resume.epoch + 1, trainer_epoch)

    @property
    def _num_replicas(self) -> int:
        in_batches = getattr(self.batch_sampler, "size", 1)
        return int(getattr(self.sampler, "num_replicas", in_batches))

    @property
    def _rows_per_batch(self) -> int:
        return (self.batch_size or 1) * self._num_replicas

    def _set_epoch(self, epoch: int) -> None:
        if callable(set_epoch := getattr(self.sampler, "set_epoch", None)):
            set_epoch(epoch)

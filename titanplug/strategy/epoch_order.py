"""The order of samples in an epoch, and the random numbers of a fetched batch, from seed and epoch alone.

Samplers draw from the global generators of Python, NumPy and torch, or from one of their own. Ranks don't
hold those in the same state: one of them may have drawn a number for itself, or was seeded by another
number. Here a sampler draws with states that depend on seed and epoch only, and what others see of the
generators is as if it had not drawn at all.
"""

from __future__ import annotations

import copy
import itertools
import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch.utils.data import RandomSampler, Sampler

# Items drawn at a time: a sampler may go on without end.
_CHUNK = 1024


class EpochOrder(Sampler[Any]):
    """What a sampler or a batch sampler yields in an epoch; random draws depend on seed and epoch only.

    Args:
        source: the user's sampler or batch sampler; it stays as it is.
        seed: of the order, equal on all ranks.
        workers: the generator that gives data workers their seeds, and the seed of its own.
    """

    def __init__(self, source: Any, seed: int, workers: tuple[torch.Generator, int] | None = None) -> None:
        self.seed = seed
        self.epoch = 0
        self._workers = workers
        self._generator: torch.Generator | None = None
        if isinstance(getattr(source, "generator", None), torch.Generator):
            source = copy.copy(source)
            source.generator = self._generator = torch.Generator()
        self.source = source

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of the next pass; Lightning calls it before each epoch."""
        self.epoch = epoch
        for told in (self.source, getattr(self.source, "sampler", None)):
            if callable(tell := getattr(told, "set_epoch", None)):
                tell(epoch)
        if self._workers is not None:
            generator, seed = self._workers
            generator.manual_seed((seed + epoch) % 2**63)

    def __iter__(self) -> Iterator[Any]:
        source, seed = self.source, self.seed + self.epoch
        if type(source) is RandomSampler and not source.replacement:
            count = len(source.data_source)
            if len(source) <= count:  # then the order is that of torch's DistributedSampler
                generator = torch.Generator().manual_seed(seed)
                return iter(torch.randperm(count, generator=generator).tolist()[: len(source)])
        if self._generator is not None:
            self._generator.manual_seed(seed)
        return _drawn_apart(source, seed)

    def __len__(self) -> int:
        return len(self.source)


class FetchSeeds:
    """Lets the samples of a batch be made with random numbers that depend on a seed only, in this process.

    Stands in for a loader's ``collate_fn``: between :meth:`begin` and the call the samples are made.

    Args:
        collate: the loader's own function.
    """

    def __init__(self, collate: Callable[[Any], Any]) -> None:
        self._collate = collate
        self._generators = _Generators()
        self._begun = False

    def begin(self, seed: int) -> None:
        """The samples of a batch are about to be made."""
        if not self._begun:
            self._generators.swap()
        self._begun = True
        _seed(seed)

    def __call__(self, samples: Any) -> Any:
        """The batch of ``samples``, which are made."""
        batch = self._collate(samples)
        if self._begun:
            self._generators.swap()
        self._begun = False
        return batch


class _Generators:
    """States of Python's, NumPy's and torch's global generators, to be exchanged with those in use."""

    def __init__(self) -> None:
        self._python = random.getstate()
        self._numpy: Any = np.random.MT19937()
        self._torch = torch.default_generator.get_state()

    def swap(self) -> None:
        """Put these in use and keep those that were."""
        numpy: Any = np.random  # copying a state of NumPy's would take ten times as long as this exchange
        outside = random.getstate(), numpy.get_bit_generator(), torch.default_generator.get_state()
        random.setstate(self._python)
        numpy.set_bit_generator(self._numpy)
        torch.default_generator.set_state(self._torch)
        self._python, self._numpy, self._torch = outside

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """These are in use inside, and follow what is drawn there."""
        self.swap()
        try:
            yield
        finally:
            self.swap()


def _seed(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.default_generator.manual_seed(seed % 2**63)


def _drawn_apart(source: Iterable[Any], seed: int) -> Iterator[Any]:
    """The items of ``source``, drawn while the global generators hold states of their own."""
    generators = _Generators()
    with generators.in_use():
        _seed(seed)
        items = iter(source)
    while True:
        with generators.in_use():
            chunk = list(itertools.islice(items, _CHUNK))
        yield from chunk
        if len(chunk) < _CHUNK:
            return

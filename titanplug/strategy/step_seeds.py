"""Torch's generators around each batch: equal where ranks compute alike, different where data differs."""

from __future__ import annotations

from typing import Literal, TypeAlias

import torch

from titanplug.parallel.initialise import named_seed

Use: TypeAlias = Literal["train", "evaluate", "transfer"]


class StepSeeds:
    """Seeds torch's generators, on the host and on this rank's device.

    - While a batch is moved to the device (hooks that augment it draw then) and while its step runs, by seed,
      batch and data-parallel rank, and nothing else: tensor-parallel ranks draw alike, data-parallel ranks
      differently, and a resumed run as if it had not been interrupted.
    - In between, alike on all ranks: what hooks of epochs and set-ups of data draw are decisions that all
      ranks must take alike (a random split, a freeze). Evaluation leaves the generators as they were.

    Args:
        seed: the run's seed.
        rank: position in the ``batch`` view.
        device: this rank's device.
    """

    def __init__(self, seed: int, rank: int, device: torch.device) -> None:
        self._rank = rank
        self._generators: list[torch.Generator] = [torch.default_generator]
        if device.type == "cuda":
            self._generators.append(torch.cuda.default_generators[device.index])
        self._before: list[torch.Tensor] | None = None
        self.set_seed(seed)

    def set_seed(self, seed: int) -> None:
        """Draw random numbers as the run with this seed."""
        uses: tuple[Use, ...] = ("train", "evaluate", "transfer")
        self._seeds = {use: named_seed(seed, use) for use in uses}
        self._between = named_seed(seed, "between")

    def begin(self, use: Use, index: int, loader_idx: int | None = None, part: int = 0) -> None:
        """What follows is for batch ``index``, on this data-parallel rank.

        Args:
            use: what it is.
            index: of the batch, in the run for training and in its loader for evaluation.
            loader_idx: the loader of an evaluation; None in training.
            part: the microbatch; pipeline stages draw alike until the model is called.
        """
        if loader_idx is not None and self._before is None:
            self._before = [generator.get_state() for generator in self._generators]
        offset = 0 if loader_idx is None else 7919 * (1 + loader_idx)
        own = self._rank * 998_244_353 + part * 15_485_863
        self._seed(self._seeds[use] + offset + index * 1_000_003 + own)

    def enter_stage(self, stage: int) -> None:
        """The model runs on a later pipeline stage: its draws are others than those of the stages before."""
        for generator in self._generators:
            generator.manual_seed((generator.initial_seed() + 104_729 * stage) % 2**63)

    def end(self, index: int) -> None:
        """The step of batch ``index`` is over."""
        if self._before is None:
            self._seed(self._between + index)
            return
        for generator, state in zip(self._generators, self._before, strict=True):
            generator.set_state(state)
        self._before = None

    def _seed(self, seed: int) -> None:
        for generator in self._generators:
            generator.manual_seed(seed % 2**63)

"""Learning-rate schedules with warmup, as factors of the optimizer's own rate.

Each takes the optimizer and the number of optimizer steps of the whole run, so that a configuration
names only what differs between runs::

    LanguageModel(config, schedule=partial(cosine, warmup_steps=100))

A run that is shorter than its warmup doesn't reach the full rate.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeAlias

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from titanplug.errors import ConfigError

Schedule: TypeAlias = Callable[[Optimizer, int], LRScheduler]
"""Builds a scheduler, advanced once per optimizer step, from an optimizer and the number of steps."""


def constant(optimizer: Optimizer, num_steps: int, *, warmup_steps: int = 0) -> LRScheduler:
    """Linear warmup, then the full rate.

    Args:
        optimizer: whose rates are scaled.
        num_steps: optimizer steps of the whole run.
        warmup_steps: steps until the full rate is reached.

    Raises:
        ConfigError: the warmup is negative.
    """
    _check(warmup_steps)
    return LambdaLR(optimizer, lambda step: _warmup(step, warmup_steps))


def cosine(
    optimizer: Optimizer, num_steps: int, *, warmup_steps: int = 0, min_ratio: float = 0.1
) -> LRScheduler:
    """Linear warmup, then half a cosine down to ``min_ratio`` at the last step.

    Paper: Loshchilov and Hutter 2017, "SGDR".

    Args:
        optimizer: whose rates are scaled.
        num_steps: optimizer steps of the whole run.
        warmup_steps: steps until the full rate is reached.
        min_ratio: rate at the end as a fraction of the full rate, 0 to 1.

    Raises:
        ConfigError: the warmup is negative, or the fraction is out of range.
    """
    _check(warmup_steps, min_ratio=min_ratio)

    def factor(step: int) -> float:
        if step < warmup_steps:
            return _warmup(step, warmup_steps)
        progress = (step - warmup_steps) / max(1, num_steps - warmup_steps)
        return min_ratio + (1 - min_ratio) * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))

    return LambdaLR(optimizer, factor)


def linear(
    optimizer: Optimizer, num_steps: int, *, warmup_steps: int = 0, min_ratio: float = 0.0
) -> LRScheduler:
    """Linear warmup, then straight down to ``min_ratio`` at the last step.

    Args:
        optimizer: whose rates are scaled.
        num_steps: optimizer steps of the whole run.
        warmup_steps: steps until the full rate is reached.
        min_ratio: rate at the end as a fraction of the full rate, 0 to 1.

    Raises:
        ConfigError: the warmup is negative, or the fraction is out of range.
    """
    _check(warmup_steps, min_ratio=min_ratio)

    def factor(step: int) -> float:
        left = max(0, num_steps - step) / max(1, num_steps - warmup_steps)
        return min(_warmup(step, warmup_steps), min_ratio + (1 - min_ratio) * min(1.0, left))

    return LambdaLR(optimizer, factor)


def warmup_stable_decay(
    optimizer: Optimizer,
    num_steps: int,
    *,
    warmup_steps: int = 0,
    decay_fraction: float = 0.1,
    min_ratio: float = 0.0,
) -> LRScheduler:
    """Linear warmup, the full rate, then linear decay to ``min_ratio`` over the last part of the run.

    Paper: Hu et al. 2024, "MiniCPM".

    Args:
        optimizer: whose rates are scaled.
        num_steps: optimizer steps of the whole run.
        warmup_steps: steps until the full rate is reached.
        decay_fraction: part of the run that decays, 0 to 1.
        min_ratio: rate at the end as a fraction of the full rate, 0 to 1.

    Raises:
        ConfigError: the warmup is negative, or a fraction is out of range.
    """
    _check(warmup_steps, decay_fraction=decay_fraction, min_ratio=min_ratio)
    decay_steps = max(1, round(decay_fraction * num_steps))

    def factor(step: int) -> float:
        left = max(0, num_steps - step) / decay_steps
        return min(_warmup(step, warmup_steps), min_ratio + (1 - min_ratio) * min(1.0, left))

    return LambdaLR(optimizer, factor)


def _warmup(step: int, warmup_steps: int) -> float:
    # The first step already moves: a rate of 0 would waste a batch.
    return min(1.0, (step + 1) / (warmup_steps + 1))


def _check(warmup_steps: int, **fractions: float) -> None:
    problems = [
        f"{name}={value!r}: it is a fraction. Give a number from 0 to 1."
        for name, value in fractions.items()
        if not 0 <= value <= 1
    ]
    if warmup_steps < 0:
        problems.append(f"warmup_steps={warmup_steps}: a number of steps is at least 0. Give 0 or more.")
    if problems:
        raise ConfigError(problems)

"""Random draws on shards of the sequence: others on each rank of the tensor axis.

Ranks of the axis hold their generators in the same state, so that they draw alike where they compute alike.
A dropout on shards of the sequence would give the tokens of all shards the same masks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from titanplug.parallel.collectives import AxisGroup


class DrawOnShard:
    """A dropout's forward, whose draws depend on the rank and leave the generators alike on all ranks.

    Args:
        module: the dropout.
        group: the axis whose ranks hold the shards.
    """

    def __init__(self, module: nn.Module, group: AxisGroup) -> None:
        self.module = module
        self.forward: Callable[[Tensor], Any] = module.forward
        self.group = group

    def __call__(self, x: Tensor) -> Any:
        """The dropout of this rank's shard ``x``."""
        if not self.module.training:
            return self.forward(x)
        with draws_of_rank(self.group, x.device):
            return self.forward(x)


@contextmanager
def draws_of_rank(group: AxisGroup, device: torch.device) -> Iterator[None]:
    """Inside, what is drawn depends on the rank; the generators are left alike on all ranks.

    Args:
        group: the axis whose ranks hold their generators alike.
        device: where is drawn.
    """
    # Drawn alike on all ranks, and from the generator on the host, which is not waited for.
    seed = int(torch.randint(2**62, ()))
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed + group.rank)
        yield

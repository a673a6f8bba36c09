"""Manual optimization under FSDP.

A step runs as the forward of the LightningModule, the FSDP root, whose hooks gather what no other unit holds
and hand its gradients on once the step is over. A manual step calls backward and the optimizers inside of
that forward, and may call modules again afterwards.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from lightning.pytorch import LightningModule
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from titanplug.parallel.fsdp import follow_frozen, free_gathered, gathered_when_called, register_backward

_TOGGLES = ("toggle_optimizer", "untoggle_optimizer")


class ManualStep:
    """Keeps FSDP right while a step with manual optimization runs.

    Args:
        module: the LightningModule.
        units: its FSDP units, the root last; none where nothing is sharded.
    """

    def __init__(self, module: LightningModule, units: list[FSDPModule]) -> None:
        self._module, self._units = module, units
        self.is_running = False
        """Whether such a step runs, with units."""

    @contextmanager
    def running(self) -> Iterator[None]:
        """Around the step."""
        if not self._units:
            yield
            return
        self.is_running = True
        for name in _TOGGLES:
            self._module.__dict__[name] = self._followed(getattr(self._module, name))
        try:
            with gathered_when_called(self._units):
                yield
        finally:
            self.is_running = False
            for name in _TOGGLES:
                del self._module.__dict__[name]

    def before_backward(self, loss: Tensor) -> None:
        """A backward is about to start at ``loss``; it frees what is gathered."""
        if self.is_running:
            register_backward(self._units, loss)

    def around_update(self) -> None:
        """An optimizer is about to step, or has stepped: what is gathered would be old after it.

        Hooks that look at gradients before the step find them on the shards; a closure may gather again.
        """
        free_gathered(self._units)

    def _followed(self, toggle: Any) -> Any:
        def run(optimizer: Any) -> None:
            toggle(optimizer)
            follow_frozen(self._units)

        return run

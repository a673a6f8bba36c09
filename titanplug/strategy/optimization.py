"""From a loss to an update, as Lightning asks for it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from lightning.pytorch import Trainer
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from titanplug.parallel.fsdp import set_gradient_sync
from titanplug.parallel.local_optimizer import LocalShards, has_shards, is_elementwise
from titanplug.strategy.over_ranks import OverRanks
from titanplug.strategy.peer_checks import check_gradients


class Optimization(OverRanks):
    """Backward, final gradients, clipping and updates; see :mod:`titanplug.strategy.gradient_window`."""

    _local_shards: dict[Optimizer, LocalShards]

    def compute_gradient_norm(self, optimizer: Optimizer) -> Tensor:
        """One norm of all gradients of ``optimizer`` over all ranks, before clipping.

        A collective: call it on all ranks, between backward and the optimizer's step, for example in
        ``on_before_optimizer_step``. Computed once a step; clipping uses the same number.

        Returns:
            0-dim float64 tensor, equal on all ranks.
        """
        optimizer = getattr(optimizer, "_optimizer", optimizer)
        self._gradients.finish(self.optimizers)
        return self._gradients.norm(optimizer)

    @override
    def backward(
        self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any
    ) -> Tensor:
        module, plugin = self._module, self.precision_plugin
        trainer = module.trainer
        automatic = module.automatic_optimization
        self.pre_backward(closure_loss)
        closure_loss = plugin.pre_backward(closure_loss, module)
        if self._laid_out.pipeline is None:
            if automatic:
                weighted = self._gradients.scale(closure_loss, trainer.accumulate_grad_batches)
            else:
                weighted = self._gradients.scale_alone(closure_loss)
                self._running.manual.before_backward(weighted)
            plugin.backward(weighted, module, optimizer, *args, **kwargs)
        # A manual step may call backward again: its gradients are final when they are used.
        if automatic and not trainer.fit_loop._should_accumulate():
            self._gradients.finish(self.optimizers)
        closure_loss = plugin.post_backward(closure_loss, module)
        self.post_backward(closure_loss)
        return closure_loss

    @override
    def optimizer_step(self, optimizer: Optimizer, closure: Any, model: Any = None, **kwargs: Any) -> Any:
        manual = self._running.manual
        if manual.is_running:
            manual.around_update()
        try:
            result = super().optimizer_step(optimizer, closure, model, **kwargs)
        finally:
            if optimizer in self._local_shards:
                self._local_shards[optimizer].exit()
        if manual.is_running:
            manual.around_update()
        return result

    def finish_gradients(self) -> None:
        """Called by the precision plugin when the closure of a step has run."""
        self._gradients.finish(self.optimizers)

    def before_update(self, optimizer: Optimizer) -> None:
        """Called by the precision plugin when gradients are final, right before the update.

        Raises:
            NonFiniteGradientError: the norm is not finite and ``error_if_nonfinite`` is set.
        """
        self._gradients.check(optimizer)
        if self._check_peers:
            check_gradients(self._module, self.mesh, self.root_device)
        shards = self._local_shards.get(optimizer)
        if shards is None and is_elementwise(optimizer) and has_shards(optimizer):
            shards = self._local_shards[optimizer] = LocalShards(optimizer)
        if shards is not None:
            shards.enter()

    @override
    def setup_optimizers(self, trainer: Trainer) -> None:
        self._local_shards = {}
        super().setup_optimizers(trainer)

    def clip_gradients(self, optimizer: Optimizer, limit: float, *, by_value: bool = False) -> None:
        """Clip all gradients of ``optimizer`` by their one global norm, or each element by value.

        Args:
            optimizer: whose gradients.
            limit: largest norm, or largest absolute value; 0 clips nothing.
            by_value: clip elements.
        """
        self._gradients.finish(self.optimizers)
        self._gradients.clip(getattr(optimizer, "_optimizer", optimizer), limit, by_value=by_value)

    @contextmanager
    @override
    def block_backward_sync(self) -> Iterator[None]:
        if self._laid_out.pipeline is not None:  # steps decide by themselves
            yield
            return
        units = self._laid_out.fsdp_units
        set_gradient_sync(units, False)
        try:
            yield
        finally:
            set_gradient_sync(units, True)

"""Checkpoints as Lightning asks for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.trainer.states import TrainerFn
from torch.optim import Optimizer
from typing_extensions import override

from titanplug.parallel.buffers import broadcast_buffers
from titanplug.parallel.fsdp import free_gathered
from titanplug.strategy import checkpoint as checkpoints
from titanplug.strategy.launcher import ScriptLauncher
from titanplug.strategy.over_ranks import OverRanks
from titanplug.strategy.resume import STATE_KEY, reopen_epoch


class Saving(OverRanks):
    """Writes and reads directories that any layout can load; see :mod:`titanplug.strategy.checkpoint`."""

    @property
    def _names(self) -> checkpoints.CheckpointNames:
        return checkpoints.CheckpointNames(self._module, self._layout)

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        return checkpoints.model_state(self._module)

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        inner = optimizer._optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
        return checkpoints.optimizer_state(self._names, inner)

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        if storage_options is not None:
            raise TypeError(
                "save_checkpoint(storage_options=...): TitanStrategy writes its checkpoints itself and "
                "takes no storage options. Leave it out."
            )
        if not self._after_exception.may_save(self._module.trainer):
            return
        assert self._data is not None
        path = Path(self.broadcast(str(filepath)))
        broadcast_buffers(self._module, self.mesh.group("tokens"))  # the checkpoint refers to them
        self._running.share_states()
        checkpoint[STATE_KEY] = self._data.state()
        checkpoints.save(checkpoint, path, (self.dp_rank, self.dp_size), self._names)

    @override
    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        path = Path(self.broadcast(str(checkpoint_path)))
        module, launcher = self._module, self._launcher
        free_gathered(self._laid_out.fsdp_units)
        fitting = module.trainer.state.fn == TrainerFn.FITTING
        if weights_only is None and isinstance(launcher, ScriptLauncher):
            weights_only = launcher.weights_only
        rest = checkpoints.load(
            path,
            module,
            self.optimizers if fitting else [],
            (self.dp_rank, self.dp_size),
            self._names,
            strict=module.strict_loading,
            weights_only=weights_only,
        )
        state = rest.pop(STATE_KEY, {})
        if fitting:
            assert self._data is not None
            reopen_epoch(rest)
            self._data.load_state(state, checkpoints.loader_states(rest))
            self._running.seeds.set_seed(self._data.seed)
        return rest

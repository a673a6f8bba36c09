"""Checkpoints as Lightning asks for them."""

from __future__ import annotations

import warnings
from typing import Any

from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.trainer.states import TrainerFn
from torch.optim import Optimizer
from typing_extensions import override

from titanplug.checkpoint import directory
from titanplug.checkpoint.background import Writer
from titanplug.checkpoint.files import place_of
from titanplug.checkpoint.names import CheckpointNames
from titanplug.checkpoint.ranks import Ranks, host_ranks
from titanplug.checkpoint.state import loader_states, model_state, optimizer_state
from titanplug.parallel.buffers import broadcast_buffers
from titanplug.parallel.fsdp import free_gathered
from titanplug.strategy.launcher import ScriptLauncher
from titanplug.strategy.over_ranks import OverRanks
from titanplug.strategy.resume import STATE_KEY, reopen_epoch


class Saving(OverRanks):
    """Writes and reads directories that any layout can load; see :mod:`titanplug.checkpoint`."""

    _writer: Writer
    _save_in_background: bool

    @property
    def _names(self) -> CheckpointNames:
        return CheckpointNames(self._module, self._layout)

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        return model_state(self._module)

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        inner = optimizer._optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
        return optimizer_state(self._names, inner)

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
        path = self.broadcast(str(filepath))
        broadcast_buffers(self._module, self.mesh.group("tokens"))  # the checkpoint refers to them
        self._running.share_states()
        checkpoint[STATE_KEY] = self._data.state()
        ranks = Ranks()
        position = self.dp_rank, self.dp_size
        snapshot = directory.take_snapshot(checkpoint, path, position, self._names, ranks)
        # A thread must not mix its collectives with those of this one.
        self._writer.write(snapshot, host_ranks() if self._save_in_background else ranks)

    @override
    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        self.finish_saving()
        path = self.broadcast(str(checkpoint_path))
        module, launcher = self._module, self._launcher
        free_gathered(self._laid_out.fsdp_units)
        fitting = module.trainer.state.fn == TrainerFn.FITTING
        if weights_only is None and isinstance(launcher, ScriptLauncher):
            weights_only = launcher.weights_only
        rest, states_of_all = directory.load(
            path,
            module,
            self.optimizers if fitting else [],
            (self.dp_rank, self.dp_size),
            self._names,
            Ranks(),
            strict=module.strict_loading,
            weights_only=weights_only,
        )
        state = rest.pop(STATE_KEY, {})
        if fitting:
            assert self._data is not None
            reopen_epoch(rest)
            if states_of_all:
                state = {**state, "all_loader_states": states_of_all}
            self._data.load_state(state, loader_states(rest))
            self._running.seeds.set_seed(self._data.seed)
        return rest

    @override
    def remove_checkpoint(self, filepath: Any) -> None:
        """Remove a checkpoint once the one that is being written is there."""
        if self.is_global_zero:
            self._writer.then(place_of(str(filepath)).remove)

    def link_checkpoint(self, target: str, link: str) -> None:
        """Let a name stand for a checkpoint once that is there."""
        if self.is_global_zero:
            self._writer.then(lambda: place_of(link).link_to(target))

    def finish_saving(self) -> None:
        """Wait for a checkpoint that is written in the background.

        Raises:
            CheckpointError: it could not be written; on all ranks.
        """
        self._writer.wait()

    @override
    def on_train_end(self) -> None:
        self.finish_saving()

    def _end_saving(self) -> None:
        """Wait at the end of a run, which may have been cut off by an error that says more."""
        try:
            self.finish_saving()
        except Exception as error:
            if not self._module.trainer.interrupted:
                raise
            warnings.warn(f"The last checkpoint was not written: {error}", stacklevel=2)

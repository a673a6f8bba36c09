"""A running average of the weights, for evaluation and as the result of a training."""

from __future__ import annotations

import warnings
import weakref
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy, ModelParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from typing_extensions import override

from titanplug.callbacks.ranks import find_dims
from titanplug.errors import ConfigError
from titanplug.parallel.fsdp import free_gathered
from titanplug.parallel.gradients import local_tensor
from titanplug.parallel.local_parameter import dtensor_like
from titanplug.parallel.names import plain_name

_SECTION, _KEY = "parameter_like", "WeightAverage"


class WeightAverage(Callback):
    """Averages the trained weights over optimizer steps, on each rank's own shards.

    Works under every layout and on one process, without communication. Costs memory for one more copy of
    the weights (in float32, where the weights have 16 bits), and for another one during an evaluation.

    - Updated after optimizer steps, so not within an accumulation window. The first update copies.
    - Validation, test and prediction use the average; afterwards the training weights are back, bit by bit.
      Before the first update they use the training weights.
    - After ``fit`` the module holds the average. Checkpoints that are written in training hold the training
      weights and, beside them, the average, from which a run continues exactly under any layout. One with
      ``save_weights_only=True`` holds the training weights alone.
    - Buffers, such as the statistics of BatchNorm, stay those of training.
    - A parameter that is unfrozen later joins with the value of its first update.

    Args:
        decay: part of the average that an update keeps: ``decay * average + (1 - decay) * weights``
            (exponential moving average). None: all updates weigh alike (stochastic weight averaging,
            Izmailov et al. 2018).
        start_step: optimizer steps at the start that are left out.
        every_n_steps: optimizer steps from one update to the next.
        use_for_evaluation: validate, test and predict with the average.
        use_at_end: leave the average in the module after ``fit``.

    Raises:
        ConfigError: a value is out of range; all of them at once.
    """

    def __init__(
        self,
        decay: float | None = 0.999,
        start_step: int = 0,
        every_n_steps: int = 1,
        use_for_evaluation: bool = True,
        use_at_end: bool = True,
    ) -> None:
        problems = []
        if decay is not None and not 0 < decay < 1:
            problems.append(
                f"decay={decay}: an update keeps this part of the average, so it must be between 0 and 1, "
                "without these. Give for example 0.999, or None to weigh all updates alike."
            )
        if start_step < 0:
            problems.append(f"start_step={start_step}: give 0 or a number of optimizer steps to leave out.")
        if every_n_steps < 1:
            problems.append(
                f"every_n_steps={every_n_steps}: give 1, or more optimizer steps between updates."
            )
        if problems:
            raise ConfigError(problems)
        self.decay = decay
        self.start_step = start_step
        self.every_n_steps = every_n_steps
        self.use_for_evaluation = use_for_evaluation
        self.use_at_end = use_at_end
        self._averages: dict[str, Tensor] = {}
        self._num_updates = 0
        self._step: int | None = None  # optimizer steps at the last look
        self._owner: weakref.ref[nn.Module] | None = None  # the module that the average is of
        self._was_loaded = False
        self._parameters: _Parameters | None = None  # in training, where updates come often
        self._training_weights: list[tuple[nn.Parameter, Tensor]] = []  # while the module holds the average

    # ---------------------------------------------------------------- averaging

    @override
    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        strategy = trainer.strategy
        foreign = isinstance(strategy, FSDPStrategy | DeepSpeedStrategy | ModelParallelStrategy)
        if foreign and find_dims(trainer) is None:
            raise ConfigError(
                f"WeightAverage under {type(strategy).__name__}: its checkpoints would hold one rank's part "
                "of the average. Use TitanStrategy, or a strategy that doesn't shard parameters."
            )
        self._was_loaded = False
        if stage == TrainerFn.FITTING:
            self._forget()

    @override
    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self._step is None:
            self._step = trainer.global_step
        self._parameters = _Parameters(pl_module)
        # A checkpoint that was written between a step and the end of its batch lacks that step's update.
        self._follow(trainer, pl_module)

    @override
    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._follow(trainer, pl_module)

    def _follow(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Update the average if it has become due since the last look."""
        assert self._step is not None
        last, self._step = self._step, trainer.global_step
        if self._num_due(self._step) > self._num_due(last):
            self._update(pl_module)

    def _num_due(self, step: int) -> int:
        # Counted, since several optimizers take several steps in a batch.
        return max(step - self.start_step, 0) // self.every_n_steps

    @torch.no_grad()
    def _update(self, module: nn.Module) -> None:
        assert self._parameters is not None
        averages, weights = [], []
        self._parameters.free_gathered()
        for name, parameter in self._parameters.named:
            average = self._average_of(name, parameter)
            if average is not None:
                averages.append(local_tensor(average))
                weights.append(local_tensor(parameter))
            elif parameter.requires_grad:
                self._averages[name] = _averaging_copy(parameter, parameter)
        keep = self._num_updates / (self._num_updates + 1) if self.decay is None else self.decay
        if averages:
            torch._foreach_mul_(averages, keep)
            torch._foreach_add_(averages, weights, alpha=1 - keep)
        self._num_updates += 1
        self._owner = weakref.ref(module)

    def _average_of(self, name: str, parameter: nn.Parameter) -> Tensor | None:
        average = self._averages.get(name)
        if average is not None and average.device != parameter.device:
            # Some strategies move the module only after a checkpoint was loaded.
            average = self._averages[name] = average.to(parameter.device)
        return average

    def _forget(self) -> None:
        self._averages, self._num_updates, self._step, self._owner = {}, 0, None, None

    # ---------------------------------------------------------------- use

    @override
    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self.use_for_evaluation and self._is_of(trainer, pl_module):
            self._put_in(pl_module)

    @override
    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._put_back(pl_module)

    on_test_start = on_predict_start = on_validation_start
    on_test_end = on_predict_end = on_validation_end

    @override
    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._parameters = None
        # Not in on_train_end, where ModelCheckpoint writes its last checkpoint.
        if self.use_at_end:
            self._put_in(pl_module)
            self._training_weights = []
            self._forget()  # the module is the average now

    @override
    def on_exception(
        self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException
    ) -> None:
        self._put_back(pl_module)

    def _is_of(self, trainer: L.Trainer, module: nn.Module) -> bool:
        """Whether the average is one of the weights that this run evaluates."""
        if self._owner is None or self._owner() is not module:
            return False
        # A checkpoint may have brought other weights and no average.
        return trainer.state.fn == TrainerFn.FITTING or trainer.ckpt_path is None or self._was_loaded

    # Evaluation may run in inference mode, whose tensors can't be changed outside of it.
    @torch.inference_mode(False)
    @torch.no_grad()
    def _put_in(self, module: nn.Module) -> None:
        """Put the average into the module and keep its own weights."""
        self._training_weights = []
        for name, parameter in _Parameters(module).named:
            average = self._average_of(name, parameter)
            if average is not None:
                local = local_tensor(parameter)
                self._training_weights.append((parameter, local.clone()))
                local.copy_(local_tensor(average))

    @torch.inference_mode(False)
    @torch.no_grad()
    def _put_back(self, module: nn.Module) -> None:
        if not self._training_weights:
            return
        _Parameters(module).free_gathered()
        for parameter, weights in self._training_weights:
            local_tensor(parameter).copy_(weights)
        self._training_weights = []

    # ---------------------------------------------------------------- checkpoints

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"num_updates": self._num_updates, "step": self._step}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        num_updates: int = state_dict["num_updates"]
        if num_updates and not self._was_loaded:
            warnings.warn(
                f"The checkpoint tells of {num_updates} updates of the averaged weights but doesn't hold "
                "these: WeightAverage begins anew.",
                stacklevel=2,
            )
            num_updates = 0
        self._num_updates, self._step = num_updates, state_dict["step"]

    @override
    def on_save_checkpoint(
        self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        if self._training_weights:  # somebody saves in the middle of an evaluation
            self._restore_in(checkpoint["state_dict"])
        if self._num_updates:
            checkpoint.setdefault(_SECTION, {})[_KEY] = dict(self._averages)

    @override
    @torch.no_grad()
    def on_load_checkpoint(
        self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        self._forget()
        saved = checkpoint.get(_SECTION, {}).get(_KEY)
        if saved is None:
            return
        for name, parameter in _Parameters(pl_module).named:
            if name in saved:
                self._averages[name] = _averaging_copy(saved[name], parameter)
        self._owner, self._was_loaded = weakref.ref(pl_module), True

    def _restore_in(self, state: dict[str, Any]) -> None:
        """Replace the average by the training weights in the state of a module that holds the average."""
        by_memory = {local_tensor(p).data_ptr(): kept for p, kept in self._training_weights if kept.numel()}
        for name, value in state.items():
            kept = by_memory.get(local_tensor(value).data_ptr()) if isinstance(value, Tensor) else None
            if kept is not None:
                state[name] = dtensor_like(kept, value._spec) if isinstance(value, DTensor) else kept


def _averaging_copy(values: Tensor, parameter: nn.Parameter) -> Tensor:
    """``values`` laid out as ``parameter`` is; in float32 at least, where small updates don't get lost."""
    dtype = torch.promote_types(parameter.dtype, torch.float32)
    copy = torch.empty_like(parameter, dtype=dtype, requires_grad=False)
    local_tensor(copy).copy_(local_tensor(values))
    return copy


class _Parameters:
    """A module's parameters by their names in checkpoints; this rank's shards where there are any."""

    def __init__(self, module: nn.Module) -> None:
        self._units: list[FSDPModule] = [m for m in module.modules() if isinstance(m, FSDPModule)]
        self.free_gathered()  # while whole parameters are gathered, the module shows those
        self.named = [(plain_name(name), parameter) for name, parameter in module.named_parameters()]

    def free_gathered(self) -> None:
        """Free whole parameters, so that the next forward uses the shards as they are then."""
        free_gathered(self._units)

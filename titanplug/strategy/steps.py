"""Running the user's steps: random state, share of the batch, logs, and outputs in order."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from torchmetrics import Metric

from titanplug.mesh import Mesh
from titanplug.parallel.active_sequence import forget_sequences
from titanplug.parallel.fsdp import free_gathered
from titanplug.parallel.parallelize import Parallelized
from titanplug.parallel.pipeline.runtime import PipelineRuntime
from titanplug.parallel.sharded_tensor import gather_shards
from titanplug.strategy.gradient_window import GradientWindow
from titanplug.strategy.loaders import HasShares, Share
from titanplug.strategy.logs import StepLogs
from titanplug.strategy.loss_weights import num_rows
from titanplug.strategy.manual import ManualStep
from titanplug.strategy.metrics import find_metrics, metrics_untouched, prepare_metrics
from titanplug.strategy.step_seeds import StepSeeds

_PAST_A_UNIT = (
    "{step} used a weight that is a shard. The whole weights of an FSDP unit (here: {units}) are there while "
    "the unit itself is called, so its layers can't be called past it. Call the unit, or return a "
    "ParallelPlan without fsdp_units from `configure_parallel_plan`: then all weights are whole in a step."
)


Context: TypeAlias = Callable[[], AbstractContextManager[Any]]
"""Makes the context of the precision that a step runs in."""


class Steps:
    """Runs the steps of one LightningModule.

    Args:
        trainer: the Trainer.
        module: the laid-out module.
        layout: how it is laid out.
        window: weights of the losses.
        seed: the run's seed.
        device: this rank's device.
    """

    runtime: PipelineRuntime | None = None
    """What runs a pipeline's schedules."""

    def __init__(
        self,
        trainer: Trainer,
        module: LightningModule,
        layout: Parallelized,
        window: GradientWindow,
        seed: int,
        device: torch.device,
    ) -> None:
        self._trainer = trainer
        self._module = module
        self._units, self._plan = layout.fsdp_units, layout.plan
        self.manual = ManualStep(module, layout.fsdp_units)
        self._context = layout.context
        self._gathers_outputs = layout.tensor.group is not None or bool(layout.context.borders)
        self._mesh: Mesh = layout.mesh
        self._window = window
        self._device = device
        self.seeds = StepSeeds(seed, layout.mesh.rank("batch"), device)
        size = layout.mesh["batch"].size()
        self.logs = StepLogs(module, layout.mesh.group("batch"), size, device, self._is_log_step)
        self._served: dict[int, int] = {}
        self._loader_idx = 0
        self._received: tuple[int, Share | None] = -1, None
        self._metrics: list[Metric] = []
        self.prepare_metrics()

    # ---------------------------------------------------------------- which batch this is

    def receive(self, loader_idx: int) -> None:
        """A batch is about to be moved to the device and run."""
        if self._trainer.training:
            self.seeds.begin("transfer", self._trainer.fit_loop.epoch_loop.batch_progress.total.ready)
            return
        self._loader_idx = loader_idx
        index = self._served[loader_idx] = self._served.get(loader_idx, -1) + 1
        self.seeds.begin("transfer", index, loader_idx)

    def received(self, batch: Any) -> None:
        """The batch is on the device; what is logged before its step weighs as it."""
        if self._trainer.training:
            index, loop = self._trainer.fit_loop.epoch_loop.batch_idx + 1, self._trainer.fit_loop
            share = self._share(batch, self._loaders(loop), 0, index)
            self._received = index, share
        else:
            active: Any = self._trainer._active_loop
            index = self._served[self._loader_idx]
            share = self._share(batch, self._loaders(active), self._loader_idx, index)
        if index == 0:
            self.prepare_metrics()
        self.logs.expect(share.local)

    def prepare_metrics(self) -> None:
        """Let metrics, also those that have come during the run, work over ranks."""
        self._metrics = find_metrics(self._module)
        prepare_metrics(self._metrics, self._mesh.group("batch"))

    def restart_count(self) -> None:
        """An evaluation starts."""
        self._served = {}

    def _share(self, batch: Any, loaders: list[Any], loader_idx: int, index: int) -> Share:
        """What of a batch counts; all of its rows where nothing else is known."""
        source = _shares_of(loaders[loader_idx]) if loader_idx < len(loaders) else None
        share = None if source is None else source.share(index)
        if share is not None:
            return share
        rows = num_rows(batch)
        return Share(rows, rows if self._mesh["batch"].size() == 1 else None)

    def _training_share(self, batch: Any) -> Share:
        """What of a training batch counts. Of several loaders the first decides how many rows theirs has."""
        index = self._trainer.fit_loop.epoch_loop.batch_idx
        received, share = self._received
        if share is None or received != index:  # Lightning hasn't moved it (`dataloader_iter`)
            share = self._share(batch, self._loaders(self._trainer.fit_loop), 0, index)
        return share

    # ---------------------------------------------------------------- steps

    def train(self, context: Context, args: tuple[Any, ...], kwargs: Any) -> Any:
        """``training_step``, its loss counted and its logs passed on."""
        loop = self._trainer.fit_loop.epoch_loop
        share = self._training_share(args[0])
        self.seeds.begin("train", loop.total_batch_idx)
        self.logs.start(share.local)
        self._window.start(share)
        if self._context.borders:
            forget_sequences()
        automatic = self._module.automatic_optimization
        with context(), self._metrics_of(share.local):
            if automatic:
                output = self._call("training_step", args, kwargs)
            else:
                with self.manual.running():
                    output = self._call("training_step", args, kwargs)
        self.seeds.end(loop.total_batch_idx)
        self.check_models(trained=output is not None)
        if output is None or not automatic:
            free_gathered(self._units)  # no backward follows that would
            self.logs.finish()
            return output
        loss = output["loss"] if isinstance(output, dict) else output
        output = self._window.add(share, output)
        self.logs.finish(loss=loss, count=self._window.count)
        return output if isinstance(output, Tensor) else self._whole(output)

    def evaluate(self, name: str, context: Context, args: tuple[Any, ...], kwargs: Any) -> Any:
        """``validation_step`` or ``test_step``."""
        loop: Any = self._trainer._active_loop
        index = self._served.get(self._loader_idx, 0)
        share = self._share(args[0], self._loaders(loop), self._loader_idx, index)
        self.seeds.begin("evaluate", index, self._loader_idx)
        self.logs.start(share.local)
        with context(), self._metrics_of(share.local):
            output = self._whole(self._call(name, args, kwargs))
        self.seeds.end(index)
        self.check_models()
        self.logs.finish()
        return output

    def predict(self, context: Context, args: tuple[Any, ...], kwargs: Any) -> Any:
        """``predict_step``."""
        loop: Any = self._trainer.predict_loop
        index = self._served.get(self._loader_idx, 0)
        self._hide_indices(loop, args[0])
        self.seeds.begin("evaluate", index, self._loader_idx)
        with context():
            output = self._whole(self._call("predict_step", args, kwargs))
        self.seeds.end(index)
        self.check_models()
        return output

    def check_models(self, *, trained: bool = False) -> None:
        """A step is over: where models run on parts of a sequence, their attention must have known."""
        if self._context.borders:
            self._context.check_step(self._mesh.group("pp"), self._device, trained=trained)

    def _hide_indices(self, loop: Any, batch: Any) -> None:
        """Tell prediction writers of no samples where another rank has those of this batch."""
        index = self._served.get(self._loader_idx, 0)
        if self._share(batch, self._loaders(loop), self._loader_idx, index).local == 0:
            loop.current_batch_indices = []
            for indices in loop.epoch_batch_indices[self._loader_idx : self._loader_idx + 1]:
                indices[-1:] = [[]] if indices else []

    @staticmethod
    def _loaders(loop: Any) -> list[Any]:
        combined = loop._combined_loader
        return [] if combined is None else list(combined.flattened)

    def _call(self, name: str, args: tuple[Any, ...], kwargs: Any) -> Any:
        module = self._module
        step = getattr(module, name)
        if not self._units:
            return step(*args, **kwargs)
        # FSDP's hooks run around the module's call: run the step as if it were its forward.
        own = module.__dict__.get("forward")

        def run(*step_args: Any, **step_kwargs: Any) -> Any:
            _set_forward(module, own)  # the step may call `self(...)`
            return step(*step_args, **step_kwargs)

        _set_forward(module, run)
        try:
            return module(*args, **kwargs)
        except RuntimeError as error:
            if "mixed torch.Tensor and DTensor" in str(error):
                error.add_note(_PAST_A_UNIT.format(step=name, units=", ".join(self._plan.fsdp_units)))
            raise
        finally:
            _set_forward(module, own)

    def _metrics_of(self, rows: int) -> AbstractContextManager[None]:
        """Where none of the rows count, metrics are put back afterwards."""
        return nullcontext() if rows or not self._metrics else metrics_untouched(self._metrics)

    def _whole(self, output: Any) -> Any:
        return gather_shards(output) if self._gathers_outputs and output is not None else output

    def _is_log_step(self) -> bool:
        trainer: Any = self._trainer  # some of its attributes are set from outside its class
        loop = trainer.fit_loop.epoch_loop
        if trainer.fit_loop._should_accumulate():
            return False
        every = trainer.log_every_n_steps  # 0: never
        due = every > 0 and (loop._batches_that_stepped + 1) % every == 0
        return due or bool(trainer.fast_dev_run) or trainer.should_stop

    def share_states(self) -> None:
        """A checkpoint is about to be written; called on all ranks."""

    # ---------------------------------------------------------------- predictions

    def gather_predictions(self) -> None:
        """Give global rank 0 the predictions of all ranks, batch by batch in the order of the data."""
        loop = self._trainer.predict_loop
        if not loop.return_predictions or self._mesh["batch"].size() == 1:
            return
        loaders = self._loaders(loop)
        # Copies on other axes hold the same predictions: one line of ranks sends.
        sends = all(self._mesh.rank(axis) == 0 for axis in ("pp", "cp", "tp"))
        for loader, predictions in zip(loaders, loop._predictions, strict=True):
            shares = _shares_of(loader)
            mine = [
                output
                for index, output in enumerate(predictions)
                if shares is None or (share := shares.share(index)) is None or share.local
            ]
            if sends:
                mine = _gather_in_turn(mine, self._mesh.group("batch"))
            predictions[:] = mine


def _gather_in_turn(mine: list[Any], group: dist.ProcessGroup) -> list[Any]:
    first = dist.get_global_rank(group, 0)
    parts: list[Any] | None = None
    if dist.get_rank() == first:
        parts = [None] * dist.get_world_size(group)
    dist.gather_object(mine, parts, dst=first, group=group)
    if parts is None:
        return mine
    longest = max(map(len, parts))
    return [part[index] for index in range(longest) for part in parts if index < len(part)]


def _shares_of(loader: Any) -> HasShares | None:
    for holder in (
        loader,
        getattr(loader, "batch_sampler", None),
        getattr(loader, "sampler", None),
    ):
        for candidate in (holder, getattr(holder, "_batch_sampler", None)):
            if hasattr(type(candidate), "share"):
                return candidate
    return None


def _set_forward(module: torch.nn.Module, forward: Any) -> None:
    if forward is None:
        module.__dict__.pop("forward", None)
    else:
        module.__dict__["forward"] = forward

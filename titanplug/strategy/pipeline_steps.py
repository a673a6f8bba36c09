"""Steps under pipeline parallel: the user's step on each microbatch, cut at the borders of stages.

The schedule runs forwards and backwards inside of ``training_step``. The last stage alone sees the model's
output; what the step returned, logged and counted there goes to all stages in one message, and every rank
passes it on, so that callbacks, loggers and monitors see the same everywhere.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from torch.utils._pytree import tree_map_only
from torchmetrics import Metric
from typing_extensions import override

from titanplug.errors import ConfigError
from titanplug.parallel.active_sequence import forget_sequences
from titanplug.parallel.fsdp import finish_step, gather_for_step
from titanplug.parallel.parallelize import Parallelized
from titanplug.parallel.pipeline.runtime import PipelineRuntime
from titanplug.schedules.catalogue import build_table
from titanplug.schedules.evaluation import forward_table
from titanplug.strategy.gradient_window import GradientWindow
from titanplug.strategy.log_reduction import LogEntry, merge_entries
from titanplug.strategy.loss_weights import counted
from titanplug.strategy.metrics import share_metrics, value_over_calls
from titanplug.strategy.microbatches import Microbatch, merge_outputs, split_batch
from titanplug.strategy.stage_messages import StageMessages
from titanplug.strategy.steps import Context, Steps


class PipelineSteps(Steps):
    """Runs the steps of one LightningModule whose model is cut into pipeline stages.

    Args:
        trainer: the Trainer.
        module: the laid-out module.
        layout: how it is laid out.
        window: weights of the losses.
        seed: the run's seed.
        device: this rank's device.
        num_microbatches: parts of a training batch.
    """

    def __init__(
        self,
        trainer: Trainer,
        module: LightningModule,
        layout: Parallelized,
        window: GradientWindow,
        seed: int,
        device: torch.device,
        num_microbatches: int,
    ) -> None:
        assert layout.pipeline is not None
        self._stages = layout.pipeline
        group = layout.mesh.group("pp")
        self.runtime: PipelineRuntime = PipelineRuntime(self._stages, group, device)
        self.messages = StageMessages(group, self._stages.last_rank, device)
        super().__init__(trainer, module, layout, window, seed, device)
        self._stages.on_enter = self.seeds.enter_stage
        self.num_microbatches = num_microbatches
        self.metric_calls: dict[int, list[Any]] = {}
        """What metrics were called with in the microbatches of the running step, by their ids."""
        self.keeps_metric_calls = True
        self._metrics_read: set[int] = set()
        self.in_step = False
        """Whether the user's step runs, on the last stage alone."""

    # ---------------------------------------------------------------- steps

    @override
    def train(self, context: Context, args: tuple[Any, ...], kwargs: Any) -> Any:
        loop = self._trainer.fit_loop.epoch_loop
        share = self._training_share(args[0])
        length, index = self._trainer.accumulate_grad_batches, loop.total_batch_idx
        parts = split_batch(self._module, args[0], self.num_microbatches, share.local, fill=True)
        self.logs.expect(share.local)
        # They keep outputs alive that the schedule would free.
        self.keeps_metric_calls = self._is_log_step() or index == 0 or bool(self._metrics_read)
        self._window.start(share)
        self._window.open()
        forget_sequences()
        step = self._step_of("training_step", args[1:], kwargs)
        done = _Parts(len(parts))

        def run_stage(stage: int, number: int, received: Tensor | None) -> Tensor:
            part = parts[number]
            self.seeds.begin("train", index, part=number)
            output = self._run_part(stage, part, received, step, context)
            if not self._is_last(stage):
                return output  # type: ignore[no-any-return]
            loss = _require_loss(output)
            output, count = counted(part.rows, output)
            given, loss = loss, output["loss"] if isinstance(output, dict) else output
            done.add(number, self._whole(output), self.logs.take_part(part.rows, given, count), count)
            return self._window.scale_part(loss, count, length)

        gather_for_step(self._units)
        self._run(run_stage, parts, train=True)
        finish_step(self._units, reduce=not self._trainer.fit_loop._should_accumulate())
        self.seeds.end(index)
        self.check_models(trained=True)
        output, entries, count = self._share_results(done, [part.rows for part in parts], train=True)
        self._window.add_batch(count, length)
        self.logs.finish_parts(entries)
        return output

    @override
    def evaluate(self, name: str, context: Context, args: tuple[Any, ...], kwargs: Any) -> Any:
        return self._evaluate(name, self._trainer._active_loop, context, args, kwargs)

    @override
    def predict(self, context: Context, args: tuple[Any, ...], kwargs: Any) -> Any:
        loop: Any = self._trainer.predict_loop
        self._hide_indices(loop, args[0])
        return self._evaluate("predict_step", loop, context, args, kwargs)

    def _evaluate(self, name: str, loop: Any, context: Context, args: tuple[Any, ...], kwargs: Any) -> Any:
        index = self._served.get(self._loader_idx, 0)
        share = self._share(args[0], self._loaders(loop), self._loader_idx, index)
        self.logs.expect(share.local)
        self.keeps_metric_calls = True
        # Where other ranks hold other samples they run as many parts: a step may communicate with them.
        several = self._mesh["batch"].size() > 1
        parts = split_batch(self._module, args[0], self.num_microbatches, share.local, fill=several)
        step = self._step_of(name, args[1:], kwargs)
        done = _Parts(len(parts))

        def run_stage(stage: int, number: int, received: Tensor | None) -> Tensor:
            part = parts[number]
            self.seeds.begin("evaluate", index, self._loader_idx, part=number)
            output = self._run_part(stage, part, received, step, context)
            if not self._is_last(stage):
                return output  # type: ignore[no-any-return]
            done.add(number, self._whole(output), self.logs.take_part(part.rows))
            return received if received is not None else torch.zeros(())

        gather_for_step(self._units)
        self._run(run_stage, parts, train=False)
        self.seeds.end(index)
        self.check_models()
        output, entries, _ = self._share_results(done, [part.rows for part in parts], train=False)
        self.logs.finish_parts(entries)
        return output

    @override
    def prepare_metrics(self) -> None:
        super().prepare_metrics()
        share_metrics(self._metrics, self)

    @override
    def share_states(self) -> None:
        for child in self._metrics:
            if any(child._persistent.values()):
                own = {name: getattr(child, name) for name in child._defaults}
                for name, value in self.messages.share(own).items():
                    setattr(child, name, value)

    def _run(self, run_stage: Callable[..., Tensor], parts: list[Microbatch], *, train: bool) -> None:
        options, stages = self._stages.options, self._stages
        if train:
            table = build_table(options.schedule, stages.num_ranks, len(parts), options.chunks)
        else:
            table = forward_table(stages.stage_to_rank, len(parts))
        self.runtime.run(table, run_stage, [part.signature for part in parts], train=train)

    def _is_last(self, stage: int) -> bool:
        return stage == self._stages.num_stages - 1

    def _run_part(
        self,
        stage: int,
        part: Microbatch,
        received: Tensor | None,
        step: Callable[[Any], Any],
        context: Context,
    ) -> Any:
        last = self._is_last(stage)
        self.logs.start_part()
        self.in_step = True
        try:
            with context(), self._metrics_of(part.rows if last else 0):
                return self._stages.run(stage, received, lambda: step(part.batch))
        finally:
            self.in_step = False
            if not last:
                self.logs.discard()

    def _step_of(self, name: str, rest: tuple[Any, ...], kwargs: Any) -> Callable[[Any], Any]:
        module: Any = self._module
        if name == "training_step" and hasattr(module, "pipeline_inputs"):
            return self._step_in_halves()
        step = getattr(module, name)
        return lambda batch: step(batch, *rest, **kwargs)

    def _step_in_halves(self) -> Callable[[Any], Any]:
        """The step of a module that says apart what goes into the model and what its loss is."""
        module: Any = self._module
        model = module.get_submodule(self._stages.names[0].partition(".")[0])

        def step(batch: Any) -> Any:
            inputs = module.pipeline_inputs(batch)
            if isinstance(inputs, dict):
                return module.pipeline_loss(model(**inputs), batch)
            inputs = inputs if isinstance(inputs, tuple) else (inputs,)
            return module.pipeline_loss(model(*inputs), batch)

        return step

    # ---------------------------------------------------------------- results

    def _share_results(
        self, done: _Parts, rows: list[int], *, train: bool
    ) -> tuple[Any, list[LogEntry], int | Tensor]:
        """Output, logged values and count of the whole batch, on every stage."""
        message: Any = None
        calls_of, self.metric_calls = self.metric_calls, {}
        if self._stages.holds_last:
            output = merge_outputs(done.outputs, rows, done.counts if train else None)
            count: Any = sum(done.counts) if train else 0
            entries = merge_entries(done.logs)
            for entry in entries:
                if isinstance(entry.value, Metric) and entry.on_step(bool(self._trainer.training)):
                    self._recompute(entry, calls_of.get(id(entry.value), []))
            message = output, [self._packed(entry) for entry in entries], count
        output, packed, count = self.messages.share(message)
        return output, [self._unpacked(entry) for entry in packed], count

    def _recompute(self, entry: LogEntry, calls: list[Any]) -> None:
        """The value of a step is over all of its microbatches; a metric keeps that of the last one."""
        if self.logs.is_read(entry):
            self._metrics_read.add(id(entry.value))
        if len(calls) > 1:
            self.in_step = True
            try:
                entry.value._forward_cache = value_over_calls(entry.value, calls)
            finally:
                self.in_step = False

    def _packed(self, entry: LogEntry) -> tuple[Any, ...]:
        value: Any = entry.value
        if isinstance(value, Metric):
            names = {id(child): name for name, child in self._module.named_modules()}
            value = {"metric": names[id(value)], "forward": value._forward_cache}
        return entry.hook, entry.name, value, entry.weight, entry.options

    def _unpacked(self, packed: tuple[Any, ...]) -> LogEntry:
        hook, name, value, weight, options = packed
        if isinstance(value, dict):
            metric: Any = self._module.get_submodule(value["metric"])
            metric._forward_cache = value["forward"]
            value = metric
        return LogEntry(hook, name, value, options, weight=weight)


class _Parts:
    """Results of the microbatches of one batch, on the last stage."""

    def __init__(self, number: int) -> None:
        self.outputs: list[Any] = [None] * number
        self.logs: list[list[LogEntry]] = [[] for _ in range(number)]
        self.counts: list[Any] = [0] * number

    def add(self, number: int, output: Any, logs: list[LogEntry], count: int | Tensor = 0) -> None:
        self.outputs[number] = tree_map_only(Tensor, Tensor.detach, output)
        self.logs[number], self.counts[number] = logs, count


def _require_loss(output: Any) -> Any:
    loss = output.get("loss") if isinstance(output, dict) else output
    if not isinstance(loss, Tensor):
        returned = "a dict without a loss tensor" if isinstance(output, dict) else repr(output)
        raise ConfigError(
            f"training_step returned {returned}. Under pp each step trains: a schedule has begun when the "
            "loss is known. Return the loss, or "
            "{'loss': loss, 'num_targets': 0} for a batch that shall not count."
        )
    return loss

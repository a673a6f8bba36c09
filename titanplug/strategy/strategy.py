"""The Lightning strategy: an ordinary LightningModule under any layout."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
from lightning.fabric.plugins import CheckpointIO
from lightning.fabric.utilities.optimizer import _optimizers_to_device
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.plugins.io import TorchCheckpointIO
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch.optim import Optimizer
from typing_extensions import override

from titanplug.checkpoint.background import Writer
from titanplug.compat import (
    hide_warnings_of_lightning,
    let_collectives_end_before_exit,
    let_strategy_validate_settings,
    tell_namespaces_apart,
)
from titanplug.errors import ConfigError
from titanplug.mesh import Mesh, ParallelDims, shared_mesh
from titanplug.parallel.active_sequence import forget_sequences
from titanplug.parallel.buffers import broadcast_buffers
from titanplug.parallel.context import models_of
from titanplug.parallel.fsdp import free_gathered
from titanplug.parallel.local_optimizer import LocalShards
from titanplug.parallel.parallelize import Parallelized, parallelize, switches
from titanplug.parallel.pipeline.split import ordered_modules, split_as_given
from titanplug.parallel.pipeline.stages import PipelineOptions, require_covered
from titanplug.parallel.styles import TensorOptions
from titanplug.plan import ParallelPlan, plan_of_models, resolve_plan
from titanplug.schedules.catalogue import chunks_per_rank, default_microbatches, resolve_schedule
from titanplug.strategy.after_exception import AfterException
from titanplug.strategy.data import DataSharding
from titanplug.strategy.foreign_callbacks import adapt_callbacks
from titanplug.strategy.gradient_window import GradientWindow
from titanplug.strategy.launcher import ScriptLauncher
from titanplug.strategy.metrics import move_to_device
from titanplug.strategy.optimization import Optimization
from titanplug.strategy.over_ranks import OverRanks
from titanplug.strategy.peer_checks import check_batch
from titanplug.strategy.pipeline_loop import install_pipeline_loop, validate_pipeline_module
from titanplug.strategy.pipeline_steps import PipelineSteps
from titanplug.strategy.precision import build_precision, shard_options
from titanplug.strategy.profiler import replace_idle_profiler
from titanplug.strategy.refusals import validate_callbacks
from titanplug.strategy.same_checkpoint import load_what_rank_0_found
from titanplug.strategy.same_settings import require_same_settings
from titanplug.strategy.saving import Saving
from titanplug.strategy.signals import GracefulStop, Preempted, tell_preempted
from titanplug.strategy.steps import Steps
from titanplug.strategy.summary import show_whole_summary
from titanplug.validation import ContextOptions, PipelineFacts, RunFacts, validate_run

_LAYOUT = "_titanplug_layout"

let_strategy_validate_settings()
tell_namespaces_apart()
hide_warnings_of_lightning()


class TitanStrategy(Optimization, Saving, OverRanks):
    """Trains and evaluates an ordinary LightningModule on a mesh of data, tensor and further axes.

    Example::

        trainer = Trainer(devices=8, precision="bf16-mixed", strategy=TitanStrategy(dp_shard=4, tp=2))

    Args:
        dp_replicate: copies of the model (HSDP).
        dp_shard: shards of the model (FSDP2). -1: the rest of the processes.
        tp: shards of each layer (tensor parallel); needs a plan.
        pp: ranks of the pipeline; needs a plan with the order of the model's modules.
        cp: shards of the sequence (context parallel); needs a plan with the sequence dims of the model's
            inputs.
        plan: what to do with which modules, by names relative to the LightningModule. None: from the hook
            ``configure_parallel_plan`` of the module, or ``parallel_plan`` of the model.
        sequence_parallel: under tp, hidden states between blocks are sharded over the sequence.
        loss_parallel: under tp, logits stay sharded over the vocabulary up to the loss.
        meta_init: run ``configure_model`` on the meta device; weights are then filled module by module,
            no rank ever holding the whole model.
        reshard_after_forward: free gathered parameters between forward and backward. None: yes, but not
            under pp, where they stay gathered for all microbatches of a step.
        pp_schedule: order of forwards and backwards: GPipe, 1F1B, Interleaved1F1B, LoopedBFS,
            InterleavedZeroBubble, ZBVZeroBubble, DualPipeV, in any usual spelling, or the path of a CSV file.
        pp_microbatches: parts that a data-parallel rank's batch is split into. None: about twice pp.
        pp_chunks: stages of a rank, for schedules that interleave. None: as the schedule has it, mostly 2.
        pp_split: for each stage the names of its modules. None: balanced by cost.
        pp_first_weight: cost of the modules before the layers, in layers. None: by their parameters, at
            most one layer.
        pp_last_weight: cost of the modules after the layers, in layers. None: by their parameters.
        cp_backend: how attention sees the tokens of other ranks: all_gather (any mask), ring, ulysses (heads
            are exchanged for the sequence) or torch (its own ring).
        cp_load_balance: each rank holds an early and a late chunk of the sequence. None: yes, but for
            ulysses.
        cp_pad: pad sequences that the ranks can't share evenly; False refuses them.
        gradient_norm_type: p of the gradient norm that is clipped; ``inf`` or ``"inf"`` for the maximum.
        error_if_nonfinite: stop all ranks before a step whose gradient norm is NaN or infinite. Reads
            the norm on the host in every step.
        check_peers: debug switch: in every step, ranks of the tensor axis must have read the same batch and
            hold the same gradients of replicated weights. Costs a few collectives and reads on the host.
        save_in_background: go on training once a checkpoint's tensors are copied to host memory, which costs
            that much memory, and write them meanwhile; one at a time. Errors are raised by the next save, or
            at the end.
        process_group_backend: backend of torch.distributed; None: by device (NCCL or gloo).
        timeout_s: seconds after which a collective that some rank doesn't join fails.

    Raises:
        ConfigError: a degree is out of range or an axis is not available; all problems at once. The
            Trainer's constructor checks them against its devices and precision.
    """

    strategy_name = "titan"

    def __init__(
        self,
        *,
        dp_replicate: int = 1,
        dp_shard: int = -1,
        tp: int = 1,
        pp: int = 1,
        cp: int = 1,
        plan: ParallelPlan | None = None,
        sequence_parallel: bool = True,
        loss_parallel: bool = True,
        meta_init: bool = False,
        reshard_after_forward: bool | None = None,
        pp_schedule: str = "Interleaved1F1B",
        pp_microbatches: int | None = None,
        pp_chunks: int | None = None,
        pp_split: Sequence[Sequence[str]] | None = None,
        pp_first_weight: float | None = None,
        pp_last_weight: float | None = None,
        cp_backend: str = "all_gather",
        cp_load_balance: bool | None = None,
        cp_pad: bool = True,
        gradient_norm_type: float | str = 2.0,
        error_if_nonfinite: bool = False,
        check_peers: bool = False,
        save_in_background: bool = False,
        process_group_backend: str | None = None,
        timeout_s: float = 1800.0,
    ) -> None:
        self._pipeline_facts = PipelineFacts(
            pp_schedule,
            pp_microbatches,
            pp_chunks,
            None if pp_split is None else tuple(tuple(stage) for stage in pp_split),
            pp_first_weight,
            pp_last_weight,
            reshard_after_forward,
        )
        self._context_options = ContextOptions(cp_backend, cp_load_balance, cp_pad)
        facts = RunFacts(
            gradient_norm_type=gradient_norm_type,
            timeout_s=timeout_s,
            pipeline=self._pipeline_facts,
            context=self._context_options,
        )
        validate_run(facts, dp_replicate=dp_replicate, dp_shard=dp_shard, tp=tp, pp=pp, cp=cp)
        super().__init__(process_group_backend=process_group_backend, timeout=timedelta(seconds=timeout_s))
        self.parallel_dims = ParallelDims(pp, dp_replicate, dp_shard, cp, tp)
        self._given_plan = plan
        self._tensor_options = TensorOptions(sequence_parallel, loss_parallel)
        self._meta_init = meta_init
        self._reshard_after_forward = reshard_after_forward
        self._norm_type = float(gradient_norm_type)
        self._error_if_nonfinite = error_if_nonfinite
        self._check_peers = check_peers
        self._mesh: Mesh | None = None
        self._seed = 0
        self._data: DataSharding | None = None
        self._layout: Parallelized | None = None
        self._window: GradientWindow | None = None
        self._steps: Steps | None = None
        self._local_shards: dict[Optimizer, LocalShards] = {}
        self._after_exception = AfterException()
        self._save_in_background = save_in_background
        self._writer = Writer(save_in_background)

    def __repr__(self) -> str:
        """The degrees. A Trainer that can't take the strategy prints this."""
        degrees = ", ".join(f"{axis}={n}" for axis, n in self.parallel_dims.degrees.items() if n != 1)
        text = f"{type(self).__name__}({degrees})"
        if "pytorch_lightning" in sys.modules:
            text += ", which is for `lightning`: import Trainer and LightningModule from there"
        return text

    # ---------------------------------------------------------------- before any process starts

    @property
    @override
    def precision_plugin(self) -> Precision:
        assert self._precision_plugin is not None
        return self._precision_plugin

    @precision_plugin.setter
    @override
    def precision_plugin(self, plugin: Precision | None) -> None:
        # None in the constructor: Lightning would take a plugin there for the user's choice.
        self._precision_plugin = None if plugin is None else build_precision(plugin, self)

    @property
    @override
    def checkpoint_io(self) -> CheckpointIO:
        return super().checkpoint_io

    @checkpoint_io.setter
    @override
    def checkpoint_io(self, io: CheckpointIO) -> None:
        if type(io) is not TorchCheckpointIO:
            raise ConfigError(
                f"plugins={type(io).__name__}: TitanStrategy writes sharded checkpoints itself, so a "
                "CheckpointIO would never be used. Remove it."
            )
        self._checkpoint_io = io

    def validate_settings(self, world_size: int, precision: str) -> None:
        """Check the layout against the Trainer's settings and settle a degree of -1.

        Called in the Trainer's constructor, as soon as these are known.

        Raises:
            ConfigError: they don't fit; all problems at once.
        """
        heads = None if self._given_plan is None else self._given_plan.heads
        self.parallel_dims = validate_run(
            replace(self._facts(heads), world_size=world_size, precision=precision),
            **self.parallel_dims.degrees,
        )

    @override
    def _configure_launcher(self) -> None:
        assert self.cluster_environment is not None
        self._launcher = ScriptLauncher(
            self.cluster_environment, self.num_processes, self.num_nodes, self.validate_module
        )

    def validate_module(self, model: LightningModule) -> None:
        """Check what can be seen of a module before it is laid out, and before other processes start.

        Raises:
            ConfigError: it can't be laid out as asked; all problems at once.
        """
        if _LAYOUT not in model.__dict__:
            plan, built = self._plan_before_start(model)
            if plan is not None:
                validate_run(self._facts(plan.heads), **self.parallel_dims.degrees)
            if plan is not None and built:
                self._validate_structure(model, plan)
        if self.parallel_dims.pp > 1:
            validate_pipeline_module(model)

    def _plan_before_start(self, model: LightningModule) -> tuple[ParallelPlan | None, bool]:
        """What is known of the plan, and whether all modules that it names must be there already."""
        if next(model.parameters(), None) is None:
            return self._given_plan, False
        if is_overridden("configure_model", model):  # which may have more to build
            return self._given_plan or plan_of_models(model), self._given_plan is None
        return resolve_plan(model, self._given_plan, needs_tensor=self.parallel_dims.tp > 1), True

    def _validate_structure(self, model: LightningModule, plan: ParallelPlan) -> None:
        if self.parallel_dims.cp > 1:
            models_of(model, plan.sequence_dims)
        if self.parallel_dims.pp > 1:
            self._validate_stages(model, plan)

    # ---------------------------------------------------------------- set-up

    @override
    def setup_environment(self) -> None:
        trainer = self._module.trainer
        validate_callbacks(trainer)
        self._setup_distributed()
        let_collectives_end_before_exit()
        load_what_rank_0_found(trainer)
        self._after_exception = AfterException()
        if self._mesh is None:
            self._mesh = shared_mesh(self.parallel_dims, self.root_device.type)
            given = os.environ.get("PL_GLOBAL_SEED")
            own = int(given) if given is not None else torch.initial_seed() % 2**31
            self._seed = int(self.broadcast(own))
        self._device_mesh = self._mesh.device
        self._module._device_mesh = self._mesh.device
        replace_idle_profiler(trainer)
        self._data = DataSharding(trainer, self._mesh, self._seed)

    @contextmanager
    @override
    def tensor_init_context(self, empty_init: bool | None = None) -> Iterator[None]:
        meta = self._meta_init if empty_init is None else empty_init
        with (
            torch.device("meta") if meta else nullcontext(),
            self.precision_plugin.tensor_init_context(),
        ):
            yield

    @override
    def setup(self, trainer: Trainer) -> None:
        assert self.accelerator is not None
        self.accelerator.setup(trainer)
        adapt_callbacks(trainer, self.dp_size)
        module = self._module
        self._layout = self._lay_out(module)
        self.model = module
        move_to_device(module, self.root_device)
        self._window = GradientWindow(
            module,
            self._layout,
            self.root_device,
            norm_type=self._norm_type,
            error_if_nonfinite=self._error_if_nonfinite,
        )
        if self._steps is not None:
            self._steps.logs.uninstall()
        self._steps = self._build_steps(trainer, module)
        for loop in (
            trainer.fit_loop.epoch_loop.val_loop,
            trainer.validate_loop,
            trainer.test_loop,
            trainer.predict_loop,
        ):
            # Tensors made in inference mode can't take part in a later backward.
            loop.inference_mode = False
        GracefulStop(trainer)
        self.barrier()
        fitting = trainer.state.fn == TrainerFn.FITTING
        if fitting:
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()
        optimizers = self.optimizers if fitting else []
        require_same_settings(trainer, module, optimizers, self.mesh, self.root_device)
        if fitting:
            _optimizers_to_device(self.optimizers, self.root_device)

    def _build_steps(self, trainer: Trainer, module: LightningModule) -> Steps:
        layout = self._laid_out
        common = trainer, module, layout, self._gradients, self._seed, self.root_device
        if layout.pipeline is None:
            return Steps(*common)
        facts = self._pipeline_facts
        number = facts.num_microbatches or default_microbatches(facts.schedule, self.parallel_dims.pp)
        install_pipeline_loop(trainer)
        return PipelineSteps(*common, number)

    def _facts(self, heads: tuple[int, int] | None) -> RunFacts:
        """What is known of the run, with the heads of the model that runs."""
        return RunFacts(heads=heads, pipeline=self._pipeline_facts, context=self._context_options)

    def _pipeline_options(self) -> PipelineOptions:
        facts = self._pipeline_facts
        return PipelineOptions(
            resolve_schedule(facts.schedule),
            facts.num_chunks,
            facts.split,
            facts.first_weight,
            facts.last_weight,
        )

    def _validate_stages(self, module: LightningModule, plan: ParallelPlan) -> None:
        """Check that the module can be cut into stages, where it is whole."""
        names, layers = ordered_modules(module, plan.pipeline)
        require_covered(module, names)
        facts = self._pipeline_facts
        validate_run(RunFacts(num_layers=len(layers), pipeline=facts), **self.parallel_dims.degrees)
        if facts.split is not None:
            stages = self.parallel_dims.pp * chunks_per_rank(facts.schedule, facts.num_chunks)
            split_as_given(names, facts.split, stages)

    def _lay_out(self, module: LightningModule) -> Parallelized:
        layout: Parallelized | None = module.__dict__.get(_LAYOUT)
        reshard = (
            self.parallel_dims.pp == 1 if self._reshard_after_forward is None else self._reshard_after_forward
        )
        shard = shard_options(self.precision_plugin, reshard_after_forward=reshard)
        pipeline = self._pipeline_options()
        if layout is not None:
            now = switches(self.mesh, self._tensor_options, shard, pipeline, self._context_options)
            if layout.mesh is not self.mesh or layout.options != now:
                raise ConfigError(
                    f"This {type(module).__name__} is laid out for {layout.mesh.dims} with {layout.options}, "
                    f"and this Trainer asks for {self.mesh.dims} with {now}: a module is laid out once. "
                    "Build a new one for another layout or precision, and load a checkpoint into that."
                )
            return layout
        plan = resolve_plan(module, self._given_plan, needs_tensor=self.parallel_dims.tp > 1)
        facts = replace(self._facts(plan.heads), world_size=self.world_size)
        validate_run(facts, **self.parallel_dims.degrees)
        self._validate_structure(module, plan)
        if self.parallel_dims.pp > 1:
            show_whole_summary(self._module.trainer, module)
        if self._layer_sync is not None:
            self._layer_sync.apply(module)
        self.precision_plugin.convert_module(module)
        layout = parallelize(
            module,
            plan,
            self.mesh,
            device=self.root_device,
            seed=self._seed,
            tensor=self._tensor_options,
            shard=shard,
            pipeline=pipeline,
            context=self._context_options,
        )
        module.__dict__[_LAYOUT] = layout
        return layout

    # ---------------------------------------------------------------- data

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": self.dp_size, "rank": self.dp_rank}

    @override
    def process_dataloader(self, dataloader: object) -> object:
        assert self._data is not None
        return self._data.shard(dataloader)

    @override
    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        self._running.receive(dataloader_idx)
        batch = super().batch_to_device(batch, device, dataloader_idx)
        self._running.received(batch)
        return batch

    @override
    def on_train_start(self) -> None:
        assert self._data is not None
        self._data.resume()

    @override
    def on_validation_start(self) -> None:
        self._running.restart_count()
        broadcast_buffers(self._module, self.mesh.group("tokens"))

    on_test_start = on_predict_start = on_validation_start

    @override
    def on_validation_end(self) -> None:
        free_gathered(self._laid_out.fsdp_units)

    on_test_end = on_validation_end

    @override
    def on_predict_end(self) -> None:
        self._running.gather_predictions()
        free_gathered(self._laid_out.fsdp_units)

    # ---------------------------------------------------------------- steps

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        if self._check_peers:
            check_batch(args[0], self.mesh, self.root_device)
        return self._running.train(self.precision_plugin.train_step_context, args, kwargs)

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        context = self.precision_plugin.val_step_context
        return self._running.evaluate("validation_step", context, args, kwargs)

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        context = self.precision_plugin.test_step_context
        return self._running.evaluate("test_step", context, args, kwargs)

    @override
    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._running.predict(self.precision_plugin.predict_step_context, args, kwargs)

    # ---------------------------------------------------------------- end

    @override
    def on_exception(self, exception: BaseException) -> None:
        # After the callbacks, which may save with all ranks. On SIGTERM every rank ends by itself.
        self._end_saving()
        if isinstance(exception, Preempted):
            tell_preempted(exception, self._module.trainer)
        if isinstance(self._launcher, ScriptLauncher) and not isinstance(exception, SystemExit):
            self._launcher.end_children()

    @override
    def teardown(self) -> None:
        self._end_saving()
        if self._steps is not None:
            self._steps.logs.uninstall()
        forget_sequences()
        super().teardown()

"""Schemas of a run: what every run has, whatever it trains.

A schema gives each key of the configuration a type, a default and a meaning. Hydra checks overrides
against them; fields are described in the docstrings, with their units.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING


@dataclass
class PathsConfig:
    """Where a run reads and writes.

    Args:
        runs: folder that holds the folders of all runs; relative to the working directory.
        run_dir: folder of this run.
    """

    runs: str = "runs"
    run_dir: str = "${paths.runs}/${name}/${run_id:}"


@dataclass
class PrecisionConfig:
    """Number formats.

    Args:
        name: Lightning's name: 32-true, bf16-mixed (float32 master weights and gradient reduction)
            or bf16-true.
    """

    name: str = MISSING


@dataclass
class TitanStrategyConfig:
    """The layout: degrees of the axes, and how they are used.

    Args:
        dp_replicate: copies of the model (HSDP).
        dp_shard: shards of the model (FSDP2); -1: the rest of the processes.
        tp: shards of each layer (tensor parallel).
        pp: ranks of the pipeline.
        cp: shards of the sequence (context parallel).
        sequence_parallel: under tp, shard hidden states between blocks over the sequence.
        loss_parallel: under tp, keep logits sharded over the vocabulary up to the loss.
        meta_init: build the model without memory and fill it module by module.
        reshard_after_forward: free gathered parameters between forward and backward; null: yes without pp.
        pp_schedule: GPipe, 1F1B, Interleaved1F1B, LoopedBFS, InterleavedZeroBubble, ZBVZeroBubble, DualPipeV,
            or the path of a CSV file.
        pp_microbatches: parts of a batch; null: about twice pp.
        pp_chunks: stages of a rank where the schedule interleaves; null: as the schedule has it.
        pp_split: for each stage the names of its modules; null: balanced by cost.
        pp_first_weight: cost of the modules before the layers, in layers; null: by their parameters.
        pp_last_weight: cost of the modules after the layers, in layers; null: by their parameters.
        cp_backend: how attention sees the tokens of other ranks: all_gather, ring, ulysses or torch.
        cp_load_balance: each rank holds an early and a late chunk of the sequence; null: but for ulysses.
        cp_pad: pad sequences that the ranks can't share evenly; false: refuse them.
        gradient_norm_type: p of the gradient norm, a number or "inf".
        check_peers: debug switch: ranks of the tensor and of the context axis must read the same batch and
            hold the same gradients of replicated weights, checked in every step.
        error_if_nonfinite: stop before a step whose gradient norm is NaN or infinite.
        save_in_background: write checkpoints while the training goes on; needs host memory for a copy.
        process_group_backend: backend of torch.distributed; null: by device.
        timeout_s: seconds until a collective that a rank doesn't join fails.
    """

    _target_: str = "titanplug.strategy.TitanStrategy"
    dp_replicate: int = 1
    dp_shard: int = -1
    tp: int = 1
    pp: int = 1
    cp: int = 1
    sequence_parallel: bool = True
    loss_parallel: bool = True
    meta_init: bool = False
    reshard_after_forward: bool | None = None
    pp_schedule: str = "Interleaved1F1B"
    pp_microbatches: int | None = None
    pp_chunks: int | None = None
    pp_split: Any = None
    pp_first_weight: float | None = None
    pp_last_weight: float | None = None
    cp_backend: str = "all_gather"
    cp_load_balance: bool | None = None
    cp_pad: bool = True
    gradient_norm_type: float | str = 2.0
    error_if_nonfinite: bool = False
    check_peers: bool = False
    save_in_background: bool = False
    process_group_backend: str | None = None
    timeout_s: float = 1800.0


@dataclass
class TrainerConfig:
    """Arguments of ``lightning.Trainer``; its strategy, callbacks and loggers are groups of their own.

    Args:
        accelerator: auto, cpu or gpu.
        devices: processes on each node; -1: one for every GPU.
        num_nodes: machines.
        precision: from the group ``precision``.
        max_steps: optimizer steps; -1: no limit.
        min_steps: optimizer steps before a callback may stop the run.
        max_epochs: passes over the training data; -1: no limit.
        min_epochs: passes before a callback may stop the run.
        max_time: stop after DD:HH:MM:SS.
        limit_train_batches: batches an epoch (a whole number) or part of them (0.0 to 1.0).
        limit_val_batches: the same for validation.
        limit_test_batches: the same for the test.
        limit_predict_batches: the same for predictions.
        overfit_batches: train and validate on the same few batches, a number or a part.
        fast_dev_run: run this many batches of everything and write nothing.
        val_check_interval: training batches between validations (a whole number, over epochs when
            check_val_every_n_epoch is null), or part of an epoch (0.0 to 1.0).
        check_val_every_n_epoch: epochs between validations; null: count batches over epochs.
        num_sanity_val_steps: validation batches before the training starts.
        log_every_n_steps: optimizer steps between logged values and step lines.
        accumulate_grad_batches: batches whose gradients make one optimizer step.
        gradient_clip_val: largest gradient norm (or value); null: no clipping.
        gradient_clip_algorithm: norm or value.
        enable_checkpointing: write a checkpoint even where no callback asks for one.
        enable_progress_bar: null: where the output is a terminal.
        enable_model_summary: list the layers at the start.
        deterministic: allow deterministic kernels only.
        benchmark: let cuDNN choose kernels by timing them.
        inference_mode: turn autograd off in evaluation.
        use_distributed_sampler: give each data-parallel rank its share of the samples.
        reload_dataloaders_every_n_epochs: epochs after which the loaders are built again; 0: never.
        detect_anomaly: find the operation that made a NaN (slow).
        profiler: simple, advanced or pytorch.
        default_root_dir: where Lightning writes what has no other place.
        enable_autolog_hparams: write the hyperparameters to the loggers.
    """

    _target_: str = "lightning.Trainer"
    accelerator: str = "auto"
    devices: int = 1
    num_nodes: int = 1
    precision: str = "${precision.name}"
    max_steps: int = -1
    min_steps: int | None = None
    max_epochs: int | None = -1
    min_epochs: int | None = None
    max_time: str | None = None
    limit_train_batches: int | float | None = None
    limit_val_batches: int | float | None = None
    limit_test_batches: int | float | None = None
    limit_predict_batches: int | float | None = None
    overfit_batches: int | float = 0.0
    fast_dev_run: int | bool = False
    val_check_interval: int | float | None = None
    check_val_every_n_epoch: int | None = 1
    num_sanity_val_steps: int | None = None
    log_every_n_steps: int | None = 10
    accumulate_grad_batches: int = 1
    gradient_clip_val: float | None = None
    gradient_clip_algorithm: str | None = None
    enable_checkpointing: bool | None = None
    enable_progress_bar: bool | None = None
    enable_model_summary: bool | None = False
    deterministic: bool | str | None = None
    benchmark: bool | None = None
    inference_mode: bool = True
    use_distributed_sampler: bool = True
    reload_dataloaders_every_n_epochs: int = 0
    detect_anomaly: bool = False
    profiler: str | None = None
    default_root_dir: str | None = "${paths.run_dir}"
    enable_autolog_hparams: bool = True


@dataclass
class TrainConfig:
    """Everything that `titanplug train` reads.

    Args:
        name: of the run; names its folder.
        seed: of initial weights, data order and random draws.
        global_batch_size: rows of an optimizer step over all processes; sets data.batch_size so that layouts
            train on the same rows. null: data.batch_size rows for each data-parallel rank and each batch.
        ckpt_path: checkpoint from which a new run starts, in a folder of its own; null: none.
        resume: auto: go on with the newest run of this name and configuration, in its folder, from its last
            checkpoint, or start anew where there is none; the folder of a run: go on with that one; null:
            start anew.
        test: evaluate the test split after training.
        optimized_metric: name of the final value that a run returns to a sweeper; null: none.
        model: what is trained (group).
        module: the LightningModule that trains it (group).
        parallelism: the layout (group).
        precision: number formats (group).
        data: the data module (group).
        tokenizer: how text becomes tokens (group).
        optim: the optimizer (group).
        scheduler: the learning rate over the run (group).
        trainer: Lightning's Trainer (group).
        callbacks: by name; null switches one off (group).
        logger: loggers by name; null switches one off (group).
        paths: folders (group).
    """

    name: str = "train"
    seed: int = 0
    global_batch_size: int | None = None
    ckpt_path: str | None = None
    resume: str | None = None
    test: bool = False
    optimized_metric: str | None = "val_loss"
    model: Any = MISSING
    module: Any = MISSING
    parallelism: Any = MISSING
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    data: Any = MISSING
    tokenizer: Any = MISSING
    optim: Any = MISSING
    scheduler: Any = None
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    callbacks: dict[str, Any] | None = field(default_factory=dict)
    logger: dict[str, Any] | None = field(default_factory=dict)
    paths: PathsConfig = field(default_factory=PathsConfig)

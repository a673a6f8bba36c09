"""Schemas of what a run is made of. Each stands for the constructor that its ``_target_`` names.

The meanings are those of the constructors' arguments; a test compares names and defaults.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING

# --------------------------------------------------------------------------------------
# Model, module
# --------------------------------------------------------------------------------------


@dataclass
class RopeScalingConfig:
    """Stretching of the rotary frequencies, as in Llama 3.1.

    Args:
        factor: by how much the slow frequencies are slowed down.
        low_freq_factor: turns over the original context below which a frequency is stretched.
        high_freq_factor: turns over the original context above which a frequency is kept.
        original_max_position: context that the model was first trained on, in tokens.
    """

    _target_: str = "titanplug.models.RopeScaling"
    factor: float = MISSING
    low_freq_factor: float = MISSING
    high_freq_factor: float = MISSING
    original_max_position: int = MISSING


@dataclass
class TransformerConfig:
    """A decoder-only Transformer of the Llama, Mistral or Qwen family.

    Args:
        vocab_size: token ids.
        dim: width of the hidden states, in features.
        num_layers: blocks.
        num_heads: query heads.
        hidden_dim: width of the feed-forward layer, in features.
        num_kv_heads: key-value heads; null: as many as query heads.
        head_dim: width of one head, in features; null: dim / num_heads.
        max_seq_len: longest sequence, in tokens.
        rope_theta: base of the rotary wavelengths.
        rope_scaling: stretching of the rotary frequencies; null: none.
        norm_eps: added to the mean square in every norm.
        qkv_bias: biases in the query, key and value projections.
        qk_norm: a norm over each query and key head.
        tie_embeddings: the output layer uses the weight of the token embeddings.
        sliding_window: tokens that a token sees, itself included; null: all before it.
        init_std: standard deviation of the initial weights.
        depth_scaled_init: start layers that add to the residual stream smaller in deeper models.
        init_from: where the first weights are: a Hugging Face directory, a checkpoint directory, or a state
            dict as .safetensors or .pt; null: drawn at random.
    """

    _target_: str = "titanplug.models.TransformerConfig"
    vocab_size: int = MISSING
    dim: int = MISSING
    num_layers: int = MISSING
    num_heads: int = MISSING
    hidden_dim: int = MISSING
    num_kv_heads: int | None = None
    head_dim: int | None = None
    max_seq_len: int = 2048
    rope_theta: float = 10000.0
    rope_scaling: RopeScalingConfig | None = None
    norm_eps: float = 1e-5
    qkv_bias: bool = False
    qk_norm: bool = False
    tie_embeddings: bool = False
    sliding_window: int | None = None
    init_std: float = 0.02
    depth_scaled_init: bool = True
    init_from: str | None = None


@dataclass
class HFModelConfig:
    """A model with its weights, from a directory.

    Args:
        init_from: a Hugging Face directory, or a checkpoint directory of titanplug.
        max_seq_len: longest sequence, in tokens; null: as the directory says.
    """

    _target_: str = "titanplug.models.config_from_directory"
    init_from: str = MISSING
    max_seq_len: int | None = None


@dataclass
class LanguageModelConfig:
    """Pre-training of a causal language model.

    Args:
        config: the model.
        optimizer: builds the optimizer.
        schedule: builds the learning-rate schedule; null: a constant rate.
    """

    _target_: str = "titanplug.modules.LanguageModel"
    config: Any = "${model}"
    optimizer: Any = "${optim}"
    schedule: Any = "${scheduler}"


# --------------------------------------------------------------------------------------
# Optimizer, schedule
# --------------------------------------------------------------------------------------


@dataclass
class AdamWConfig:
    """AdamW (Loshchilov and Hutter 2019).

    Args:
        lr: learning rate after warmup.
        betas: decay of the running means of gradient and squared gradient.
        eps: added to the denominator.
        weight_decay: of matrices; norms and biases have none.
        fused: one kernel for all of the step; null: torch's choice.
    """

    _target_: str = "torch.optim.AdamW"
    _partial_: bool = True
    lr: float = 3e-4
    betas: list[float] = field(default_factory=lambda: [0.9, 0.95])
    eps: float = 1e-8
    weight_decay: float = 0.1
    fused: bool | None = None


@dataclass
class AdamW8bitConfig:
    """AdamW whose states have 8 bits, in blocks with a scale each (Dettmers et al. 2022).

    Args:
        lr: learning rate after warmup.
        betas: decay of the running means of gradient and squared gradient.
        eps: added to the denominator.
        weight_decay: of matrices; norms and biases have none.
        block_size: weights that share a scale.
    """

    _target_: str = "titanplug.modules.adamw_8bit"
    _partial_: bool = True
    lr: float = 3e-4
    betas: list[float] = field(default_factory=lambda: [0.9, 0.95])
    eps: float = 1e-8
    weight_decay: float = 0.1
    block_size: int = 256


@dataclass
class SGDConfig:
    """Stochastic gradient descent.

    Args:
        lr: learning rate after warmup.
        momentum: decay of the running mean of gradients; 0: none.
        nesterov: look ahead by the momentum.
        weight_decay: of matrices; norms and biases have none.
    """

    _target_: str = "torch.optim.SGD"
    _partial_: bool = True
    lr: float = 0.1
    momentum: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0


@dataclass
class ConstantConfig:
    """A constant learning rate.

    Args:
        warmup_steps: optimizer steps until the full rate is reached.
    """

    _target_: str = "titanplug.modules.constant"
    _partial_: bool = True
    warmup_steps: int = 0


@dataclass
class CosineConfig(ConstantConfig):
    """Half a cosine down from the full rate.

    Args:
        warmup_steps: optimizer steps until the full rate is reached.
        min_ratio: rate at the end, as a fraction of the full rate.
    """

    _target_: str = "titanplug.modules.cosine"
    min_ratio: float = 0.1


@dataclass
class LinearConfig(ConstantConfig):
    """Straight down from the full rate.

    Args:
        warmup_steps: optimizer steps until the full rate is reached.
        min_ratio: rate at the end, as a fraction of the full rate.
    """

    _target_: str = "titanplug.modules.linear"
    min_ratio: float = 0.0


@dataclass
class WarmupStableDecayConfig(ConstantConfig):
    """The full rate, then linear decay.

    Args:
        warmup_steps: optimizer steps until the full rate is reached.
        decay_fraction: part of the run that decays, 0 to 1.
        min_ratio: rate at the end, as a fraction of the full rate.
    """

    _target_: str = "titanplug.modules.warmup_stable_decay"
    decay_fraction: float = 0.1
    min_ratio: float = 0.0


# --------------------------------------------------------------------------------------
# Callbacks, loggers
# --------------------------------------------------------------------------------------


@dataclass
class TargetConfig:
    """A part without settings."""

    _target_: str = MISSING


@dataclass
class StepLinesConfig:
    """One line of values every ``trainer.log_every_n_steps`` steps, or the progress bar's.

    Args:
        tokens_key: entry of the batch whose elements are the tokens.
    """

    _target_: str = "titanplug.callbacks.StepLines"
    tokens_key: str = "input_ids"


@dataclass
class LossCurveConfig:
    """A picture and a table of the losses.

    Args:
        path: of the picture; the table lies beside it as .csv.
        train_key: logged name of the training loss.
        val_key: logged name of the validation value.
        val_label: how its axis is called.
    """

    _target_: str = "titanplug.callbacks.LossCurve"
    path: str = "${paths.run_dir}/loss_curve.png"
    train_key: str = "train_loss"
    val_key: str = "val_bits_per_byte"
    val_label: str = "bits per byte"


@dataclass
class PipelineTimelineConfig:
    """A picture of one training step of a pipeline, measured.

    Args:
        path: of the picture, .png or .svg.
        step: which batch is timed, counted from 0.
    """

    _target_: str = "titanplug.callbacks.PipelineTimeline"
    path: str = "${paths.run_dir}/pipeline.svg"
    step: int = 3


@dataclass
class RunSummaryConfig:
    """The last line of a run.

    Args:
        run_dir: folder of the run.
        key: logged name of the value to tell, without ``val_`` or ``test_``.
        label: its unit.
    """

    _target_: str = "titanplug.callbacks.RunSummary"
    run_dir: str = "${paths.run_dir}"
    key: str = "bits_per_byte"
    label: str = "bits per byte"


@dataclass
class WeightAverageConfig:
    """A running average of the weights.

    Args:
        decay: part of the average that an update keeps, 0 to 1; null: all updates weigh alike.
        start_step: optimizer steps at the start that are left out.
        every_n_steps: optimizer steps from one update to the next.
        use_for_evaluation: validate, test and predict with the average.
        use_at_end: leave the average in the module after training.
    """

    _target_: str = "titanplug.callbacks.WeightAverage"
    decay: float | None = 0.999
    start_step: int = 0
    every_n_steps: int = 1
    use_for_evaluation: bool = True
    use_at_end: bool = True


@dataclass
class SeedCheckpointConfig:
    """A checkpoint before the first step, for runs in other layouts.

    Args:
        path: of the checkpoint.
    """

    _target_: str = "titanplug.callbacks.SeedCheckpoint"
    path: str = "${paths.run_dir}/checkpoints/seed.ckpt"


@dataclass
class ModelCheckpointConfig:
    """Checkpoints.

    Args:
        dirpath: folder of the checkpoints.
        filename: name of one; {step}, {epoch} and logged values in braces are filled in.
        monitor: logged value by which the best are kept; null: the latest.
        mode: min or max.
        save_top_k: how many of the best are kept; -1: all, 0: none.
        save_last: also keep the latest, as ``last.ckpt``.
        every_n_train_steps: optimizer steps between checkpoints; null: after each validation.
        save_weights_only: leave out what is needed to go on training.
        auto_insert_metric_name: put ``name=`` before each value in the file name.
        enable_version_counter: keep what has the name already and write ``name-v1``.
    """

    _target_: str = "lightning.pytorch.callbacks.ModelCheckpoint"
    dirpath: str = "${paths.run_dir}/checkpoints"
    filename: str = "step_{step}"
    monitor: str | None = "val_loss"
    mode: str = "min"
    save_top_k: int = 1
    save_last: bool | None = True
    every_n_train_steps: int | None = None
    save_weights_only: bool = False
    auto_insert_metric_name: bool = False
    enable_version_counter: bool = False


@dataclass
class TensorBoardConfig:
    """TensorBoard event files.

    Args:
        save_dir: folder of the run.
        name: of a folder in it; empty: none.
        version: of a folder in that.
    """

    _target_: str = "lightning.pytorch.loggers.TensorBoardLogger"
    save_dir: str = "${paths.run_dir}"
    name: str = ""
    version: str = "tensorboard"


@dataclass
class CSVConfig(TensorBoardConfig):
    """A table of all logged values, ``metrics.csv``.

    Args:
        save_dir: folder of the run.
        name: of a folder in it; empty: none.
        version: of a folder in that.
    """

    _target_: str = "lightning.pytorch.loggers.CSVLogger"
    version: str = "csv"


@dataclass
class WandbConfig:
    """Weights & Biases.

    Args:
        project: where the run is filed.
        name: of the run there.
        save_dir: folder of the run.
        group: runs that belong together, such as the jobs of a sweep; null: none.
        offline: write files to be sent later.
        log_model: send checkpoints too.
    """

    _target_: str = "lightning.pytorch.loggers.WandbLogger"
    project: str = "titanplug"
    name: str | None = "${name}"
    save_dir: str = "${paths.run_dir}"
    group: str | None = None
    offline: bool = False
    log_model: bool = False


@dataclass
class MLFlowConfig:
    """MLflow.

    Args:
        experiment_name: where the run is filed.
        run_name: of the run there; null: MLflow's choice.
        tracking_uri: address of a server; null: the folder save_dir.
        save_dir: folder for all runs, where there is no server.
    """

    _target_: str = "lightning.pytorch.loggers.MLFlowLogger"
    experiment_name: str = "${name}"
    run_name: str | None = None
    tracking_uri: str | None = None
    save_dir: str | None = "${paths.runs}/mlruns"

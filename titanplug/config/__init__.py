"""The typed configuration: schemas, where the YAML files are, and the checks before a run.

Importing this package imports neither torch nor Lightning. A YAML file takes its schema with

    defaults:
      - schema/adamw@_here_
      - _self_

and has then all keys of the schema, with their types and defaults. A file of your own without these
lines may have any keys.
"""

from __future__ import annotations

import os
import secrets
from datetime import datetime
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from hydra.core.config_store import ConfigStore
from omegaconf import OmegaConf

from titanplug.config import components, data, run

SWEEP_VARIABLE = "TITANPLUG_SWEEP_ID"
"""Environment variable with the id of the sweep that a process works for."""

SCHEMAS: dict[str, dict[str, type]] = {
    "model": {"transformer": components.TransformerConfig, "hf": components.HFModelConfig},
    "module": {"language_model": components.LanguageModelConfig},
    "parallelism": {"titan": run.TitanStrategyConfig},
    "data": {
        "text": data.TextDataConfig,
        "file": data.TextFileConfig,
        "hf": data.HFDataConfig,
    },
    "tokenizer": {
        "byte": data.ByteTokenizerConfig,
        "bpe": data.BPETokenizerConfig,
        "hf": data.HFTokenizerConfig,
    },
    "optim": {
        "adamw": components.AdamWConfig,
        "adamw_8bit": components.AdamW8bitConfig,
        "sgd": components.SGDConfig,
    },
    "scheduler": {
        "constant": components.ConstantConfig,
        "cosine": components.CosineConfig,
        "linear": components.LinearConfig,
        "warmup_stable_decay": components.WarmupStableDecayConfig,
    },
    "callbacks": {
        "step_lines": components.StepLinesConfig,
        "loss_curve": components.LossCurveConfig,
        "pipeline_timeline": components.PipelineTimelineConfig,
        "run_summary": components.RunSummaryConfig,
        "model_checkpoint": components.ModelCheckpointConfig,
        "seed_checkpoint": components.SeedCheckpointConfig,
        "weight_average": components.WeightAverageConfig,
        "target": components.TargetConfig,
    },
    "logger": {
        "tensorboard": components.TensorBoardConfig,
        "csv": components.CSVConfig,
        "wandb": components.WandbConfig,
        "mlflow": components.MLFlowConfig,
    },
}
"""Schema by group and name."""


def register_schemas() -> None:
    """Make the schemas and the resolvers ``run_id`` and ``sweep_id`` known to Hydra. May be called again."""
    store = ConfigStore.instance()
    store.store(name="train_schema", node=run.TrainConfig, provider="titanplug")
    for group, schemas in SCHEMAS.items():
        for name, schema in schemas.items():
            store.store(group=f"{group}/schema", name=name, node=schema, provider="titanplug")
    OmegaConf.register_new_resolver("run_id", run_id, replace=True)
    OmegaConf.register_new_resolver("sweep_id", sweep_id, replace=True)


def find_conf() -> str:
    """Where the YAML files are, as Hydra takes it: in the installed package, or in the checkout."""
    if find_spec("titanplug.conf") is not None:
        return "pkg://titanplug.conf"
    return str(Path(__file__).parents[2] / "conf")


def sweep_id() -> str:
    """Names a sweep's folder: as ``run_id``, and the same in all workers that a launcher starts."""
    return os.environ.setdefault(SWEEP_VARIABLE, run_id())


@cache
def run_id() -> str:
    """Names this run's folder: job and step under Slurm, else the time and four random digits.

    The digits keep runs apart that start within a second. The same all through a process.
    """
    job = os.environ.get("SLURM_JOB_ID")
    if job is not None:
        attempt = os.environ.get("SLURM_RESTART_COUNT", "0")
        return f"slurm-{job}.{os.environ.get('SLURM_STEP_ID', '0')}.{attempt}"
    return f"{datetime.now():%Y-%m-%d_%H-%M-%S}_{secrets.token_hex(2)}"

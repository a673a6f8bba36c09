"""Wrong settings end in the Trainer's constructor, before any process or process group."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.plugins.io import TorchCheckpointIO
from lightning.pytorch.plugins.precision import (
    DoublePrecision,
    HalfPrecision,
    MixedPrecision,
    Precision,
)
from torch import nn

from titanplug import ParallelPlan, TitanStrategy
from titanplug.errors import ConfigError
from titanplug.models import Transformer, TransformerConfig
from titanplug.validation import PRECISIONS

QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


def refused(strategy: Any = "titan", devices: int = 4, **options: Any) -> str:
    """The message of the error that the Trainer's constructor raises."""
    with pytest.raises(ConfigError) as error:
        if isinstance(strategy, dict):
            strategy = TitanStrategy(**strategy)
        L.Trainer(devices=devices, strategy=strategy, **QUIET, **options)
    assert isinstance(error.value, ValueError)
    assert not dist.is_initialized()
    assert not multiprocessing.active_children()
    return str(error.value)


# What is given, and what the message must say: field, value, allowed values.
DEGREES: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "product": ({"dp_shard": 3, "tp": 2}, ("dp_shard=3", "tp=2", "= 6 for 4 processes", "must equal")),
    "rest": ({"tp": 3}, ("tp=3", "4 processes", "must divide")),
    "two rests": ({"dp_replicate": -1}, ("dp_replicate and dp_shard are -1", "at most one")),
    "size": ({"dp_shard": -2}, ("dp_shard=-2", "at least 1, or -1")),
    "pipeline": ({"pp": 4, "pp_schedule": "1F1B", "pp_microbatches": 2}, ("pp_microbatches=2", "4 or more")),
    "context": ({"cp": 2, "cp_backend": "gather"}, ("cp_backend='gather'", "ring", "mean 'all_gather'")),
    "context heads": (
        {"dp_shard": 1, "cp": 4, "cp_backend": "ulysses", "plan": ParallelPlan(heads=(4, 2))},
        ("cp=4 x tp=1, 4 heads and 2 key-value heads", "Allowed values of cp: 1, 2;"),
    ),
    "heads": (
        {"dp_shard": 1, "tp": 4, "plan": ParallelPlan(heads=(4, 2))},
        ("tp=4 with 4 heads and 2 key-value heads", "Allowed values of tp: 1, 2."),
    ),
    "norm": ({"gradient_norm_type": 0}, ("gradient_norm_type=0", "above 0", "inf")),
    "norm name": ({"gradient_norm_type": "max"}, ("gradient_norm_type='max'", "above 0", "inf")),
    "timeout": ({"timeout_s": 0}, ("timeout_s=0", "above 0")),
}


@pytest.mark.parametrize("name", DEGREES)
def test_a_wrong_layout_is_refused(name: str) -> None:
    degrees, parts = DEGREES[name]
    message = refused(degrees)
    for part in parts:
        assert part in message


def test_all_wrong_fields_at_once() -> None:
    message = refused({"dp_shard": 0, "tp": -2, "cp_backend": "x", "gradient_norm_type": -1})
    assert message.startswith("4 problems in the configuration:")
    message = refused({"dp_shard": 3, "tp": 2}, precision="16-mixed")
    assert message.startswith("2 problems in the configuration:")


@pytest.mark.parametrize("strategy", ["titan", {}])
@pytest.mark.parametrize("precision", ["16-mixed", "16-true", "64-true", "transformer-engine"])
def test_other_precisions_are_refused_with_the_list(strategy: Any, precision: Any) -> None:
    message = refused(strategy, precision=precision)
    assert message.startswith(f"precision={precision!r}")
    assert all(name in message for name in PRECISIONS)


class OwnPrecision(Precision):
    pass


@pytest.mark.parametrize("strategy", ["titan", {}])
@pytest.mark.parametrize(
    "plugin",
    [
        OwnPrecision(),
        DoublePrecision(),
        HalfPrecision("16-true"),
        MixedPrecision("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu")),
    ],
    ids=lambda plugin: type(plugin).__name__,
)
def test_precision_plugins_are_refused_with_the_list(strategy: Any, plugin: Any) -> None:
    message = refused(strategy, plugins=plugin)
    assert type(plugin).__name__ in message or plugin.precision in message
    assert all(name in message for name in PRECISIONS)


def test_a_checkpoint_plugin_is_refused() -> None:
    class OwnIO(TorchCheckpointIO):
        pass

    assert "OwnIO" in refused({}, plugins=OwnIO())


@pytest.mark.parametrize("precision", [*PRECISIONS, 32, "bf16"])
def test_good_settings_pass_by_name_and_by_instance(precision: Any) -> None:
    trainers = [
        L.Trainer(devices=4, strategy=strategy, precision=precision, **QUIET)
        for strategy in ("titan", TitanStrategy(tp=2))
    ]
    for trainer in trainers:
        assert trainer.precision == {32: "32-true", "bf16": "bf16-mixed"}.get(precision, precision)
        assert trainer.precision_plugin.precision == trainer.precision
    by_name, by_instance = (trainer.strategy for trainer in trainers)
    assert isinstance(by_name, TitanStrategy) and isinstance(by_instance, TitanStrategy)
    assert str(by_name.parallel_dims) == "dp_shard=4"
    assert str(by_instance.parallel_dims) == "dp_shard=2 x tp=2"
    # Other strategies keep Lightning's own rules.
    assert L.Trainer(devices=1, precision="64-true", **QUIET).precision == "64-true"


# ---------------------------------------------------------------- what only the module knows


class Lit(L.LightningModule):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.model(batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_heads_of_the_model_are_checked_before_the_process_group(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # One process that claims to be one of four: a process group would wait for the others.
    for name, value in {"RANK": 0, "WORLD_SIZE": 4, "LOCAL_RANK": 0, "GROUP_RANK": 0}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    config = TransformerConfig(vocab_size=8, dim=16, num_layers=1, num_heads=4, num_kv_heads=2, hidden_dim=16)
    trainer = L.Trainer(devices=4, strategy=TitanStrategy(dp_shard=1, tp=4, timeout_s=5), **QUIET)
    with pytest.raises(ConfigError, match="tp=4 with 4 heads and 2 key-value heads"):
        trainer.fit(Lit(Transformer(config)), [torch.zeros(1, 4, dtype=torch.int64)])
    assert not dist.is_initialized()


def test_a_script_ends_quickly_with_the_message_last(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        textwrap.dedent(
            """
            import lightning as L
            from titanplug import TitanStrategy

            strategy = TitanStrategy(dp_shard=3, tp=2)
            L.Trainer(devices=4, accelerator="cpu", strategy=strategy, logger=False)
            """
        )
    )
    start = time.monotonic()
    root = str(Path(__file__).parents[2])
    ended = subprocess.run(
        [sys.executable, str(script)],
        env={**os.environ, "PYTHONPATH": root},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert ended.returncode not in (0, None)
    assert "dp_shard=3 x cp=1 x tp=2 = 6 for 4 processes" in ended.stderr.splitlines()[-1]
    assert time.monotonic() - start < 60  # most of it is Python that imports torch

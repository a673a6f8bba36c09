"""Draws what each pipeline rank computed when, in one real step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback
from typing_extensions import override

from titanplug.errors import ConfigError
from titanplug.report.timeline import draw_timeline


class PipelineTimeline(Callback):
    """Times the computations of one training step and draws them, a row for each rank of the pipeline.

    Ranks of other machines have clocks of their own: the picture is of the ranks with rank 0's place on the
    other axes, and right where these are on one machine.

    Args:
        path: of the picture, .png or .svg.
        step: which batch is timed, counted from 0; the first ones also exchange shapes.

    Raises:
        ConfigError: there is no pipeline, or the path has another ending; when training starts.
    """

    def __init__(self, path: str, step: int = 3) -> None:
        self.path = Path(path)
        self.step = step

    @override
    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        problems = []
        if getattr(trainer.strategy, "pipeline", None) is None:
            problems.append("PipelineTimeline needs a pipeline: use TitanStrategy(pp=2), or leave it out.")
        if self.path.suffix not in (".png", ".svg"):
            problems.append(f"path={self.path}: the picture is a .png or .svg. Give such a name.")
        if problems:
            raise ConfigError(problems)

    @override
    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        runtime: Any = trainer.strategy.pipeline_runtime  # type: ignore[attr-defined]
        runtime.timed = [] if trainer.fit_loop.total_batch_idx == self.step else None

    @override
    def on_train_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        strategy: Any = trainer.strategy
        mine, strategy.pipeline_runtime.timed = strategy.pipeline_runtime.timed, None
        if mine is None:
            return
        group = strategy.mesh.group("pp")
        rows: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(rows, mine, group=group)
        if trainer.is_global_zero:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            draw_timeline(rows, self.path, title=f"{strategy.pipeline.options.schedule}, measured")

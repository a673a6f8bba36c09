"""What the parts of the strategy share: the mesh, what runs on it, and communication over all ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor
from typing_extensions import override

from titanplug.mesh import Mesh, ParallelDims
from titanplug.parallel.parallelize import Parallelized
from titanplug.parallel.pipeline.runtime import PipelineRuntime
from titanplug.parallel.pipeline.stages import PipelineStages
from titanplug.plan import ParallelPlan
from titanplug.strategy.after_exception import AfterException
from titanplug.strategy.data import DataSharding
from titanplug.strategy.gradient_window import GradientWindow
from titanplug.strategy.reductions import gather_tensor, reduce_tensor
from titanplug.strategy.steps import Steps


class OverRanks(ModelParallelStrategy):
    """Communication as Lightning asks for it, over the ranks that hold different data."""

    parallel_dims: ParallelDims
    _mesh: Mesh | None
    _data: DataSharding | None
    _layout: Parallelized | None
    _window: GradientWindow | None
    _steps: Steps | None
    _after_exception: AfterException
    _check_peers: bool

    @property
    def mesh(self) -> Mesh:
        """The mesh; there once the processes are connected."""
        if self._mesh is None:
            raise RuntimeError("The mesh is made when a Trainer call starts; it isn't there before that.")
        return self._mesh

    @property
    def dp_rank(self) -> int:
        """Position among the ranks that read different samples."""
        return self.mesh.rank("batch")

    @property
    def dp_size(self) -> int:
        """Number of ranks that read different samples."""
        return self.mesh["batch"].size()

    @property
    def plan(self) -> ParallelPlan:
        """The plan that was followed."""
        return self._laid_out.plan

    @property
    def pipeline(self) -> PipelineStages | None:
        """The pipeline stages; None without pipeline, and before the module is laid out."""
        return None if self._layout is None else self._layout.pipeline

    @property
    def pipeline_runtime(self) -> PipelineRuntime | None:
        """What runs the pipeline's schedules; None without pipeline."""
        return self._running.runtime

    @property
    def _laid_out(self) -> Parallelized:
        assert self._layout is not None
        return self._layout

    @property
    def _gradients(self) -> GradientWindow:
        assert self._window is not None
        return self._window

    @property
    def _running(self) -> Steps:
        assert self._steps is not None
        return self._steps

    @property
    def _module(self) -> LightningModule:
        assert self.lightning_module is not None
        return self.lightning_module

    @override
    def reduce(self, tensor: Tensor | Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        if not isinstance(tensor, Tensor):
            return tensor
        replayed = self._steps.logs.replaying if self._steps is not None else None
        if replayed is not None:
            return tensor if replayed.reduced is None else replayed.reduced
        return reduce_tensor(tensor, self._data_group(group), reduce_op)

    @override
    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        return gather_tensor(tensor, self._data_group(group), sync_grads)

    def _data_group(self, group: Any) -> Any:
        """Lightning means all ranks by its default; here those that hold different data."""
        everyone = group is None or group is dist.group.WORLD
        return self.mesh.group("batch") if everyone and self._mesh is not None else group

    @override
    def barrier(self, name: str | None = None) -> None:
        if not self._after_exception.is_alone:
            super().barrier(name)

    @override
    def broadcast(self, obj: Any, src: int = 0) -> Any:
        return obj if self._after_exception.is_alone else super().broadcast(obj, src)

    @override
    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        if self._after_exception.is_alone:
            return decision
        votes = torch.tensor(int(decision), device=self.root_device)
        dist.all_reduce(votes, op=dist.ReduceOp.MIN if all else dist.ReduceOp.MAX)
        return bool(votes)

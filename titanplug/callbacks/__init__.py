"""Lightning callbacks: what a run prints, logs and leaves behind. They work under any strategy."""

from titanplug.callbacks.gradient_norm import GradientNorm
from titanplug.callbacks.layout_summary import LayoutSummary
from titanplug.callbacks.loss_curve import LossCurve
from titanplug.callbacks.pipeline_timeline import PipelineTimeline
from titanplug.callbacks.run_summary import RunSummary
from titanplug.callbacks.seed_checkpoint import SeedCheckpoint
from titanplug.callbacks.step_lines import StepLines
from titanplug.callbacks.weight_average import WeightAverage

__all__ = [
    "GradientNorm",
    "LayoutSummary",
    "LossCurve",
    "PipelineTimeline",
    "RunSummary",
    "SeedCheckpoint",
    "StepLines",
    "WeightAverage",
]

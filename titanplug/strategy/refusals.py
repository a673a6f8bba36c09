"""Callbacks of Lightning that can't work on a module laid out over several ranks.

They copy the module, or rewrite its parameters, before the strategy lays it out, and then mix whole tensors
with shards. Left alone they fail in the middle of a training, or change each rank's shard by itself.
"""

from __future__ import annotations

from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ModelPruning, StochasticWeightAveraging, WeightAveraging

from titanplug.errors import ConfigError

_AVERAGES = (
    "it keeps a whole copy of the module on every rank and averages it with shards. Use titanplug.callbacks."
    "{replacement}, which averages each rank's own shards; or average the weights of consolidated "
    "checkpoints (ModelCheckpoint(save_top_k=-1)) afterwards"
)
_REFUSED: tuple[tuple[type[Callback], str], ...] = (
    (
        StochasticWeightAveraging,
        _AVERAGES.format(
            replacement="WeightAverage(decay=None, start_step=...) and a learning-rate schedule"
        ),
    ),
    (WeightAveraging, _AVERAGES.format(replacement="WeightAverage(decay=0.999)")),
    (
        ModelPruning,
        "it would prune each rank's shard by itself, where the smallest weights are those of the whole "
        "module. Leave it out, and prune the consolidated checkpoint on one process",
    ),
)


def validate_callbacks(trainer: Trainer) -> None:
    """Check the callbacks of a Trainer that runs on several ranks; called before any of them is set up.

    Raises:
        ConfigError: some can't work there; all of them at once.
    """
    if trainer.world_size == 1:
        return
    problems = [
        f"callbacks={type(callback).__name__} on {trainer.world_size} processes: {reason}."
        for callback in trainer.callbacks  # type: ignore[attr-defined]
        for kind, reason in _REFUSED
        if isinstance(callback, kind)
    ]
    if problems:
        raise ConfigError(problems)

"""All ranks of a run have the same settings: hyperparameters, the Trainer's, the optimizers'.

A rank that has drawn or read another value trains on without a sign, with an average of both.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from torch.optim import Optimizer

from titanplug.errors import ConfigError
from titanplug.mesh import Mesh

_OF_THE_RANK = (
    "rank",
    "local_rank",
    "global_rank",
    "node_rank",
    "dp_rank",
    "pid",
    "host",
    "hostname",
    "device",
)
"""Hyperparameters that may differ."""
_TRAINER = (
    "max_steps",
    "max_epochs",
    "min_steps",
    "min_epochs",
    "accumulate_grad_batches",
    "gradient_clip_val",
    "gradient_clip_algorithm",
    "precision",
    "limit_train_batches",
    "limit_val_batches",
    "limit_test_batches",
    "limit_predict_batches",
    "overfit_batches",
    "val_check_interval",
    "check_val_every_n_epoch",
    "reload_dataloaders_every_n_epochs",
)


def require_same_settings(
    trainer: Trainer,
    module: LightningModule,
    optimizers: Sequence[Optimizer],
    mesh: Mesh,
    device: torch.device,
) -> None:
    """Compare the settings of all ranks; a collective. Two numbers a rank are sent where all is well.

    Raises:
        ConfigError: ranks differ, with what each has; on all ranks.
    """
    if dist.get_world_size() == 1:
        return
    stage = mesh.rank("pp")
    common = dict(_common(trainer, module))
    # Ranks with other parts of the model may have other groups.
    own = {f"{name} in stage {stage}": value for name, value in _settings_of(optimizers)}
    if mesh.dims.pp == 1:
        own = dict(_settings_of(optimizers))
    mine = torch.tensor([stage, _digest(common), _digest(own)], device=device)
    table = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(table, mine)
    rows = {tuple(row) for row in torch.stack(table).tolist()}
    if len({row[1] for row in rows}) == 1 and len(rows) == len({row[0] for row in rows}):
        return
    settings: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(settings, {**common, **own})
    raise ConfigError(_differences(settings))


def _differences(settings: Sequence[Mapping[str, Any]]) -> list[str]:
    problems = []
    for name in dict.fromkeys(name for given in settings for name in given):
        ranks: dict[str, int] = {}
        for rank, given in enumerate(settings):
            if name in given:
                ranks.setdefault(repr(given[name]), rank)
        if len(ranks) > 1:
            (one, first), (two, second), *_ = ranks.items()
            problems.append(
                f"{name} is {one} on rank {first} and {two} on rank {second}: all ranks must train with the "
                "same settings. Look for a value that each rank draws or reads by itself; a Hydra resolver "
                "that draws one must be registered with use_cache=True."
            )
    return problems or ["The settings of the ranks differ: some have hyperparameters that others lack."]


def _digest(settings: Mapping[str, Any]) -> int:
    text = json.dumps(settings, sort_keys=True)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")


def _common(trainer: Trainer, module: LightningModule) -> Iterator[tuple[str, Any]]:
    for name in _TRAINER:
        yield from _plain(f"trainer.{name}", getattr(trainer, name, None))
    yield from _plain("hparams", dict(module.hparams))
    datamodule = getattr(trainer, "datamodule", None)
    if datamodule is not None:
        yield from _plain("hparams of the data", dict(datamodule.hparams))


def _settings_of(optimizers: Sequence[Optimizer]) -> Iterator[tuple[str, Any]]:
    for number, optimizer in enumerate(optimizers):
        for index, group in enumerate(optimizer.param_groups):
            where = f"optimizer {number}, group {index}: "
            yield from ((where + name, value) for name, value in _plain("", _without_parameters(group)))


def _without_parameters(group: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name not in ("params", "param_names")}


def _plain(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Numbers, switches and choices by dotted name; what may be a path isn't compared."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            if str(key) not in _OF_THE_RANK:
                yield from _plain(f"{name}.{key}" if name else str(key), item)
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from _plain(f"{name}[{index}]", item)
    elif (
        value is None
        or isinstance(value, bool | int | float)
        or (isinstance(value, str) and "/" not in value)
    ):
        yield name, value

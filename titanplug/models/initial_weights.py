"""Where a Transformer's first weights come from: Hugging Face directories, checkpoints, state dicts.

Nothing is read but sizes and names until a tensor is asked for.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from titanplug.errors import ConfigError
from titanplug.models import hf_files
from titanplug.models.config import TransformerConfig
from titanplug.models.lazy_weights import (
    Entry,
    LazyWeights,
    fit_to_model,
    safetensors_entries,
    torch_entries,
)

if TYPE_CHECKING:
    from titanplug.checkpoint.weights import SavedWeights

# What doesn't change what the weights mean.
_FREE = ("max_seq_len", "init_std", "depth_scaled_init", "init_from")
_MODEL = "model."  # where a LightningModule's checkpoint has the Transformer


def config_from_directory(init_from: str, max_seq_len: int | None = None) -> TransformerConfig:
    """The model that a directory holds, with its weights as the first ones.

    Args:
        init_from: a Hugging Face directory, or a checkpoint of titanplug or Lightning whose module is a
            :class:`titanplug.modules.LanguageModel`.
        max_seq_len: longest sequence, in tokens; None: as the directory says.

    Raises:
        ConfigError: there is no such directory, or the Transformer here has no such model.
    """
    if _is_checkpoint(init_from):
        found = saved_config(open_checkpoint(init_from))
        if found is None:
            raise ConfigError(
                f"{init_from} doesn't hold the configuration of its model: no LanguageModel wrote it. Give "
                f"the configuration yourself, and init_from={init_from} in it."
            )
    else:
        found = hf_files.read_config(Path(init_from).expanduser())
    return replace(found, init_from=init_from, max_seq_len=max_seq_len or found.max_seq_len)


def open_weights(config: TransformerConfig) -> LazyWeights:
    """The weights in ``config.init_from`` by the Transformer's names; each is read when it is asked for.

    Raises:
        ConfigError: there are none, they can't be read, or they are those of another model: every field
            that differs is told, or every tensor that is missing, unknown or of another shape.
    """
    source = config.init_from
    if source is None:
        raise ConfigError("init_from is not given. It must be the path of the weights.")
    entries, of = _open(source)
    if of is not None:
        _require_same(config, of, source)
    return LazyWeights(fit_to_model(entries, config, source))


def open_checkpoint(checkpoint: str, average: bool = False) -> SavedWeights:
    """A checkpoint directory of titanplug, or a file of Lightning.

    Args:
        checkpoint: its path.
        average: the averaged weights.

    Raises:
        CheckpointError: it is no checkpoint, or it is damaged, or it holds no averages.
    """
    from titanplug.checkpoint.weights import read_weights

    return read_weights(checkpoint, average=average)


def saved_config(checkpoint: SavedWeights) -> TransformerConfig | None:
    """The configuration among a checkpoint's hyper-parameters; None where it isn't there."""
    fields = checkpoint.hyper_parameters.get("config")
    known = set(TransformerConfig.__dataclass_fields__)
    if not isinstance(fields, Mapping) or "num_layers" not in fields or not set(fields) <= known:
        return None
    return TransformerConfig.from_fields(fields)


def _open(source: str) -> tuple[dict[str, Entry], TransformerConfig | None]:
    """What the files hold, and the model they say they are of."""
    if _is_checkpoint(source):
        weights = open_checkpoint(source)
        return checkpoint_entries(weights), saved_config(weights)
    path = Path(source).expanduser()
    if path.is_dir():
        if not (path / hf_files.CONFIG_FILE).is_file():
            raise ConfigError(
                f"init_from={source}: it has neither {hf_files.CONFIG_FILE} nor .metadata. Give a Hugging "
                "Face directory, a checkpoint directory of titanplug, or a file."
            )
        return hf_files.directory_entries(path), hf_files.read_config(path)
    if not path.is_file():
        raise ConfigError(
            f"init_from={source} does not exist. Give a Hugging Face directory, a checkpoint directory of "
            "titanplug, or a state dict as .safetensors or .pt."
        )
    if path.name.endswith(".safetensors"):
        return safetensors_entries(path), None
    if path.name.endswith(".index.json"):
        return hf_files.index_entries(path), None
    return torch_entries(path), None


def _is_checkpoint(source: str) -> bool:
    if "://" in source or source.endswith(".ckpt"):
        return True
    return (Path(source).expanduser() / ".metadata").is_file()


def checkpoint_entries(checkpoint: SavedWeights) -> dict[str, Entry]:
    """A checkpoint's tensors below ``model.``, the others left out; by the Transformer's names."""

    def entry(name: str) -> Entry:
        return Entry(lambda: checkpoint[name])

    return {name.removeprefix(_MODEL): entry(name) for name in checkpoint if name.startswith(_MODEL)}


def _require_same(config: TransformerConfig, of: TransformerConfig, source: str) -> None:
    wanted, found = _meaning(config), _meaning(of)
    problems = [
        f"{name}={wanted[name]!r}, in init_from={source} it is {found[name]!r}. Weights mean something in "
        "the model that they are of: give its value, or take the model from the directory (model=hf)."
        for name in wanted
        if wanted[name] != found[name]
    ]
    if problems:
        raise ConfigError(problems)


def _meaning(config: TransformerConfig) -> dict[str, Any]:
    fields = asdict(replace(config, num_kv_heads=config.kv_heads, head_dim=config.head_size))
    return {name: value for name, value in fields.items() if name not in _FREE}

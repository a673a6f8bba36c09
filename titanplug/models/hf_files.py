"""Hugging Face directories, read and written one tensor at a time. transformers is not needed.

Weights are safetensors only: pickled ones could run code when loaded.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from titanplug.compat import require_extra
from titanplug.errors import ConfigError
from titanplug.models.config import TransformerConfig
from titanplug.models.hf import config_from_hf, config_to_hf, name_to_hf
from titanplug.models.lazy_weights import OUTPUT, Entry, model_shapes, safetensors_entries, shown

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
COMPANIONS = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)
"""Files of tokenizer and generation, which are copied as they are."""
_KEPT_KEYS = ("bos_token_id", "eos_token_id", "pad_token_id")  # of config.json, beside what makes the model
_DTYPE_NAMES = {torch.float64, torch.float32, torch.float16, torch.bfloat16}


# --------------------------------------------------------------------------------------
# Reading
# --------------------------------------------------------------------------------------


def read_config(directory: Path) -> TransformerConfig:
    """The configuration in a directory's ``config.json``.

    Raises:
        ConfigError: there is none, or it is of a model that can't be converted.
    """
    given = read_json_object(_existing(directory) / CONFIG_FILE)
    if given.get("quantization_config"):
        raise ConfigError(
            f"{directory / CONFIG_FILE} has a quantization_config: quantised weights can't be converted. Use "
            "the model without quantisation."
        )
    try:
        return config_from_hf(given)
    except ConfigError as error:
        raise ConfigError([f"{directory / CONFIG_FILE}: {problem}" for problem in error.problems]) from None


def read_json_object(path: Path) -> dict[str, Any]:
    """The content of a JSON file that holds an object.

    Raises:
        ConfigError: there is no such file, or it holds something else.
    """
    if not path.is_file():
        raise ConfigError(
            f"{path.parent} has no {path.name}. Give a directory that save_pretrained of transformers wrote, "
            "or the files of a model of the hub."
        )
    try:
        content = json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise ConfigError(f"{path} is no JSON ({error}). Get it anew.") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{path} holds a {type(content).__name__}, an object is needed. Get it anew.")
    return content


def directory_entries(directory: Path) -> dict[str, Entry]:
    """The tensors of a directory under the names of Hugging Face; only headers are read.

    Raises:
        ConfigError: there are no safetensors, a shard is missing or cut off, or the index doesn't fit.
    """
    single, index = _existing(directory) / WEIGHTS_FILE, directory / INDEX_FILE
    if single.is_file():
        return safetensors_entries(single)
    if index.is_file():
        return index_entries(index)
    pickled = sorted(path.name for path in directory.glob("*.bin"))
    if pickled:
        raise ConfigError(
            f"{directory} has its weights as pickles ({shown(pickled)}), which can run code when loaded. "
            "Convert them where you trust them: load the model with transformers and save_pretrained it."
        )
    raise ConfigError(f"{directory} has neither {WEIGHTS_FILE} nor {INDEX_FILE}. Get the weights as well.")


def index_entries(index: Path) -> dict[str, Entry]:
    """The tensors that an index of shards names, as :func:`directory_entries`."""
    places = read_json_object(index).get("weight_map")
    if not isinstance(places, dict) or not all(isinstance(name, str) for name in places.values()):
        raise ConfigError(f"{index} has no weight_map from tensors to files. Get it anew.")
    outside = sorted({name for name in places.values() if Path(name).name != name})
    if outside:
        raise ConfigError(f"{index} names files of other folders: {shown(outside)}. Get it anew.")
    files = sorted(set(places.values()))
    missing = [name for name in files if not (index.parent / name).is_file()]
    if missing:
        raise ConfigError(
            f"{index} names {len(files)} files, of which {len(missing)} are missing: {shown(missing)}. Get "
            "them as well."
        )
    shards = {name: safetensors_entries(index.parent / name) for name in files}
    strayed = [f"{name} in {file}" for name, file in places.items() if name not in shards[file]]
    unlisted = [name for entries in shards.values() for name in entries if name not in places]
    if strayed or unlisted:
        raise ConfigError(
            f"{index} doesn't fit its files. In the index only: {shown(strayed) or 'none'}; in the files "
            f"only: {shown(unlisted) or 'none'}. Get all of them anew, from one place."
        )
    return {name: shards[file][name] for name, file in places.items()}


def _existing(directory: Path) -> Path:
    if not directory.is_dir():
        found = "is a file" if directory.exists() else "does not exist"
        raise ConfigError(f"{directory} {found}: the directory of a Hugging Face model is needed.")
    return directory


# --------------------------------------------------------------------------------------
# Writing
# --------------------------------------------------------------------------------------


def write_directory(
    directory: Path,
    config: TransformerConfig,
    weights: Mapping[str, Tensor],
    *,
    family: str | None = None,
    dtype: torch.dtype | None = None,
    max_shard_size_bytes: int = 5 * 10**9,
    companions: Path | None = None,
    tell: Callable[[str], object] = lambda line: None,
) -> None:
    """Write a directory that ``from_pretrained`` of transformers reads.

    No more than the tensors of one shard are in memory.

    Args:
        directory: where it shall appear, once it is whole; it mustn't have any files.
        config: the model's.
        weights: by the Transformer's names.
        family: model type of Hugging Face; None: what the configuration tells.
        dtype: of the written tensors; None: as they come.
        max_shard_size_bytes: a file gets no larger, but for a tensor that is.
        companions: a directory whose tokenizer and generation config are copied.
        tell: called with a line for each file.

    Raises:
        ConfigError: the directory has files, tensors are missing or of other shapes, or the family has
            no such model.
    """
    content = config_to_hf(config, family)
    shapes = model_shapes(config)
    given = set(weights)  # to ask a mapping whether it has a name may read the tensor
    missing = [name for name in shapes if name not in given]
    if missing:
        raise ConfigError(f"the weights lack {shown(missing)}. Give all weights of the model.")
    if companions is not None and (companions / CONFIG_FILE).is_file():
        original = read_json_object(companions / CONFIG_FILE)
        content |= {key: original[key] for key in _KEPT_KEYS if original.get(key) is not None}
    with written_aside(directory) as aside:
        names = [name for name in shapes if not (config.tie_embeddings and name == OUTPUT)]
        written = _write_shards(aside, names, shapes, weights, dtype, max_shard_size_bytes, tell)
        content |= {"dtype": written, "torch_dtype": written}  # transformers 5 and 4
        write_json(aside / CONFIG_FILE, content)
        copy_companions(companions, aside, tell)


def _write_shards(
    folder: Path,
    names: list[str],
    shapes: Mapping[str, tuple[int, ...]],
    weights: Mapping[str, Tensor],
    dtype: torch.dtype | None,
    max_bytes: int,
    tell: Callable[[str], object],
) -> str:
    """Write the tensors; returns what type most of their bytes are of."""
    save_file = require_extra("safetensors.torch", "hf").save_file
    shard: dict[str, Tensor] = {}
    shards: list[list[str]] = []
    by_dtype: dict[torch.dtype, int] = {}
    in_shard = 0

    def finish() -> None:
        nonlocal in_shard
        save_file(shard, folder / f"{len(shards)}.part", metadata={"format": "pt"})
        shards.append(list(shard))
        done = sum(map(len, shards))
        tell(f"file {len(shards)}: {size(in_shard)}; {done} of {len(names)} tensors are written")
        shard.clear()
        in_shard = 0

    for name in names:
        tensor = weights[name].detach()
        if tensor.shape != shapes[name] or tensor.dtype not in _DTYPE_NAMES:
            raise ConfigError(
                f"{name} is {tuple(tensor.shape)} of {tensor.dtype}; the model's is {shapes[name]}, of "
                "floating-point numbers with 16 to 64 bits. Give the configuration that the weights are of."
            )
        tensor = tensor.to(dtype or tensor.dtype).contiguous()
        if shard and in_shard + tensor.nbytes > max_bytes:
            finish()
        shard[name_to_hf(name)] = tensor
        in_shard += tensor.nbytes
        by_dtype[tensor.dtype] = by_dtype.get(tensor.dtype, 0) + tensor.nbytes
        del tensor
    finish()
    _name_shards(folder, shards, sum(by_dtype.values()))
    return str(max(by_dtype, key=lambda key: by_dtype[key])).removeprefix("torch.")


def _name_shards(folder: Path, shards: list[list[str]], total_bytes: int) -> None:
    if len(shards) == 1:
        os.replace(folder / "0.part", folder / WEIGHTS_FILE)
        return
    places: dict[str, str] = {}
    for number, names in enumerate(shards):
        file = f"model-{number + 1:05d}-of-{len(shards):05d}.safetensors"
        os.replace(folder / f"{number}.part", folder / file)
        places |= dict.fromkeys(names, file)
    metadata = {"total_size": total_bytes}
    write_json(folder / INDEX_FILE, {"metadata": metadata, "weight_map": dict(sorted(places.items()))})


@contextmanager
def written_aside(directory: Path) -> Iterator[Path]:
    """A folder that becomes ``directory`` when the block ends well, and goes when it doesn't.

    Raises:
        ConfigError: ``directory`` has files already.
    """
    directory = directory.absolute()
    require_empty(directory)
    aside = directory.with_name(f".{directory.name}.writing")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    try:
        yield aside
        require_empty(directory)
        os.replace(aside, directory)  # an empty directory is replaced
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def require_empty(directory: Path) -> None:
    """Check that nothing is in the way.

    Raises:
        ConfigError: there is a file, or a directory with files.
    """
    if directory.is_symlink() or (directory.exists() and not directory.is_dir()):
        raise ConfigError(f"{directory} is there already, and is no directory. Give another path.")
    if directory.is_dir() and any(directory.iterdir()):
        raise ConfigError(f"{directory} has files already, which aren't overwritten. Give another path.")


def copy_companions(source: Path | None, target: Path, tell: Callable[[str], object]) -> None:
    """Copy the files of tokenizer and generation that ``source`` has."""
    names = [name for name in COMPANIONS if source is not None and (source / name).is_file()]
    for name in names:
        assert source is not None
        shutil.copyfile(source / name, target / name)
    if names:
        tell(f"copied {', '.join(names)}")


def size(num_bytes: int) -> str:
    """A number of bytes for people."""
    return f"{num_bytes / 1e9:.2f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.2f} MB"


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write an object as readable JSON."""
    path.write_text(json.dumps(content, indent=2) + "\n", "utf-8")

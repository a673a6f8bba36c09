"""``titanplug import`` and ``titanplug export``: between Hugging Face directories and checkpoints."""

from __future__ import annotations

import argparse
import re
import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path

import torch

from titanplug.checkpoint.command import run_command
from titanplug.errors import ConfigError
from titanplug.models import hf_files
from titanplug.models.hf import SUPPORTED
from titanplug.models.initial_weights import (
    checkpoint_entries,
    open_checkpoint,
    open_weights,
    saved_config,
)
from titanplug.models.lazy_weights import EMBEDDING, OUTPUT, LazyWeights, fit_to_model

KEPT_FOLDER = "hf"
"""Folder of an imported checkpoint with what belongs to the model beside its weights."""
_DTYPES: dict[str, torch.dtype | None] = {
    "keep": None,
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}
_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9}

_IMPORT_EXAMPLES = """\
  titanplug import models/SmolLM2-135M checkpoints/smollm2
  titanplug train model=hf model.init_from=checkpoints/smollm2 tokenizer=hf \\
      tokenizer.path=checkpoints/smollm2/hf

OUT is a checkpoint directory with weights only, for init_from and LanguageModel.load_from_checkpoint;
OUT/hf has the tokenizer and config.json. Training can start from HF_DIR just as well, without an import.
"""
_EXPORT_EXAMPLES = """\
  titanplug export runs/mine/checkpoints/last.ckpt models/mine --dtype bfloat16 \\
      --tokenizer models/SmolLM2-135M
  titanplug export checkpoints/smollm2 models/again

HF_DIR is for from_pretrained of transformers. A checkpoint of any layout does; nothing is distributed.
"""


def import_directory(source: Path, target: Path, tell: Callable[[str], object] = lambda line: None) -> None:
    """Turn a Hugging Face directory into a checkpoint directory that holds weights only.

    Args:
        source: the directory.
        target: where the checkpoint shall appear; it mustn't have any files.
        tell: called with a line now and then.

    Raises:
        ConfigError: ``source`` isn't whole or can't be converted, or ``target`` has files.
    """
    from titanplug.checkpoint.weights import write_weights

    config = hf_files.read_config(source)
    weights = open_weights(replace(config, init_from=str(source.absolute())))
    with hf_files.written_aside(target) as aside:
        tensors = {f"model.{name}": value for name, value in weights.items()}  # mapped, not in memory
        if config.tie_embeddings:
            tensors[f"model.{OUTPUT}"] = tensors[f"model.{EMBEDDING}"]
        num_bytes = sum(value.nbytes for value in tensors.values())
        tell(f"writing {len(tensors)} tensors, {hf_files.size(num_bytes)}")
        write_weights(aside, tensors, {"config": asdict(config)})
        kept = aside / KEPT_FOLDER
        kept.mkdir()
        hf_files.copy_companions(source, kept, tell)
        shutil.copyfile(source / hf_files.CONFIG_FILE, kept / hf_files.CONFIG_FILE)


def export_checkpoint(
    checkpoint: str,
    target: Path,
    *,
    dtype: torch.dtype | None = None,
    family: str | None = None,
    max_shard_size_bytes: int = 5 * 10**9,
    tokenizer: Path | None = None,
    average: bool = False,
    tell: Callable[[str], object] = lambda line: None,
) -> None:
    """Write a checkpoint's model as a Hugging Face directory, a tensor at a time.

    Args:
        checkpoint: a checkpoint directory, or a file of Lightning; of a LanguageModel.
        target: as the directory of :func:`titanplug.models.hf_files.write_directory`, which tells the
            other arguments.
        dtype: of the written tensors; None: as they are in the checkpoint.
        family: model type; None: what the configuration tells.
        max_shard_size_bytes: a file gets no larger.
        tokenizer: directory whose tokenizer and generation config are copied; None: that of the import.
        average: the averaged weights instead.
        tell: called with a line for each file.

    Raises:
        ConfigError: the checkpoint isn't of a LanguageModel, ``target`` has files, or the family doesn't fit.
        CheckpointError: it is no checkpoint, or it is damaged.
    """
    saved = open_checkpoint(checkpoint, average)
    config = saved_config(saved)
    if config is None:
        raise ConfigError(
            f"{checkpoint} doesn't hold the configuration of a Transformer among its hyper-parameters, so "
            "its sizes aren't known. Export what a LanguageModel wrote, or use hf_files.write_directory."
        )
    if tokenizer is not None and not any((tokenizer / name).is_file() for name in hf_files.COMPANIONS):
        raise ConfigError(f"{tokenizer} has no files of a tokenizer. Give a directory that has some.")
    kept = Path(checkpoint) / KEPT_FOLDER
    entries = fit_to_model(checkpoint_entries(saved), config, checkpoint)
    hf_files.write_directory(
        target,
        config,
        LazyWeights(entries),
        family=family or _imported_family(kept),
        dtype=dtype,
        max_shard_size_bytes=max_shard_size_bytes,
        companions=tokenizer or (kept if kept.is_dir() else None),
        tell=tell,
    )


def _imported_family(kept: Path) -> str | None:
    """What the model was when it was imported: a mistral without window looks like a llama."""
    if not (kept / hf_files.CONFIG_FILE).is_file():
        return None
    family: str = hf_files.read_json_object(kept / hf_files.CONFIG_FILE)["model_type"]
    return family


def _dtype(text: str) -> torch.dtype | None:
    if text not in _DTYPES:
        raise argparse.ArgumentTypeError(f"{text!r} is none of {', '.join(_DTYPES)}")
    return _DTYPES[text]


def _num_bytes(text: str) -> int:
    found = re.fullmatch(r"([0-9.]+) *([KMG]?B?)", text.upper())
    if found is None or found[2] not in _UNITS or float(found[1]) <= 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no size such as 500MB or 5GB")
    return int(float(found[1]) * _UNITS[found[2]])


def import_main(arguments: Sequence[str]) -> None:
    """Run ``titanplug import``. Exit code 2 where it can't be."""
    parser = argparse.ArgumentParser(
        prog="titanplug import",
        description="Turn a Hugging Face directory (Llama, Mistral, Qwen2, Qwen3) into a checkpoint.",
        epilog=_IMPORT_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "source", metavar="HF_DIR", type=Path, help="directory with config.json and safetensors"
    )
    parser.add_argument("target", metavar="OUT", type=Path, help="the checkpoint directory to write")
    given = parser.parse_args(arguments)
    run_command(parser, lambda: import_directory(given.source, given.target, _tell))
    print(f"wrote {given.target}")


def export_main(arguments: Sequence[str]) -> None:
    """Run ``titanplug export``. Exit code 2 where it can't be."""
    parser = argparse.ArgumentParser(
        prog="titanplug export",
        description="Turn a checkpoint into a Hugging Face directory.",
        epilog=_EXPORT_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("checkpoint", metavar="CKPT", help="checkpoint directory, or file of Lightning")
    parser.add_argument("target", metavar="HF_DIR", type=Path, help="the directory to write")
    parser.add_argument(
        "--dtype",
        type=_dtype,
        default="keep",
        metavar="TYPE",
        help=f"of the written weights: {', '.join(_DTYPES)} (as they are, the default)",
    )
    parser.add_argument("--family", choices=SUPPORTED, help="model type (default: what the model tells)")
    parser.add_argument(
        "--max-shard-size",
        type=_num_bytes,
        default="5GB",
        metavar="SIZE",
        help="a file of weights gets no larger, and so much is in memory (default: 5GB)",
    )
    parser.add_argument(
        "--tokenizer",
        type=Path,
        metavar="DIR",
        help="copy tokenizer and generation config from there (default: those of the import)",
    )
    parser.add_argument("--average", action="store_true", help="the weights that WeightAverage averaged")
    given = parser.parse_args(arguments)
    run_command(
        parser,
        lambda: export_checkpoint(
            given.checkpoint,
            given.target,
            dtype=given.dtype,
            family=given.family,
            max_shard_size_bytes=given.max_shard_size,
            tokenizer=given.tokenizer,
            average=given.average,
            tell=_tell,
        ),
    )
    print(f"wrote {given.target}")


def _tell(line: str) -> None:
    print(line, flush=True)

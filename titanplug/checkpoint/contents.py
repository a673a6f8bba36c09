"""What isn't tensors of a checkpoint: plain containers, which load without running code."""

from __future__ import annotations

import io
import pickle
import sys
import warnings
import zipfile
from collections import Counter, OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint.metadata import Metadata

from titanplug.errors import CheckpointError

_RECORD_MODULES = ("torch.distributed.checkpoint.metadata",)
_RECORD_NAMES = (
    "torch.distributed.checkpoint.filesystem._StorageInfo",
    "torch.Size",
    "torch.serialization._get_layout",
    "pathlib.PosixPath",
    "pathlib._local.PosixPath",
    "collections.OrderedDict",
)


# ---------------------------------------------------------------------------------------
# Writing
# ---------------------------------------------------------------------------------------


def pack_meta(rest: dict[str, Any]) -> bytes:
    """What a file of ``torch.save`` holds."""
    buffer = io.BytesIO()
    torch.save(plain(rest), buffer)
    return buffer.getvalue()


def warn_of_objects(content: bytes) -> None:
    """Warn where a load of ``content`` with ``weights_only=True`` will refuse it."""
    try:
        torch.load(io.BytesIO(content), weights_only=True)
    except pickle.UnpicklingError as error:
        warnings.warn(
            "The checkpoint holds Python objects beyond tensors and plain containers, so it can be loaded "
            f"with weights_only=False only. {_refused(error)} If it is a hyper-parameter, leave it out: "
            "self.save_hyperparameters(ignore=[...]).",
            stacklevel=2,
        )


def plain(value: Any) -> Any:
    """Configuration containers and NumPy scalars as plain values, which load without running code."""
    kind = type(value)
    if kind.__module__.startswith("omegaconf."):
        omegaconf: Any = sys.modules["omegaconf"]  # not imported here: whoever has such a value has done it
        return omegaconf.OmegaConf.to_container(value, resolve=True)
    if isinstance(value, type) and value.__module__.startswith("omegaconf."):
        return value.__qualname__  # Lightning notes the class of hyper-parameters
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, dict):
        items = {plain(key): plain(item) for key, item in value.items()}
        return kind(items) if kind in (OrderedDict, Counter) else items
    if kind in (list, tuple):
        return kind(plain(item) for item in value)
    return value


# ---------------------------------------------------------------------------------------
# Reading
# ---------------------------------------------------------------------------------------


def load_plain(source: Any, path: str, weights_only: bool | None, mapped: bool = False) -> Any:
    """Read what ``torch.save`` wrote.

    Args:
        source: a path of this machine, or a stream.
        path: for messages.
        weights_only: False allows any Python object.
        mapped: leave tensors in the file until they are used.

    Raises:
        CheckpointError: it holds objects that could run code and ``weights_only`` isn't False, or it is
            damaged.
    """
    mapped = mapped and isinstance(source, str) and zipfile.is_zipfile(source)  # not of torch before 1.6
    try:
        return torch.load(source, map_location="cpu", mmap=mapped, weights_only=weights_only is not False)
    except pickle.UnpicklingError as error:
        if weights_only is False:
            raise CheckpointError(f"{path} can't be read: {error}. Use another checkpoint.") from error
        raise CheckpointError(
            f"{path} holds Python objects beyond tensors and plain containers, which could run code when "
            "loaded. If you trust the file, pass weights_only=False, as in trainer.fit(..., "
            f"weights_only=False). {_refused(error)}"
        ) from error
    except (RuntimeError, EOFError, ValueError, KeyError) as error:
        raise CheckpointError(f"{path} can't be read: {error}. Use another checkpoint.") from error


def load_records(content: bytes, path: str) -> Metadata:
    """Torch's records of what is where, which are a pickle, with nothing but its own classes.

    Raises:
        CheckpointError: they name other classes or functions, which could run code when loaded.
    """
    try:
        records: Metadata = _RecordsUnpickler(io.BytesIO(content)).load()
    except Exception as error:
        raise CheckpointError(
            f"{path} can't be read as the records of a checkpoint: {error}. Don't use it."
        ) from error
    return records


class _RecordsUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if module in _RECORD_MODULES or f"{module}.{name}" in _RECORD_NAMES or is_dtype:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it names {module}.{name}")


def _refused(error: pickle.UnpicklingError) -> str:
    lines = [line.strip() for line in str(error).splitlines()]
    named = [line for line in lines if "GLOBAL" in line or "Unsupported" in line]
    return f"({(named or lines)[0]})"

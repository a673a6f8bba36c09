"""The files of a checkpoint: written aside, agreed on by all ranks, published by a rename, read safely."""

from __future__ import annotations

import contextlib
import os
import pickle
import shutil
import warnings
import zipfile
from collections import Counter, OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from titanplug.errors import TitanplugError

META_FILE = "meta.pt"
# A folder of its own: whoever lists checkpoints must not see what isn't whole, whatever its name.
_WRITING = ".writing"
_METADATA_MODULES = ("torch.distributed.checkpoint.metadata",)
_METADATA_NAMES = (
    "torch.distributed.checkpoint.filesystem._StorageInfo",
    "torch.Size",
    "torch.serialization._get_layout",
    "pathlib.PosixPath",
    "pathlib._local.PosixPath",
    "collections.OrderedDict",
)


class CheckpointError(TitanplugError):
    """A checkpoint can't be written or read."""


# ---------------------------------------------------------------------------------------
# Writing
# ---------------------------------------------------------------------------------------


def writing_path(path: Path) -> Path:
    """Where the checkpoint that will be ``path`` is written.

    Raises:
        CheckpointError: ``path`` is a URL, or a directory of something else, which must not be replaced.
    """
    if ":/" in str(path):
        raise CheckpointError(
            f"{path} is a URL: checkpoints are directories of a file system that all ranks reach. Give a "
            "path of one, and copy the finished checkpoint."
        )
    if path.is_dir() and any(path.iterdir()) and not (path / META_FILE).exists():
        raise CheckpointError(
            f"{path} is a directory that isn't a checkpoint, and saving would replace it. Give the "
            "checkpoint a name of its own."
        )
    return path.parent / _WRITING / path.name


def publish(aside: Path, path: Path) -> None:
    """Give a finished checkpoint its name. What had it is removed when the new one is in its place."""
    old = aside.with_name(f"{path.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if path.is_dir() and not path.is_symlink():
        os.replace(path, old)
    elif path.exists() or path.is_symlink():
        path.unlink()
    os.replace(aside, path)
    discard(old)


def discard(aside: Path) -> None:
    """Remove what was written aside, and the folder for it if nothing else is being written."""
    shutil.rmtree(aside, ignore_errors=True)
    with contextlib.suppress(OSError):
        aside.parent.rmdir()


def write_meta(rest: dict[str, Any], path: Path) -> None:
    """Write what isn't a sharded tensor. Warns where a load with ``weights_only=True`` will refuse it."""
    torch.save(plain(rest), path)
    try:
        torch.load(path, weights_only=True)
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
        from omegaconf import OmegaConf

        return OmegaConf.to_container(value, resolve=True)
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


@contextmanager
def agreed(what: str) -> Iterator[None]:
    """Let all ranks fail together where one fails inside; a collective.

    Raises:
        CheckpointError: on all ranks, with the reason of the first rank that failed.
    """
    failure: BaseException | None = None
    try:
        yield
    except (Exception, CheckpointException) as error:
        failure = error
    reasons = [None if failure is None else _reason(failure)]
    if dist.is_initialized() and dist.get_world_size() > 1:
        gathered: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, reasons[0])
        reasons = gathered
    if reasons[0] is not None and isinstance(failure, CheckpointError) and len(set(reasons)) == 1:
        raise failure
    for rank, reason in enumerate(reasons):
        if reason is not None:
            named_rank, text = reason
            failed_on = rank if named_rank is None else named_rank
            raise CheckpointError(f"{what} failed on rank {failed_on}: {text}") from failure


def is_first() -> bool:
    """Whether this is global rank 0, which makes and publishes directories."""
    return not dist.is_initialized() or dist.get_rank() == 0


def _reason(failure: BaseException) -> tuple[int | None, str]:
    """The rank that failed, where the error names one, and its message."""
    if isinstance(failure, CheckpointException) and failure.failures:
        rank, (error, _) = min(failure.failures.items())
        return rank, f"{type(error).__name__}: {error}"
    if isinstance(failure, TitanplugError):
        return None, str(failure)
    return None, f"{type(failure).__name__}: {failure}"


# ---------------------------------------------------------------------------------------
# Reading
# ---------------------------------------------------------------------------------------


def require_checkpoint(path: Path) -> None:
    """Check that ``path`` is a checkpoint directory.

    Raises:
        CheckpointError: it isn't; with what is there.
    """
    if not (path / ".metadata").is_file() or not (path / META_FILE).is_file():
        found = "is a directory without them" if path.is_dir() else "does not exist"
        raise CheckpointError(
            f"{path} is not a checkpoint: a directory with .metadata and {META_FILE}, or a Lightning "
            f"checkpoint file, is needed; it {found}. Check the path; an interrupted save never gets its "
            "final name."
        )


def require_plain_metadata(path: Path) -> None:
    """Check that ``.metadata``, which torch reads with pickle, holds nothing but torch's records.

    Raises:
        CheckpointError: it names other classes or functions, which could run code when loaded.
    """
    try:
        with (path / ".metadata").open("rb") as file:
            _MetadataUnpickler(file).load()
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{path / '.metadata'} can't be read as the records of a checkpoint: {error}. Don't use it."
        ) from error


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if module in _METADATA_MODULES or f"{module}.{name}" in _METADATA_NAMES or is_dtype:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it names {module}.{name}")


def load_plain(path: Path, weights_only: bool | None, mapped: bool = False) -> Any:
    """Read a file of ``torch.save``; ``mapped`` leaves tensors in the file until they are used.

    Raises:
        CheckpointError: it holds objects that could run code and ``weights_only`` isn't False, or it is
            damaged.
    """
    mapped = mapped and zipfile.is_zipfile(path)  # torch before 1.6 wrote other files
    try:
        return torch.load(path, map_location="cpu", mmap=mapped, weights_only=weights_only is not False)
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{path} holds Python objects beyond tensors and plain containers, which could run code when "
            "loaded. If you trust the file, pass weights_only=False, as in trainer.fit(..., "
            f"weights_only=False). {_refused(error)}"
        ) from error
    except (RuntimeError, EOFError) as error:
        raise CheckpointError(f"{path} can't be read: {error}. Use another checkpoint.") from error


def _refused(error: pickle.UnpicklingError) -> str:
    lines = [line.strip() for line in str(error).splitlines()]
    named = [line for line in lines if "GLOBAL" in line or "Unsupported" in line]
    return f"({(named or lines)[0]})"

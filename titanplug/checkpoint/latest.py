"""The newest checkpoint below a folder, for scripts that go on where they were stopped.

Only the index of a file is read, never a tensor, and nothing in it can run code.
"""

from __future__ import annotations

import io
import os
import pickle
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from titanplug.checkpoint.files import CHECKSUMS_FILE, META_FILE, settle

_NEEDED = ("optimizer_states", "loops")


class _Found(NamedTuple):
    """In the order in which they compare."""

    step: int
    time_s: float
    path: Path


def latest_checkpoint(folder: str | os.PathLike[str]) -> Path | None:
    """The checkpoint below ``folder`` from which training goes on, or None where there is none.

    A script that is started again with the same command continues by it::

        trainer.fit(model, ckpt_path=latest_checkpoint("runs/mine"))

    Each rank of a script calls this by itself, and may find something else, where files come and go or a
    file system is slow to show them: ``TitanStrategy`` lets all ranks load what rank 0 found.

    Args:
        folder: where to look, at any depth; it may be missing, or be a checkpoint itself.

    Returns:
        The checkpoint with the most optimizer steps, of those the youngest: a directory, or a ``.ckpt``
        file of Lightning. Left out are checkpoints that are not whole, links that lead nowhere, folders
        whose name begins with a dot, and checkpoints of weights alone.
    """
    found = {place.path: place for path in _places(Path(folder)) if (place := _read(path)) is not None}
    newest = max(found.values(), default=None)
    return None if newest is None else newest.path


def step_of(checkpoint: Path) -> int | None:
    """Optimizer steps that a checkpoint holds; None where training can't go on from it."""
    found = _read(checkpoint)
    return None if found is None else found.step


def _places(folder: Path) -> Iterator[Path]:
    """All that may be checkpoints."""
    if _is_directory_checkpoint(folder) or folder.is_file():
        yield folder
        return
    for parent, folders, files in os.walk(folder):
        folders += settle(Path(parent))
        kept = []
        for name in folders:
            path = Path(parent, name)
            if _is_directory_checkpoint(path):
                yield path
            elif not name.startswith("."):
                kept.append(name)
        folders[:] = kept  # links to folders aren't followed
        yield from (Path(parent, name) for name in files if name.endswith(".ckpt"))


def _is_directory_checkpoint(path: Path) -> bool:
    hidden = path.name.startswith(".")
    return not hidden and (path / META_FILE).is_file() and (path / CHECKSUMS_FILE).is_file()


def _read(path: Path) -> _Found | None:
    """A checkpoint by its true path, or None where ``path`` isn't a whole one."""
    try:
        path = path.resolve(strict=True) if path.is_symlink() else path
        file = path / META_FILE if path.is_dir() else path
        values = _index(file)
        if not isinstance(values, dict) or any(key not in values for key in _NEEDED):
            return None
        return _Found(int(values["global_step"]), file.stat().st_mtime, path)
    except (OSError, LookupError, ValueError, TypeError, AttributeError, EOFError):
        return None  # cut short, removed meanwhile, or something else
    except (zipfile.BadZipFile, pickle.UnpicklingError):
        return None


def _index(file: Path) -> Any:
    """What ``torch.save`` wrote, without tensors and with a stand-in for every class."""
    with zipfile.ZipFile(file) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith("/data.pkl"))
        return _IndexReader(io.BytesIO(archive.read(name))).load()


class _StandIn:
    """Takes whatever a pickle does with an object."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __call__(self, *_: Any, **__: Any) -> _StandIn:
        return self

    def __setstate__(self, _: Any) -> None:
        pass

    def __setitem__(self, *_: Any) -> None:
        pass

    def append(self, _: Any) -> None:
        """Takes an item of a list."""

    def extend(self, _: Any) -> None:
        """Takes items of a list."""

    def add(self, _: Any) -> None:
        """Takes an item of a set."""


class _IndexReader(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        return _StandIn

    def persistent_load(self, pid: Any) -> Any:
        return _StandIn()

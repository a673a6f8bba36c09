"""Places for checkpoints, on this machine and remote: written aside, published at once, linked, removed.

A folder of checkpoints belongs to one run. Whatever isn't whole is in its subfolder ``.writing``: what is
being written, and what is being removed. Whoever lists checkpoints must not see it, whatever its name.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import shutil
import sys
from abc import ABC, abstractmethod
from pathlib import Path
from typing import IO, Any, TypeAlias
from urllib.parse import urlsplit

from titanplug.errors import CheckpointError

META_FILE = "meta.pt"
RECORDS_FILE = ".metadata"
CHECKSUMS_FILE = "checksums"
_WRITING = ".writing"
_OLD = ".old"

PathOrUrl: TypeAlias = str | os.PathLike[str]


def place_of(path: PathOrUrl) -> Place:
    """Where a checkpoint is or shall be: a path of this machine, or a URL of a file system fsspec knows."""
    return RemotePlace(str(path)) if "://" in str(path) else LocalPlace(Path(path))


class Place(ABC):
    """The directory of one checkpoint."""

    def __str__(self) -> str:
        """The path or URL."""
        return self.name

    @property
    @abstractmethod
    def name(self) -> str:
        """The path or URL."""

    @property
    @abstractmethod
    def aside(self) -> str:
        """The directory in which it is written."""

    @abstractmethod
    def open(self, path: str, mode: str) -> IO[bytes]:
        """Open a file, given by its whole path."""

    def file(self, name: str) -> str:
        """Path of one of its files."""
        return f"{self.name.rstrip('/')}/{name}"

    @abstractmethod
    def size_of(self, name: str) -> int | None:
        """Bytes of one of its files; None where there is none."""

    @abstractmethod
    def exists(self) -> bool:
        """Whether there is anything."""

    @abstractmethod
    def is_file(self) -> bool:
        """Whether it is one file, as plain Lightning writes."""

    @abstractmethod
    def require_free(self) -> None:
        """Check that nothing else than a checkpoint would be replaced.

        Raises:
            CheckpointError: it is a directory of something else.
        """

    @abstractmethod
    def settle(self) -> None:
        """Before it is read or written: finish what a kill has cut off."""

    @abstractmethod
    def begin(self) -> None:
        """Make the directory aside; what an interrupted save has left there is removed."""

    @abstractmethod
    def publish(self) -> None:
        """Give what was written aside its name. What had it is removed."""

    @abstractmethod
    def discard(self) -> None:
        """Remove what was written aside."""

    @abstractmethod
    def remove(self) -> None:
        """Remove the checkpoint. It is gone at once, not file by file."""

    @abstractmethod
    def link_to(self, target: PathOrUrl) -> None:
        """Let this name stand for another checkpoint, at once."""

    def is_checkpoint(self) -> bool:
        """Whether it is a checkpoint directory."""
        return all(self.size_of(name) is not None for name in (META_FILE, RECORDS_FILE, CHECKSUMS_FILE))

    def _require_free(self, has_files: bool) -> None:
        if has_files and self.size_of(META_FILE) is None:
            raise CheckpointError(
                f"{self} is a directory that isn't a checkpoint, and saving would replace it. Give the "
                "checkpoint a name of its own."
            )

    def require_checkpoint(self) -> None:
        """Check that it is a checkpoint directory.

        Raises:
            CheckpointError: it isn't; with what is there.
        """
        if not self.is_checkpoint():
            found = "is a directory without them" if self.exists() else "does not exist"
            raise CheckpointError(
                f"{self} is not a checkpoint: a directory with {RECORDS_FILE}, {META_FILE} and "
                f"{CHECKSUMS_FILE}, or a Lightning checkpoint file, is needed; it {found}. Check the path; "
                "an interrupted save never gets its final name."
            )


class LocalPlace(Place):
    """A directory of a file system of this machine, which all ranks reach."""

    def __init__(self, path: Path) -> None:
        if ":/" in str(path):
            raise CheckpointError(f"{path} is a URL that has lost a slash. Give it as text, not as a Path.")
        self._path = path
        self._writing = path.parent / _WRITING

    @property
    def name(self) -> str:  # noqa: D102
        return str(self._path)

    @property
    def aside(self) -> str:  # noqa: D102
        return str(self._writing / self._path.name)

    def open(self, path: str, mode: str) -> IO[bytes]:  # noqa: D102
        return open(path, mode)

    def size_of(self, name: str) -> int | None:  # noqa: D102
        file = self._path / name
        return file.stat().st_size if file.is_file() else None

    def exists(self) -> bool:  # noqa: D102
        return self._path.exists()

    def is_file(self) -> bool:  # noqa: D102
        return self._path.is_file()

    def require_free(self) -> None:  # noqa: D102
        self._require_free(self._path.is_dir() and any(self._path.iterdir()))

    def settle(self) -> None:  # noqa: D102
        settle(self._path.parent)

    def begin(self) -> None:  # noqa: D102
        self.settle()
        shutil.rmtree(self._writing, ignore_errors=True)
        Path(self.aside).mkdir(parents=True)

    def publish(self) -> None:  # noqa: D102
        _sync_directory(self.aside)
        _put_in_place(self.aside, self._path)
        _sync_directory(self._path.parent)
        self.discard()

    def discard(self) -> None:  # noqa: D102
        _delete(self.aside)
        with contextlib.suppress(OSError):
            self._writing.rmdir()

    def remove(self) -> None:  # noqa: D102
        if self._path.is_symlink() or self._path.is_file():
            self._path.unlink()
            return
        if not self._path.is_dir():
            return
        self._writing.mkdir(exist_ok=True)
        _delete(self.aside)
        os.replace(self._path, self.aside)
        self.discard()

    def link_to(self, target: PathOrUrl) -> None:  # noqa: D102
        self._writing.mkdir(parents=True, exist_ok=True)
        _delete(self.aside)
        os.symlink(os.path.relpath(target, self._path.parent), self.aside)
        _put_in_place(self.aside, self._path)
        self.discard()


class RemotePlace(Place):
    """A directory of a remote file system, by its URL.

    There is no rename there that puts a directory in another's place, so the file with the checksums,
    without which nothing is a checkpoint, is put there last.
    """

    def __init__(self, url: str) -> None:
        from fsspec.core import url_to_fs  # type: ignore[import-untyped]

        try:
            self._fs, self._path = url_to_fs(url)
        except (ImportError, ValueError) as error:
            raise CheckpointError(
                f"{url}: there is no file system for {urlsplit(url).scheme!r}: {error}. Install what it "
                "names, or give a path of this machine."
            ) from error
        self._url = url.rstrip("/")
        self._path = self._path.rstrip("/")
        self._parent, _, self._last = self._path.rpartition("/")

    @property
    def name(self) -> str:  # noqa: D102
        return self._url

    @property
    def aside(self) -> str:  # noqa: D102
        return f"{self._url.rpartition('/')[0]}/{_WRITING}/{self._last}"

    def open(self, path: str, mode: str) -> IO[bytes]:  # noqa: D102
        stream: IO[bytes] = self._fs.open(self._stripped(path), mode)
        return stream

    def size_of(self, name: str) -> int | None:  # noqa: D102
        self._fs.invalidate_cache()
        try:
            info: dict[str, Any] = self._fs.info(f"{self._path}/{name}")
        except (FileNotFoundError, NotADirectoryError):
            return None
        return info["size"] if info["type"] == "file" else None

    def exists(self) -> bool:  # noqa: D102
        self._fs.invalidate_cache()
        return bool(self._fs.exists(self._path))

    def is_file(self) -> bool:  # noqa: D102
        return bool(self._fs.isfile(self._path))

    def require_free(self) -> None:  # noqa: D102
        self._require_free(bool(self._fs.isdir(self._path) and self._fs.ls(self._path)))

    def settle(self) -> None:
        """There are no renames."""

    def begin(self) -> None:  # noqa: D102
        self._delete(f"{self._parent}/{_WRITING}")
        self._fs.makedirs(self._stripped(self.aside), exist_ok=True)

    def publish(self) -> None:  # noqa: D102
        aside = self._stripped(self.aside)
        self._delete(f"{self._path}/{CHECKSUMS_FILE}")  # from here on what was there is no checkpoint
        self._delete(self._path)
        self._fs.makedirs(self._path, exist_ok=True)
        names = [entry.rstrip("/").rpartition("/")[2] for entry in self._fs.ls(aside, detail=False)]
        for name in sorted(names, key=CHECKSUMS_FILE.__eq__):
            self._fs.mv(f"{aside}/{name}", f"{self._path}/{name}")
        self.discard()

    def discard(self) -> None:  # noqa: D102
        self._delete(self._stripped(self.aside))
        with contextlib.suppress(OSError):
            self._fs.rmdir(f"{self._parent}/{_WRITING}")

    def remove(self) -> None:  # noqa: D102
        self._delete(f"{self._path}/{CHECKSUMS_FILE}")
        self._delete(self._path)

    def link_to(self, target: PathOrUrl) -> None:  # noqa: D102
        raise CheckpointError(
            f"{self}: a remote file system has no links. Use ModelCheckpoint(save_last=True), which saves "
            "once more, or resume from the newest checkpoint by its own name."
        )

    def _stripped(self, url: str) -> str:
        stripped: str = self._fs._strip_protocol(url)
        return stripped

    def _delete(self, path: str) -> None:
        if self._fs.exists(path):
            self._fs.rm(path, recursive=True)


def settle(folder: Path) -> list[str]:
    """Finish what a kill has cut off between two renames, on a file system where they can't be one.

    Returns:
        Names of the checkpoints that are in their place again.
    """
    restored: list[str] = []
    try:
        names = os.listdir(folder / _WRITING)
    except OSError:  # there is none, or a save has just ended
        return restored
    for old in (folder / _WRITING / name for name in names if name.endswith(_OLD)):
        path = folder / old.name.removesuffix(_OLD)
        if not os.path.lexists(path):
            with contextlib.suppress(OSError):  # another process has been faster
                os.replace(old, path)
                restored.append(path.name)
    return restored


# ---------------------------------------------------------------------------------------
# Names that change at once
# ---------------------------------------------------------------------------------------

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2


def _put_in_place(new: str, path: Path) -> None:
    """Give ``new`` the name ``path``; what had that name has the other one afterwards, or is gone."""
    if not os.path.lexists(path):
        os.replace(new, path)
    elif not _exchange(new, path):
        old = _old(new)
        _delete(old)
        os.replace(path, old)
        os.replace(new, path)
        _delete(old)


def _exchange(one: str, other: Path) -> bool:
    """Exchange two names as one operation of the file system; False where it has none."""
    rename = (
        getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None) if sys.platform == "linux" else None
    )
    if rename is None:
        return False
    names = os.fsencode(one), os.fsencode(other)
    if rename(_AT_FDCWD, names[0], _AT_FDCWD, names[1], _RENAME_EXCHANGE) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP):
        return False
    raise OSError(code, os.strerror(code), str(other))


def _old(aside: str) -> str:
    return f"{aside}{_OLD}"


def _delete(path: str) -> None:
    if os.path.islink(path) or os.path.isfile(path):
        os.unlink(path)
    else:
        shutil.rmtree(path, ignore_errors=True)


def _sync_directory(path: str | Path) -> None:
    """Make the names in a directory last over a loss of power, where the system can."""
    with contextlib.suppress(OSError):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

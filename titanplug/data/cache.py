"""The cache folder: names by content, published by rename, so that parallel ranks are safe."""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

from titanplug.errors import ConfigError


def resolve_cache_dir(cache_dir: str | None) -> Path:
    """The folder for tokenizers and tokens.

    Args:
        cache_dir: a folder, or None for ``titanplug`` in the user's cache folder
            (``$XDG_CACHE_HOME``, by default ``~/.cache``).
    """
    if cache_dir is not None:
        return Path(cache_dir).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "titanplug"


def hash_parts(parts: Iterable[str]) -> str:
    """SHA-256 of a sequence of strings; where one ends and the next begins counts too."""
    digest = hashlib.sha256()
    for part in parts:
        data = part.encode("utf-8")
        digest.update(len(data).to_bytes(8, "little"))
        digest.update(data)
    return digest.hexdigest()


def publish_folder(folder: Path, write: Callable[[Path], None]) -> None:
    """Create a folder with its files all at once.

    The files are written beside it and the result is renamed: whoever sees the folder sees all of
    it. If another process was faster, its result stays.

    Args:
        folder: the folder to create.
        write: called with an empty folder to write the files to.

    Raises:
        ConfigError: the place cannot be written to.
    """
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        aside = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    except OSError as error:
        raise ConfigError(
            f"The cache folder {str(folder.parent)!r} cannot be written to ({error}): tokenizers "
            "and tokens are kept there. Set cache_dir to a folder that can be written to."
        ) from error
    try:
        write(aside)
        aside.chmod(0o755)  # mkdtemp lets no one else read
        aside.rename(folder)
    except OSError:
        if not folder.is_dir():
            raise
    finally:
        shutil.rmtree(aside, ignore_errors=True)

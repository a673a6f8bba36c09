"""Lightning without the strategy loads checkpoint directories too, once titanplug is imported.

Importing this module imports neither torch nor Lightning.
"""

from __future__ import annotations

import functools
import os
import sys
from typing import Any

from titanplug.checkpoint.files import CHECKSUMS_FILE


def load_directories_in(module: str) -> None:
    """Let plain Lightning load the checkpoint directories of titanplug where it loads its own files.

    Args:
        module: an imported module of Lightning, with its function for loading under the name ``pl_load``.
    """
    importing: Any = sys.modules[module]
    load = importing.pl_load

    @functools.wraps(load)
    def load_any(path_or_url: Any, map_location: Any = None, weights_only: bool | None = None) -> Any:
        is_path = isinstance(path_or_url, str | os.PathLike)
        if is_path and os.path.isfile(os.path.join(path_or_url, CHECKSUMS_FILE)):
            from titanplug.checkpoint.weights import read_checkpoint

            return read_checkpoint(path_or_url, weights_only, map_location)
        return load(path_or_url, map_location, weights_only)

    importing.pl_load = load_any

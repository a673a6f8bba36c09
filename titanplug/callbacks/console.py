"""Where callbacks print: the application's log where there is one, else standard output."""

from __future__ import annotations

import logging
import sys

_logger = logging.getLogger("titanplug.console")


def say(text: str) -> None:
    """Print ``text``; call it on rank 0 only."""
    if logging.getLogger().handlers and _logger.isEnabledFor(logging.INFO):
        _logger.info(text)
    else:
        print(text, file=sys.stdout, flush=True)

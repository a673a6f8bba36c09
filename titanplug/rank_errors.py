"""The errors of ranks, left in files, so that whoever started the ranks can tell which came first.

When a rank fails, its peers lose their connection and report that, most often sooner and louder.
Imports neither torch nor Lightning.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path

from titanplug.errors import TitanplugError

ERROR_DIR_VARIABLE = "TITANPLUG_ERROR_DIR"
"""Environment variable with the folder for the files; unset where nobody reads them."""

CONSEQUENCES = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "Socket closed",
    "Timed out waiting",
    "remote process exited or there was a network error",
)
"""What a rank reports when a peer has gone: a consequence, never the cause."""


@dataclass(frozen=True)
class RankReport:
    """An error of a rank.

    Args:
        rank: global rank.
        time_s: when it was reported, in seconds since the epoch.
        text: the message of an error that titanplug raised on purpose, else the whole traceback.
    """

    rank: int
    time_s: float
    text: str

    @property
    def is_consequence(self) -> bool:
        """Whether it only tells that a peer has gone."""
        return any(sign in self.text for sign in CONSEQUENCES)


def describe_error(error: BaseException) -> str:
    """What a user has to read of an error."""
    if isinstance(error, TitanplugError):
        return str(error)
    return "".join(traceback.format_exception(error)).rstrip()


def record_error(rank: int, error: BaseException) -> bool:
    """Leave an error for the process that started this rank.

    Returns:
        Whether anybody will read it.
    """
    folder = os.environ.get(ERROR_DIR_VARIABLE)
    if not folder or not Path(folder).is_dir():
        return False
    report = RankReport(rank, time.time(), describe_error(error))
    path = Path(folder) / f"rank{rank}.json"
    aside = path.with_suffix(".writing")
    aside.write_text(json.dumps(asdict(report)))
    os.replace(aside, path)
    return True


def first_error(folder: Path) -> RankReport | None:
    """The error in ``folder`` that came first; one that isn't a consequence goes before one that is."""
    reports = []
    for path in folder.glob("rank*.json"):
        with contextlib.suppress(json.JSONDecodeError):
            reports.append(RankReport(**json.loads(path.read_text())))
    return min(reports, key=lambda report: (report.is_consequence, report.time_s), default=None)

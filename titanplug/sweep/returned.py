"""Brings what a job's function returns from its process to the sweep: a callback of Hydra's."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from hydra.core.utils import JobReturn, JobStatus
from hydra.experimental.callback import Callback

from titanplug.run_status import one_line


class SaveReturn(Callback):
    """Writes the value that a job has returned, or its error, to a file.

    Args:
        path: of the file.
    """

    def __init__(self, path: str) -> None:
        self._path = Path(path)

    def on_job_end(self, config: Any, job_return: JobReturn, **_: Any) -> None:
        """Write the file; of a value that JSON doesn't have a number, as of a tensor, or else None."""
        value = error = None
        if job_return.status == JobStatus.COMPLETED:
            value = job_return.return_value
        else:
            error = one_line(job_return._return_value)
        try:
            text = json.dumps({"value": value, "error": error}, default=float)
        except (TypeError, ValueError):
            text = json.dumps({"value": None, "error": None})
        self._path.parent.mkdir(parents=True, exist_ok=True)
        aside = self._path.with_suffix(".writing")
        aside.write_text(text)
        os.replace(aside, self._path)

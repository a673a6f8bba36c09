"""Lets Hydra find ``hydra/launcher=titanplug``. Every Hydra app imports this: nothing heavy at the top."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.core.utils import JobReturn
from hydra.plugins.launcher import Launcher

from titanplug.sweep.config import SweepConfig


class TitanplugLauncher(Launcher):
    """Runs each job of a sweep in processes of its own.

    Args:
        settings: as in :class:`titanplug.sweep.config.SweepConfig`.
    """

    def __init__(self, **settings: Any) -> None:
        self._settings = settings

    def setup(self, **given: Any) -> None:
        """Take what Hydra has read."""
        from titanplug.sweep.launcher import Sweep

        self._sweep = Sweep(**self._settings)
        self._sweep.setup(**given)

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Run jobs and wait for them."""
        return self._sweep.launch(job_overrides, initial_job_idx)


ConfigStore.instance().store(group="hydra/launcher", name="titanplug", node=SweepConfig, provider="titanplug")

"""Places for processes, which the jobs of a sweep share out between them."""

from __future__ import annotations

from collections.abc import Sequence

from titanplug.errors import ConfigError


class Slots:
    """Counts places, and GPUs where these are what is shared.

    Args:
        number: places; None: one job at a time, whatever it takes.
        gpus: ids of the GPUs, one for each place; None: processors.

    Raises:
        ConfigError: the two don't fit.
    """

    def __init__(self, number: int | None, gpus: Sequence[int | str] | None) -> None:
        if number is not None and number < 1:
            raise ConfigError(
                f"hydra.launcher.slots={number}: a job needs one at least. Give 1 or more, or null."
            )
        if gpus is not None and len(set(map(str, gpus))) != len(gpus):
            raise ConfigError(f"hydra.launcher.gpus={list(gpus)}: a GPU is named twice. Name each once.")
        if number is not None and gpus is not None and number != len(gpus):
            raise ConfigError(
                f"hydra.launcher.slots={number} with {len(gpus)} GPUs in hydra.launcher.gpus: each process "
                "takes one GPU. Leave slots out."
            )
        self._gpus = None if gpus is None else list(map(str, gpus))
        self.number = len(gpus) if gpus is not None else number
        self._free = list(range(self.number or 1))

    def check(self, processes: int) -> str | None:
        """Why a job can never run here, or None."""
        if self.number is not None and processes > self.number:
            return (
                f"a job of {processes} processes with {self.number} slots: it would never start. Raise "
                "hydra.launcher.slots, or leave it out to run one job at a time."
            )
        return None

    def take(self, processes: int) -> list[int] | None:
        """Places for a job, or None while too few are free."""
        wanted = processes if self.number is not None else 1
        if wanted > len(self._free):
            return None
        taken, self._free = self._free[:wanted], self._free[wanted:]
        return taken

    def give_back(self, taken: Sequence[int]) -> None:
        """Let others have the places of a job."""
        self._free = sorted([*self._free, *taken])

    def environment(self, taken: Sequence[int], num_cores: int) -> dict[str, str]:
        """What a job has to know of its places."""
        if self.number is None:
            return {}
        if self._gpus is not None:
            return {"CUDA_VISIBLE_DEVICES": ",".join(self._gpus[place] for place in taken)}
        # Jobs share the cores; each would take all of them.
        return {"OMP_NUM_THREADS": str(max(1, num_cores // self.number))}

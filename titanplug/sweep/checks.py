"""What a launcher that isn't ours must fit, checked before it starts anything: a callback of Hydra's."""

from __future__ import annotations

import sys
from typing import Any

from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf


class CheckLauncher(Callback):
    """Compares the tasks that a Slurm launcher starts with the ranks of a job."""

    def on_multirun_start(self, config: DictConfig, **_: Any) -> None:
        """End the command where they differ (Hydra makes a warning of any other error)."""
        tasks = OmegaConf.select(config, "hydra.launcher.tasks_per_node")
        is_swept = any(item.startswith("trainer.devices=") and not item[16:].isdigit() for item in sys.argv)
        if tasks is None or is_swept:
            return
        nodes, devices = config.hydra.launcher.nodes, config.trainer.devices
        on_slurm = "slurm" in config.hydra.launcher._target_.lower()
        if on_slurm and (tasks, nodes) != (devices, config.trainer.num_nodes):
            problem = (
                f"hydra.launcher.tasks_per_node={tasks} and nodes={nodes} with trainer.devices={devices} and "
                f"num_nodes={config.trainer.num_nodes}: Slurm starts one task for each rank. Give "
                f"hydra.launcher.tasks_per_node={devices} hydra.launcher.nodes={config.trainer.num_nodes}."
            )
        elif not on_slurm and tasks != 1:
            problem = (
                f"hydra.launcher.tasks_per_node={tasks}: on this machine a job starts its ranks by itself. "
                "Give hydra.launcher.tasks_per_node=1."
            )
        else:
            return
        print(f"titanplug: {problem}", file=sys.stderr, flush=True)
        raise SystemExit(2)

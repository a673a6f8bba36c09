"""A user's own `@hydra.main` script with `TitanStrategy` under --multirun, by Hydra alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.processes import processes_in

ROOT = Path(__file__).parents[2]

APP = """
import json, os, random
from dataclasses import dataclass
import hydra, lightning as L, torch
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from omegaconf import OmegaConf
from torch.utils.data import DataLoader, TensorDataset
from titanplug import TitanStrategy

def draw():
    return random.SystemRandom().random()

OmegaConf.register_new_resolver("drawn_once", draw, use_cache=True)
OmegaConf.register_new_resolver("drawn_always", draw)


@dataclass
class App:
    lr: float = 0.01
    dropout: float = "${drawn_once:}"
    devices: int = 2
    failing: int = 0  # the number of processes with which rank 1 fails


ConfigStore.instance().store("app", App)


class Module(L.LightningModule):
    def __init__(self, lr, dropout):
        super().__init__()
        self.save_hyperparameters()
        self.net = torch.nn.Linear(4, 1)

    def training_step(self, batch, batch_idx):
        loss = self.net(batch[0]).pow(2).mean()
        self.log("loss", loss, on_epoch=True, on_step=False)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.hparams.lr)


@hydra.main(version_base="1.3", config_path=None, config_name="app")
def main(cfg):
    L.seed_everything(1, verbose=False)
    module = Module(cfg.lr, cfg.dropout)
    trainer = L.Trainer(
        accelerator="cpu", devices=cfg.devices, strategy=TitanStrategy(), max_epochs=2, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )
    rows = torch.arange(48.0).reshape(12, 4) / 48
    trainer.fit(module, DataLoader(TensorDataset(rows), batch_size=12 // cfg.devices))
    used = {
        "hparams": dict(module.hparams), "world": trainer.world_size,
        "lr": trainer.optimizers[0].param_groups[0]["lr"], "loss": float(trainer.callback_metrics["loss"]),
    }
    folder = HydraConfig.get().runtime.output_dir
    with open(f"{folder}/used{trainer.global_rank}.json", "w") as file:
        json.dump(used, file)
    if cfg.failing == cfg.devices and trainer.global_rank == 1:
        raise ValueError("the disk of this rank is full")
    return used["loss"]


if __name__ == "__main__":
    main()
"""


@pytest.fixture
def app(run_dir: Path) -> Path:
    path = run_dir / "app.py"
    path.write_text(APP)
    return path


def run(*arguments: str) -> tuple[int, str]:
    """Exit code and stderr of ``python ...`` in the folder of the test."""
    process = subprocess.Popen(
        [sys.executable, *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    _, errors = process.communicate(timeout=110)
    return process.returncode, errors


def used(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted(folder.glob("used*.json"))]


def test_jobs_of_a_sweep_have_their_own_ranks_folders_and_values(app: Path) -> None:
    """World sizes 2, 3 and 1 in one sweep, a failing rank in the middle, and values drawn at random."""
    code, errors = run(str(app), "-m", "devices=2,3,1", "failing=3", "hydra.sweep.dir=sweep")
    assert code == 1
    assert "rank 1 of 3 failed" in errors and "the disk of this rank is full" in errors
    jobs = [used(Path("sweep", number)) for number in "012"]
    assert [[rank["world"] for rank in ranks] for ranks in jobs] == [[2, 2], [3, 3, 3], [1]]
    for ranks in jobs:
        assert all(rank["hparams"] == ranks[0]["hparams"] for rank in ranks)
        assert all(rank["loss"] == ranks[0]["loss"] for rank in ranks)
    assert len({ranks[0]["hparams"]["dropout"] for ranks in jobs}) == 3  # drawn anew for each job
    assert jobs[0][0]["loss"] == pytest.approx(jobs[2][0]["loss"], rel=1e-6)
    assert sorted(path.name for path in Path("sweep").iterdir()) == ["0", "1", "2", "multirun.yaml"]
    logs = sorted(path.name for path in Path("sweep/1").glob("*.log"))
    assert logs == ["app.log", "app_rank1.log", "app_rank2.log"]
    assert not Path("outputs").exists() and not Path("multirun").exists()
    assert not processes_in(app.parent)


def test_a_run_under_hydra_gives_all_ranks_the_values_of_rank_0(app: Path) -> None:
    code, errors = run("-m", "app", "hydra.run.dir=run", "hydra.job.chdir=true", "lr=0.3")
    assert code == 0, errors
    first, second = used(Path("run"))
    assert first["hparams"] == second["hparams"] and first["lr"] == second["lr"] == 0.3
    assert (Path("run") / ".hydra" / "overrides.yaml").read_text() == "- lr=0.3\n"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("package", "given"),
    [
        ("joblib", ["hydra/launcher=joblib", "hydra.launcher.n_jobs=2", "lr=0.1,0.2"]),
        ("optuna", ["hydra/sweeper=optuna", "hydra.sweeper.n_trials=2", "lr=interval(0.01,0.1)"]),
        ("hydra", ["hydra/launcher=titanplug", "hydra.launcher.slots=2", "lr=0.1,0.2"]),
    ],
)
def test_other_launchers_and_sweepers(app: Path, package: str, given: list[str]) -> None:
    """All ranks of a trial used the same values, and what rank 0 has reached comes back."""
    if find_spec(package) is None:
        pytest.skip(f"needs titanplug[{package}]")
    code, errors = run(str(app), "-m", *given, "hydra.sweep.dir=sweep")
    assert code == 0, errors
    jobs = [used(Path("sweep", number)) for number in "01"]
    for first, second in jobs:
        assert first["hparams"] == second["hparams"] and first["lr"] == second["lr"]
        assert first["lr"] == first["hparams"]["lr"]
    assert jobs[0][0]["lr"] != jobs[1][0]["lr"]
    if package == "optuna":
        best = yaml.safe_load(Path("sweep", "optimization_results.yaml").read_text())
        assert best["best_value"] == pytest.approx(min(ranks[0]["loss"] for ranks in jobs))
    assert not processes_in(app.parent)


def test_a_value_that_each_rank_draws_is_an_error(app: Path) -> None:
    code, errors = run(str(app), "hydra.run.dir=run", "dropout=${drawn_always:}")
    assert code == 1
    assert "hparams.dropout is 0." in errors and "use_cache=True" in errors
    assert not processes_in(app.parent)

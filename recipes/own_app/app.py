"""An app of your own with an ordinary LightningModule, and titanplug's groups beside its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import hydra
import lightning as L
import torch
from hydra.core.config_store import ConfigStore
from hydra.utils import instantiate
from omegaconf import DictConfig
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from titanplug import ColwiseParallel, ParallelPlan, ReplicateParallel, RowwiseParallel
from titanplug.config.components import AdamWConfig


@dataclass
class AMSGradConfig(AdamWConfig):
    """titanplug's AdamW with one key more."""

    lr: float = 3e-3
    amsgrad: bool = True


ConfigStore.instance().store(group="optim", name="amsgrad", node=AMSGradConfig)


class Classifier(L.LightningModule):
    def __init__(self, network: nn.Module, optimizer: Callable[..., torch.optim.Optimizer]) -> None:
        super().__init__()
        self.network = network
        self.optimizer = optimizer

    def configure_parallel_plan(self) -> ParallelPlan:
        """For parallelism=tp: each block's two layers, the first by its outputs, the second by its inputs."""
        return ParallelPlan(
            tensor={
                "network.first": ReplicateParallel(),
                "network.blocks.*.norm": ReplicateParallel(),
                "network.last": ReplicateParallel(),
                "network.blocks.*.up": ColwiseParallel(),
                "network.blocks.*.down": RowwiseParallel(),
            },
            fsdp_units=["network.blocks.*"],
        )

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss = F.cross_entropy(self.network(batch[0]), batch[1])
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        logits = self.network(batch[0])
        self.log("val_loss", F.cross_entropy(logits, batch[1]))
        self.log("val_accuracy", (logits.argmax(-1) == batch[1]).float().mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.optimizer(self.parameters())


def spirals(num_points: int, seed: int) -> TensorDataset:
    """Points on two spirals; which one is the class."""
    generator = torch.Generator().manual_seed(seed)
    label = torch.randint(2, (num_points,), generator=generator)
    angle = 3 * torch.pi * torch.rand(num_points, generator=generator).sqrt()
    radius = angle * (2 * label - 1) / (3 * torch.pi)
    noise = 0.02 * torch.randn(num_points, 2, generator=generator)
    return TensorDataset(torch.stack([radius * angle.cos(), radius * angle.sin()], -1) + noise, label)


@hydra.main(version_base="1.3", config_path="conf", config_name="config")
def main(config: DictConfig) -> float:
    L.seed_everything(config.seed, verbose=False)
    module = Classifier(instantiate(config.network), instantiate(config.optim, _convert_="all"))
    trainer = L.Trainer(
        **config.trainer,
        precision=config.precision.name,
        strategy=instantiate(config.parallelism, _convert_="all"),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    rows = 64 // max(1, trainer.strategy.parallel_dims.size("batch"))
    train = DataLoader(spirals(2048, seed=1), batch_size=rows, shuffle=True)
    trainer.fit(module, train)
    values = {name: float(value) for name, value in trainer.callback_metrics.items()}
    trainer.validate(module, DataLoader(spirals(512, seed=2), batch_size=rows), verbose=False)
    values |= {name: float(value) for name, value in trainer.callback_metrics.items()}
    if trainer.is_global_zero:
        print(", ".join(f"{name} {value:.4f}" for name, value in sorted(values.items())))
    return values["val_loss"]


if __name__ == "__main__":
    main()

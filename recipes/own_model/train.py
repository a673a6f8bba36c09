"""Trains the model of model.py on the shipped text, byte by byte, in any layout.

python train.py                         one process
python train.py --devices 2             two shards (FSDP2)
python train.py --devices 2 --tp 2      each layer on two processes
python train.py --devices 4 --tp 2      both
python train.py --devices 2 --pp 2      two pipeline stages
python train.py --devices 2 --cp 2      each sequence on two processes
"""

from __future__ import annotations

import argparse

import lightning as L
import torch
import torch.nn.functional as F
from model import GPT

from titanplug import (
    ColwiseParallel,
    ParallelPlan,
    PipelineOrder,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    TitanStrategy,
)
from titanplug.callbacks import GradientNorm, LayoutSummary, StepLines
from titanplug.data import ByteTokenizer, TextDataModule


class LitGPT(L.LightningModule):
    def __init__(self, dim: int = 64, num_layers: int = 4, num_heads: int = 4) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.model: GPT | None = None

    def configure_model(self):
        if self.model is None:
            self.model = GPT(vocab_size=257, **self.hparams)

    def configure_parallel_plan(self) -> ParallelPlan:
        """What makes the model splittable: the only part that an ordinary module does not have."""
        return ParallelPlan(
            tensor={
                # Between blocks each rank holds its part of the sequence, (B, S/tp, D) ...
                "model.embedding": RowwiseParallel(output="sequence"),
                "model.blocks.*.norm1": SequenceParallel(),
                "model.blocks.*.norm2": SequenceParallel(),
                # ... inside attention all of the sequence, and H/tp of the heads ...
                "model.blocks.*.attention": PrepareModuleInput(),
                "model.blocks.*.attention.query": ColwiseParallel(),
                "model.blocks.*.attention.key": ColwiseParallel(),
                "model.blocks.*.attention.value": ColwiseParallel(),
                "model.blocks.*.attention.out": RowwiseParallel(output="sequence"),
                # ... and likewise all of the sequence, and 4D/tp of the hidden features.
                "model.blocks.*.feed_forward": PrepareModuleInput(),
                "model.blocks.*.feed_forward.up": ColwiseParallel(),
                "model.blocks.*.feed_forward.down": RowwiseParallel(output="sequence"),
                "model.norm": SequenceParallel(),
                # Each rank has the scores of V/tp tokens; cross_entropy works on them as it is.
                "model.head": ColwiseParallel(input="sequence", output="logits"),
            },
            fsdp_units=["model.blocks.*"],
            # For pipeline stages: the order in which the modules run.
            pipeline=PipelineOrder(
                first=("model.embedding",), layers="model.blocks", last=("model.norm", "model.head")
            ),
            # For parts of a sequence: the argument of GPT.forward that has one, and its dim.
            sequence_dims={"model.tokens": 1},
            heads=(self.hparams.num_heads, self.hparams.num_heads),
        )

    def training_step(self, batch, batch_idx):
        loss = self._loss(batch)
        self.log("train_loss", loss.detach())
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self._loss(batch))

    def _loss(self, batch):
        logits = self.model(batch["input_ids"])
        return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=3e-3, betas=(0.9, 0.95))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--devices", type=int, default=1, help="processes")
    parser.add_argument("--tp", type=int, default=1, help="processes that share a layer")
    parser.add_argument("--pp", type=int, default=1, help="pipeline stages")
    parser.add_argument("--cp", type=int, default=1, help="processes that share a sequence")
    parser.add_argument("--steps", type=int, default=200, help="optimizer steps")
    parser.add_argument("--global-batch", type=int, default=16, help="rows of a step")
    parser.add_argument("--precision", default="32-true", help="32-true, bf16-mixed or bf16-true")
    args = parser.parse_args()

    L.seed_everything(0, verbose=False)
    shards = args.devices // (args.tp * args.pp * args.cp)
    data = TextDataModule(ByteTokenizer(), seq_len=128, batch_size=args.global_batch // shards, seed=0)
    trainer = L.Trainer(
        accelerator="auto",
        devices=args.devices,
        precision=args.precision,
        strategy=TitanStrategy(dp_shard=shards, tp=args.tp, pp=args.pp, cp=args.cp, pp_schedule="1F1B"),
        max_steps=args.steps,
        log_every_n_steps=10,
        gradient_clip_val=1.0,
        limit_val_batches=20,
        default_root_dir="runs",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[LayoutSummary(), GradientNorm(), StepLines()],
    )
    module = LitGPT()
    trainer.fit(module, datamodule=data)
    (values,) = trainer.validate(module, datamodule=data, verbose=False)
    if trainer.is_global_zero:
        print(f"validation loss after {args.steps} steps: {values['val_loss']:.5f}")


if __name__ == "__main__":
    main()

"""A run that was interrupted anywhere goes on as if it had not been: the same losses, step by step.

7 batches an epoch in windows of 2, so each epoch ends in half a window; validation after every 3 batches,
so it comes in the middle of windows too; shuffled rows, random draws in each step, a schedule by steps.
"""

from __future__ import annotations

import random
import string
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset

from tests.distributed import checkpoint_case
from tests.distributed.case import build_trainer, whole
from tests.harness import reference, run_ranks
from titanplug.data import ByteTokenizer, PackedStream, RowFormat, StreamDataLoader
from titanplug.models import Transformer, TransformerConfig
from titanplug.strategy import TitanStrategy

SEQ, GLOBAL_BATCH, BATCHES, EPOCHS = 8, 4, 7, 2
WINDOW = 2
STEPS = -(-BATCHES // WINDOW)  # an epoch
TOKENIZER = ByteTokenizer()
Layout = tuple[int, dict[str, Any]]
LAYOUTS: dict[str, Layout] = {
    "one process": (1, {}),
    "fsdp2": (2, {"dp_shard": 2}),
    "replicate2": (2, {"dp_replicate": 2, "dp_shard": 1}),
    "tp2": (2, {"tp": 2}),
    "pp2": (2, {"pp": 2, "pp_schedule": "1F1B", "pp_microbatches": 2}),
}


@dataclass
class Run:
    """What a rank saw, by the number of batches before in the whole run."""

    losses: dict[int, float] = field(default_factory=dict)
    rates: dict[int, float] = field(default_factory=dict)
    validations: dict[int, float] = field(default_factory=dict)
    weights: dict[str, Tensor] = field(default_factory=dict)


class Lit(L.LightningModule):
    """``noise`` drops tokens at random; ``fail_at`` raises in that batch of the run."""

    def __init__(self, noise: bool, fail_at: int) -> None:
        super().__init__()
        torch.manual_seed(3)
        sizes: dict[str, Any] = {"dim": 8, "num_layers": 2, "num_heads": 2, "hidden_dim": 12}
        config = TransformerConfig(TOKENIZER.vocab_size, max_seq_len=SEQ, init_std=0.3, **sizes)
        self.model = Transformer(config).double()
        self.noise = noise
        self.fail_at = fail_at
        self.run = Run()

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        if self.batch == self.fail_at:
            raise KeyError("stop")
        tokens = batch["input_ids"]
        if self.noise:
            kept = F.dropout(torch.ones(tokens.shape), 0.3)
            tokens = torch.where(kept == 0, 0, tokens)
        logits = self.model(tokens)
        return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        logits = self.model(batch["input_ids"])
        self.log("val_loss", F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten()))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=3, gamma=0.7)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]

    # ---------------------------------------------------------------- recording

    @property
    def batch(self) -> int:
        progress: Any = self.trainer.fit_loop.epoch_loop.batch_progress
        ready: int = progress.total.ready
        return ready - 1

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.run.losses[self.batch] = float(outputs["loss"])
        self.run.rates[self.batch] = self.trainer.optimizers[0].param_groups[0]["lr"]

    def on_validation_end(self) -> None:
        self.run.validations[self.batch] = float(self.trainer.callback_metrics["val_loss"])

    def on_fit_end(self) -> None:
        self.run.weights = {name: whole(value) for name, value in self.state_dict().items()}


# ---------------------------------------------------------------------------------------
# Data: rows in memory, our stream, a stream of the user's own
# ---------------------------------------------------------------------------------------


def row_of(index: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(index)
    tokens = torch.randint(0, TOKENIZER.vocab_size, (SEQ + 1,), generator=generator)
    return {"input_ids": tokens[:-1], "labels": tokens[1:]}


class Rows(Dataset[dict[str, Tensor]]):
    def __len__(self) -> int:
        return GLOBAL_BATCH * BATCHES

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return row_of(index)


class Documents:
    """Texts of many lengths; each epoch begins with another one."""

    def __init__(self) -> None:
        draw = random.Random(0)
        self.texts = ["".join(draw.choices(string.ascii_letters, k=draw.randint(5, 90))) for _ in range(12)]

    def read(
        self, share: int, num_shares: int, epoch: int, position: dict[str, Any] | None
    ) -> Iterator[tuple[str, dict[str, Any]]]:
        mine = self.texts[share::num_shares]
        turned = mine[epoch % len(mine) :] + mine[: epoch % len(mine)]
        start = 0 if position is None else position["index"]
        for index, text in enumerate(turned[start:], start):
            yield text, {"index": index}


class Numbered(IterableDataset[dict[str, Tensor]]):
    """Rows without end, dealt to the ranks in batches."""

    def __init__(self, batch_size: int) -> None:
        self.start, self.at, self.rank, self.size, self.batch_size = 0, 0, 0, 1, batch_size

    def set_data_parallel(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        while True:
            batch, row = divmod(self.at, self.batch_size)
            self.at += 1
            yield row_of(self.start + (batch * self.size + self.rank) * self.batch_size + row)


class OwnLoader(DataLoader[Any]):
    def state_dict(self) -> dict[str, Any]:
        dataset: Any = self.dataset
        return {"start": dataset.start, "at": dataset.at, "rank": dataset.rank}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.load_state_dicts([state] * self.dataset.size)  # type: ignore[attr-defined]

    def load_state_dicts(self, states: list[dict[str, Any]]) -> None:
        dataset: Any = self.dataset
        dataset.start, dataset.at = states[0]["start"] + sum(state["at"] for state in states), 0


def build_loader(kind: str, batch_size: int) -> Any:
    num_workers = 2 if "workers" in kind else 0
    if "rows" in kind:
        return DataLoader(Rows(), batch_size=batch_size, shuffle=True, num_workers=num_workers)
    if "own" in kind:
        return OwnLoader(Numbered(batch_size), batch_size=batch_size)
    stream = PackedStream(Documents(), TOKENIZER, RowFormat(SEQ, start_id=256, eos_id=256))
    # More than the limit on batches where there is one.
    batches = BATCHES + 3 if "limited" in kind else BATCHES
    return StreamDataLoader(stream, batch_size, batches, num_workers=num_workers)


# ---------------------------------------------------------------------------------------
# Runs
# ---------------------------------------------------------------------------------------


def fit(layout: Layout, kind: str, *, noise: bool = True, seed: int = 7, **options: Any) -> Run:
    """Train to the end, or from ``ckpt_path`` on; as a new process with any seed would."""
    L.seed_everything(seed, verbose=False)
    world_size, degrees = layout
    ckpt_path, save_to = options.pop("ckpt_path", None), options.pop("save_to", None)
    fail_at = options.pop("fail_at", -1)
    strategy = TitanStrategy(**degrees)
    settings: dict[str, Any] = {
        "max_epochs": EPOCHS,
        "accumulate_grad_batches": WINDOW,
        "val_check_interval": 3,
        "gradient_clip_val": 1.0,
        "limit_train_batches": BATCHES,
    }
    trainer = build_trainer(world_size, strategy, **{**settings, **options})
    module = Lit(noise, fail_at)
    if ckpt_path is not None:
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.zero_()
    rows = GLOBAL_BATCH // strategy.parallel_dims.size("batch")
    validation = DataLoader(torch.utils.data.Subset(Rows(), range(6)), batch_size=2)
    try:
        trainer.fit(module, build_loader(kind, rows), validation, ckpt_path=ckpt_path)
    except KeyError:
        assert fail_at >= 0
    if save_to is not None:
        trainer.save_checkpoint(save_to)
    return module.run


def savers(folder: Path) -> list[L.Callback]:
    """Save after each step, after each validation and at each epoch's end."""
    kept: dict[str, Any] = {"save_top_k": -1, "filename": "{step}"}
    return [
        ModelCheckpoint(folder / "step", every_n_train_steps=1, **kept),
        ModelCheckpoint(folder / "validated", save_on_train_epoch_end=False, **kept),
        ModelCheckpoint(folder / "epoch end", save_on_train_epoch_end=True, mode="max", **kept),
    ]


def batches_before(step: int) -> int:
    epochs, rest = divmod(step, STEPS)
    return epochs * BATCHES + rest * WINDOW


def assert_continues(run: Run, expected: Run, start: int, limit: float = 0.0, due: bool = False) -> None:
    """From batch ``start`` on the run did what the uninterrupted one did, and nothing else.

    ``due``: a validation of the batch before is still to be run.
    """
    for name in ("losses", "rates", "validations"):
        found, wanted = getattr(run, name), getattr(expected, name)
        after = {batch: value for batch, value in wanted.items() if batch >= start}
        if name == "validations" and due and start - 1 in wanted:
            after[start - 1] = wanted[start - 1]
        assert found.keys() == after.keys(), f"{name} of {sorted(found)} instead of {sorted(after)}"
        for batch, value in after.items():
            assert abs(found[batch] - value) <= limit * abs(value), f"{name} of batch {batch}"
    for name, weight in expected.weights.items():
        torch.testing.assert_close(run.weights[name], weight, rtol=0, atol=limit, msg=name)


def interrupt_and_resume(layout: Layout, kind: str, folder: Path, seed: int, count: int) -> None:
    """The same run uninterrupted, with saves, and resumed from some of these, in the same layout."""

    def run(rank: int, world_size: int) -> None:
        expected = fit(layout, kind)
        assert [*expected.losses] == [*range(BATCHES * EPOCHS)]
        assert len(expected.validations) == 2 * EPOCHS
        saving = fit(layout, kind, callbacks=savers(folder), enable_checkpointing=True)
        assert_continues(saving, expected, 0)
        paths = sorted(folder.glob("*/*.ckpt"))
        assert len(paths) == STEPS * EPOCHS + 2 * EPOCHS + EPOCHS
        marked = [
            folder / "step" / f"step={STEPS}.ckpt",  # the last batch of an epoch
            folder / "step" / f"step={STEPS + 1}.ckpt",  # the first window of one
            folder / "validated" / "step=1.ckpt",  # in the middle of a window
            folder / "epoch end" / f"step={STEPS}.ckpt",
        ]
        for path in dict.fromkeys([*marked, *random.Random(seed).sample(paths, count)]):
            resumed = fit(layout, kind, seed=8, ckpt_path=path)
            start = batches_before(int(path.stem.rpartition("=")[2]))
            try:
                assert_continues(resumed, expected, start, due=path.parent.name == "step")
            except AssertionError as error:
                error.add_note(f"resumed from {path.relative_to(folder)}")
                raise

    run_ranks(run, layout[0], init_process_group=False)


SOME = [
    ("one process", "rows, workers"),
    ("one process", "stream"),
    ("fsdp2", "limited stream"),
    ("fsdp2", "own stream"),
    ("tp2", "stream, workers"),
    ("pp2", "rows"),
]
KINDS = ["rows", "rows, workers", "stream", "stream, workers", "limited stream", "own stream"]


@pytest.mark.parametrize(("layout", "kind"), SOME)
def test_a_run_goes_on_bitwise_in_the_same_layout(layout: str, kind: str, tmp_path: Path) -> None:
    interrupt_and_resume(LAYOUTS[layout], kind, tmp_path, seed=len(layout + kind), count=1)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_run_goes_on_bitwise_wherever_it_was_interrupted(layout: str, kind: str, tmp_path: Path) -> None:
    everywhere = STEPS * EPOCHS + 2 * EPOCHS + EPOCHS
    interrupt_and_resume(LAYOUTS[layout], kind, tmp_path, seed=0, count=everywhere)


@pytest.mark.parametrize("kind", ["stream", "own stream", "rows"])
def test_a_window_that_an_exception_cut_off_is_run_again(kind: str, tmp_path: Path) -> None:
    """The whole window, since its gradients are lost; with the batches and random draws that it had."""

    def run() -> None:
        expected = fit((1, {}), kind)
        for failed in (2, 3, BATCHES, BATCHES + 1):
            kept: dict[str, Any] = {
                "callbacks": [OnExceptionCheckpoint(tmp_path)],
                "enable_checkpointing": True,
            }
            fit((1, {}), kind, fail_at=failed, **kept)
            resumed = fit((1, {}), kind, seed=8, ckpt_path=tmp_path / "on_exception.ckpt")
            epochs, batch = divmod(failed, BATCHES)
            assert_continues(resumed, expected, epochs * BATCHES + batch - batch % WINDOW)

    reference(run)


def joined(runs: list[Run], layout: Layout) -> Run:
    """What all data-parallel ranks did: they have as many rows each."""
    losses = {
        batch: sum(run.losses[batch] for run in runs) / len(runs) if "dp_shard" in layout[1] else loss
        for batch, loss in runs[-1].losses.items()
    }
    weights = {name: weight for run in runs for name, weight in run.weights.items()}  # of all stages
    return replace(runs[-1], losses=losses, weights=weights)


def across(chain: list[str], kind: str, folder: Path, seed: int) -> None:
    """A run in the first layout equals one that goes on in the other ones, as one sequence of batches."""
    draw = random.Random(seed)
    stops = sorted(draw.sample(range(1, STEPS * EPOCHS), len(chain) - 1))

    def run(rank: int, world_size: int, layout: Layout, options: dict[str, Any]) -> Run:
        return fit(layout, kind, noise=False, **options)

    def start(name: str, **options: Any) -> Run:
        layout = LAYOUTS[name]
        return joined(run_ranks(run, layout[0], layout, options, init_process_group=False), layout)

    expected = start(chain[0])
    found, path = Run(), None
    for index, (name, stop) in enumerate(zip(chain, [*stops, -1], strict=True)):
        save_to = folder / str(index)
        part = start(name, max_steps=stop, save_to=save_to, ckpt_path=path, seed=7 + index)
        assert not found.losses.keys() & part.losses.keys()
        for key in ("losses", "rates", "validations"):
            getattr(found, key).update(getattr(part, key))
        found.weights, path = part.weights, save_to
    assert_continues(found, expected, 0, limit=1e-12)


@pytest.mark.parametrize("kind", ["rows", "stream", "own stream"])
def test_a_run_goes_on_in_other_layouts(kind: str, tmp_path: Path) -> None:
    across(["fsdp2", "one process", "tp2"], kind, tmp_path, seed=len(kind))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("kind", KINDS)
def test_a_run_goes_on_in_any_layouts(kind: str, seed: int, tmp_path: Path) -> None:
    across(random.Random(seed).choices([*LAYOUTS], k=4), kind, tmp_path, seed)


def go_on_without_validations(rank: int, world_size: int, folder: Path) -> tuple[int, int]:
    """A validation at an epoch's last batch has saved, and the run that goes on has none."""
    validated: dict[str, Any] = {"val_check_interval": 2, "check_val_every_n_epoch": None, "max_epochs": 4}
    keep = ModelCheckpoint(folder, save_last=True)
    trainer = checkpoint_case.trainer_for(1, {}, callbacks=[keep], enable_checkpointing=True, **validated)
    loader = checkpoint_case.loader(trainer.strategy)
    trainer.fit(checkpoint_case.Module(), loader, loader)
    assert trainer.global_step == 20
    trainer = checkpoint_case.trainer_for(1, {}, max_epochs=8, max_steps=21)
    loader = checkpoint_case.loader(trainer.strategy)
    trainer.fit(checkpoint_case.Module(), loader, ckpt_path=folder / "last.ckpt")
    return trainer.global_step, trainer.current_epoch


def test_no_empty_epochs(tmp_path: Path) -> None:
    (found,) = run_ranks(go_on_without_validations, 1, tmp_path, init_process_group=False)
    assert found == (21, 5)

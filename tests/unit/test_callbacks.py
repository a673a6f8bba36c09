"""What runs print, log and leave behind."""

from __future__ import annotations

import csv
import itertools
import logging
import re
import struct
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor
from torch.utils.data import DataLoader

from titanplug.callbacks import GradientNorm, LayoutSummary, LossCurve, RunSummary, StepLines
from titanplug.callbacks.console import say
from titanplug.callbacks.layout_summary import describe_reading
from titanplug.callbacks.ranks import logged_value, ranks_by_share
from titanplug.mesh import ParallelDims
from titanplug.report.loss_curve import Curve, write_table

ROWS, TOKENS = 8, 6


class Tiny(L.LightningModule):
    """One weight; batches of (2, TOKENS) tokens."""

    def __init__(self, lr: float = 0.5) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(3))
        self.lr = lr

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = (self.weight * batch["x"].mean()).square().sum()
        self.log("train_loss", loss.detach())
        return loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.log("val_bits_per_byte", self.weight.detach().square().sum())

    def test_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.log("test_bits_per_byte", self.weight.detach().square().sum())

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=self.lr)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


def data() -> DataLoader[Any]:
    items = [
        {"input_ids": torch.zeros(TOKENS, dtype=torch.int64), "x": torch.tensor(0.1 * (i + 1))}
        for i in range(ROWS)
    ]
    return DataLoader(items, batch_size=2)  # type: ignore[arg-type]


def fit(path: Path, *callbacks: Callback, **options: Any) -> L.Trainer:
    settings: dict[str, Any] = {"max_steps": 8, "max_epochs": -1, "log_every_n_steps": 2}
    settings |= {"logger": CSVLogger(path, name="", version="csv"), "enable_progress_bar": False}
    settings |= {"enable_checkpointing": False, "enable_model_summary": False, **options}
    trainer = L.Trainer(
        accelerator="cpu", devices=1, callbacks=list(callbacks), default_root_dir=path, **settings
    )
    trainer.fit(Tiny(), data(), data(), ckpt_path=options.get("ckpt_path"))
    return trainer


def logged(path: Path) -> list[dict[str, str]]:
    with (path / "csv" / "metrics.csv").open() as file:
        return list(csv.DictReader(file))


# --------------------------------------------------------------------------------------
# Step lines, gradient norm
# --------------------------------------------------------------------------------------


def test_a_line_for_every_logged_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fit(tmp_path, GradientNorm(), StepLines())
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("step ")]
    steps = [line for line in lines if "loss" in line]
    assert [line.split(" | ")[0] for line in steps] == [f"step {n}/8" for n in (2, 4, 6, 8)]
    pattern = (
        r"step 2/8 \| loss \d+\.\d{4} \| grad norm \d+\.\d{4} \| lr 2\.50e-01 \| [\d,]+ tokens/s \| "
        r"\d+\.\d\d GiB \| \d+\.\d s"
    )
    assert re.fullmatch(pattern, steps[0])
    validations = [line for line in lines if "validation" in line]
    assert [line.split(" | ")[0] for line in validations] == ["step 4/8", "step 8/8"]
    assert all("val_bits_per_byte" in line for line in validations)


def test_values_are_those_of_the_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    seen: list[tuple[float, float]] = []

    class Watch(Callback):
        def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
            seen.append((module.weight.grad.norm().item(), optimizer.param_groups[0]["lr"]))

    fit(tmp_path, Watch(), GradientNorm(), StepLines())
    rows = [row for row in logged(tmp_path) if row["tokens_per_s"]]
    assert [int(row["step"]) for row in rows] == [1, 3, 5, 7]  # Lightning counts from 0
    for row, (norm, rate) in zip(rows, seen[1::2], strict=True):
        assert float(row["grad_norm"]) == pytest.approx(norm, rel=1e-6)
        assert float(row["lr"]) == pytest.approx(rate)
    lines = [line for line in capsys.readouterr().out.splitlines() if "grad norm" in line]
    norms = [float(line.split("grad norm ")[1].split(" ")[0]) for line in lines]
    assert norms == pytest.approx([norm for norm, _ in seen[1::2]], abs=1e-4)


def test_tokens_per_second_count_every_batch_and_no_validation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Clock(Callback):
        """A second for each batch, an hour for each validation."""

        now = 0.0

        def on_train_batch_start(self, *_: Any) -> None:
            Clock.now += 1

        def on_validation_batch_start(self, *_: Any) -> None:
            Clock.now += 900

    monkeypatch.setattr("titanplug.callbacks.step_lines.time.perf_counter", lambda: Clock.now)
    fit(tmp_path, StepLines(), Clock(), accumulate_grad_batches=2)
    rates = [float(row["tokens_per_s"]) for row in logged(tmp_path) if row["tokens_per_s"]]
    assert rates == [2 * TOKENS] * 4


def test_nothing_is_read_between_logged_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reads = itertools.count()
    monkeypatch.setattr(
        "titanplug.callbacks.step_lines.logged_value",
        lambda *given: (next(reads), logged_value(*given))[1],
    )
    fit(tmp_path, StepLines(), limit_val_batches=0, log_every_n_steps=4)
    assert next(reads) == 2 * 2  # loss and norm, on two of eight steps


def test_a_progress_bar_takes_the_place_of_the_lines(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer = fit(tmp_path, GradientNorm(), StepLines(), enable_progress_bar=True)
    assert "step " not in capsys.readouterr().out.replace("v_num", "")
    assert {"loss", "grad norm", "tokens_per_s"} <= trainer.progress_bar_metrics.keys()


def test_where_nothing_is_logged_nothing_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fit(tmp_path, GradientNorm(), StepLines(), logger=False, log_every_n_steps=0)
    assert "loss" not in capsys.readouterr().out


def test_an_application_with_a_log_gets_the_lines_there(
    caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    with caplog.at_level(logging.INFO):
        say("to the log")
    assert "to the log" in caplog.text and "to the log" not in capsys.readouterr().out
    with caplog.at_level(logging.WARNING):
        say("to the reader")
    assert capsys.readouterr().out == "to the reader\n"


# --------------------------------------------------------------------------------------
# Layout
# --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("degrees", "expected"),
    [
        ({"dp_shard": 1}, "all samples"),
        ({"dp_shard": 1, "tp": 2}, "all ranks read the same samples"),
        ({"dp_shard": 2}, "2 shares of the samples (share 0: rank 0; share 1: rank 1)"),
        (
            {"dp_replicate": 2, "dp_shard": 1, "tp": 2},
            "2 shares of the samples (share 0: ranks 0, 1; share 1: ranks 2, 3)",
        ),
        (
            {"pp": 2, "dp_shard": 2},
            "2 shares of the samples (share 0: ranks 0, 2; share 1: ranks 1, 3)",
        ),
        ({"dp_shard": 16, "tp": 8}, "16 shares of the samples, each read by 8 ranks"),
    ],
)
def test_what_each_rank_reads(degrees: dict[str, int], expected: str) -> None:
    assert describe_reading(ParallelDims(**degrees)) == expected


def test_shares_number_the_data_axes_outermost_first() -> None:
    dims = ParallelDims(dp_replicate=2, dp_shard=2, cp=2, tp=1)
    assert ranks_by_share(dims) == [[0, 1], [2, 3], [4, 5], [6, 7]]


def test_the_layout_of_one_process(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fit(tmp_path, LayoutSummary(), max_steps=1)
    lines = capsys.readouterr().out.splitlines()
    assert "Layout     1 process on cpu" in lines
    assert "Reading    all samples" in lines
    assert "Precision  32-true" in lines
    assert "Parameters 3; 3 on each rank" in lines


# --------------------------------------------------------------------------------------
# Loss curve, summary
# --------------------------------------------------------------------------------------


def picture_size(path: Path) -> tuple[int, int]:
    header = path.read_bytes()[:24]
    assert header.startswith(b"\x89PNG")
    width, height = struct.unpack(">II", header[16:])
    return width, height


def test_the_curve_is_a_picture_and_a_table(tmp_path: Path) -> None:
    fit(tmp_path, LossCurve(str(tmp_path / "curve.png")))
    width, height = picture_size(tmp_path / "curve.png")
    assert width > 1.5 * height > 600  # two panels
    with (tmp_path / "curve.csv").open() as file:
        head, *rows = csv.reader(file)
    assert head == ["step", "training loss (nats per token)", "validation (bits per byte)"]
    assert [row[0] for row in rows] == ["2", "4", "6", "8"]
    assert [bool(row[2]) for row in rows] == [False, True, False, True]
    recorded = [float(row["train_loss"]) for row in logged(tmp_path) if row["train_loss"]]
    assert [float(row[1]) for row in rows] == pytest.approx(recorded)


def test_a_resumed_run_draws_the_whole_curve(tmp_path: Path) -> None:
    saved = ModelCheckpoint(tmp_path / "saved", filename="at", every_n_train_steps=4)
    fit(tmp_path, LossCurve(str(tmp_path / "a.png")), saved, max_steps=4, enable_checkpointing=True)
    curve = LossCurve(str(tmp_path / "b.png"))
    fit_again = L.Trainer(
        accelerator="cpu",
        max_steps=8,
        logger=False,
        log_every_n_steps=2,
        callbacks=[curve],
        enable_checkpointing=False,
        enable_progress_bar=False,
        default_root_dir=tmp_path,
    )
    fit_again.fit(Tiny(), data(), data(), ckpt_path=tmp_path / "saved" / "at.ckpt")
    assert curve.train.steps == [2, 4, 6, 8]


def test_a_run_that_fails_leaves_its_curve(tmp_path: Path) -> None:
    class Fail(Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            if trainer.global_step == 5:
                raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        fit(tmp_path, LossCurve(str(tmp_path / "curve.png")), Fail())
    assert (tmp_path / "curve.csv").read_text().count("\n") == 3  # head, steps 2 and 4


def test_cells_without_value_are_empty(tmp_path: Path) -> None:
    first, second = Curve("a", "x", [1, 3], [0.5, 0.25]), Curve("b", "y", [2], [7.0])
    first.add(4, None)
    write_table([first, second], tmp_path / "t.csv")
    assert (tmp_path / "t.csv").read_text().splitlines() == [
        "step,a (x),b (y)",
        "1,0.5,",
        "2,,7.0",
        "3,0.25,",
    ]


def test_the_last_line_says_where_everything_is(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = run_dir / "runs" / "one"
    saved = ModelCheckpoint(folder / "checkpoints", monitor="val_bits_per_byte", filename="best")
    trainer = fit(
        folder,
        RunSummary(str(folder)),  # before the curve, which is there all the same
        LossCurve(str(folder / "loss_curve.png")),
        saved,
        enable_checkpointing=True,
    )
    value = float(trainer.callback_metrics["val_bits_per_byte"])
    last = capsys.readouterr().out.splitlines()[-1]
    assert re.fullmatch(
        rf"Trained 8 steps in \d+ s, validation {value:.4f} bits per byte\. Everything is in runs/one "
        r"\(checkpoints/best\.ckpt, loss_curve\.png, csv\)\.",
        last,
    )
    trainer.test(Tiny(), data(), verbose=False)
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("Tested, test 3.0000 bits per byte. Everything is in runs/one")


def test_the_mean_speed_leaves_the_first_line_out() -> None:
    """Which has the warm-up in it; a run with one line has no other."""
    lines = StepLines()
    assert lines.results() == {"tokens_per_s": None, "memory_gib": None}
    lines._rates, lines._peak_gib = [(100.0, 50.0)], 1.5
    assert lines.results() == {"tokens_per_s": 2.0, "memory_gib": 1.5}
    lines._rates += [(300.0, 1.0), (500.0, 3.0)]
    assert lines.results()["tokens_per_s"] == 200.0

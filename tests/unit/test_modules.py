"""LanguageModel on plain Lightning, and the learning-rate schedules."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.optim import SGD
from torch.utils.data import DataLoader

from titanplug.errors import ConfigError
from titanplug.models import RopeScaling, TransformerConfig
from titanplug.modules import LanguageModel, constant, cosine, warmup_stable_decay

V, S = 17, 8
CONFIG = TransformerConfig(vocab_size=V, dim=16, num_layers=2, num_heads=2, hidden_dim=24, max_seq_len=S)


def rows(count: int = 12, seed: int = 0) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    made = []
    for index in range(count):
        tokens = torch.randint(0, V, (S + 1,), generator=generator)
        labels = tokens[1:].clone()
        labels[: index % 5] = -100
        made.append({"input_ids": tokens[:-1], "labels": labels, "target_bytes": torch.tensor(9 + index)})
    return made


def loader(items: list[dict[str, Tensor]], batch_size: int = 4) -> DataLoader[Any]:
    return DataLoader(items, batch_size=batch_size)  # type: ignore[arg-type]


def trainer(path: Path, **options: Any) -> L.Trainer:
    settings = {"max_steps": 20, "max_epochs": -1, "logger": False, **options}
    return L.Trainer(
        accelerator="cpu",
        devices=1,
        default_root_dir=path,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=options.pop("enable_checkpointing", False),
        **{key: value for key, value in settings.items() if key != "enable_checkpointing"},
    )


def built(**options: Any) -> LanguageModel:
    torch.manual_seed(0)
    module = LanguageModel(CONFIG, **options)
    module.configure_model()
    return module


def stacked(items: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {key: torch.stack([item[key] for item in items]) for key in items[0]}


def test_it_learns_on_plain_lightning(tmp_path: Path) -> None:
    module = LanguageModel(CONFIG, partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.1))
    fit = trainer(tmp_path, max_steps=60)
    data = loader(rows(8))
    (before,) = trainer(tmp_path).validate(module, data, verbose=False)
    fit.fit(module, data)
    (after,) = fit.validate(module, data, verbose=False)
    assert after["val_loss"] < before["val_loss"] - 0.5
    assert fit.callback_metrics["val_bits_per_byte"] == pytest.approx(after["val_bits_per_byte"])


def test_the_training_loss_is_a_mean_over_targets_told_with_their_number() -> None:
    module, batch = built(), stacked(rows())
    logged: dict[str, Tensor] = {}
    module.log = lambda name, value, **_: logged.update({name: value})  # type: ignore[method-assign]
    output = module.training_step(batch, 0)
    assert module.model is not None
    logits = module.model(batch["input_ids"])
    mean = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())
    torch.testing.assert_close(output["loss"], mean)
    assert output["num_targets"].item() == (batch["labels"] != -100).sum()
    assert logged["train_loss"].item() == output["loss"].item()
    assert not logged["train_loss"].requires_grad


def test_a_batch_without_targets_gives_zero_and_not_nan() -> None:
    module, batch = built(), stacked(rows())
    module.log = lambda *_, **__: None  # type: ignore[method-assign]
    output = module.training_step({**batch, "labels": torch.full_like(batch["labels"], -100)}, 0)
    output["loss"].backward()
    assert output["loss"].item() == 0 and output["num_targets"].item() == 0
    assert all(not p.grad.any() for p in module.parameters() if p.grad is not None)


@pytest.mark.parametrize("stage", ["validate", "test"])
def test_evaluation_is_exact_over_ragged_batches(tmp_path: Path, stage: str) -> None:
    module, items = built(), rows(11)
    (values,) = getattr(trainer(tmp_path), stage)(module, loader(items, 3), verbose=False)
    batch = stacked(items)
    assert module.model is not None
    with torch.no_grad():
        logits = module.model(batch["input_ids"])
    nll = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), reduction="sum").item()
    prefix = {"validate": "val", "test": "test"}[stage]
    targets = int((batch["labels"] != -100).sum())
    num_bytes = int(batch["target_bytes"].sum())
    assert values[f"{prefix}_loss"] == pytest.approx(nll / targets, rel=1e-6)
    assert values[f"{prefix}_bits_per_byte"] == pytest.approx(nll / (math.log(2) * num_bytes), rel=1e-6)


def test_data_without_bytes_has_a_loss_and_no_bits(tmp_path: Path) -> None:
    items = [{key: item[key] for key in ("input_ids", "labels")} for item in rows(4)]
    (values,) = trainer(tmp_path).validate(built(), loader(items), verbose=False)
    assert values.keys() == {"val_loss"}


def test_documents_of_a_row_are_kept_apart_where_the_batch_tells_them() -> None:
    module, batch = built(), stacked(rows())
    documents = torch.zeros_like(batch["input_ids"])
    documents[:, S // 2 :] = 1
    whole, apart = module(batch), module({**batch, "document_ids": documents})
    torch.testing.assert_close(whole[:, : S // 2], apart[:, : S // 2])
    assert (whole[:, S // 2 :] - apart[:, S // 2 :]).abs().max() > 1e-3


def test_predictions_are_the_likeliest_tokens(tmp_path: Path) -> None:
    module, items = built(), rows(6)
    predicted = trainer(tmp_path).predict(module, loader(items, 4))
    assert predicted is not None
    assert [tuple(part.shape) for part in predicted] == [(4, S), (2, S)]  # type: ignore[union-attr]
    with torch.no_grad():
        expected = module(stacked(items)).argmax(-1)
    assert torch.equal(torch.cat(predicted), expected)  # type: ignore[arg-type]


def test_a_saved_module_is_loaded_without_unpickling_classes(tmp_path: Path) -> None:
    scaled = TransformerConfig(
        vocab_size=V,
        dim=16,
        num_layers=1,
        num_heads=2,
        hidden_dim=24,
        rope_scaling=RopeScaling(8.0, 1.0, 4.0, 4096),
    )
    module = LanguageModel(scaled)
    fit = trainer(tmp_path, max_steps=1, enable_checkpointing=True)
    fit.fit(module, loader(rows(4)))
    path = tmp_path / "saved.ckpt"
    fit.save_checkpoint(path)
    torch.load(path, weights_only=True)
    loaded = LanguageModel.load_from_checkpoint(path)
    assert loaded.config == scaled
    for name, value in module.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value), name


def test_only_matrices_decay() -> None:
    module = built(optimizer=partial(SGD, lr=1.0, weight_decay=0.5))
    optimizer = module.configure_optimizers()
    assert isinstance(optimizer, SGD)
    matrices, rest = optimizer.param_groups
    assert matrices["weight_decay"] == 0.5 and all(p.dim() >= 2 for p in matrices["params"])
    assert rest["weight_decay"] == 0.0 and all(p.dim() < 2 for p in rest["params"])
    assert len(matrices["params"]) + len(rest["params"]) == len(list(module.parameters()))


def test_the_schedule_spans_the_run_and_moves_every_step(tmp_path: Path) -> None:
    rates: list[float] = []

    class Watch(L.Callback):
        def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
            rates.append(optimizer.param_groups[0]["lr"])

    module = LanguageModel(CONFIG, partial(SGD, lr=1.0), partial(cosine, warmup_steps=3, min_ratio=0.1))
    fit = trainer(tmp_path, max_steps=9, accumulate_grad_batches=2, callbacks=[Watch()])
    fit.fit(module, loader(rows(8), 2))
    per_step = rates
    expected = [0.25, 0.5, 0.75]
    expected += [0.1 + 0.45 * (1 + math.cos(math.pi * step / 6)) for step in range(6)]
    assert per_step == pytest.approx(expected)


def test_a_run_without_end_has_no_schedule(tmp_path: Path) -> None:
    module = LanguageModel(CONFIG, partial(SGD, lr=1.0), cosine)
    with pytest.raises(ConfigError, match="has no end.*max_steps"):
        trainer(tmp_path, max_steps=-1).fit(module, loader(rows(4)))


# --------------------------------------------------------------------------------------
# Schedules
# --------------------------------------------------------------------------------------


def factors(schedule: Any, num_steps: int, **options: Any) -> list[float]:
    optimizer = SGD([torch.nn.Parameter(torch.zeros(1))], lr=2.0)
    scheduler = schedule(optimizer, num_steps, **options)
    values = []
    for _ in range(num_steps):
        values.append(optimizer.param_groups[0]["lr"] / 2.0)
        optimizer.step()
        scheduler.step()
    return values


def test_constant_warms_up_from_above_zero() -> None:
    assert factors(constant, 5, warmup_steps=3) == pytest.approx([0.25, 0.5, 0.75, 1, 1])
    assert factors(constant, 2) == [1, 1]


def test_cosine_falls_to_its_floor() -> None:
    values = factors(cosine, 101, warmup_steps=0, min_ratio=0.2)
    assert values[0] == 1 and values == sorted(values, reverse=True)
    assert values[-1] == pytest.approx(0.2, abs=1e-3)
    assert factors(cosine, 4, warmup_steps=9) == pytest.approx([0.1, 0.2, 0.3, 0.4])


def test_warmup_stable_decay() -> None:
    values = factors(warmup_stable_decay, 20, warmup_steps=4, decay_fraction=0.25, min_ratio=0.1)
    assert values[:4] == pytest.approx([0.2, 0.4, 0.6, 0.8])
    assert values[4:16] == pytest.approx([1] * 12)
    assert values[16:] == pytest.approx([0.82, 0.64, 0.46, 0.28])


@pytest.mark.parametrize(
    ("schedule", "options", "words"),
    [
        (constant, {"warmup_steps": -1}, "warmup_steps=-1"),
        (cosine, {"min_ratio": 1.5}, "min_ratio=1.5"),
        (warmup_stable_decay, {"decay_fraction": -0.1, "min_ratio": 2}, "2 problems"),
    ],
)
def test_values_out_of_range(schedule: Any, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        factors(schedule, 4, **options)

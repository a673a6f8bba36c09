"""Training from given weights: the first step and the weights are one process's, whatever the layout."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.distributed.case import build_trainer, whole
from tests.harness import reference, run_ranks
from titanplug import ParallelPlan, TitanStrategy
from titanplug.errors import ConfigError
from titanplug.models import RopeScaling, Transformer, TransformerConfig
from titanplug.models.hf_commands import import_directory
from titanplug.models.hf_files import write_directory
from titanplug.modules import LanguageModel

V, S, ROWS = 33, 16, 8
CONFIG = TransformerConfig(
    vocab_size=V,
    dim=16,
    num_layers=4,
    num_heads=4,
    num_kv_heads=2,
    hidden_dim=24,
    max_seq_len=64,
    rope_scaling=RopeScaling(8.0, 1.0, 4.0, 8),
    qkv_bias=True,
)
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "fsdp2": (2, {"dp_shard": 2}),
    "tp2": (2, {"dp_shard": 1, "tp": 2}),
    "pp2": (2, {"dp_shard": 1, "pp": 2, "pp_schedule": "Interleaved1F1B", "pp_microbatches": 4}),
    "cp2": (2, {"dp_shard": 1, "cp": 2}),
    "hsdp 2x2": (4, {"dp_replicate": 2, "dp_shard": 2}),
    "fsdp2 x tp2": (4, {"dp_shard": 2, "tp": 2}),
}


def rows() -> list[dict[str, Tensor]]:
    tokens = torch.randint(0, V, (ROWS, S + 1), generator=torch.Generator().manual_seed(5))
    return [{"input_ids": row[:-1], "labels": row[1:]} for row in tokens]


def make_directory(path: Path, tied: bool = False) -> TransformerConfig:
    """Weights like none that a seed gives, as a Hugging Face directory of several files."""
    config = replace(CONFIG, tie_embeddings=tied)
    torch.manual_seed(99)
    model = Transformer(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.3 + (parameter.dim() == 1))
    write_directory(path, config, model.state_dict(), max_shard_size_bytes=4000)
    return replace(config, init_from=str(path))


class Recorded(LanguageModel):
    """Keeps the whole weights as they are before the first step, and what the steps lose."""

    def on_train_start(self) -> None:
        self.first = {name: whole(p) for name, p in self.named_parameters()}
        self.losses: list[float] = []

    def on_train_batch_end(self, *_: Any) -> None:
        self.losses.append(float(self.trainer.callback_metrics["train_loss"]))


def train(rank: int, size: int, config: TransformerConfig, layout: dict[str, Any]) -> dict[str, Any]:
    L.seed_everything(3, verbose=False)
    strategy = TitanStrategy(**layout)
    share = strategy.parallel_dims.resolve(size).size("batch")
    module = Recorded(config, partial(torch.optim.SGD, lr=0.1))
    data = DataLoader(rows(), batch_size=ROWS // share)  # type: ignore[arg-type]
    trainer = build_trainer(size, strategy, max_epochs=2)
    trainer.fit(module, data)
    last = {name: whole(p) for name, p in module.named_parameters()}
    return {"first": module.first, "losses": module.losses, "last": last}


@pytest.mark.parametrize("meta_init", [False, True])
@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_starts_from_the_directory(name: str, meta_init: bool, tmp_path: Path) -> None:
    size, layout = LAYOUTS[name]
    config = make_directory(tmp_path / "hf", tied=name in ("pp2", "fsdp2"))
    weights = reference(lambda: Transformer(config).state_dict())
    alone = reference(train, 0, 1, config, {"dp_shard": 1})
    results = run_ranks(train, size, config, {**layout, "meta_init": meta_init}, init_process_group=False)
    found: dict[str, Tensor] = {}
    for result in results:
        found |= result["first"]  # ranks of a pipeline have some each
        for key, value in result["first"].items():
            assert torch.equal(value, weights[key.removeprefix("model.")]), key
        assert result["losses"] == pytest.approx(alone["losses"], rel=1e-5)
        for key, value in result["last"].items():
            expected = alone["last"].get(key, alone["last"]["model.tok_embeddings.weight"])
            torch.testing.assert_close(value, expected, rtol=1e-4, atol=1e-6)
    assert alone["first"].keys() <= found.keys()
    assert len(alone["losses"]) == 2 and alone["losses"][0] != alone["losses"][1]


def test_a_checkpoint_is_a_start_too(tmp_path: Path) -> None:
    config = make_directory(tmp_path / "hf")
    import_directory(tmp_path / "hf", tmp_path / "imported")
    config_2 = replace(config, init_from=str(tmp_path / "imported"))
    weights = reference(lambda: Transformer(config).state_dict())
    for result in run_ranks(train, 2, config_2, {"dp_shard": 2, "meta_init": True}, init_process_group=False):
        for key, value in result["first"].items():
            assert torch.equal(value, weights[key.removeprefix("model.")]), key


# --- models of one's own ---


class Reads(Mapping[str, Tensor]):
    """Knows what was asked for."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self.tensors = tensors
        self.asked: list[str] = []

    def __getitem__(self, name: str) -> Tensor:
        self.asked.append(name)
        return self.tensors[name]

    def __iter__(self) -> Any:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)


class Scale(nn.Module):
    """A parameter, a buffer that is saved, one that is computed, and no initialisation for the first two."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4))
        self.register_buffer("offset", torch.zeros(4))
        self.register_buffer("computed", torch.zeros(4), persistent=False)

    def reset_parameters(self) -> None:
        self.computed.fill_(5.0)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight + self.offset + self.computed


class Own(nn.Module):
    """Brings its weights; the head is tied to the first layer."""

    def __init__(self, reads: Reads) -> None:
        super().__init__()
        self.__dict__["reads"] = reads
        self.first = nn.Linear(4, 4)
        self.layers = nn.ModuleList([Scale()])
        self.head = nn.Linear(4, 4, bias=False)
        self.head.weight = self.first.weight

    def initial_weights(self) -> Mapping[str, Tensor] | None:
        return self.reads

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers[0](self.first(x)))  # type: ignore[no-any-return]

    def parallel_plan(self) -> ParallelPlan:
        return ParallelPlan(fsdp_units=("layers.*",))


OWN = {
    "first.weight": torch.arange(16.0).reshape(4, 4) / 16,
    "first.bias": torch.ones(4),
    "layers.0.weight": torch.full((4,), 2.0, dtype=torch.bfloat16),
    "layers.0.offset": torch.full((4,), 3.0),
}


class OwnModule(L.LightningModule):
    def __init__(self, reads: Reads) -> None:
        super().__init__()
        self.reads = reads
        self.model: Own | None = None
        self.other: nn.Linear | None = None

    def configure_model(self) -> None:
        if self.model is None:
            self.model = Own(self.reads)
            self.other = nn.Linear(2, 2)  # beside the model that brings weights: drawn as ever

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        assert self.model is not None and self.other is not None
        return F.mse_loss(self.model(batch), batch) + self.other(batch[:, :2]).sum() * 0

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.0)


def train_own(rank: int, size: int, reads: Reads) -> tuple[dict[str, Tensor], list[str]]:
    L.seed_everything(3, verbose=False)
    module = OwnModule(reads)
    data = DataLoader(torch.ones(4, 4), batch_size=2)  # type: ignore[arg-type]
    build_trainer(size, TitanStrategy(dp_shard=size, meta_init=True)).fit(module, data)
    named = [*module.named_parameters(), *module.named_buffers()]
    return {name: whole(value) for name, value in named}, reads.asked


def test_a_model_of_ones_own_may_bring_weights() -> None:
    for state, asked in run_ranks(train_own, 2, Reads(OWN), init_process_group=False):
        for name, value in OWN.items():
            assert torch.equal(state[f"model.{name}"], value.float()), name
        assert torch.equal(state["model.layers.0.computed"], torch.full((4,), 5.0))
        assert 0 < state["other.weight"].abs().max() < 1
        assert sorted(asked) == sorted(OWN)  # each once


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layers.0.offset": None}, r"layers.0.offset: `initial_weights` of model \(Own\) has no value"),
        ({"first.bias": torch.ones(3)}, r"first.bias: .* of shape \(3,\), the model's is \(4,\)"),
    ],
)
def test_what_a_model_does_not_bring_is_named(changes: dict[str, Any], message: str) -> None:
    tensors = {name: value for name, value in (OWN | changes).items() if value is not None}
    with pytest.raises(ConfigError, match=message):
        run_ranks(train_own, 2, Reads(tensors), init_process_group=False)


def test_wrong_weights_are_an_error_on_every_rank(tmp_path: Path) -> None:
    config = replace(make_directory(tmp_path / "hf"), dim=32)

    def told(rank: int, size: int) -> str:
        try:
            train(rank, size, config, {"dp_shard": 1, "pp": 2, "meta_init": True})
        except ConfigError as error:
            return str(error)
        return ""

    first, second = run_ranks(told, 2, init_process_group=False)
    assert first == second and "dim=32, in init_from=" in first

"""Initial weights that no layout changes, and random draws that agree where ranks compute alike."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.distributed.case import Case, Rows, build_model, build_trainer, whole
from tests.distributed.tiny import DP2_TP2, Indices, Tiny, numbered, weight_of
from tests.harness import reference, run_ranks
from titanplug import (
    ColwiseParallel,
    ParallelPlan,
    ReplicateParallel,
    RowwiseParallel,
    SequenceParallel,
    TitanStrategy,
)
from titanplug.errors import ConfigError
from titanplug.models import Transformer, TransformerConfig

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one process": (1, {}),
    "fsdp2": (2, {}),
    "hsdp 2x2": (4, {"dp_replicate": 2, "dp_shard": 2}),
    "tp2": (2, {"tp": 2}),
    "fsdp2 x tp2": (4, {"dp_shard": 2, "tp": 2}),
}


def _stop_before_training(trainer: L.Trainer, module: L.LightningModule) -> dict[str, Tensor]:
    """Weights and buffers as training would start with them."""
    start: dict[str, Tensor] = {}

    class Take(L.Callback):
        def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
            start.update({name: whole(p) for name, p in pl_module.named_parameters()})
            start.update({name: whole(b) for name, b in pl_module.named_buffers()})

    trainer.callbacks.append(Take())  # type: ignore[attr-defined]
    trainer.fit_loop.max_epochs = 0
    trainer.fit(module, numbered(4, batch_size=1)())
    return start


# ---------------------------------------------------------------- initial weights


class Lit(L.LightningModule):
    """Builds its model in ``configure_model``, or before."""

    def __init__(self, build: Callable[[], nn.Module], early: bool = False) -> None:
        super().__init__()
        self.build = build
        self.model: nn.Module | None = build() if early else None

    def configure_model(self) -> None:
        if self.model is None:
            self.model = self.build()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        raise AssertionError("no step is needed")

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def _transformer(**settings: Any) -> Transformer:
    sizes: dict[str, Any] = {"vocab_size": 33, "dim": 16, "num_layers": 2, "num_heads": 4, "hidden_dim": 24}
    return Transformer(TransformerConfig(max_seq_len=16, **sizes, **settings))


class Mixed(nn.Module):
    """Layers of torch, with buffers, a bare parameter, and one that isn't trained."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 8)
        self.up = nn.Linear(8, 12)
        self.down = nn.Linear(12, 8)
        self.batch_norm = nn.BatchNorm1d(8)
        self.attention = nn.MultiheadAttention(8, 2)
        self.own = Own()
        self.up.requires_grad_(False)

    def parallel_plan(self) -> ParallelPlan:
        alike = ("batch_norm", "attention", "own")
        return ParallelPlan(
            tensor={
                "embedding": RowwiseParallel(),
                "up": ColwiseParallel(),
                "down": RowwiseParallel(),
                **dict.fromkeys(alike, ReplicateParallel()),
            }
        )


class Own(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.empty(5))
        self.register_buffer("table", torch.empty(3))

    def init_weights(self) -> None:
        nn.init.normal_(self.factor)
        self.table.copy_(torch.arange(3.0))  # type: ignore[operator]


MODELS: dict[str, Callable[[], nn.Module]] = {
    "transformer": _transformer,
    "tied": lambda: _transformer(tie_embeddings=True),
    "qwen3": lambda: _transformer(qk_norm=True, qkv_bias=True),
    "layers of torch": Mixed,
}


def _start(
    rank: int, world_size: int, degrees: Any, early: bool, seed: int = 7, **options: Any
) -> dict[str, dict[str, Tensor]]:
    found = {}
    for name, build in MODELS.items():
        L.seed_everything(seed, verbose=False)
        # Sizes of the meta device, and values that a rank without the seed would draw.
        module = Lit(build, early)
        trainer = build_trainer(world_size, TitanStrategy(**degrees, **options))
        torch.rand(rank)
        found[name] = _stop_before_training(trainer, module)
    return found


def assert_bitwise(found: dict[str, Tensor], expected: dict[str, Tensor], what: str) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), f"{what}: {name}"


def run_start(layout: str, early: bool, **options: Any) -> list[Any]:
    world_size, degrees = LAYOUTS[layout]

    def run(rank: int, world_size: int) -> Any:
        return _start(rank, world_size, degrees, early, **options)

    return run_ranks(run, world_size, init_process_group=False)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_weights_from_the_meta_device_are_bitwise_equal_in_every_layout(layout: str) -> None:
    (expected,) = run_start("one process", False, meta_init=True)
    for found in run_start(layout, False, meta_init=True):
        for name in MODELS:
            assert_bitwise(found[name], expected[name], name)


def test_weights_from_the_meta_device_are_those_of_the_modules_own_initialisation() -> None:
    (found,) = run_start("one process", False, meta_init=True)
    mixed = found["layers of torch"]
    assert torch.equal(mixed["model.batch_norm.running_mean"], torch.zeros(8))
    assert torch.equal(mixed["model.batch_norm.running_var"], torch.ones(8))
    assert int(mixed["model.batch_norm.num_batches_tracked"]) == 0
    assert torch.equal(mixed["model.own.table"], torch.arange(3.0))
    assert mixed["model.embedding.weight"].std() == pytest.approx(1.0, rel=0.5)
    bound = 8**-0.5
    assert 0.5 * bound < mixed["model.up.weight"].abs().max() <= bound
    assert torch.equal(mixed["model.attention.in_proj_bias"], torch.zeros(24))
    tied = found["tied"]
    assert "model.output.weight" not in tied  # the same parameter has one name
    # Another seed gives other weights, and no two modules of one kind start alike.
    (other,) = run_start("one process", False, meta_init=True, seed=8)
    plain = found["transformer"]
    name = "model.layers.{}.attention.wq.weight"
    assert not torch.equal(plain[name.format(0)], plain[name.format(1)])
    assert not torch.equal(plain[name.format(0)], other["transformer"][name.format(0)])


def _seeded_by_rank(rank: int, world_size: int, degrees: Any, early: bool) -> Any:
    found = {}
    for name, build in MODELS.items():
        L.seed_everything(100 + rank, verbose=False)
        module = Lit(build, early)
        trainer = build_trainer(world_size, TitanStrategy(**degrees))
        found[name] = _stop_before_training(trainer, module)
    return found


@pytest.mark.parametrize("early", [True, False])
@pytest.mark.parametrize("layout", ["fsdp2", "hsdp 2x2", "tp2", "fsdp2 x tp2"])
def test_values_of_rank_zero_are_kept_whatever_the_seeds(layout: str, early: bool) -> None:
    def built() -> dict[str, dict[str, Tensor]]:
        found = {}
        for name, build in MODELS.items():
            L.seed_everything(100, verbose=False)
            model = Lit(build, early=True)
            found[name] = {
                **{key: whole(p) for key, p in model.named_parameters()},
                **{key: whole(b) for key, b in model.named_buffers()},
            }
        return found

    expected = reference(built)
    world_size, degrees = LAYOUTS[layout]
    for found in run_ranks(_seeded_by_rank, world_size, degrees, early, init_process_group=False):
        for name in MODELS:
            if name == "layers of torch":  # Own's values are whatever the memory held
                for key in ("model.own.factor", "model.own.table"):
                    found[name].pop(key), expected[name].pop(key, None)
            assert_bitwise(found[name], expected[name], name)


class NoMethod(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.ones(3))


def test_a_module_that_can_not_fill_its_weights_is_named() -> None:
    def run(rank: int, world_size: int) -> str:
        module = Lit(lambda: nn.Sequential(nn.Linear(2, 2), NoMethod(), NoMethod()))
        trainer = build_trainer(world_size, TitanStrategy(meta_init=True))
        with pytest.raises(ConfigError) as error:
            _stop_before_training(trainer, module)
        return str(error.value)

    for message in run_ranks(run, 2, init_process_group=False):
        assert message.startswith("2 problems")
        for name in ("model.1 (NoMethod)", "model.2 (NoMethod)"):
            assert f"{name} has weights or buffers on the meta device" in message
        assert "meta_init=False" in message


# ---------------------------------------------------------------- draws in a step


class Drops(Tiny):
    """Draws masks in its step; one rank draws for itself between steps."""

    def __init__(self, spoiled: bool) -> None:
        super().__init__()
        self.spoiled = spoiled
        self.masks: list[list[float]] = []
        self.augmented: list[list[float]] = []
        self.decided: list[float] = []

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.augmented.append(torch.rand(4).tolist())
        return batch

    def on_train_epoch_start(self) -> None:
        super().on_train_epoch_start()
        if self.current_epoch:
            self.decided.append(float(torch.rand(())))

    def on_train_epoch_end(self) -> None:
        self.decided.append(float(torch.rand(())))

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.spoiled and self.global_rank == 1:
            torch.rand(3)
            random.random()

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        mask = F.dropout(torch.ones(16), 0.5)
        self.masks.append(mask.tolist())
        return (self.errors(batch) * (1 + mask.mean())).mean()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.masks.append(torch.rand(16).tolist())


def _masks(rank: int, world_size: int, degrees: Any, spoiled: bool, **options: Any) -> Any:
    L.seed_everything(7 + (rank if spoiled else 0), verbose=False)
    trainer = build_trainer(world_size, TitanStrategy(**degrees), max_epochs=2, **options)
    module = Drops(spoiled)
    trainer.fit(module, numbered(8, batch_size=2)(), numbered(4, batch_size=2)())
    return module.masks, weight_of(module), module.augmented, module.decided


def test_draws_agree_on_peers_and_differ_over_data_ranks_and_steps() -> None:
    found = run_ranks(_masks, 4, DP2_TP2, False, init_process_group=False)
    first, first_peer, second, second_peer = (masks for masks, *_ in found)
    assert first == first_peer and second == second_peer
    training = [masks[i] for masks in (first, second) for i in (0, 1, 3, 4)]
    assert len({tuple(mask) for mask in training}) == 8
    assert first[2] == first[5] != second[2]  # each validation draws alike
    # Batches are augmented as they are dropped from; between batches all ranks draw alike.
    augmented = [item[2] for item in found]
    assert augmented[0] == augmented[1] and augmented[2] == augmented[3]
    training = [rows[i] for rows in (augmented[0], augmented[2]) for i in (0, 1, 3, 4)]
    assert len({tuple(row) for row in training}) == 8
    assert found[0][3] == found[1][3] == found[2][3] == found[3][3]
    assert len(set(found[0][3])) == 3
    # The same again, and what one rank draws for itself changes nothing.
    assert run_ranks(_masks, 4, DP2_TP2, False, init_process_group=False) == found
    assert run_ranks(_masks, 4, DP2_TP2, True, init_process_group=False) == found


def test_draws_of_each_batch_of_a_window_differ() -> None:
    def run(rank: int, world_size: int) -> Any:
        return _masks(rank, world_size, {}, False, accumulate_grad_batches=2)

    (masks, *_), _ = run_ranks(run, 2, init_process_group=False)
    assert masks[0] != masks[1]


class DropsInside(L.LightningModule):
    """A dropout on hidden states between two layers, (B, S, D), whose mask can be seen from outside."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.second = nn.Linear(8, 4)
        self.dropout = nn.Dropout(0.5)
        self.masks: list[Tensor] = []
        self.dropout.register_forward_hook(lambda module, args, out: self.masks.append(out.detach() != 0))

    def configure_parallel_plan(self) -> ParallelPlan:
        return ParallelPlan(
            tensor={
                "first": ColwiseParallel(),
                "second": RowwiseParallel(output="sequence"),
                "dropout": SequenceParallel(),
            }
        )

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        x = torch.ones(len(batch), 8, 4)
        return self.dropout(self.second(self.first(x))).square().sum(-1).mean()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.training_step(batch, batch_idx)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_dropout_on_shards_of_the_sequence_differs_by_shard(sequence_parallel: bool) -> None:
    def run(rank: int, world_size: int) -> Any:
        L.seed_everything(7, verbose=False)
        module = DropsInside()
        strategy = TitanStrategy(**DP2_TP2, sequence_parallel=sequence_parallel)
        trainer = build_trainer(world_size, strategy)
        trainer.fit(module, DataLoader(Indices(8), batch_size=2), DataLoader(Indices(4), batch_size=2))
        assert bool(module.masks[-1].all())  # not in evaluation
        return torch.stack(module.masks[:2]), torch.rand(1), weights(module)

    first, first_peer, second, _ = run_ranks(run, 4, init_process_group=False)
    assert first[0].shape == (2, 2, 4 if sequence_parallel else 8, 4)
    assert torch.equal(first[0], first_peer[0]) is not sequence_parallel
    assert not torch.equal(first[0], second[0])
    # The generators stay alike, and so do the weights.
    assert torch.equal(first[1], first_peer[1])
    for name, value in first[2].items():
        assert torch.equal(value, first_peer[2][name]) and torch.equal(value, second[2][name])


def weights(module: nn.Module) -> dict[str, Tensor]:
    return {name: whole(p) for name, p in module.named_parameters()}


class Dropping(L.LightningModule):
    """The shared model with a dropout on its logits, trained on replicated hidden states."""

    def __init__(self) -> None:
        super().__init__()
        self.model = build_model(Case())

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        logits = F.dropout(self.model(batch["input_ids"]), 0.5)
        return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_a_model_with_dropout_trains_alike_under_tensor_parallel() -> None:
    def run(rank: int, world_size: int, degrees: Any) -> Any:
        L.seed_everything(7, verbose=False)
        trainer = build_trainer(world_size, TitanStrategy(**degrees, sequence_parallel=False))
        module = Dropping()
        trainer.fit(module, DataLoader(Rows(Case(num_rows=8)), batch_size=4))
        return weights(module)

    (expected,) = run_ranks(run, 1, {}, init_process_group=False)
    for found in run_ranks(run, 2, {"tp": 2}, init_process_group=False):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)

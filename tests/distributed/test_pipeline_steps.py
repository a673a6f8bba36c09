"""Under pp: gathers of FSDP, norms and non-finite gradients, who reads what, weights from the meta device."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader

from tests.distributed.case import Case, Module, Rows, build_trainer, train_reference, train_titan, whole
from tests.harness import reference, run_ranks
from titanplug.callbacks import PipelineTimeline
from titanplug.errors import ConfigError
from titanplug.models import Transformer, TransformerConfig
from titanplug.plan import ParallelPlan, PipelineOrder
from titanplug.strategy import TitanStrategy
from titanplug.strategy.gradient_window import NonFiniteGradientError

PP2_FSDP2: dict[str, Any] = {"pp": 2, "dp_shard": 2, "pp_schedule": "1F1B"}


class Collectives(TorchDispatchMode):
    """Counts FSDP's collectives."""

    def __init__(self) -> None:
        super().__init__()
        self.now = Counter[str]()
        self.by_step: list[tuple[int, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.now[str(func).removeprefix("c10d.").partition(".")[0]] += 1
        return func(*args, **(kwargs or {}))

    def end_step(self) -> None:
        self.by_step.append((self.now["_allgather_base_"], self.now["_reduce_scatter_base_"]))
        self.now.clear()


def count_collectives(rank: int, world_size: int, num_microbatches: int) -> tuple[list[Any], int]:
    case = Case(num_rows=32)
    strategy = TitanStrategy(**PP2_FSDP2, pp_microbatches=num_microbatches)
    counts = Collectives()
    ends = LambdaCallback(
        on_train_start=lambda *_: counts.now.clear(), on_train_batch_end=lambda *_: counts.end_step()
    )
    trainer = build_trainer(world_size, strategy, accumulate_grad_batches=2, callbacks=[ends])
    with counts:
        trainer.fit(Module(case), DataLoader(Rows(case), batch_size=4))
    units = [unit for unit in strategy._laid_out.fsdp_units if unit._get_fsdp_state()._fsdp_param_groups]
    return counts.by_step, len(units)


def test_parameters_are_gathered_once_a_step_and_gradients_reduced_once_a_window() -> None:
    few = run_ranks(count_collectives, 4, 2, init_process_group=False)
    many = run_ranks(count_collectives, 4, 4, init_process_group=False)
    for (counts, units), (others, _) in zip(few, many, strict=True):
        assert counts == others
        assert counts == [(units, 0), (units, units)] * 2


@pytest.mark.parametrize("norm_type", ["inf", 1.5])
def test_other_norms(norm_type: Any) -> None:
    case = Case(clip=1e-3, options={"gradient_norm_type": norm_type, "pp_microbatches": 2})
    expected = reference(train_reference, case)
    p = float(norm_type)
    first = torch.cat([grad.reshape(-1) for grad in expected.grads[0].values()])
    results = run_ranks(train_titan, 4, case, {**PP2_FSDP2}, init_process_group=False)
    for result in results:
        assert result.norms == results[0].norms
        torch.testing.assert_close(result.norms[0], float(first.norm(p)), rtol=1e-12, atol=0)


class Infinite(Module):
    def on_after_backward(self) -> None:
        if self.global_rank == 3 and self.trainer.global_step == 1:
            local = next(iter(self.parameters())).grad.to_local()  # type: ignore[union-attr]
            local.view(-1)[0] = float("inf")


def stop_at_infinity(rank: int, world_size: int) -> tuple[int, bool]:
    case = Case(options={"pp_microbatches": 2})
    strategy = TitanStrategy(**PP2_FSDP2, pp_microbatches=2, error_if_nonfinite=True)
    trainer, module = build_trainer(world_size, strategy), Infinite(case)
    try:
        trainer.fit(module, DataLoader(Rows(case), batch_size=4))
    except NonFiniteGradientError:
        return trainer.global_step, all(bool(p.isfinite().all()) for p in map(whole, module.parameters()))
    raise AssertionError("went on")


def test_a_gradient_that_is_not_finite_stops_all_stages_before_the_step() -> None:
    assert run_ranks(stop_at_infinity, 4, init_process_group=False) == [(1, True)] * 4


class Reader(Module):
    """What each rank read in its steps."""

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        self.read: list[list[Tensor]] = []

    def on_train_epoch_start(self) -> None:
        self.read.append([])
        if self.global_rank == 1:
            torch.rand(3)  # on one rank alone; changes nothing

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.read[-1].append(batch["input_ids"].clone())


def read(rank: int, world_size: int) -> list[Tensor]:
    L.seed_everything(7, verbose=False)
    case = Case(num_rows=8)
    strategy = TitanStrategy(**PP2_FSDP2, pp_microbatches=2)
    trainer, module = build_trainer(world_size, strategy, max_epochs=2), Reader(case)
    trainer.fit(module, DataLoader(Rows(case), batch_size=2, shuffle=True))
    return [torch.cat(epoch) for epoch in module.read]


def test_stages_read_the_same_rows_and_shards_different_ones() -> None:
    # Ranks: pp is the outer axis.
    (a, b, c, d) = run_ranks(read, 4, init_process_group=False)
    everything = {tuple(row) for row in Rows(Case(num_rows=8)).tokens[:, :-1].tolist()}
    for epoch in range(2):
        assert torch.equal(a[epoch], c[epoch]) and torch.equal(b[epoch], d[epoch])
        halves = [{tuple(row) for row in rank[epoch].tolist()} for rank in (a, b)]
        assert not halves[0] & halves[1] and halves[0] | halves[1] == everything
    assert not torch.equal(a[0], a[1])


class OnMeta(L.LightningModule):
    """Built on the meta device; weights depend on the seed and their names alone."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.tied, self.model = tied, None

    def configure_model(self) -> None:
        if self.model is None:
            config = {"vocab_size": 33, "dim": 16, "num_layers": 4, "num_heads": 4, "hidden_dim": 24}
            self.model = Transformer(TransformerConfig(**config, tie_embeddings=self.tied))  # type: ignore[arg-type]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.model(batch["input_ids"]).mean()  # type: ignore[misc]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.0)


def initial_weights(rank: int, world_size: int, degrees: dict[str, Any], tied: bool) -> dict[str, Tensor]:
    L.seed_everything(11, verbose=False)
    module = OnMeta(tied)
    trainer = build_trainer(world_size, TitanStrategy(**degrees, meta_init=True), max_steps=1)
    trainer.fit(module, DataLoader(Rows(Case()), batch_size=4))
    return {name: whole(p) for name, p in module.named_parameters()}


@pytest.mark.parametrize("tied", [False, True])
def test_initial_weights_are_bitwise_those_of_one_process(tied: bool) -> None:
    (expected,) = run_ranks(initial_weights, 1, {}, tied, init_process_group=False)
    held: set[str] = set()
    for found in run_ranks(
        initial_weights, 4, {"pp": 2, "tp": 2, "pp_microbatches": 2}, tied, init_process_group=False
    ):
        for name, value in found.items():
            own = name if name in expected else "model.tok_embeddings.weight"
            assert torch.equal(value, expected[own]), name
            held.add(own)
    assert held == expected.keys()


class HeadFirst(nn.Module):
    """Its head is registered before the embedding with which it shares its weight, so that has its name."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, 33, bias=False)
        self.embedding = nn.Embedding(33, 8)
        self.embedding.weight = self.head.weight
        self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(2)])

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embedding(tokens)
        for layer in self.layers:
            hidden = layer(hidden).tanh()
        return self.head(hidden)

    def parallel_plan(self) -> ParallelPlan:
        return ParallelPlan(pipeline=PipelineOrder(("embedding",), "layers", ("head",)))


class LitHeadFirst(OnMeta):
    def configure_model(self) -> None:
        if self.model is None:
            self.model = HeadFirst()  # type: ignore[assignment]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.0)


def head_first(rank: int, world_size: int, degrees: dict[str, Any]) -> tuple[Tensor, set[str]]:
    L.seed_everything(11, verbose=False)
    module = LitHeadFirst(tied=True)
    trainer = build_trainer(world_size, TitanStrategy(**degrees, meta_init=True), max_steps=1)
    trainer.fit(module, DataLoader(Rows(Case()), batch_size=4))
    saved = trainer.strategy.optimizer_state(trainer.optimizers[0])["state"]
    held = {name: whole(p) for name, p in module.named_parameters(remove_duplicate=False)}
    weight = held.get("model.head.weight", held.get("model.embedding.weight"))
    assert weight is not None
    return weight, {name for name in saved if "layers" not in name}


def test_a_shared_weight_has_the_name_and_the_values_that_one_process_gives_it() -> None:
    (expected,) = run_ranks(head_first, 1, {}, init_process_group=False)
    assert expected[1] == {"model.head.weight"}
    degrees = {"pp": 2, "pp_schedule": "1F1B", "pp_microbatches": 2}
    for weight, names in run_ranks(head_first, 2, degrees, init_process_group=False):
        assert torch.equal(weight, expected[0]) and names == expected[1]


def draw(rank: int, world_size: int, path: str) -> bool:
    case = Case()
    strategy = TitanStrategy(pp=2, pp_schedule="1F1B", pp_microbatches=4)
    trainer = build_trainer(world_size, strategy, callbacks=[PipelineTimeline(path, step=1)])
    trainer.fit(Module(case), DataLoader(Rows(case), batch_size=8))
    return strategy.pipeline_runtime is not None and strategy.pipeline_runtime.timed is None


def test_a_measured_step_is_drawn(tmp_path: Path) -> None:
    path = tmp_path / "new" / "step.svg"
    assert all(run_ranks(draw, 2, str(path), init_process_group=False))
    assert path.read_text().count("<path") > 16


@pytest.mark.parametrize(
    ("pp", "path", "message"), [(1, "a.svg", "needs a pipeline"), (2, "a.txt", ".png or .svg")]
)
def test_no_picture_of(pp: int, path: str, message: str) -> None:
    def refuse(rank: int, world_size: int) -> str:
        case = Case()
        strategy = TitanStrategy(pp=pp, pp_schedule="1F1B")
        trainer = build_trainer(world_size, strategy, callbacks=[PipelineTimeline(path)])
        with pytest.raises(ConfigError) as caught:
            trainer.fit(Module(case), DataLoader(Rows(case), batch_size=4))
        return str(caught.value)

    assert all(message in text for text in run_ranks(refuse, pp, init_process_group=False))

"""What every strategy must do, on data ranks and on copies. Answers Lightning's test_common.py."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.plugins.precision import Precision
from torch import Tensor

from tests.distributed.case import build_trainer
from tests.harness import reference, run_ranks
from tests.ported.module import TP_PLAN, Net, rows, trainer

LAYOUTS: dict[str, dict[str, Any]] = {
    "fsdp2": {"dp_shard": 2},
    "tp2": {"tp": 2, "plan": TP_PLAN, "sequence_parallel": False},
}
layouts = pytest.mark.parametrize("degrees", LAYOUTS.values(), ids=LAYOUTS.keys())


def evaluate(rank: int, own: L.Trainer, batch_size: int) -> Any:
    module = Net()
    own.fit(module, rows(batch_size))
    values = [
        own.test(module, rows(batch_size), verbose=False),
        own.validate(module, rows(batch_size), verbose=False),
    ]
    outputs: Any = own.predict(module, rows(batch_size))
    return values, torch.cat(outputs) if outputs else None


# test_evaluate: what test, validate and predict give after fit is what one process of plain Lightning gives
@layouts
def test_evaluates_after_fit_as_one_process(degrees: dict[str, Any]) -> None:
    def run(rank: int, world_size: int) -> Any:
        return evaluate(rank, trainer(world_size, **degrees), 4 // degrees.get("dp_shard", 1))

    values, outputs = reference(lambda: evaluate(0, build_trainer(1, "auto"), 4))
    results = run_ranks(run, 2, init_process_group=False)
    for own_values, _ in results:
        for own, expected in zip(own_values, values, strict=True):
            assert own[0] == pytest.approx(expected[0], rel=1e-5)
    torch.testing.assert_close(results[0][1], outputs, rtol=1e-5, atol=1e-6)


class Asks(Net):
    """Uses what a strategy offers over ranks, in a hook where all ranks are."""

    def on_train_start(self) -> None:
        rank, strategy = self.global_rank, self.trainer.strategy
        value = torch.tensor([float(rank), 2.0])
        self.answers: dict[str, Any] = {
            "broadcast": strategy.broadcast(f"rank {rank}", src=1),
            "mean": strategy.reduce(value).tolist(),
            "sum": strategy.reduce(value, reduce_op="sum").tolist(),
            "gathered": self.all_gather({"x": value, "n": rank}),
            "votes": [strategy.reduce_boolean_decision(rank == 0, all=all) for all in (True, False)],
            "untouched": value.tolist(),
        }
        grown = torch.ones(2, requires_grad=True)
        gathered = self.all_gather(grown, sync_grads=True)
        (gathered[0].sum() * (rank + 1) + gathered[-1].sum() * 10).backward()
        self.answers["gradient"] = grown.grad


def ask(rank: int, world_size: int, degrees: dict[str, Any]) -> dict[str, Any]:
    module = Asks()
    trainer(world_size, max_steps=1, **degrees).fit(module, rows())
    return module.answers


# the interface on data ranks, gradients of a gathered tensor included
def test_collectives_over_data_ranks() -> None:
    for rank, answers in enumerate(run_ranks(ask, 2, LAYOUTS["fsdp2"], init_process_group=False)):
        assert answers["broadcast"] == "rank 1" and answers["votes"] == [False, True]
        assert answers["mean"] == [0.5, 2.0] and answers["sum"] == [1.0, 4.0]
        assert answers["gathered"]["x"].tolist() == [[0.0, 2.0], [1.0, 2.0]]
        assert answers["gathered"]["n"].tolist() == [0, 1]
        assert answers["untouched"] == [rank, 2.0]
        # both ranks' losses: weights 1 and 2 for the first row, 10 and 10 for the last
        assert answers["gradient"].tolist() == ([3.0, 3.0] if rank == 0 else [20.0, 20.0])


# the same on tensor-parallel ranks: they hold copies, so by their data each of them is alone
def test_collectives_over_copies() -> None:
    for rank, answers in enumerate(run_ranks(ask, 2, LAYOUTS["tp2"], init_process_group=False)):
        assert answers["broadcast"] == "rank 1" and answers["votes"] == [False, True]
        assert answers["mean"] == answers["sum"] == answers["untouched"] == [rank, 2.0]
        assert answers["gathered"]["x"].tolist() == [[rank, 2.0]]
        assert answers["gathered"]["n"].tolist() == [rank]
        assert answers["gradient"].tolist() == [rank + 11.0] * 2


class Counts(Net):
    """Adds one optimizer step's worth of epochs, and counts the calls of its hooks."""

    def setup(self, stage: str) -> None:
        self.stages = [*getattr(self, "stages", []), stage]


# test_strategy_setup_optimizers..., test_fit_twice: setup is called anew for each call, on the same module
@layouts
def test_calls_follow_each_other(degrees: dict[str, Any]) -> None:
    def run(rank: int, world_size: int) -> list[int]:
        module = Counts()
        own = trainer(world_size, limit_train_batches=2, **degrees)
        own.fit(module, rows(1), rows(1))
        steps = [own.global_step]
        own.validate(module, rows(1), verbose=False)
        own.fit_loop.max_epochs = 2
        own.fit(module, rows(1), rows(1))
        steps.append(own.global_step)
        assert module.stages == ["fit", "validate", "fit"]
        strategy: Any = own.strategy
        [optimizer] = strategy.optimizers
        held = [p for group in optimizer.param_groups for p in group["params"]]
        assert list(map(id, held)) == list(map(id, module.parameters()))
        assert own.model is module and own.lightning_module is module and strategy.model is module
        assert isinstance(own.precision_plugin, Precision) and own.precision == "32-true"
        # what the user wrote is where it was, in its whole shape
        assert module.net.w1.in_features == 8 and module.net.w1.weight.shape == (16, 8)
        assert {name for name, _ in module.named_parameters()} == dict(Net().named_parameters()).keys()
        trainer(world_size, **degrees).fit(Net(), rows())  # another module and Trainer in the same processes
        return steps

    assert run_ranks(run, 2, init_process_group=False) == [[2, 4], [2, 4]]


class PartlyFrozen(Net):
    def configure_model(self) -> None:
        self.net.w1.requires_grad_(False)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW((p for p in self.parameters() if p.requires_grad), lr=0.1)


# an optimizer with a part of the parameters: the others stay, on every layout
@layouts
def test_frozen_parameters_stay(degrees: dict[str, Any]) -> None:
    def run(rank: int, world_size: int) -> list[str]:
        module = PartlyFrozen()
        trainer(world_size, **degrees).fit(module, rows())
        fresh = dict(Net().named_parameters())
        return [name for name, p in module.named_parameters() if not torch.equal(_whole(p), fresh[name])]

    for changed in run_ranks(run, 2, init_process_group=False):
        assert changed == ["net.w2.weight", "net.w2.bias", "net.w3.weight", "net.w3.bias"]


def _whole(parameter: Any) -> Tensor:
    return parameter.full_tensor()  # type: ignore[no-any-return]

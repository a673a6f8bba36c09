"""What Lightning's test_common.py and the strategy's interface ask: run after run, and across ranks."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn

from tests.distributed.case import whole
from tests.harness import reference, run_ranks
from tests.ported.module import TP_PLAN, Net, rows, trainer
from titanplug.errors import ConfigError

FLAT_TP = {"tp": 2, "plan": TP_PLAN, "sequence_parallel": False}


# test_evaluate: validate and test after fit leave the weights alone, with the best checkpoint and without
@pytest.mark.parametrize("degrees", [{"dp_shard": 2}, FLAT_TP], ids=["fsdp2", "tp2"])
def test_evaluate_after_fit(degrees: dict[str, Any], tmp_path: Path) -> None:
    def run(rank: int, world_size: int) -> None:
        saves = ModelCheckpoint(tmp_path, monitor="val_loss")
        t = trainer(world_size, max_epochs=2, callbacks=[saves], enable_checkpointing=True, **degrees)
        module = Net()
        t.fit(module, rows(), rows())
        assert "ckpt" in saves.best_model_path
        before = {name: whole(value) for name, value in module.state_dict().items()}
        assert t.validate(dataloaders=rows(), verbose=False)[0].keys() == {"val_loss"}
        assert t.test(dataloaders=rows(), verbose=False)[0].keys() == {"test_loss"}
        after = {name: whole(value) for name, value in module.state_dict().items()}
        assert all(torch.equal(after[name], before[name]) for name in before)
        # a Trainer of its own for the test, with a strategy of its own
        own = trainer(world_size, **degrees)
        assert own.test(module, rows(), verbose=False) == t.test(module, rows(), verbose=False)
        # and training goes on
        t.fit_loop.max_epochs = 3
        t.fit(module, rows(), rows())
        assert t.global_step == 3 * len(t.train_dataloader)  # type: ignore[arg-type]

    run_ranks(run, 2, init_process_group=False)


# a module is laid out once: another layout or precision for it is refused
def test_laid_out_module_in_another_layout() -> None:
    def run(rank: int, world_size: int) -> None:
        module = Net()
        trainer(world_size, dp_shard=2).fit(module, rows())
        with pytest.raises(ConfigError, match="dp_shard=2 .* asks for dp_replicate=2 .* laid out once"):
            trainer(world_size, dp_shard=1, dp_replicate=2).fit(module, rows())
        with pytest.raises(ConfigError, match="laid out once"):
            trainer(world_size, dp_shard=2, precision="bf16-mixed").test(module, rows())

    run_ranks(run, 2, init_process_group=False)


# test_model_parallel_setup_called: configure_model makes the model, once for all runs
@pytest.mark.parametrize("meta_init", [False, True])
def test_configure_model(meta_init: bool) -> None:
    class Late(Net):
        calls: list[torch.device]

        def __init__(self) -> None:
            super().__init__()
            del self.net
            self.net = None  # type: ignore[assignment]
            self.calls = []

        def configure_model(self) -> None:
            if self.net is None:
                torch.manual_seed(5)
                self.net = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
            self.calls.append(self.net[0].weight.device)  # type: ignore[index]

    def run(rank: int, world_size: int) -> tuple[list[str], dict[str, Tensor]]:
        t = trainer(world_size, meta_init=meta_init)
        module = Late()
        t.validate(module, rows(), verbose=False)
        weights = {name: whole(value) for name, value in module.state_dict().items()}
        t.fit(module, rows())
        t.test(module, rows(), verbose=False)
        assert all(not value.is_meta for value in module.parameters())
        return [device.type for device in module.calls], weights

    results = run_ranks(run, 2, init_process_group=False)
    for calls, weights in results:
        assert calls == ["meta" if meta_init else "cpu", "cpu", "cpu"]
        assert weights.keys() == results[0][1].keys()
        assert all(torch.equal(weights[name], value) for name, value in results[0][1].items())
    if not meta_init:  # exactly the values that configure_model gave
        torch.manual_seed(5)
        expected = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)).state_dict()
        assert all(torch.equal(results[0][1][f"net.{name}"], value) for name, value in expected.items())


# the interface: barrier, broadcast, reduce, all_gather, reduce_boolean_decision, is_global_zero
def test_across_ranks() -> None:
    class Talks(Net):
        def on_train_start(self) -> None:
            strategy, rank = self.trainer.strategy, self.trainer.global_rank
            strategy.barrier("anything")
            assert strategy.broadcast({"a": [rank]}) == {"a": [0]}
            assert strategy.broadcast(rank, src=1) == 1
            assert strategy.is_global_zero == (rank == 0)
            # over the ranks that hold different data: dp_shard, not tp
            dp = rank // 2
            value = torch.tensor([1.0 + dp, 5.0])
            assert strategy.reduce(value, reduce_op="sum").tolist() == [3.0, 10.0]
            assert strategy.reduce(value).tolist() == [1.5, 5.0]
            assert strategy.reduce(torch.tensor(4 + dp)).item() == 4.5  # integers aren't rounded
            assert strategy.reduce(value, reduce_op="max").tolist() == [2.0, 5.0]
            assert strategy.reduce("text") == "text"  # type: ignore[arg-type]
            assert value.tolist() == [1.0 + dp, 5.0]
            with pytest.raises(ValueError, match="reduce_op='median'"):
                strategy.reduce(value, reduce_op="median")
            assert self.all_gather(torch.tensor(dp)).tolist() == [0, 1]
            nested = self.all_gather({"x": torch.tensor([dp, 7]), "y": 3})
            assert nested["x"].tolist() == [[0, 7], [1, 7]]
            # decisions are everybody's
            assert strategy.reduce_boolean_decision(rank == 3, all=False)
            assert not strategy.reduce_boolean_decision(rank == 3)
            assert strategy.reduce_boolean_decision(True)

        def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
            weight = torch.full((), float(self.trainer.global_rank // 2), requires_grad=True)
            gathered = self.all_gather(weight, sync_grads=True)
            (gathered * torch.tensor([1.0, 10.0])).sum().backward()
            # both ranks hand 1 and 10 back
            assert weight.grad is not None and weight.grad.item() == 2 * [1.0, 10.0][int(weight)]
            return super().training_step(batch, batch_idx)

    def run(rank: int, world_size: int) -> None:
        options: dict[str, Any] = {"dp_shard": 2, **FLAT_TP}
        trainer(world_size, max_steps=1, **options).fit(Talks(), rows())

    run_ranks(run, 4, init_process_group=False)


# steps and hooks that are missing, or modules that have nothing to train
def test_incomplete_modules() -> None:
    class WithoutOptimizer(Net):
        def configure_optimizers(self) -> Any:
            return None

    class WithoutParameters(Net):
        def __init__(self) -> None:
            super().__init__()
            del self.net

        def forward(self, x: Tensor) -> Tensor:
            return x * 2

    class WithoutTest(Net):
        test_step = None  # type: ignore[assignment]

    def run(rank: int, world_size: int) -> None:
        frozen = WithoutOptimizer()
        with pytest.warns(UserWarning, match="no optimizer") if rank == 0 else nullcontext():
            trainer(world_size).fit(frozen, rows())
        assert all(whole(p).equal(q) for p, q in zip(frozen.parameters(), Net().parameters(), strict=True))
        predicted = trainer(world_size).predict(WithoutParameters(), rows())
        assert predicted is not None
        if rank == 0:
            torch.testing.assert_close(torch.cat(predicted), 2 * rows().dataset.tensors[0])  # type: ignore
        t = trainer(world_size)
        assert t.validate(WithoutParameters(), rows(), verbose=False)
        with pytest.raises(MisconfigurationException, match="test_step"):
            trainer(world_size).test(WithoutTest(), rows())

    run_ranks(run, 2, init_process_group=False)


# manual optimization through the strategy's hooks: as one process
def test_manual_optimization() -> None:
    class Manual(Net):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
            optimizer = self.optimizers()
            optimizer.zero_grad()  # type: ignore[union-attr]
            self.manual_backward(self(batch[0]).square().mean())
            self.clip_gradients(optimizer, gradient_clip_val=0.01)  # type: ignore[arg-type]
            optimizer.step()  # type: ignore[union-attr]

    def run(rank: int, world_size: int, degrees: dict[str, Any]) -> tuple[int, list[Tensor]]:
        t = trainer(world_size, **degrees)
        module = Manual()
        t.fit(module, rows(4 // t.strategy.parallel_dims.size("batch")))  # type: ignore[attr-defined]
        return t.global_step, [whole(p) for p in module.parameters()]

    ((steps, expected),) = run_ranks(run, 1, {}, init_process_group=False)
    assert steps == 2
    for degrees in ({"dp_shard": 2}, FLAT_TP):
        for steps, weights in run_ranks(run, 2, degrees, init_process_group=False):
            assert steps == 2
            for a, b in zip(weights, expected, strict=True):
                torch.testing.assert_close(a, b)


# accumulation through block_backward_sync: as one process with whole batches
def test_accumulation() -> None:
    def run(rank: int, world_size: int, batch_size: int, every: int) -> list[Tensor]:
        module = Net()
        trainer(world_size, accumulate_grad_batches=every).fit(module, rows(batch_size))
        return [whole(p) for p in module.parameters()]

    expected = reference(run, 0, 1, 8, 1)
    for weights in run_ranks(run, 2, 1, 4, init_process_group=False):
        for a, b in zip(weights, expected, strict=True):
            torch.testing.assert_close(a, b)

"""What Lightning's test_custom_strategy.py asks: who restores optimizers, and what a subclass may change."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from typing_extensions import override

from tests.distributed.case import build_trainer
from tests.harness import reference
from tests.ported.module import Net, rows, trainer
from titanplug import TitanStrategy


class Momentum(Net):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class Watched(TitanStrategy):
    asked: list[str]

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        self.asked.append("optimizers")

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        self.asked.append("model")


# test_strategy_lightning_restore_optimizer_and_schedulers: the strategy restores optimizers, Lightning does
# not ask it to again; schedulers stay with Lightning
def test_restores_optimizers_itself(tmp_path: Path) -> None:
    def run() -> None:
        first = trainer(max_steps=2)
        module = Momentum()
        first.fit(module, rows())
        first.save_checkpoint(tmp_path / "a.ckpt")

        strategy = Watched()
        strategy.asked = []
        assert not strategy.lightning_restore_optimizer
        assert strategy.restore_checkpoint_after_setup
        fresh = Momentum()
        again = build_trainer(1, strategy, max_steps=2)
        again.fit(fresh, rows(), ckpt_path=tmp_path / "a.ckpt")
        assert strategy.asked == ["model"]
        saved, loaded = module.optimizers(), fresh.optimizers()
        for a, b in zip(saved.state.values(), loaded.state.values(), strict=True):  # type: ignore[union-attr]
            assert torch.equal(a["momentum_buffer"], b["momentum_buffer"])

    reference(run)


# (the same file, in later versions) a subclass with a hook of its own around the step
def test_subclass() -> None:
    class Counting(TitanStrategy):
        steps = 0

        @override
        def training_step(self, *args: Any, **kwargs: Any) -> Any:
            self.steps += 1
            return super().training_step(*args, **kwargs)

    def run() -> int:
        strategy = Counting()
        build_trainer(1, strategy).fit(Net(), rows())
        return strategy.steps

    assert reference(run) == 4

"""The strategy in Lightning's registry. Answers Lightning's tests_pytorch/strategies/test_registry.py."""

from __future__ import annotations

import lightning as L
import pytest
from lightning.pytorch.strategies import StrategyRegistry


# test_available_strategies_in_registry
def test_the_name_is_listed_with_a_description() -> None:
    assert "titan" in StrategyRegistry.available_strategies()
    assert "TitanStrategy" in StrategyRegistry["titan"]["description"]


# test_strategy_registry_with_new_strategy: an unknown name is told the names there are, ours among them
def test_an_unknown_name_lists_ours() -> None:
    with pytest.raises(ValueError, match="titan"):
        L.Trainer(strategy="titanium", accelerator="cpu", logger=False)

"""What Lightning's test_registry.py asks: the strategy by its name."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
from lightning.pytorch.strategies import StrategyRegistry

from titanplug import ParallelDims, TitanStrategy
from titanplug.errors import ConfigError


# test_fsdp_strategy_registry: the name is there and makes the class, by a Trainer too
def test_by_name() -> None:
    assert "titan" in StrategyRegistry
    assert isinstance(StrategyRegistry.get("titan"), TitanStrategy)
    trainer = L.Trainer(strategy="titan", accelerator="cpu", devices=2, logger=False)
    assert isinstance(trainer.strategy, TitanStrategy)
    assert trainer.strategy.parallel_dims == ParallelDims(dp_shard=2)
    assert TitanStrategy.strategy_name == "titan"


# test_ddp_find_unused_parameters_strategy_registry: a name of one's own, with settings
def test_own_name_with_settings() -> None:
    StrategyRegistry.register("own-titan", TitanStrategy, description="tp of two", tp=2)
    try:
        trainer = L.Trainer(strategy="own-titan", accelerator="cpu", devices=4, logger=False)
        assert trainer.strategy.parallel_dims == ParallelDims(dp_shard=2, tp=2)  # type: ignore[attr-defined]
    finally:
        StrategyRegistry.remove("own-titan")


# test_custom_registered_strategy_to_strategy_flag: a CheckpointIO. It would never be used, so it is refused.
def test_checkpoint_io_is_refused() -> None:
    from lightning.pytorch.plugins import AsyncCheckpointIO

    with pytest.raises(ConfigError, match="plugins=AsyncCheckpointIO"):
        L.Trainer(strategy=TitanStrategy(), accelerator="cpu", devices=1, plugins=AsyncCheckpointIO())


# accelerators and devices, as the connector's tests go through them
@pytest.mark.parametrize(
    ("options", "world_size"),
    [
        ({"devices": 1}, 1),
        ({"devices": 4}, 4),
        ({"devices": 2, "num_nodes": 2}, 4),
        ({"devices": 2, "accelerator": "auto"}, 2),
    ],
)
def test_devices(options: dict[str, Any], world_size: int) -> None:
    trainer = L.Trainer(strategy=TitanStrategy(), logger=False, **{"accelerator": "cpu", **options})
    assert trainer.world_size == world_size
    assert trainer.strategy.parallel_dims.dp_shard == world_size  # type: ignore[attr-defined]


# test_check_mixed_imports and the connector's errors: `pytorch_lightning` is another package, and it is said
def test_the_other_namespace() -> None:
    import pytorch_lightning as other

    class Module(other.LightningModule):
        pass

    trainer = L.Trainer(strategy=TitanStrategy(), accelerator="cpu", devices=1, logger=False)
    for call in (trainer.fit, trainer.validate, trainer.test, trainer.predict):
        with pytest.raises(TypeError, match=r"is a LightningModule of `pytorch_lightning`.*`lightning`"):
            call(Module())  # type: ignore[operator,arg-type]
    with pytest.raises(TypeError, match="must be a `LightningModule`"):
        trainer.fit(object())  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"TitanStrategy\(.*tp=2\), which is for `lightning`: import"):
        other.Trainer(strategy=TitanStrategy(tp=2), accelerator="cpu", devices=2, logger=False)

"""What Lightning's test_model_parallel.py and test_model_parallel_integration.py ask of a strategy."""

from __future__ import annotations

import importlib
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torchmetrics.classification import MulticlassAccuracy

from tests.harness import reference, run_ranks
from tests.ported.module import TP_PLAN, Net, rows, trainer
from titanplug import TitanStrategy
from titanplug.errors import CheckpointError, ConfigError, TitanplugError

FLAT_TP: dict[str, Any] = {"tp": 2, "plan": TP_PLAN, "sequence_parallel": False}


# test_torch_greater_equal_2_4: an old torch is told, before anything else
def test_minimum_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    from titanplug import compat, strategy

    monkeypatch.setattr(compat, "version", lambda name: "2.9.1")
    with pytest.raises(TitanplugError, match=r"torch 2.9.1 is installed: titanplug needs torch 2.11"):
        importlib.reload(strategy)


# test_device_mesh_access: there is no mesh before the processes are connected
def test_device_mesh_before_the_run() -> None:
    strategy = TitanStrategy()
    for name in ("device_mesh", "mesh", "dp_rank", "dp_size"):
        with pytest.raises(RuntimeError, match="before"):
            getattr(strategy, name)


# test_validate_device_mesh_dimensions: sizes that don't multiply to the world; told by the constructor
@pytest.mark.parametrize(
    ("num_nodes", "devices", "degrees"),
    [
        (1, 4, {"dp_shard": 1, "tp": 1}),
        (1, 4, {"dp_shard": 2, "tp": 3}),
        (1, 4, {"dp_shard": 4, "tp": 2}),
        (2, 4, {"dp_shard": 1, "tp": 4}),
        (2, 4, {"dp_replicate": 2, "dp_shard": 1}),
    ],
)
def test_degrees_that_dont_multiply(num_nodes: int, devices: int, degrees: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match=f"for {num_nodes * devices} processes"):
        trainer(devices, num_nodes=num_nodes, **degrees)


# test_fsdp_v1_modules_unsupported, and modules that configure_model has parallelized in the way
# test_fsdp2_tensor_parallel does: the strategy does it
def test_module_that_is_sharded_already() -> None:
    class Sharded(Net):
        def configure_model(self) -> None:
            fully_shard(self.net.w1, mesh=self.device_mesh["dp_shard"])

    class Wrapped(Net):
        def configure_model(self) -> None:
            self.net = nn.parallel.DistributedDataParallel(self.net)  # type: ignore[assignment]

    def run(rank: int, world_size: int) -> None:
        for kind, what in ((Sharded, "net.w1"), (Wrapped, "DistributedDataParallel")):
            with pytest.raises(ConfigError, match=f"laid out already: .*{what}"):
                trainer(world_size).fit(kind(), rows())

    run_ranks(run, 2, init_process_group=False)


# test_configure_model_required: it isn't; a model built in __init__ is laid out too
def test_model_built_in_init() -> None:
    def run(rank: int, world_size: int) -> None:
        module = Net()
        trainer(world_size).fit(module, rows())
        assert all(isinstance(p, DTensor) for p in module.parameters())
        assert isinstance(module.net.w1, nn.Linear)  # attributes are what they were
        assert module.net.w1.weight.shape == (16, 8)

    run_ranks(run, 2, init_process_group=False)


# test_save_checkpoint_storage_options
def test_storage_options(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="takes no storage options"):
        TitanStrategy().save_checkpoint({}, tmp_path, storage_options={})


# test_save_checkpoint_path_exists and test_load_unknown_checkpoint_type: through the Trainer
def test_paths(tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.mkdir()
    (own / "file").touch()

    def run() -> None:
        t = trainer()
        t.fit(Net(), rows())
        file = tmp_path / "a.ckpt"
        file.touch()
        for path in (file, file):  # a file, then a checkpoint
            t.save_checkpoint(path)
            assert path.is_dir()
        with pytest.raises(CheckpointError, match="isn't a checkpoint"):
            t.save_checkpoint(own)
        with pytest.raises(CheckpointError, match="is not a checkpoint"):
            trainer().fit(Net(), rows(), ckpt_path=own)
        with pytest.raises(AttributeError, match="model is attached"):
            trainer().save_checkpoint(tmp_path / "b.ckpt")

    reference(run)
    assert (own / "file").exists()


# test_set_timeout
def test_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    def run() -> timedelta:
        found = {}
        original = dist.init_process_group

        def watched(*args: Any, **kwargs: Any) -> None:
            found.update(kwargs)
            original(*args, **kwargs)

        monkeypatch.setattr(dist, "init_process_group", watched)
        monkeypatch.setattr(torch.distributed, "init_process_group", watched)
        trainer(timeout_s=17.0).fit(Net(), rows())
        return found["timeout"]  # type: ignore[no-any-return]

    assert reference(run) == timedelta(seconds=17)


# test_meta_device_materialization: with reset_parameters; without it is an error here, not a warning
def test_meta_weights() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(8, 8))
            self.register_buffer("scale", torch.rand(2))

    class Resettable(Block):
        def reset_parameters(self) -> None:
            self.weight.data.fill_(3.0)
            self.scale.fill_(2.0)

    def build(kind: type[Block]) -> Net:
        class Late(Net):
            def configure_model(self) -> None:
                self.block = kind()

        return Late()

    def run(rank: int, world_size: int) -> tuple[list[float], str]:
        module: Any = build(Resettable)
        trainer(world_size, meta_init=True).validate(module, rows(), verbose=False)
        with pytest.raises(ConfigError) as caught:
            trainer(world_size, meta_init=True).validate(build(Block), rows(), verbose=False)
        values = [module.block.weight.full_tensor().mean().item(), module.block.scale.mean().item()]
        return values, str(caught.value)

    for values, message in run_ranks(run, 2, init_process_group=False):
        assert values == [3.0, 2.0]
        assert "block (Block)" in message and "reset_parameters" in message


# test_setup_device_mesh: the mesh is there in configure_model, in every hook after it, and by its axes
@pytest.mark.parametrize(
    "degrees", [{"dp_shard": 2}, {"dp_replicate": 2, "dp_shard": 1}, FLAT_TP], ids=["fsdp", "copies", "tp"]
)
def test_device_mesh_in_configure_model(degrees: dict[str, Any]) -> None:
    class Asks(Net):
        def configure_model(self) -> None:
            mesh = self.device_mesh
            assert isinstance(mesh, DeviceMesh)
            assert mesh.device_type == self.device.type
            assert mesh.mesh_dim_names == ("pp", "dp_replicate", "dp_shard", "cp", "tp")
            sizes = {axis: mesh[axis].size() for axis in mesh.mesh_dim_names}
            assert sizes == {axis: degrees.get(axis, 1) for axis in sizes}
            assert self.trainer.strategy.mesh["batch"].size() == (1 if "tp" in degrees else 2)  # type: ignore

    def run(rank: int, world_size: int) -> None:
        trainer(world_size, max_steps=1, **degrees).fit(Asks(), rows())

    run_ranks(run, 2, init_process_group=False)


# test_tensor_parallel and test_fsdp2_tensor_parallel: what is sharded over what, who reads what, and that the
# optimizer holds the module's own parameters
@pytest.mark.parametrize("meta_init", [False, True])
def test_sharding(meta_init: bool) -> None:
    class Looks(Net):
        def on_train_start(self) -> None:
            optimizer = self.optimizers(use_pl_optimizer=False)
            held = [p for group in optimizer.param_groups for p in group["params"]]  # type: ignore[union-attr]
            assert [id(p) for p in held] == [id(p) for p in self.parameters()]
            assert all(isinstance(p, DTensor) and not p.is_meta for p in held)
            weight: Any = self.net.w1.weight
            assert weight.device_mesh.ndim == 2
            assert weight.to_local().shape == (4, 8)  # 16 rows over tp 2 and dp_shard 2
            loader: Any = self.trainer.train_dataloader
            assert len(loader) == 8 // loader.batch_size // 2
            assert self.trainer.model is self is self.trainer.lightning_module

        def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
            everywhere = [torch.empty_like(batch[0]) for _ in range(4)]
            dist.all_gather(everywhere, batch[0])
            assert everywhere[0].equal(everywhere[1]) and everywhere[2].equal(everywhere[3])
            assert not everywhere[0].equal(everywhere[2])
            return super().training_step(batch, batch_idx)

    def run(rank: int, world_size: int) -> int:
        t = trainer(world_size, dp_shard=2, max_steps=2, **FLAT_TP)
        with t.init_module(empty_init=meta_init):
            module = Looks()
        assert module.net.w1.weight.is_meta == meta_init
        t.fit(module, rows())
        return t.global_step

    assert run_ranks(run, 4, init_process_group=False) == [2] * 4


# test_modules_without_parameters: metrics go to the device and take part
def test_metrics() -> None:
    class Measures(Net):
        def __init__(self) -> None:
            super().__init__()
            self.accuracy = MulticlassAccuracy(num_classes=8)

        def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
            assert self.accuracy.device == self.device
            self.accuracy(self(batch[0]), torch.zeros(len(batch[0]), dtype=torch.long))
            self.log("accuracy", self.accuracy, on_epoch=True)
            return super().training_step(batch, batch_idx)

    def run(rank: int, world_size: int) -> float:
        t = trainer(world_size)
        t.fit(Measures(), rows())
        return float(t.callback_metrics["accuracy_epoch"])

    first, second = run_ranks(run, 2, init_process_group=False)
    assert first == second


# test_module_init_context: the precision's type and the meta device, by init_module
@pytest.mark.parametrize(
    ("precision", "dtype"),
    [("32-true", torch.float32), ("bf16-true", torch.bfloat16), ("bf16-mixed", torch.float32)],
)
def test_init_module(precision: str, dtype: torch.dtype) -> None:
    class Looks(Net):
        def on_train_start(self) -> None:
            assert self.net.w1.weight.dtype == dtype
            assert not self.net.w1.weight.is_meta

    def run() -> None:
        for empty_init in (False, True):
            t = trainer(precision=precision, max_steps=1)
            with t.init_module(empty_init=empty_init):
                module = Looks()
            assert module.net.w1.weight.is_meta == empty_init
            assert module.net.w1.weight.dtype == dtype
            t.fit(module, rows())
            assert t.precision_plugin.precision == precision

    reference(run)


# test_strategy_state_dict and test_save_load_sharded_state_dict: names, files and metadata of a checkpoint
def test_state_dict(tmp_path: Path) -> None:
    def run(rank: int, world_size: int) -> None:
        module = Net()
        names = list(module.state_dict())
        t = trainer(world_size)
        t.fit(module, rows())
        state = t.strategy.lightning_module_state_dict()
        assert list(state) == names
        assert all(isinstance(value, DTensor) for value in state.values())
        t.save_checkpoint(tmp_path / "a.ckpt")

    run_ranks(run, 2, init_process_group=False)
    path = tmp_path / "a.ckpt"
    files = {".metadata", "meta.pt", "checksums", "__0_0.distcp", "__1_0.distcp"}
    assert {file.name for file in path.iterdir()} == files
    meta = torch.load(path / "meta.pt", weights_only=True)
    assert "pytorch-lightning_version" in meta and "state_dict" not in meta


# LightningModule.strict_loading, through the Trainer
def test_strict_loading(tmp_path: Path) -> None:
    class More(Net):
        def __init__(self, strict: bool) -> None:
            super().__init__()
            self.strict_loading = strict
            self.more = nn.Linear(8, 8)

        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            checkpoint["own"] = [1, 2]

        def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            assert checkpoint["own"] == [1, 2]

    class Saves(Net):
        on_save_checkpoint = More.on_save_checkpoint

    def run() -> None:
        t = trainer()
        module = Saves()
        t.fit(module, rows())
        t.save_checkpoint(tmp_path / "a.ckpt")
        with pytest.raises(CheckpointError, match=r"missing: more.bias, more.weight"):
            trainer().validate(More(True), rows(), ckpt_path=tmp_path / "a.ckpt")
        more = More(False)
        trainer().validate(more, rows(), ckpt_path=tmp_path / "a.ckpt", verbose=False)
        assert torch.equal(more.net.w1.weight, module.net.w1.weight)

    reference(run)

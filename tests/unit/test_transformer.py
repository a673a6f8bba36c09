"""The Transformer alone: what a token sees, initial weights, meta device, plan, techniques."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

from titanplug.errors import ConfigError
from titanplug.models import Transformer, TransformerConfig
from titanplug.models import attention as attention_module
from titanplug.models.rotary import apply_rotary
from titanplug.models.transformer import Block
from titanplug.plan import (
    ColwiseParallel,
    PrepareModuleInput,
    ReplicateParallel,
    RowwiseParallel,
    matches,
    modules_matching,
)


def config(**changes: Any) -> TransformerConfig:
    sizes: dict[str, Any] = {
        "vocab_size": 61,
        "dim": 32,
        "num_layers": 3,
        "num_heads": 4,
        "num_kv_heads": 2,
        "hidden_dim": 40,
        "max_seq_len": 64,
        "init_std": 0.2,
    }
    return TransformerConfig(**sizes | changes)


def model_and_ids(length: int = 24, **changes: Any) -> tuple[Transformer, Tensor]:
    torch.manual_seed(1)
    model = Transformer(config(**changes)).double()
    return model, torch.randint(0, 61, (2, length))


def blocks(model: Transformer) -> list[Block]:
    return [layer for layer in model.layers.values() if isinstance(layer, Block)]


def max_error(a: Tensor, b: Tensor) -> float:
    return (a - b).abs().max().item()


# --- the whole model ---


@pytest.mark.parametrize("changes", [{}, {"sliding_window": 5}, {"qk_norm": True}])
def test_no_token_sees_later_ones(changes: dict[str, Any]) -> None:
    model, ids = model_and_ids(**changes)
    other = ids.clone()
    other[:, 10:] = (other[:, 10:] + 1) % 61
    before, after = model(ids), model(other)
    assert max_error(before[:, :10], after[:, :10]) < 1e-14
    assert max_error(before[:, 10], after[:, 10]) > 1e-3


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("restart", [False, True])
def test_documents_equal_each_one_apart(window: int | None, restart: bool) -> None:
    model, ids = model_and_ids(sliding_window=window)
    lengths = [7, 1, 16]
    documents = torch.repeat_interleave(torch.tensor([4, 9, 2]), torch.tensor(lengths))
    positions = torch.cat([torch.arange(n) for n in lengths]).expand(2, -1) if restart else None
    packed = model(ids, positions, documents.expand(2, -1))
    apart = torch.cat([model(part) for part in ids.split(lengths, dim=1)], dim=1)
    assert max_error(packed, apart) < 1e-13
    assert max_error(packed, model(ids)) > 1e-3


def test_positions_of_zero_on_are_the_default() -> None:
    model, ids = model_and_ids()
    assert torch.equal(model(ids), model(ids, torch.arange(24).expand(2, -1)))


def test_wrong_inputs_say_what_to_do() -> None:
    model, ids = model_and_ids(length=65)
    with pytest.raises(ConfigError, match=r"65 tokens.*max_seq_len=64.*Shorten"):
        model(ids)
    line = torch.arange(24)
    with pytest.raises(ConfigError) as error:
        model(ids[:, :24], line, line)
    assert len(error.value.problems) == 2
    assert "positions has shape (24,)" in error.value.problems[0]


def test_training_follows_evaluation_in_inference_mode() -> None:
    model, ids = model_and_ids()
    with torch.inference_mode():
        model(ids)
    model(ids).sum().backward()


def test_a_dry_run_leaves_no_fake_tables_behind() -> None:
    model, ids = model_and_ids()
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert model(ids).shape == (2, 24, 61)
    assert type(model(ids)) is Tensor


@pytest.mark.parametrize("qk_norm", [False, True])
def test_autocast_keeps_the_heads_in_half_precision(qk_norm: bool) -> None:
    torch.manual_seed(1)
    model = Transformer(config(qk_norm=qk_norm))
    seen: list[torch.dtype] = []
    for layer in blocks(model):
        layer.attention.core.register_forward_pre_hook(
            lambda _, inputs: seen.extend(x.dtype for x in inputs[:3])
        )
    with torch.autocast("cpu", torch.bfloat16):
        model(torch.zeros(1, 8, dtype=torch.long)).float().sum().backward()
    assert set(seen) == {torch.bfloat16}


# --- initial weights and the meta device ---


def test_on_meta_nothing_is_allocated() -> None:
    with torch.device("meta"):
        model = Transformer(config(tie_embeddings=True))
    assert {p.device.type for p in model.parameters()} == {"meta"}
    assert not list(model.buffers())
    assert model.output.weight is model.tok_embeddings.weight
    assert model(torch.zeros(2, 8, dtype=torch.long, device="meta")).shape == (2, 8, 61)


@pytest.mark.parametrize("tied", [False, True])
def test_init_weights_repeats_the_constructor(tied: bool) -> None:
    torch.manual_seed(5)
    model = Transformer(config(tie_embeddings=tied, qkv_bias=True))
    drawn = torch.get_rng_state()
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(7.0)
    torch.manual_seed(5)
    model.init_weights()
    assert torch.equal(torch.get_rng_state(), drawn)  # a shared weight is drawn once
    assert all(torch.equal(value, expected[name]) for name, value in model.state_dict().items())


def test_every_module_with_parameters_fills_its_own() -> None:
    model = Transformer(config(qkv_bias=True, qk_norm=True))
    for name, module in model.named_modules():
        own = list(module.parameters(recurse=False))
        if not own:
            continue
        with torch.no_grad():
            for parameter in own:
                parameter.fill_(math.nan)
        fill: Callable[[], None] = module.init_weights
        fill()
        assert all(parameter.isfinite().all() for parameter in own), name


@pytest.mark.parametrize("scaled", [False, True])
def test_initial_spread(scaled: bool) -> None:
    sizes = {"dim": 128, "hidden_dim": 256, "vocab_size": 500, "num_layers": 8}
    model = Transformer(config(**sizes, init_std=0.03, depth_scaled_init=scaled, qkv_bias=True))
    block = blocks(model)[2]
    attention, feed_forward = block.attention, block.feed_forward
    plain = [attention.wq, attention.wk, attention.wv, feed_forward.w1, feed_forward.w3]
    for weight in (model.tok_embeddings.weight, model.output.weight, *(m.weight for m in plain)):
        assert weight.std().item() == pytest.approx(0.03, rel=0.05)
    for module in (attention.wo, feed_forward.w2):
        assert module.weight.std().item() == pytest.approx(0.03 / (4 if scaled else 1), rel=0.05)
    assert not attention.wq.bias.any()
    assert (block.ffn_norm.weight == 1).all()


# --- with the techniques ---


@pytest.mark.parametrize("family", [{}, {"qk_norm": True, "tie_embeddings": True}])
def test_the_plan_covers_the_model(family: dict[str, Any]) -> None:
    model = Transformer(config(**family))
    plan = model.parallel_plan()
    modules_matching(model, list(plan.tensor), "tensor")  # raises where one matches nothing
    assert list(modules_matching(model, plan.fsdp_units, "fsdp")) == [f"layers.{i}" for i in "012"]
    assert plan.checkpoint_units == plan.fsdp_units
    assert plan.heads == (4, 2)
    assert plan.sequence_dims == dict.fromkeys(("input_ids", "positions", "document_ids"), 1)
    assert plan.pipeline is not None
    order = [*plan.pipeline.first, plan.pipeline.layers, *plan.pipeline.last]
    assert order == [name for name, _ in model.named_children()]
    for name, module in model.named_modules():
        styles = [style for pattern, style in plan.tensor.items() if matches(pattern, name)]
        if list(module.parameters(recurse=False)):
            assert len(styles) == 1, name
            split = isinstance(styles[0], ColwiseParallel | RowwiseParallel)
            assert split == isinstance(module, nn.Linear | nn.Embedding), name
            head_norm = name.endswith(("q_norm", "k_norm"))
            assert head_norm == (styles == [ReplicateParallel(partial_grad=True)]), name
        else:
            assert styles in ([], [PrepareModuleInput()]), name


def test_fsdp_does_not_round_the_rotary_tables(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """FSDP casts every floating-point tensor that it finds among the arguments of a block."""
    seen: list[torch.dtype] = []

    def spy(heads: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor:
        seen.extend((heads.dtype, tables[0].dtype))
        return apply_rotary(heads, tables)

    monkeypatch.setattr(attention_module, "apply_rotary", spy)
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        model = Transformer(config())
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
        for layer in model.layers.values():
            fully_shard(layer, mp_policy=policy)
        fully_shard(model, mp_policy=policy)
        ids = torch.zeros(1, 8, dtype=torch.long)
        model(ids, torch.arange(8)[None], ids).sum().backward()
    finally:
        dist.destroy_process_group()
    assert seen == [torch.bfloat16, torch.float32] * 6


def gradients(model: Transformer) -> list[Tensor]:
    return [p.grad for p in model.parameters() if p.grad is not None]


def test_recomputed_blocks_give_the_same_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = model_and_ids(sliding_window=5)
    model(ids).sum().backward()
    expected = gradients(model)
    model.zero_grad()
    for layer in blocks(model):
        inner = layer.forward
        recomputed = partial(checkpoint, inner, use_reentrant=False)
        monkeypatch.setattr(layer, "forward", recomputed)
    model(ids).sum().backward()
    assert len(gradients(model)) == len(expected) == len(list(model.parameters()))
    assert all(map(torch.equal, expected, gradients(model)))


def test_all_blocks_share_one_compilation() -> None:
    graphs: list[Any] = []

    def count(graph: Any, inputs: Any) -> Any:
        graphs.append(inputs)
        return graph.forward

    plain, ids = model_and_ids(sliding_window=5, qk_norm=True)
    documents, positions = ids // 30, torch.arange(24).expand(2, -1)
    expected = plain(ids), plain(ids, positions, documents)
    model, _ = model_and_ids(sliding_window=5, qk_norm=True)  # the same, with no table computed yet
    torch._dynamo.reset()
    for layer in model.layers.values():
        layer.compile(backend=count, fullgraph=True)
    for _ in range(2):
        assert max_error(model(ids), expected[0]) < 1e-14
        assert max_error(model(ids, positions, documents), expected[1]) < 1e-14
    torch._dynamo.reset()
    assert len(graphs) == 2  # one for each set of arguments


def test_a_configuration_costs_no_import_of_torch() -> None:
    code = (
        "import sys; from titanplug.models import TransformerConfig;"
        "assert 'torch' not in sys.modules;"
        "from titanplug.models import config_from_hf; assert 'transformers' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)

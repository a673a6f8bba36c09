"""The Transformer against transformers' own models, with the same random weights."""

from __future__ import annotations

import json
from types import ModuleType
from typing import Any

import pytest
import torch
import transformers.modeling_rope_utils
from torch import nn
from transformers import (
    GPT2Config,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.models.llama import modeling_llama
from transformers.models.mistral import modeling_mistral
from transformers.models.qwen2 import modeling_qwen2
from transformers.models.qwen3 import modeling_qwen3

from titanplug.errors import ConfigError
from titanplug.models import (
    RopeScaling,
    Transformer,
    TransformerConfig,
    config_from_hf,
    state_dict_from_hf,
    state_dict_to_hf,
)
from titanplug.models.hf import name_to_hf

SEQUENCE = 48
SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 56,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "attn_implementation": "eager",
}
# The slowest of the eight frequencies are stretched, the fastest kept, one is blended.
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
MODELS: dict[str, tuple[type[nn.Module], Any]] = {
    "llama2": (LlamaForCausalLM, LlamaConfig(**SIZES | {"num_key_value_heads": 4})),
    "llama3.1": (LlamaForCausalLM, LlamaConfig(**SIZES, rope_parameters=LLAMA3_ROPE)),
    "smollm2": (LlamaForCausalLM, LlamaConfig(**SIZES, tie_word_embeddings=True)),
    "mistral": (MistralForCausalLM, MistralConfig(**SIZES, sliding_window=7)),
    "mistral-v0.3": (MistralForCausalLM, MistralConfig(**SIZES, sliding_window=None)),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config(**SIZES)),
    "qwen2-window": (
        Qwen2ForCausalLM,
        Qwen2Config(**SIZES, use_sliding_window=True, sliding_window=5, max_window_layers=0),
    ),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config(**SIZES, head_dim=24, tie_word_embeddings=True)),
}


class DoubleTorch:
    """Stands in for ``torch`` inside transformers, whose models cast to float32 in the middle."""

    float32 = float = torch.float64

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


@pytest.fixture
def in_double(monkeypatch: pytest.MonkeyPatch) -> None:
    modules: list[ModuleType] = [
        transformers.modeling_rope_utils,
        modeling_llama,
        modeling_mistral,
        modeling_qwen2,
        modeling_qwen3,
    ]
    for module in modules:
        monkeypatch.setattr(module, "torch", DoubleTorch())


def both(name: str, dtype: torch.dtype) -> tuple[nn.Module, Transformer, torch.Tensor]:
    """Their model and ours with the same random weights (norms and biases too), and token ids."""
    model_class, hf_config = MODELS[name]
    torch.manual_seed(3)
    theirs = model_class(hf_config).to(dtype).eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.2 + (parameter.dim() == 1))
    config = config_from_hf(hf_config)
    ours = Transformer(config).to(dtype)
    ours.load_state_dict(state_dict_from_hf(theirs.state_dict(), config))
    return theirs, ours, torch.randint(0, config.vocab_size, (2, SEQUENCE))


@pytest.mark.usefixtures("in_double")
@pytest.mark.parametrize("name", MODELS)
def test_logits_and_gradients_equal_in_float64(name: str) -> None:
    theirs, ours, ids = both(name, torch.float64)
    expected, logits = theirs(ids).logits, ours(ids)
    assert expected.dtype == logits.dtype == torch.float64
    assert expected.std() > 0.1
    assert (logits - expected).abs().max() < 1e-10

    weights = torch.randn_like(expected)
    (expected * weights).sum().backward()
    (logits * weights).sum().backward()
    gradients = dict(theirs.named_parameters())
    for parameter_name, parameter in ours.named_parameters():
        reference = gradients.pop(name_to_hf(parameter_name)).grad
        assert parameter.grad is not None and reference is not None
        error = (parameter.grad - reference).abs().max() / reference.abs().max()
        assert error < 1e-12, parameter_name
    assert not gradients


@pytest.mark.parametrize("name", MODELS)
def test_logits_equal_in_float32_as_transformers_runs(name: str) -> None:
    theirs, ours, ids = both(name, torch.float32)
    expected = theirs(ids).logits
    assert (ours(ids) - expected).abs().max() < 2e-5 * expected.abs().max()


@pytest.mark.usefixtures("in_double")
def test_given_positions_mean_the_same() -> None:
    theirs, ours, ids = both("llama3.1", torch.float64)
    positions = (torch.arange(SEQUENCE) * 2 + 5).expand(2, -1)
    # The mask of ones tells transformers that a step of two starts no new document.
    expected = theirs(ids, position_ids=positions, attention_mask=torch.ones_like(ids)).logits
    assert (ours(ids, positions=positions) - expected).abs().max() < 1e-10
    assert (ours(ids) - expected).abs().max() > 1e-3


@pytest.mark.usefixtures("in_double")
def test_documents_are_those_of_transformers_packing() -> None:
    theirs, ours, ids = both("mistral", torch.float64)
    lengths = (11, 20, SEQUENCE - 31)
    documents = torch.repeat_interleave(torch.arange(3), torch.tensor(lengths)).expand(2, -1)
    positions = torch.cat([torch.arange(n) for n in lengths]).expand(2, -1)
    expected = theirs(ids, position_ids=positions, use_cache=False).logits
    assert (ours(ids, positions, documents) - expected).abs().max() < 1e-10


@pytest.mark.parametrize("name", MODELS)
def test_names_go_there_and_back_bitwise(name: str) -> None:
    theirs, ours, _ = both(name, torch.float32)
    state = theirs.state_dict()
    back = state_dict_to_hf(ours.state_dict())
    assert back.keys() == state.keys()
    assert all(torch.equal(back[key], state[key]) for key in state)
    theirs.load_state_dict(back)


def test_tied_weights_may_come_once_and_rotary_frequencies_are_dropped() -> None:
    theirs, ours, _ = both("smollm2", torch.float32)
    state = theirs.state_dict()
    del state["lm_head.weight"]
    state["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    converted = state_dict_from_hf(state, ours.config)
    assert converted["output.weight"] is converted["tok_embeddings.weight"]
    assert converted.keys() == ours.state_dict().keys()


def test_unknown_names_are_listed_together() -> None:
    strange = {"model.layers.0.mlp.router.weight": torch.ones(1), "visual.weight": torch.ones(1)}
    with pytest.raises(ConfigError, match=r"model.layers.0.mlp.router.weight, visual.weight"):
        state_dict_from_hf(strange, config_from_hf(MODELS["llama2"][1]))
    with pytest.raises(ConfigError, match=r"layers.0.attention.w9.weight"):
        state_dict_to_hf({"layers.0.attention.w9.weight": torch.ones(1)})


def test_configuration_from_json_of_either_version() -> None:
    hf_config = MODELS["llama3.1"][1]
    expected = config_from_hf(hf_config)
    new = json.loads(hf_config.to_json_string())
    old = {key: value for key, value in new.items() if key != "rope_parameters"}
    scaling = {key: value for key, value in LLAMA3_ROPE.items() if key != "rope_theta"}
    old |= {"rope_theta": 500.0, "rope_scaling": scaling}
    assert config_from_hf(new) == config_from_hf(old) == expected
    assert expected == TransformerConfig(
        vocab_size=97,
        dim=32,
        num_layers=3,
        num_heads=4,
        hidden_dim=56,
        num_kv_heads=2,
        head_dim=8,
        max_seq_len=128,
        rope_theta=500.0,
        rope_scaling=RopeScaling(8.0, 1.0, 4.0, 32),
        norm_eps=1e-6,
        depth_scaled_init=False,
    )


@pytest.mark.parametrize(("used", "full_layers", "window"), [(False, 0, None), (True, 0, 5), (True, 3, None)])
def test_a_window_in_json_counts_where_it_is_used(used: bool, full_layers: int, window: int | None) -> None:
    given = MODELS["qwen2"][1].to_dict()
    del given["layer_types"]
    given |= {"use_sliding_window": used, "sliding_window": 5, "max_window_layers": full_layers}
    assert config_from_hf(given).sliding_window == window


def test_other_model_types_are_refused_with_the_list() -> None:
    with pytest.raises(ConfigError, match=r"'gpt2'.*llama, mistral, qwen2, qwen3"):
        config_from_hf(GPT2Config())


def test_features_of_llama_we_lack_are_refused_all_at_once() -> None:
    rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
    with pytest.raises(ConfigError) as error:
        config_from_hf(LlamaConfig(**SIZES, mlp_bias=True, rope_parameters=rope))
    assert len(error.value.problems) == 2
    for text in ("mlp_bias=True", "partial_rotary_factor=0.5"):
        assert text in str(error.value)


def test_features_of_qwen_we_lack_are_refused_all_at_once() -> None:
    hf_config = Qwen3Config(
        **SIZES,
        attention_bias=True,
        attention_dropout=0.1,
        hidden_act="gelu",
        use_sliding_window=True,
        max_window_layers=1,
        rope_parameters={"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0},
    )
    with pytest.raises(ConfigError) as error:
        config_from_hf(hf_config)
    assert len(error.value.problems) == 5
    for text in ("attention_bias=True", "attention_dropout=0.1", "'gelu'", "2 of 3", "'linear'"):
        assert text in str(error.value)


def test_an_incomplete_json_is_refused() -> None:
    given = MODELS["mistral"][1].to_dict()
    del given["rms_norm_eps"], given["num_key_value_heads"]
    with pytest.raises(ConfigError, match="no rms_norm_eps, num_key_value_heads"):
        config_from_hf(given)
    given = MODELS["llama3.1"][1].to_dict()
    del given["rope_parameters"]["factor"]
    with pytest.raises(ConfigError, match="rotary positions has no factor"):
        config_from_hf(given)

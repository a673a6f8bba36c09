"""Between Hugging Face's names and ours. The rotary order is the same: tensors are never permuted.

transformers is not needed: a configuration is read from its object or from the content of
``config.json``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from torch import Tensor

from titanplug.errors import ConfigError
from titanplug.models.config import RopeScaling, TransformerConfig

Entry = TypeVar("Entry")

SUPPORTED = ("llama", "mistral", "qwen2", "qwen3")
"""Model types of Hugging Face that :func:`config_from_hf` reads."""

_SIZES = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "intermediate_size",
    "max_position_embeddings",
    "rms_norm_eps",
)
# What ``config.json`` may leave out differs: each type has defaults of its own, not repeated here.
_REQUIRED = {
    "llama": _SIZES,
    "mistral": (*_SIZES, "num_key_value_heads", "sliding_window"),
    "qwen2": (*_SIZES, "num_key_value_heads"),
    "qwen3": (*_SIZES, "num_key_value_heads", "head_dim"),
}
_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
_LLAMA3_ROPE = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")

_OUTER = {
    "tok_embeddings": "model.embed_tokens",
    "norm": "model.norm",
    "output": "lm_head",
}
_INNER = {
    "attention_norm": "input_layernorm",
    "attention.wq": "self_attn.q_proj",
    "attention.wk": "self_attn.k_proj",
    "attention.wv": "self_attn.v_proj",
    "attention.wo": "self_attn.o_proj",
    "attention.q_norm": "self_attn.q_norm",
    "attention.k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "feed_forward.w1": "mlp.gate_proj",
    "feed_forward.w2": "mlp.down_proj",
    "feed_forward.w3": "mlp.up_proj",
}
_OUTER_BACK = {theirs: ours for ours, theirs in _OUTER.items()}
_INNER_BACK = {theirs: ours for ours, theirs in _INNER.items()}

_DEFAULT_THETA = 10000.0  # what every one of these types means by a configuration without rope_theta


def config_from_hf(hf_config: Any) -> TransformerConfig:
    """The configuration of the same model here.

    Args:
        hf_config: a ``transformers`` configuration, or a mapping with the content of
            ``config.json``, written by transformers 4 or 5.

    Raises:
        ConfigError: another model type, or features that the Transformer here does not have; all of
            them in one error.
    """
    given: Mapping[str, Any] = hf_config if isinstance(hf_config, Mapping) else hf_config.to_dict()
    model_type = given.get("model_type")
    if model_type not in SUPPORTED:
        raise ConfigError(
            f"model_type={model_type!r} cannot be converted. Supported are {', '.join(SUPPORTED)}. "
            "Use a model of one of these types."
        )
    _require(given, _REQUIRED[model_type], "the configuration")
    problems = _missing_features(given)
    window = _window(given, problems)
    theta, scaling = _rope(given, problems)
    if problems:
        raise ConfigError(problems)
    return TransformerConfig(
        vocab_size=given["vocab_size"],
        dim=given["hidden_size"],
        num_layers=given["num_hidden_layers"],
        num_heads=given["num_attention_heads"],
        hidden_dim=given["intermediate_size"],
        num_kv_heads=given.get("num_key_value_heads"),
        head_dim=given.get("head_dim"),
        max_seq_len=given["max_position_embeddings"],
        rope_theta=theta,
        rope_scaling=scaling,
        norm_eps=given["rms_norm_eps"],
        qkv_bias=model_type == "qwen2",
        qk_norm=model_type == "qwen3",
        tie_embeddings=given.get("tie_word_embeddings", False),
        sliding_window=window,
        init_std=given.get("initializer_range", 0.02),
        depth_scaled_init=False,
    )


def _require(given: Mapping[str, Any], names: Sequence[str], where: str) -> None:
    absent = [name for name in names if name not in given]
    if absent:
        raise ConfigError(
            f"{where} has no {', '.join(absent)}. All of {', '.join(names)} must be there. Add "
            "them, or pass what `transformers.AutoConfig.from_pretrained` returns, with defaults."
        )


def _missing_features(given: Mapping[str, Any]) -> list[str]:
    """One message for each setting whose meaning would be lost."""
    only = {
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "attention_dropout": 0,
    }
    return [
        f"{name}={given[name]!r} is not supported. The Transformer here has {name}={value!r} only. "
        "Use a model without it."
        for name, value in only.items()
        if given.get(name, value) != value
    ]


def _window(given: Mapping[str, Any], problems: list[str]) -> int | None:
    """The sliding window of all layers; layers that differ are a problem."""
    window: int | None = given.get("sliding_window")
    if given["model_type"] == "llama" or window is None:
        return None
    if given["model_type"] == "mistral":
        return window
    if not given.get("use_sliding_window", False):
        return None
    layers = given["num_hidden_layers"]
    kinds = given.get("layer_types")
    if kinds is None:
        _require(given, ("max_window_layers",), "a configuration with use_sliding_window")
        full = min(given["max_window_layers"], layers)
        kinds = ["full_attention"] * full + ["sliding_attention"] * (layers - full)
    if set(kinds) not in ({"full_attention"}, {"sliding_attention"}):
        problems.append(
            f"layer_types has {kinds.count('sliding_attention')} of {layers} layers with a sliding "
            "window. The Transformer here has one window for all layers, or none. Use a model "
            "whose layers agree."
        )
    return window if "sliding_attention" in kinds else None


def _rope(given: Mapping[str, Any], problems: list[str]) -> tuple[float, RopeScaling | None]:
    """Base and scaling, from ``rope_parameters`` (transformers 5) or ``rope_scaling`` (before)."""
    rope: Mapping[str, Any] = given.get("rope_parameters") or given.get("rope_scaling") or {}
    theta = float(rope.get("rope_theta") or given.get("rope_theta") or _DEFAULT_THETA)
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        problems.append(
            f"partial_rotary_factor={rope['partial_rotary_factor']!r} is not supported. The "
            "Transformer here turns all features of a head. Use a model without it."
        )
    if kind == "default":
        return theta, None
    if kind != "llama3":
        problems.append(
            f"rope_type={kind!r} is not supported. The Transformer here has 'default' and "
            "'llama3'. Use a model with one of these, or its original length without scaling."
        )
        return theta, None
    _require(rope, _LLAMA3_ROPE, "the llama3 scaling of the rotary positions")
    return theta, RopeScaling(
        factor=rope["factor"],
        low_freq_factor=rope["low_freq_factor"],
        high_freq_factor=rope["high_freq_factor"],
        original_max_position=rope["original_max_position_embeddings"],
    )


def config_to_hf(config: TransformerConfig, family: str | None = None) -> dict[str, Any]:
    """The content of ``config.json`` for the same model, as transformers 4 and 5 read it.

    Args:
        config: the model's. How initial weights are drawn by depth has no name there and is left out.
        family: model type; None: qwen2 where there are ``qkv_bias``, qwen3 where ``qk_norm``, mistral where
            a ``sliding_window``, else llama.

    Raises:
        ConfigError: no such family, or it has no model like this; all reasons in one error.
    """
    family = _guessed_family(config) if family is None else family
    if family not in SUPPORTED:
        raise ConfigError(f"family={family!r} is none of {', '.join(SUPPORTED)}. Give one of these.")
    problems = _misfits(config, family)
    if problems:
        raise ConfigError(problems)
    scaling = config.rope_scaling
    content: dict[str, Any] = {
        "architectures": [_ARCHITECTURES[family]],
        "model_type": family,
        "vocab_size": config.vocab_size,
        "hidden_size": config.dim,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_size,
        "intermediate_size": config.hidden_dim,
        "max_position_embeddings": config.max_seq_len,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta,
        "rope_scaling": None,
        "tie_word_embeddings": config.tie_embeddings,
        "hidden_act": "silu",
        "attention_dropout": 0.0,
        "initializer_range": config.init_std,
        "use_cache": True,
    }
    if scaling is not None:
        content["rope_scaling"] = {
            "rope_type": "llama3",
            "factor": scaling.factor,
            "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor,
            "original_max_position_embeddings": scaling.original_max_position,
        }
    if family == "mistral":
        content["sliding_window"] = config.sliding_window
    elif family in ("qwen2", "qwen3"):
        windowed = config.sliding_window is not None
        kind = "sliding_attention" if windowed else "full_attention"
        content |= {
            "use_sliding_window": windowed,
            "sliding_window": config.sliding_window,
            "max_window_layers": 0 if windowed else config.num_layers,
            "layer_types": [kind] * config.num_layers,
        }
    if family in ("llama", "qwen3"):
        content["attention_bias"] = False
    if family == "llama":
        content["mlp_bias"] = False
    return content


def _guessed_family(config: TransformerConfig) -> str:
    if config.qkv_bias and config.qk_norm:
        raise ConfigError(
            "qkv_bias=True with qk_norm=True: no family of Hugging Face has both (qwen2 has the first, qwen3 "
            "the second). Such a model can't be converted."
        )
    if config.qkv_bias:
        return "qwen2"
    if config.qk_norm:
        return "qwen3"
    return "llama" if config.sliding_window is None else "mistral"


def _misfits(config: TransformerConfig, family: str) -> list[str]:
    """Why a model isn't one of a family."""
    has = {
        "qkv_bias": (config.qkv_bias, family == "qwen2", "qwen2"),
        "qk_norm": (config.qk_norm, family == "qwen3", "qwen3"),
    }
    problems = []
    for name, (given, wanted, only) in has.items():
        if given != wanted:
            always = "always" if wanted else "never"
            problems.append(
                f"family={family} with {name}={given}: {family} {always} has it, of all families only {only} "
                "does. Leave out the family, which the configuration tells."
            )
    if config.sliding_window is not None and family == "llama":
        problems.append(
            f"family=llama with sliding_window={config.sliding_window}: llama sees all tokens before each. "
            "Use family=mistral."
        )
    return problems


def name_to_hf(name: str) -> str:
    """``layers.3.attention.wq.weight`` -> ``model.layers.3.self_attn.q_proj.weight``.

    Raises:
        KeyError: no parameter of the Transformer has this name.
    """
    module, _, parameter = name.rpartition(".")
    if not module.startswith("layers."):
        return f"{_OUTER[module]}.{parameter}"
    _, layer, inner = module.split(".", 2)
    return f"model.layers.{layer}.{_INNER[inner]}.{parameter}"


def name_from_hf(name: str) -> str:
    """``model.layers.3.self_attn.q_proj.weight`` -> ``layers.3.attention.wq.weight``.

    Raises:
        KeyError: no parameter of the Transformer corresponds to this name.
    """
    module, _, parameter = name.rpartition(".")
    if not module.startswith("model.layers."):
        return f"{_OUTER_BACK[module]}.{parameter}"
    _, _, layer, inner = module.split(".", 3)
    return f"layers.{layer}.{_INNER_BACK[inner]}.{parameter}"


def state_dict_from_hf(state: Mapping[str, Tensor], config: TransformerConfig) -> dict[str, Tensor]:
    """A state dict of Hugging Face under our names; the tensors are the same objects.

    Args:
        state: as from ``LlamaForCausalLM(...).state_dict()`` or its safetensors files.
        config: of the model it is for. Where embeddings are tied, a file may hold them once: the
            output weight is then added.

    Raises:
        ConfigError: names that no parameter corresponds to.
    """
    renamed, unknown = entries_from_hf(state)
    _require_known(unknown)
    if config.tie_embeddings and "tok_embeddings.weight" in renamed:
        renamed.setdefault("output.weight", renamed["tok_embeddings.weight"])
    return renamed


def state_dict_to_hf(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Our state dict under the names of Hugging Face; the tensors are the same objects.

    Raises:
        ConfigError: names that are no parameter of the Transformer.
    """
    renamed, unknown = _renamed(state, name_to_hf)
    _require_known(unknown)
    return renamed


def entries_from_hf(entries: Mapping[str, Entry]) -> tuple[dict[str, Entry], list[str]]:
    """What files of Hugging Face hold, whatever stands for it, under our names; and names that have none."""
    # Llama 2 files hold the rotary frequencies, which are computed here.
    weights = {name: entry for name, entry in entries.items() if not is_computed(name)}
    return _renamed(weights, name_from_hf)


def is_computed(name: str) -> bool:
    """Whether a tensor of Hugging Face's files is one that isn't a weight here."""
    return name.endswith("rotary_emb.inv_freq")


def _renamed(
    entries: Mapping[str, Entry], rename: Callable[[str], str]
) -> tuple[dict[str, Entry], list[str]]:
    renamed, unknown = {}, []
    for name, entry in entries.items():
        try:
            renamed[rename(name)] = entry
        except (KeyError, ValueError):
            unknown.append(name)
    return renamed, unknown


def _require_known(unknown: list[str]) -> None:
    if unknown:
        raise ConfigError(
            f"the state dict has names that belong to no parameter here: {', '.join(unknown)}. It "
            f"can be converted for the model types {', '.join(SUPPORTED)}. Use one of these."
        )

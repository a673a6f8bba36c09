"""Configurations: those we ship, and what a wrong one says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf

from titanplug.errors import ConfigError
from titanplug.models import RopeScaling, Transformer, TransformerConfig, num_parameters

PRESETS = Path(__file__).parents[2] / "conf" / "model"

# Parameters; then what they do not show: theta, eps, context, factor of the scaling, window.
PUBLISHED: dict[str, tuple[int, tuple[float, float, int, float | None, int | None]]] = {
    "smollm2_135m": (134_515_008, (1e5, 1e-5, 8192, None, None)),
    "llama3_2_1b": (1_235_814_400, (5e5, 1e-5, 131072, 32.0, None)),
    "llama3_1_8b": (8_030_261_248, (5e5, 1e-5, 131072, 8.0, None)),
    "llama3_1_70b": (70_553_706_496, (5e5, 1e-5, 131072, 8.0, None)),
    "llama3_1_405b": (405_853_388_800, (5e5, 1e-5, 131072, 8.0, None)),
    "qwen3_0_6b": (596_049_920, (1e6, 1e-6, 40960, None, None)),
    "smollm2_360m": (361_821_120, (1e5, 1e-5, 8192, None, None)),
    "smollm2_1_7b": (1_711_376_384, (1.3e5, 1e-5, 8192, None, None)),
    "llama3_2_3b": (3_212_749_824, (5e5, 1e-5, 131072, 32.0, None)),
    "qwen2_5_0_5b": (494_032_768, (1e6, 1e-6, 32768, None, None)),
    "qwen2_5_1_5b": (1_543_714_304, (1e6, 1e-6, 32768, None, None)),
    "qwen2_5_3b": (3_085_938_688, (1e6, 1e-6, 32768, None, None)),
    "qwen2_5_7b": (7_615_616_512, (1e6, 1e-6, 32768, None, None)),
    "qwen2_5_14b": (14_770_033_664, (1e6, 1e-5, 32768, None, None)),
    "qwen2_5_32b": (32_763_876_352, (1e6, 1e-5, 32768, None, None)),
    "qwen2_5_72b": (72_706_203_648, (1e6, 1e-5, 32768, None, None)),
    "qwen3_1_7b": (1_720_574_976, (1e6, 1e-6, 40960, None, None)),
    "qwen3_4b": (4_022_468_096, (1e6, 1e-6, 40960, None, None)),
    "qwen3_8b": (8_190_735_360, (1e6, 1e-6, 40960, None, None)),
    "qwen3_14b": (14_768_307_200, (1e6, 1e-6, 40960, None, None)),
    "qwen3_32b": (32_762_123_264, (1e6, 1e-6, 40960, None, None)),
    "mistral_7b": (7_241_732_096, (1e4, 1e-5, 32768, None, 4096)),
}
OURS = {"debug": (200_000, 600_000), "quickstart": (1_800_000, 2_000_000)}


def preset(name: str, **changes: Any) -> TransformerConfig:
    fields = OmegaConf.load(PRESETS / f"{name}.yaml")
    assert isinstance(fields, DictConfig)
    fields.pop("defaults")  # Hydra's: the schema
    config: TransformerConfig = instantiate(fields, **changes)
    return config


def test_every_preset_is_tested() -> None:
    sizes = {path.stem for path in PRESETS.glob("*.yaml")} - {"hf"}  # whose directory has its size
    assert sizes == PUBLISHED.keys() | OURS.keys()


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_sizes(name: str) -> None:
    config = preset(name)
    count, expected = PUBLISHED[name]
    assert num_parameters(config) == count
    scaling = config.rope_scaling
    assert expected == (
        config.rope_theta,
        config.norm_eps,
        config.max_seq_len,
        scaling and scaling.factor,
        config.sliding_window,
    )
    if scaling is not None:
        assert scaling == RopeScaling(scaling.factor, 1.0, 4.0, 8192)


def test_mistral_v0_3_is_three_overrides() -> None:
    config = preset("mistral_7b", vocab_size=32768, rope_theta=1e6, sliding_window=None)
    assert num_parameters(config) == 7_248_023_552


@pytest.mark.parametrize("name", OURS)
def test_own_sizes_run(name: str) -> None:
    config = preset(name)
    least, most = OURS[name]
    assert least < num_parameters(config) < most
    assert Transformer(config)(torch.zeros(1, 4, dtype=torch.long)).shape == (1, 4, 4096)


def test_the_count_allocates_nothing_and_counts_shared_weights_once() -> None:
    sizes: dict[str, Any] = {"dim": 8, "num_layers": 1, "num_heads": 2, "hidden_dim": 12}
    config = TransformerConfig(vocab_size=10, **sizes)
    tied = TransformerConfig(vocab_size=10, tie_embeddings=True, **sizes)
    per_block = 4 * 8 * 8 + 3 * 8 * 12 + 2 * 8
    assert num_parameters(config) == 2 * 10 * 8 + per_block + 8
    assert num_parameters(tied) == 10 * 8 + per_block + 8


# --- wrong configurations ---

GOOD: dict[str, Any] = {
    "vocab_size": 10,
    "dim": 32,
    "num_layers": 2,
    "num_heads": 8,
    "hidden_dim": 16,
}


@pytest.mark.parametrize("field", ["vocab_size", "dim", "num_layers", "num_heads", "hidden_dim"])
@pytest.mark.parametrize("value", [0, -1, 2.0, "8", True, None])
def test_required_counts(field: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"^{field}={value!r} is not a whole number above 0"):
        TransformerConfig(**GOOD | {field: value})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_kv_heads": 3}, "num_kv_heads=3 does not divide num_heads=8.*Use one of 1, 2, 4, 8"),
        ({"num_kv_heads": 16}, "num_kv_heads=16 does not divide num_heads=8"),
        ({"num_kv_heads": 0}, "num_kv_heads=0 is not a whole number"),
        ({"dim": 36}, "num_heads=8 does not divide dim=36.*Give head_dim"),
        ({"head_dim": 5}, "head_dim=5 is odd"),
        ({"dim": 24}, "head_dim=3 is odd"),
        ({"head_dim": 0}, "head_dim=0 is not a whole number"),
        ({"max_seq_len": 0}, "max_seq_len=0 is not a whole number"),
        ({"sliding_window": 0}, "sliding_window=0 is not a whole number"),
        ({"norm_eps": 0.0}, "norm_eps=0.0 is not a finite number above 0"),
        ({"rope_theta": float("nan")}, "rope_theta=nan is not a finite number"),
        ({"rope_theta": float("inf")}, "rope_theta=inf is not a finite number"),
        ({"init_std": "0.02"}, "init_std='0.02' is not a finite number"),
        ({"qk_norm": "yes"}, "qk_norm='yes' is not a flag"),
        ({"rope_scaling": {"factor": 8.0}}, "is a dict.*_target_: titanplug.models.RopeScaling"),
    ],
)
def test_one_wrong_field(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        TransformerConfig(**GOOD | changes)
    assert len(error.value.problems) == 1


def test_head_dim_frees_the_width_from_the_heads() -> None:
    config = TransformerConfig(**GOOD | {"dim": 36, "head_dim": 10})
    assert (config.head_size, config.kv_heads) == (10, 8)
    assert TransformerConfig(**GOOD).head_size == 4


def test_all_wrong_fields_are_told_at_once() -> None:
    with pytest.raises(ConfigError) as error:
        TransformerConfig(
            vocab_size=0,
            dim=30,
            num_layers=-1,
            num_heads=8,
            hidden_dim=16,
            num_kv_heads=3,
            norm_eps=-1.0,
            qkv_bias=1,  # type: ignore[arg-type]
        )
    told = [problem.split("=")[0] for problem in error.value.problems]
    assert told == [
        "vocab_size",
        "num_layers",
        "norm_eps",
        "qkv_bias",
        "num_kv_heads",
        "num_heads",  # does not divide dim
    ]


def test_wrong_rope_scaling_is_told_at_once() -> None:
    with pytest.raises(ConfigError) as error:
        RopeScaling(0.5, 4.0, 1.0, 0)
    told = [problem.split("=")[0] for problem in error.value.problems]
    assert told == [
        "rope_scaling.original_max_position",
        "rope_scaling.factor",
        "rope_scaling.low_freq_factor",
    ]
    with pytest.raises(ConfigError, match=r"^rope_scaling.low_freq_factor='1' is not a finite"):
        RopeScaling(8.0, "1", 4.0, 8192)  # type: ignore[arg-type]


def test_it_is_a_schema_for_omegaconf() -> None:
    schema = OmegaConf.structured(TransformerConfig)
    merged = OmegaConf.merge(schema, GOOD, {"sliding_window": 4})
    assert OmegaConf.to_object(merged) == TransformerConfig(**GOOD, sliding_window=4)

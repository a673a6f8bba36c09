"""The shape of a Transformer, as plain data that is checked when it is made."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from titanplug.errors import ConfigError


@dataclass
class RopeScaling:
    """Stretches the slow rotary frequencies, as Llama 3.1 does to read longer sequences.

    A frequency that turns fewer than ``low_freq_factor`` times over the original context is divided
    by ``factor``, one that turns more than ``high_freq_factor`` times is kept, those between are
    blended.

    Args:
        factor: by how much the slow frequencies are slowed down, at least 1.
        low_freq_factor: turns over the original context below which a frequency is fully stretched.
        high_freq_factor: turns over the original context above which a frequency is kept.
        original_max_position: context the model was first trained on, in tokens.

    Raises:
        ConfigError: values outside these ranges, all of them in one error.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position: int

    def __post_init__(self) -> None:
        problems = _not_whole(self, "original_max_position")
        bad = _not_positive(self, "factor", "low_freq_factor", "high_freq_factor")
        problems |= bad
        if "factor" not in bad and self.factor < 1:
            problems["factor"] = f"factor={self.factor!r} is below 1. It stretches positions. Give 1 or more."
        if not bad and self.low_freq_factor >= self.high_freq_factor:
            problems["low_freq_factor"] = (
                f"low_freq_factor={self.low_freq_factor!r} must be below "
                f"high_freq_factor={self.high_freq_factor!r}. Llama 3.1 uses 1 and 4."
            )
        if problems:
            raise ConfigError([f"rope_scaling.{text}" for text in problems.values()])


@dataclass
class TransformerConfig:
    """A decoder-only Transformer: RMSNorm, rotary positions, grouped-query attention, SwiGLU.

    The families differ in a few fields only: Llama 3.1 and later set ``rope_scaling``, Mistral 7B
    v0.1 sets ``sliding_window``, Qwen2 ``qkv_bias``, Qwen3 ``qk_norm`` and ``head_dim``, and small
    models ``tie_embeddings``.

    Args:
        vocab_size: number of token ids, V.
        dim: width of the hidden states, D, in features.
        num_layers: number of blocks.
        num_heads: number of query heads, H.
        hidden_dim: width of the feed-forward layer, in features.
        num_kv_heads: number of key-value heads; None means ``num_heads``. ``kv_heads`` tells it.
        head_dim: width of one head, K, in features; None means ``dim / num_heads``. ``head_size``
            tells it.
        max_seq_len: longest sequence ``forward`` accepts, in tokens.
        rope_theta: base of the rotary wavelengths; the slowest turn takes about 2 pi theta tokens.
        rope_scaling: stretching of the rotary frequencies; None leaves them alone.
        norm_eps: added to the mean square in every RMSNorm.
        qkv_bias: query, key and value projections have a bias.
        qk_norm: queries and keys pass an RMSNorm over the head dim before the rotation.
        tie_embeddings: the output layer uses the weight of the token embeddings.
        sliding_window: a token sees this many tokens, itself included; None means all before it.
        init_std: standard deviation of the initial weights.
        depth_scaled_init: divide it by ``sqrt(2 * num_layers)`` for ``wo`` and ``w2``, which add to
            the residual stream: its variance then does not grow with depth (GPT-2, Radford et al.
            2019).
        init_from: where the model's first weights are: a Hugging Face directory, a checkpoint directory of
            titanplug, or a state dict as .safetensors or .pt; None: drawn at random.

    Raises:
        ConfigError: fields outside these ranges or at odds with each other, all in one error.
    """

    vocab_size: int
    dim: int
    num_layers: int
    num_heads: int
    hidden_dim: int
    num_kv_heads: int | None = None
    head_dim: int | None = None
    max_seq_len: int = 2048
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    norm_eps: float = 1e-5
    qkv_bias: bool = False
    qk_norm: bool = False
    tie_embeddings: bool = False
    sliding_window: int | None = None
    init_std: float = 0.02
    depth_scaled_init: bool = True
    init_from: str | None = None

    def __post_init__(self) -> None:
        required = ("vocab_size", "dim", "num_layers", "num_heads", "hidden_dim", "max_seq_len")
        optional = ("num_kv_heads", "head_dim", "sliding_window")
        given = [name for name in optional if getattr(self, name) is not None]
        problems = _not_whole(self, *required, *given)
        problems |= _not_positive(self, "rope_theta", "norm_eps", "init_std")
        problems |= _not_flags(self, "qkv_bias", "qk_norm", "tie_embeddings", "depth_scaled_init")
        source: object = self.init_from
        if isinstance(source, os.PathLike):
            self.init_from = os.fspath(source)  # plain, for checkpoints and YAML
        elif source is not None and (not isinstance(source, str) or not source):
            problems["init_from"] = f"init_from={source!r} is no path. Give one, or None for random weights."
        scaling: object = self.rope_scaling  # YAML without `_target_` gives a mapping
        if scaling is not None and not isinstance(scaling, RopeScaling):
            problems["rope_scaling"] = (
                f"rope_scaling={scaling!r} is a {type(scaling).__name__}. It must be a RopeScaling "
                "or None. In YAML give it `_target_: titanplug.models.RopeScaling`."
            )
        problems |= self._misfits(ignore=set(problems))
        if problems:
            raise ConfigError(list(problems.values()))

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> TransformerConfig:
        """A configuration from plain values by name, as ``dataclasses.asdict`` gives them."""
        scaling = fields.get("rope_scaling")
        if isinstance(scaling, Mapping):
            scaling = RopeScaling(**scaling)
        return cls(**{**fields, "rope_scaling": scaling})

    def _misfits(self, ignore: set[str]) -> dict[str, str]:
        """Fields that are right alone and wrong together, but for those already found wrong."""
        problems: dict[str, str] = {}
        if not ignore & {"num_heads", "num_kv_heads"} and self.num_heads % self.kv_heads:
            fits = [n for n in range(1, self.num_heads + 1) if self.num_heads % n == 0]
            problems["num_kv_heads"] = (
                f"num_kv_heads={self.kv_heads} does not divide num_heads={self.num_heads}. Every "
                "key-value head serves equally many query heads. Use one of "
                f"{', '.join(map(str, fits))}."
            )
        if ignore & {"dim", "num_heads", "head_dim"}:
            return problems
        if self.head_dim is None and self.dim % self.num_heads:
            problems["head_dim"] = (
                f"num_heads={self.num_heads} does not divide dim={self.dim}. Without head_dim the "
                "heads share the width evenly. Give head_dim, or change dim or num_heads."
            )
        elif self.head_size % 2:
            problems["head_dim"] = (
                f"head_dim={self.head_size} is odd. Rotary positions turn pairs of features. Make "
                "head_dim (or dim / num_heads) even."
            )
        return problems

    @property
    def kv_heads(self) -> int:
        """Number of key-value heads."""
        return self.num_heads if self.num_kv_heads is None else self.num_kv_heads

    @property
    def head_size(self) -> int:
        """Width of one head, K."""
        return self.dim // self.num_heads if self.head_dim is None else self.head_dim


# Each check returns its complaints by field: a caller then knows which fields it can still compare.


def _not_whole(config: object, *names: str) -> dict[str, str]:
    values = {name: getattr(config, name) for name in names}
    return {
        name: f"{name}={value!r} is not a whole number above 0. Give one."
        for name, value in values.items()
        if not isinstance(value, int) or isinstance(value, bool) or value < 1
    }


def _not_positive(config: object, *names: str) -> dict[str, str]:
    values = {name: getattr(config, name) for name in names}
    return {
        name: f"{name}={value!r} is not a finite number above 0. Give one."
        for name, value in values.items()
        if not isinstance(value, int | float) or isinstance(value, bool) or not (0 < value < math.inf)
    }


def _not_flags(config: object, *names: str) -> dict[str, str]:
    values = {name: getattr(config, name) for name in names}
    return {
        name: f"{name}={value!r} is not a flag. Give true or false."
        for name, value in values.items()
        if not isinstance(value, bool)
    }

"""Decoder-only Transformers (Llama, Mistral, Qwen2, Qwen3 families) with a parallel plan.

Letters in shape comments: B batch, S sequence, D model, H heads, K head dim, V vocabulary.

The names load on first use, so that reading a configuration costs no import of torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from titanplug.models.config import RopeScaling, TransformerConfig
    from titanplug.models.hf import config_from_hf, config_to_hf, state_dict_from_hf, state_dict_to_hf
    from titanplug.models.initial_weights import config_from_directory, open_weights
    from titanplug.models.transformer import Transformer, num_parameters

__all__ = [
    "RopeScaling",
    "Transformer",
    "TransformerConfig",
    "config_from_directory",
    "config_from_hf",
    "config_to_hf",
    "num_parameters",
    "open_weights",
    "state_dict_from_hf",
    "state_dict_to_hf",
]

_HOMES = {
    "RopeScaling": "config",
    "Transformer": "transformer",
    "TransformerConfig": "config",
    "config_from_directory": "initial_weights",
    "config_from_hf": "hf",
    "config_to_hf": "hf",
    "num_parameters": "transformer",
    "open_weights": "initial_weights",
    "state_dict_from_hf": "hf",
    "state_dict_to_hf": "hf",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)

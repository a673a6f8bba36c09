"""Finds operations that would mix the tokens of one rank's part of a sequence as if they were all."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from typing_extensions import override

from titanplug.errors import ConfigError
from titanplug.parallel.active_sequence import ActiveSequence

_MIXING: dict[Callable[..., Any], str] = {
    F.scaled_dot_product_attention: "scaled_dot_product_attention",
    F.multi_head_attention_forward: "nn.MultiheadAttention",
    torch._native_multi_head_attention: "nn.MultiheadAttention",
    torch._transformer_encoder_layer_fwd: "nn.TransformerEncoderLayer",
    torch.lstm: "an LSTM",
    torch.gru: "a GRU",
    torch.rnn_tanh: "an RNN",
    torch.rnn_relu: "an RNN",
}


class RefuseTokenMixing(TorchFunctionMode):
    """Inside, a known operation over tokens outside of titanplug's attention is an error.

    It looks at every call of torch, so it is for the first call of a model only.

    Args:
        sequence: the sequence that the model runs on.
        name: of the model.
        active: False looks at nothing.
    """

    def __init__(self, sequence: ActiveSequence, name: str, *, active: bool) -> None:
        super().__init__()
        self._sequence, self._name, self._active = sequence, name, active

    @override
    def __enter__(self) -> Self:
        return super().__enter__() if self._active else self  # type: ignore[no-untyped-call]

    @override
    def __exit__(self, *error: object) -> None:
        if self._active:
            super().__exit__(*error)  # type: ignore[no-untyped-call]

    @override
    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if not self._sequence.in_attention:
            what = _MIXING.get(func) or self._convolution(func, *args, **kwargs)
            if what is not None:
                raise ConfigError(
                    f"{self._name or 'The model'} uses {what} under cp={self._sequence.shards.group.size}: "
                    "it would see this rank's part of the sequence only. Attention must go through "
                    "titanplug.attention.dot_product_attention; recurrences and convolutions over the "
                    "sequence can't be sharded, so use cp=1 with them."
                )
        return func(*args, **kwargs)

    def _convolution(self, func: Callable[..., Any], *args: Any, **kwargs: Any) -> str | None:
        if func not in (F.conv1d, torch.conv1d):
            return None
        x, weight = (*args, kwargs.get("weight"))[:2]
        wide = isinstance(weight, Tensor) and weight.shape[-1] > 1
        over_tokens = isinstance(x, Tensor) and x.shape[-1] == self._sequence.shards.local_length
        return "a convolution over the sequence" if wide and over_tokens else None

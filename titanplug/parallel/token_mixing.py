"""Finds operations in a model that take the tokens of one rank's part of a sequence for all of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

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

# Where a function has its argument ``dim``.
_OVER_A_DIM = {
    **dict.fromkeys(("mean", "sum", "cumsum", "cumprod", "prod", "std", "var", "argmax", "argmin"), 1),
    **dict.fromkeys(("max", "min", "amax", "amin", "flip", "sort", "cummax", "cummin"), 1),
    **dict.fromkeys(("softmax", "log_softmax", "logsumexp"), 1),
    **dict.fromkeys(("roll", "norm", "normalize"), 2),
}


class RefuseTokenMixing(TorchFunctionMode):
    """Inside, a known operation over tokens outside of titanplug's attention is an error.

    So are positions made from the length of the part, where the model wasn't given any. It looks at every
    call of torch, so it is for the first call of a model only.

    Args:
        sequence: the sequence that the model runs on.
        name: of the model.
        has_positions: positions may be among the model's arguments.
    """

    def __init__(self, sequence: ActiveSequence, name: str, *, has_positions: bool) -> None:
        super().__init__()
        self._sequence, self._name = sequence, name or "The model"
        self._has_positions = has_positions

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
            self._look(func, args, kwargs)
        return func(*args, **kwargs)

    def _look(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        shards = self._sequence.shards
        what = _MIXING.get(func)
        if what is None:
            what = _mixes(shards.local_length, func, args, kwargs)
        if what is not None:
            raise ConfigError(
                f"{self._name} uses {what} under cp={shards.group.size}: it would see this rank's part of "
                "the sequence only. Attention must go through titanplug.attention.dot_product_attention; "
                "what else mixes tokens can't be sharded inside of the model: do it with the model's output "
                "in the step, or use cp=1."
            )
        if not self._has_positions and _makes_positions(shards.local_length, func, args, kwargs):
            raise ConfigError(
                f"{self._name} makes positions from the length of its input under cp={shards.group.size}, "
                "and a rank has only a part of the sequence: each would start at 0. Take "
                "titanplug.attention.token_positions(length, device) in place of torch.arange(length) and "
                "of the first rows of a table, or pass positions to the model as an argument that "
                "sequence_dims names."
            )


def _mixes(
    length: int, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> str | None:
    """What an operation does over the ``length`` tokens of a part, if it does."""
    x = args[0] if args and isinstance(args[0], Tensor) else kwargs.get("input")
    if not isinstance(x, Tensor) or length == 1:
        return None
    name = getattr(func, "__name__", "")
    if func in (F.conv1d, torch.conv1d):
        weight = args[1] if len(args) > 1 else kwargs.get("weight")
        wide = isinstance(weight, Tensor) and weight.shape[-1] > 1
        return "a convolution over the sequence" if wide and x.shape[-1] >= length else None
    if name in ("softmax", "_softmax") and x.ndim > 2 and x.shape[-2:] == (length, length):
        return "attention of its own"
    if x.ndim != 3 or x.shape[1] != length:
        return None
    if name == "pad":
        sides = args[1] if len(args) > 1 else kwargs.get("pad", ())
        return "padding of the sequence" if any(sides[2:4]) else None
    if func is Tensor.__getitem__:
        part = args[1][1] if isinstance(args[1], tuple) and len(args[1]) > 1 else slice(None)
        cut = isinstance(part, int) or (isinstance(part, slice) and part.indices(length) != (0, length, 1))
        return "a slice of the sequence" if cut and args[1][0] == slice(None) else None
    if name in _OVER_A_DIM:
        return f"`{name}` over the sequence" if _dims(name, args, kwargs) & {1, -2} else None
    return None


def _dims(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> set[Any]:
    """The dims that a function is called with."""
    given = next((kwargs[key] for key in ("dim", "dims", "axis") if key in kwargs), None)
    if given is None:
        at = _OVER_A_DIM[name]
        given = args[at:] if name == "flip" and isinstance(args[-1], int) else (*args, None)[at:][:1]
    flat = given if isinstance(given, tuple | list) else (given,)
    return {dim for item in flat for dim in (item if isinstance(item, tuple | list) else (item,))}


def _makes_positions(
    length: int, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> bool:
    """``arange(length)``, or the first ``length`` rows of something longer."""
    if func is torch.arange:
        start, stop, step = (0, *args, 1) if len(args) == 1 else (*args, *(0, None, 1)[len(args) :])
        given = kwargs.get("start", start), kwargs.get("end", stop), kwargs.get("step", step)
        return given == (0, length, 1)
    if func is not Tensor.__getitem__:
        return False
    index = args[1] if isinstance(args[1], tuple) else (args[1],)
    if any(part is ... or part is None for part in index):
        return False
    return any(
        isinstance(part, slice)
        and (part.start or 0, part.stop, part.step or 1) == (0, length, 1)
        and size > length
        for part, size in zip(index, args[0].shape, strict=False)
    )

"""States of optimizers that keep fewer bits (torchao's): saved as the numbers that they stand for.

Blocks that share a scale are those of a rank's shard, which no other layout has; so a checkpoint holds plain
tensors, and loading quantizes them again. In the layout that saved them that gives the same codes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from titanplug.parallel.gradients import local_tensor
from titanplug.parallel.local_parameter import dtensor_like

_SIGNED = "exp_avg"
"""The one state that can be negative."""


def plain_tensor(value: Any) -> Any:
    """A quantized state as a float32 tensor of the same layout; anything else as it is."""
    local = local_tensor(value) if isinstance(value, Tensor) else None
    if local is None or not hasattr(local, "dequantize") or not _is_quantized(local):
        return value
    plain = local.dequantize()
    return dtensor_like(plain, value._spec) if isinstance(value, DTensor) else plain


def quantize_state(optimizer: Optimizer) -> None:
    """After loading, in place: put the states of an optimizer that quantizes them back into its own form."""
    new_buffer = getattr(optimizer, "_new_buffer", None)
    if new_buffer is None:
        return
    for parameter, state in optimizer.state.items():
        for key, value in state.items():
            if isinstance(value, Tensor) and value.ndim and value.shape == parameter.shape:
                buffer = new_buffer(parameter, key == _SIGNED)
                if _is_quantized(local_tensor(buffer)):
                    _quantize(local_tensor(value), local_tensor(buffer))
                    state[key] = buffer


def _quantize(values: Tensor, room: Any) -> None:
    """Fill ``room`` with codes whose values are nearest.

    torchao's own way gives other codes for what was quantized before: it scales a block by its largest
    magnitude, and the lowest code of signed values stands for less than that (-0.993).
    """
    blocks = values.float().reshape(-1, room.block_size)
    lowest, highest = room.qmap[0], room.qmap[-1]
    scale = blocks.amax(-1) / highest
    if lowest < 0:
        scale = torch.maximum(scale, blocks.amin(-1) / lowest)
    scale = scale.clamp(min=1e-12)
    between = (room.qmap[1:] + room.qmap[:-1]) / 2
    codes = torch.searchsorted(between, (blocks / scale[:, None]).contiguous())
    room.codes.copy_(codes.reshape(room.codes.shape))
    room.scale.copy_(scale)


def _is_quantized(local: Tensor) -> bool:
    return type(local) is not Tensor and not isinstance(local, torch.nn.Parameter)

"""Buffers that ranks update by the samples or tokens they see, such as BatchNorm's statistics.

The rule is that of DDP: those of the first rank count. They are not averaged, and in training
each rank goes on with its own; before an evaluation and before a checkpoint all ranks get the first one's.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


@torch.no_grad()
def broadcast_buffers(root: nn.Module, group: dist.ProcessGroup) -> None:
    """Give all ranks of ``group`` the persistent buffers of its first rank, in place; a collective.

    One broadcast of one flat buffer for each dtype, none where ``root`` has no persistent buffers. Buffers
    that are no part of a checkpoint are computed by every rank alike, and DTensors are no copies.
    """
    if dist.get_world_size(group) == 1:
        return
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for buffer in _persistent_buffers(root):
        by_dtype.setdefault(buffer.dtype, []).append(buffer)
    source = dist.get_global_rank(group, 0)
    for buffers in by_dtype.values():
        flat = torch.cat([buffer.reshape(-1) for buffer in buffers])
        dist.broadcast(flat, src=source, group=group)
        for part, buffer in zip(flat.split([buffer.numel() for buffer in buffers]), buffers, strict=True):
            buffer.copy_(part.view(buffer.shape))


def _persistent_buffers(root: nn.Module) -> Iterator[Tensor]:
    seen: set[int] = set()
    for module in root.modules():
        for name, buffer in module._buffers.items():
            if buffer is None or name in module._non_persistent_buffers_set or id(buffer) in seen:
                continue
            seen.add(id(buffer))
            if not isinstance(buffer, DTensor):
                yield buffer

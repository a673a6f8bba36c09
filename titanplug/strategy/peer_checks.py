"""Debug checks that ranks which must agree do: they read the same batch and hold the same gradients.

Switched on by ``TitanStrategy(check_peers=True)``; each step then costs a few collectives and reads on the
host.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from titanplug.errors import TitanplugError
from titanplug.mesh import Mesh
from titanplug.parallel.gradients import local_tensor


class PeerDifferenceError(TitanplugError):
    """Ranks of an axis that must hold the same hold something else."""


def check_batch(batch: Any, mesh: Mesh, device: torch.device) -> None:
    """Ranks of the tensor and of the context axis must read the same batch.

    Raises:
        PeerDifferenceError: they don't; on all ranks of the axis.
    """
    tensors = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)]
    sums, names = [_checksum(tensor) for tensor in tensors], ["the batch"] * len(tensors)
    _check(sums, names, mesh, "tp", device)
    _check(sums, names, mesh, "cp", device)


def check_gradients(module: nn.Module, mesh: Mesh, device: torch.device) -> None:
    """Gradients of parameters that are replicated over the tensor axis must be equal on its ranks.

    Raises:
        PeerDifferenceError: they aren't, with the parameters' names; on all ranks of the axis.
    """
    sums, names = [], []
    for name, parameter in module.named_parameters():
        grad = parameter.grad
        if grad is None or (isinstance(grad, DTensor) and _is_split(grad, "tp")):
            continue
        sums.append(_checksum(local_tensor(grad)))
        names.append(f"the gradient of {name}")
    _check(sums, names, mesh, "tp", device)


def _is_split(tensor: DTensor, axis: str) -> bool:
    names = tensor.device_mesh.mesh_dim_names or ()
    return axis in names and not tensor.placements[names.index(axis)].is_replicate()


def _checksum(tensor: Tensor) -> Tensor:
    """Two numbers that change with nearly any change of the values or of their order."""
    flat = tensor.detach().reshape(-1).double()
    places = torch.arange(1, flat.numel() + 1, dtype=torch.float64, device=flat.device)
    return torch.stack([flat.sum(), (flat * places).sum()])


def _check(
    sums: list[Tensor], names: list[str], mesh: Mesh, axis: Literal["tp", "cp"], device: torch.device
) -> None:
    if mesh.dims.degrees[axis] == 1 or not sums:
        return
    own = torch.stack(sums).to(device)
    span = torch.stack([own, -own])
    dist.all_reduce(span, op=dist.ReduceOp.MAX, group=mesh.group(axis))
    highest, lowest = span[0], -span[1]
    # Ranks that reduce the same numbers get the same bits, so that nothing needs a tolerance but NaN.
    different = ((highest != lowest) & ~(highest.isnan() & lowest.isnan())).any(-1).tolist()
    wrong = list(dict.fromkeys(name for name, bad in zip(names, different, strict=True) if bad))
    if wrong:
        raise PeerDifferenceError(
            f"Ranks of the {axis} axis differ in {', '.join(wrong)}. They must read the same batch and hold "
            "the same gradients of replicated weights. Look for a loader that shards by global rank, for "
            "random numbers that differ by rank, or for a style that leaves a gradient incomplete."
        )

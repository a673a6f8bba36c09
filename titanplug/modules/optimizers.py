"""Optimizers that need another package."""

from __future__ import annotations

from typing import Any

from torch.optim import Optimizer

from titanplug.compat import keep_subclasses_apart_in_compile_cache, require_extra


def adamw_8bit(
    params: Any,
    lr: float = 3e-4,
    betas: tuple[float, float] = (0.9, 0.95),
    eps: float = 1e-8,
    weight_decay: float = 0.1,
    block_size: int = 256,
) -> Optimizer:
    """AdamW whose states have 8 bits, in blocks with a scale each; small parameters keep float32 ones.

    Paper: Dettmers et al. 2022, "8-bit Optimizers via Block-wise Quantization". From torchao, on
    the shards of a rank, under every layout; blocks differ with the layout, so runs agree to the precision of
    the states.

    Args:
        params: parameters or groups of them.
        lr: learning rate.
        betas: decay of the running means of gradient and squared gradient.
        eps: added to the denominator.
        weight_decay: of groups that have none of their own.
        block_size: weights that share a scale.

    Raises:
        MissingExtraError: torchao isn't installed.
    """
    torchao = require_extra("torchao.optim", "int8")
    keep_subclasses_apart_in_compile_cache()
    optimizer: Optimizer = torchao.AdamW8bit(
        params, lr=lr, betas=tuple(betas), eps=eps, weight_decay=weight_decay, block_size=block_size
    )
    return optimizer

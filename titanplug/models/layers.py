"""The modules that own parameters. Each fills its own: a model on meta is built piece by piece."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Linear(nn.Linear):
    """A linear layer whose weight starts normal and whose bias starts at zero.

    Args:
        in_features: width of the input.
        out_features: width of the output.
        bias: whether there is a bias.
        init_std: standard deviation of the initial weight.
    """

    def __init__(self, in_features: int, out_features: int, *, bias: bool = False, init_std: float) -> None:
        self.init_std = init_std  # first: torch's constructor calls reset_parameters
        super().__init__(in_features, out_features, bias=bias)

    def reset_parameters(self) -> None:
        """What torch calls it."""
        self.init_weights()

    def init_weights(self) -> None:
        """Fills weight and bias from the global generator."""
        nn.init.normal_(self.weight, std=self.init_std)
        if self.bias is not None:
            nn.init.zeros_(self.bias)


class Embedding(nn.Embedding):
    """Token embeddings that start normal.

    Args:
        num_embeddings: V.
        embedding_dim: D.
        init_std: standard deviation of the initial weight.
    """

    def __init__(self, num_embeddings: int, embedding_dim: int, *, init_std: float) -> None:
        self.init_std = init_std  # first: torch's constructor calls reset_parameters
        super().__init__(num_embeddings, embedding_dim)

    def reset_parameters(self) -> None:
        """What torch calls it."""
        self.init_weights()

    def init_weights(self) -> None:
        """Fills the weight from the global generator."""
        nn.init.normal_(self.weight, std=self.init_std)


class RMSNorm(nn.Module):
    """Divides by the root mean square of the last dim (Zhang and Sennrich 2019), then scales.

    Half types are computed in float32 inside and rounded once; Hugging Face rounds before it scales
    and once more after. float64 stays float64.

    Args:
        dim: size of the last dim.
        eps: added to the mean square.
    """

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(dim))
        self.init_weights()

    def init_weights(self) -> None:
        """Sets the scale to one."""
        nn.init.ones_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        """(..., dim) -> (..., dim)."""
        # Under autocast a float32 weight meets bfloat16 heads, for which there is no fused kernel.
        normed = F.rms_norm(x.to(self.weight.dtype), self.weight.shape, self.weight, self.eps)
        return normed.to(x.dtype)

    def extra_repr(self) -> str:
        """Shown by ``print(model)``."""
        return f"{len(self.weight)}, eps={self.eps}"

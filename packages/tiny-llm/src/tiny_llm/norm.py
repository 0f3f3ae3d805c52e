"""RMSNorm (Zhang and Sennrich 2019, arXiv:1910.07467)."""

import torch
from torch import Tensor, nn


class RMSNorm(nn.Module):
    """weight * x / sqrt(mean(x ** 2) + eps), over the last dimension.

    Args:
        d_model: Length of the last dimension.
        eps: Keeps an all-zero row finite.
    """

    def __init__(self, d_model: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(d_model))

    def forward(self, x: Tensor) -> Tensor:
        """Map x ``[..., d_model]`` to the same shape and dtype."""
        # squares of half-precision numbers overflow and cancel: float32 at least
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        mean_square = wide.square().mean(dim=-1, keepdim=True)
        return self.weight * (wide * torch.rsqrt(mean_square + self.eps)).to(x.dtype)

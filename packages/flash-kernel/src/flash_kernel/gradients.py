"""What a backward returns, and the one gradient that every backward computes alike."""

import math
from typing import NamedTuple

import torch
from torch import Tensor


class Gradients(NamedTuple):
    """Gradients of the loss with respect to the inputs; None for what was not asked for."""

    dq: Tensor
    dk: Tensor
    dv: Tensor
    dbias: Tensor | None = None
    dsinks: Tensor | None = None


def sink_gradient(sinks: Tensor, lse: Tensor, delta: Tensor) -> Tensor:
    """Return dsinks ``[H]``: a sink has p = exp(sink - lse) in each row, and dp = 0."""
    # a row whose denominator is empty passes nothing back, not even to a sink of -inf
    lse = lse.masked_fill(lse == -math.inf, math.inf)
    p = torch.exp(sinks.to(lse.dtype)[:, None] - lse)  # [..., H, M]
    by_head = (-p * delta).sum(-1)  # [..., H]
    return by_head.reshape(-1, sinks.shape[0]).sum(0).to(sinks.dtype)

"""Attention over parts of the keys, put together: for ring and context parallelism."""

from collections.abc import Sequence

import torch
from torch import Tensor


def merge_attention(parts: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Join ``(o, lse)`` pairs of the same queries over disjoint keys into one.

        lse = log sum_i exp(lse_i)        o = sum_i exp(lse_i - lse) * o_i

    Args:
        parts: What ``flash_attention(..., return_lse=True)`` returned for each part of the keys:
            ``o [..., M, D]`` and ``lse [..., M]``, natural logarithm.

    Returns:
        ``o`` in the dtype of the parts, summed in the dtype of lse, and ``lse``: what one call over
        all keys returns, up to rounding.  Differentiable.  A row that no part lets see a key has
        ``o = 0`` and ``lse = -inf``.

    Raises:
        ValueError: No parts, or parts whose shapes differ.

    FlashAttention (Dao et al., 2022, arXiv 2205.14135), section 3.1, for whole parts.
    """
    if not parts:
        msg = "`parts` must hold at least one (o, lse) pair, got none."
        raise ValueError(msg)
    shapes = {(tuple(o.shape), tuple(lse.shape)) for o, lse in parts}
    if len(shapes) > 1:
        msg = f"all `parts` must have the shapes of the first, got {sorted(shapes)}."
        raise ValueError(msg)
    lses = torch.stack([lse for _, lse in parts])  # [parts, ..., M]
    lse = torch.logsumexp(lses, dim=0)
    # against +inf, the parts of a row that sees nothing anywhere weigh 0
    pivot = lse.masked_fill(lse == float("-inf"), float("inf"))
    weights = torch.exp(lses - pivot)[..., None]
    o = sum(weight * part.to(lse.dtype) for weight, (part, _) in zip(weights, parts, strict=True))
    return torch.as_tensor(o).to(parts[0][0].dtype), lse

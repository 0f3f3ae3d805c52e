"""Attention as the formula says it, in plain torch: the default, and the one to read."""

import math

import torch
from torch import Tensor, nn

from tiny_llm.attention.backend import AttentionBackend, Traits
from tiny_llm.attention.mask import repeat_heads, visible_keys
from tiny_llm.attention.request import AttentionRequest
from tiny_llm.packing import Packing


def scaled_dot_product_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    is_causal: bool,
    window: int | None = None,
    scale: float | None = None,
    key_lengths: Tensor | None = None,
    packing: Packing | None = None,
) -> Tensor:
    """Return softmax(scale * q k^T) v; see `AttentionFn` for shapes and rules."""
    k, v = repeat_heads(k, v, q.shape[1])
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    scores = q @ k.transpose(-2, -1) * scale  # [B, H, M, N]
    if not is_causal and key_lengths is None and packing is None:
        return torch.softmax(scores, dim=-1) @ v

    hidden = ~visible_keys(
        q, k, is_causal=is_causal, window=window, key_lengths=key_lengths, packing=packing
    )
    weights = torch.softmax(scores.masked_fill(hidden, -math.inf), dim=-1)
    if q.shape[-2] > k.shape[-2] or key_lengths is not None:
        # rows that see no key are NaN by now; they attend to nothing
        weights = weights.masked_fill(hidden, 0.0)
    return weights @ v


class ScaledDotProductAttention(nn.Module):
    """`scaled_dot_product_attention` as a module, to be hooked, compiled or timed."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool = False) -> Tensor:
        """Take q ``[B, H, M, D]`` and k, v ``[B, H, N, D]``; return o ``[B, H, M, D]``."""
        return scaled_dot_product_attention(q, k, v, is_causal=is_causal)


class EagerBackend(AttentionBackend):
    """Takes everything, and stores every score."""

    def traits(self, request: AttentionRequest) -> Traits:
        """Dense both ways, and plain torch all through."""
        return Traits(forward="dense", backward="dense", deterministic=True)


BACKEND = EagerBackend("eager", scaled_dot_product_attention)

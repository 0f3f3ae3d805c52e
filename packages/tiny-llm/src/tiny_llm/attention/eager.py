"""Attention as the formula says it, in plain torch: the default, and the one to read."""

import math

import torch
from torch import Tensor, nn

from tiny_llm.attention.mask import causal_mask


def scaled_dot_product_attention(q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool) -> Tensor:
    """Return softmax(q k^T / sqrt(D)) v; see `AttentionFn` for shapes and the causal rule."""
    seqlen_q, seqlen_k, head_dim = q.shape[-2], k.shape[-2], q.shape[-1]
    scores = q @ k.transpose(-2, -1) / math.sqrt(head_dim)  # [B, H, M, N]
    if not is_causal:
        return torch.softmax(scores, dim=-1) @ v

    hidden = ~causal_mask(seqlen_q, seqlen_k, q.device)
    weights = torch.softmax(scores.masked_fill(hidden, -math.inf), dim=-1)
    if seqlen_q > seqlen_k:
        # the first M - N rows see no key and are NaN by now; they attend to nothing
        weights = weights.masked_fill(hidden, 0.0)
    return weights @ v


class ScaledDotProductAttention(nn.Module):
    """`scaled_dot_product_attention` as a module, to be hooked, compiled or timed."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool = False) -> Tensor:
        """Take q ``[B, H, M, D]`` and k, v ``[B, H, N, D]``; return o ``[B, H, M, D]``."""
        return scaled_dot_product_attention(q, k, v, is_causal=is_causal)

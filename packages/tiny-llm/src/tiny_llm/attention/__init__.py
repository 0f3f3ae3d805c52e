"""Attention: the layers, and the registry of backends that compute them.

    layer.attention_fn(q, k, v, is_causal=True) -> o
        q [B, H, M, D]   k, v [B, H, N, D]   o [B, H, M, D]

`registry.py` has the table of backends, `eager.py` the readable default.
"""

from tiny_llm.attention.eager import ScaledDotProductAttention
from tiny_llm.attention.multi_head import MultiHeadAttention, MultiHeadAttentionWithRoPE
from tiny_llm.attention.registry import AttentionFn, get, names, register, unregister

__all__ = [
    "AttentionFn",
    "MultiHeadAttention",
    "MultiHeadAttentionWithRoPE",
    "ScaledDotProductAttention",
    "get",
    "names",
    "register",
    "unregister",
]

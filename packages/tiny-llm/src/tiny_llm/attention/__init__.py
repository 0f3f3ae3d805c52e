"""Attention: the layers, and the registry of backends that compute them.

    layer.attention_fn(q, k, v, is_causal=True) -> o
        q [B, H, M, D]   k, v [B, H_kv, N, D]   o [B, H, M, D]

`registry.py` has the table of backends, `eager.py` the readable default; `resolve.py` chooses
among them, `explain.py` says why, and `testing.py` tests one of your own.
"""

from tiny_llm.attention.backend import (
    AttentionBackend,
    AttentionFn,
    Availability,
    Reason,
    Traits,
)
from tiny_llm.attention.eager import ScaledDotProductAttention
from tiny_llm.attention.explain import Explanation, explain, explain_model, support_table
from tiny_llm.attention.multi_head import MultiHeadAttention, MultiHeadAttentionWithRoPE
from tiny_llm.attention.registry import backend, get, names, register, unregister
from tiny_llm.attention.request import AttentionRequest
from tiny_llm.attention.resolve import Decision, Resolution, resolve

__all__ = [
    "AttentionBackend",
    "AttentionFn",
    "AttentionRequest",
    "Availability",
    "Decision",
    "Explanation",
    "MultiHeadAttention",
    "MultiHeadAttentionWithRoPE",
    "Reason",
    "Resolution",
    "ScaledDotProductAttention",
    "Traits",
    "backend",
    "explain",
    "explain_model",
    "get",
    "names",
    "register",
    "resolve",
    "support_table",
    "unregister",
]

"""flash-attn 2's functions, by its names, layouts and arguments, for code that was written for it.

    from flash_kernel.flash_attn import flash_attn_func  # was: from flash_attn import ...

Tensors are ``[batch, sequence, heads, head_dim]``, packed ones ``[total, heads, head_dim]``, and
are read where they lie.  -1 is an unbounded side of a window, and 0.0 no softcap.  What flash-attn
cannot do works here too: any device, float32 and float64, any head dim, values of another width.

Arguments that all these functions share:

- ``dropout_p`` must be 0.0: there is no dropout.
- ``softmax_scale`` is ``D ** -0.5`` by default.
- ``causal`` is aligned to the bottom right: the last query sees every key.
- ``window_size``: the keys seen before and after a row's own position.
- ``softcap``: scores become ``softcap * tanh(scores / softcap)``.
- ``alibi_slopes``: ``[H]`` or ``[B, H]``.
- ``deterministic=False`` allows a gradient of q whose last bits differ from run to run, where that
  is faster; packed sequences are bitwise repeatable in any case.
- ``return_attn_probs`` returns ``(out, lse, None)`` instead of ``out``: float32 ``lse``, and None
  where flash-attn has the mask of its dropout.

They raise what the functions that they call raise, and ValueError for what this package lacks.
"""

from typing import Any

import torch
from torch import Tensor

from flash_kernel.api import flash_attention
from flash_kernel.kvcache import flash_attention_with_kvcache
from flash_kernel.validation import check_kind
from flash_kernel.varlen import flash_attention_varlen

__all__ = [
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
]

Output = Tensor | tuple[Tensor, Tensor, None]


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Output:
    """Return ``out [B, M, H, D_v]`` of ``q [B, M, H, D]``, ``k [B, N, H_kv, D]``, ``v [.., D_v]``.

    With ``return_attn_probs``, ``lse [B, H, M]``.  Differentiable.
    """
    _refuse_dropout(dropout_p)
    options = _options(softmax_scale, causal, window_size, softcap, alibi_slopes)
    options["deterministic"] = deterministic
    q, k, v = _heads_first({"q": q, "k": k, "v": v})
    if not return_attn_probs:
        alone: Tensor = flash_attention(q, k, v, **options)
        return alone.transpose(1, 2).contiguous()
    o, lse = flash_attention(q, k, v, **options, return_lse=True)
    return o.transpose(1, 2).contiguous(), lse, None


def flash_attn_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Output:
    """`flash_attn_func` of ``q [B, M, H, D]`` and ``kv [B, N, 2, H_kv, D]``."""
    k, v = _unpacked(kv, "kv", 2)
    return flash_attn_func(
        q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes,
        deterministic, return_attn_probs,
    )  # fmt: skip


def flash_attn_qkvpacked_func(
    qkv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Output:
    """`flash_attn_func` of ``qkv [B, M, 3, H, D]``."""
    q, k, v = _unpacked(qkv, "qkv", 3)
    return flash_attn_func(
        q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes,
        deterministic, return_attn_probs,
    )  # fmt: skip


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
) -> Output:
    """Return ``out [total_q, H, D_v]`` of packed sequences: each attends to its own keys alone.

    ``q [total_q, H, D]``, ``k [total_k, H_kv, D]``, ``v [total_k, H_kv, D_v]``; ``cu_seqlens`` are
    the cumulative lengths, int32 ``[B + 1]``.  With ``return_attn_probs``, ``lse [H, total_q]``.
    Differentiable.
    """
    _refuse_dropout(dropout_p)
    if block_table is not None:
        raise ValueError(
            "flash_attn_varlen_func takes no `block_table`: pass pages to flash_attn_with_kvcache."
        )
    options = _options(softmax_scale, causal, window_size, softcap, alibi_slopes)
    options |= {"max_seqlen_q": max_seqlen_q, "max_seqlen_k": max_seqlen_k}
    if not return_attn_probs:
        alone: Tensor = flash_attention_varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, **options)
        return alone.contiguous()
    o, lse = flash_attention_varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, **options, return_lse=True)
    return o.contiguous(), lse, None


def flash_attn_varlen_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Output:
    """`flash_attn_varlen_func` of ``q [total_q, H, D]`` and ``kv [total_k, 2, H_kv, D]``."""
    k, v = _unpacked(kv, "kv", 2)
    return flash_attn_varlen_func(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale,
        causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs,
    )  # fmt: skip


def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Output:
    """`flash_attn_varlen_func` of ``qkv [total, 3, H, D]``."""
    q, k, v = _unpacked(qkv, "qkv", 3)
    return flash_attn_varlen_func(
        q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, dropout_p, softmax_scale, causal,
        window_size, softcap, alibi_slopes, deterministic, return_attn_probs,
    )  # fmt: skip


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Append ``k`` and ``v`` to a cache in place; return attention of ``q`` to all it then holds.

    Not differentiable.  With ``return_softmax_lse`` also ``lse [B, H, M]``.

    Args:
        q: ``[B, M, H, D]``, the last M queries of each sequence.
        k_cache: ``[B, capacity, H_kv, D]``; in pages ``[num_pages, page_size, H_kv, D]``.
        v_cache: Likewise.
        k: ``[B, M_new, H_kv, D]`` to append, or None.
        v: Likewise.
        rotary_cos: Refused, like ``rotary_sin``: rotate q and k before the call.
        rotary_sin: See ``rotary_cos``.
        cache_seqlens: Keys of each sequence before the call, int32 ``[B]`` or one number; by
            default the cache is full.
        cache_batch_idx: Refused: index the cache, or use a ``block_table``.
        cache_leftpad: Refused: store sequences from the start of their caches.
        block_table: Pages of each sequence, int32 ``[B, max_pages]``.
        softmax_scale: See the module, like what is not listed here.
        causal: See the module.
        window_size: See the module.
        softcap: See the module.
        rotary_interleaved: Without ``rotary_cos`` of no meaning.
        alibi_slopes: See the module.
        num_splits: Parts that the keys are worked on in at once; 0 lets the package choose.
        return_softmax_lse: Return ``(out, lse)``.
    """
    _refuse_cache_options(rotary_cos, rotary_sin, cache_batch_idx, cache_leftpad)
    tensors = _heads_first({"q": q, "k_cache": k_cache, "v_cache": v_cache})
    new = [None if x is None else _heads_first({name: x})[0] for name, x in (("k", k), ("v", v))]
    if cache_seqlens is None and k is not None:
        raise ValueError("`cache_seqlens` must be given where `k` is appended, got None.")
    if not isinstance(cache_seqlens, Tensor):
        pages = 1 if block_table is None else block_table.shape[1]
        length = k_cache.shape[1] * pages if cache_seqlens is None else cache_seqlens
        cache_seqlens = torch.full((q.shape[0],), length, dtype=torch.int32, device=q.device)
    # flash-attn copies these too: a table is often a part of a larger one
    cache_seqlens = cache_seqlens.contiguous()
    block_table = None if block_table is None else block_table.contiguous()
    options = _options(softmax_scale, causal, window_size, softcap, alibi_slopes)
    o, lse = flash_attention_with_kvcache(
        *tensors,
        *new,
        cache_seqlens=cache_seqlens,
        block_table=block_table,
        num_splits=num_splits or None,
        return_lse=True,
        **options,
    )
    o = o.transpose(1, 2).contiguous()
    return (o, lse) if return_softmax_lse else o


def _options(
    softmax_scale: float | None,
    causal: bool,
    window_size: tuple[int, int],
    softcap: float,
    alibi_slopes: Tensor | None,
) -> dict[str, Any]:
    """Translate what all functions share into this package's options."""
    if not _is_pair(window_size):
        msg = f"`window_size` must be two integers, -1 for unbounded, got {window_size!r}."
        raise ValueError(msg)
    left, right = (None if side < 0 else side for side in window_size)
    return {
        "scale": softmax_scale,
        "is_causal": causal,
        "window": (left, right),
        "softcap": softcap or None,
        "alibi_slopes": alibi_slopes,
    }


def _is_pair(window_size: object) -> bool:
    if not isinstance(window_size, tuple | list) or len(window_size) != 2:
        return False
    return all(isinstance(side, int) for side in window_size)


def _heads_first(tensors: dict[str, Tensor]) -> list[Tensor]:
    """Return views ``[B, H, rows, D]`` of named tensors ``[B, rows, H, D]``."""
    for name, x in tensors.items():
        check_kind(name, x)
        if x.dim() != 4:
            msg = (
                f"`{name}` must have four dimensions, [batch, sequence, heads, head_dim], "
                f"got shape {list(x.shape)}."
            )
            raise ValueError(msg)
    return [x.transpose(1, 2) for x in tensors.values()]


def _unpacked(packed: Tensor, name: str, count: int) -> tuple[Tensor, ...]:
    """Split ``[..., count, H, D]`` into its parts, as views."""
    check_kind(name, packed)
    if packed.dim() < 4 or packed.shape[-3] != count:
        msg = f"`{name}` must have shape [..., {count}, heads, head_dim], got {list(packed.shape)}."
        raise ValueError(msg)
    return packed.unbind(-3)


def _refuse_dropout(dropout_p: float) -> None:
    if dropout_p != 0.0:
        msg = (
            f"`dropout_p` must be 0.0, got {dropout_p}: flash_kernel has no dropout of attention "
            "weights. Drop out its output instead, or use torch's scaled_dot_product_attention."
        )
        raise ValueError(msg)


def _refuse_cache_options(
    rotary_cos: Tensor | None,
    rotary_sin: Tensor | None,
    cache_batch_idx: Tensor | None,
    cache_leftpad: Tensor | None,
) -> None:
    instead = {
        "rotary_cos": (rotary_cos, "Rotate q and k before the call"),
        "rotary_sin": (rotary_sin, "Rotate q and k before the call"),
        "cache_batch_idx": (cache_batch_idx, "Order the cache like q, or pass a `block_table`"),
        "cache_leftpad": (cache_leftpad, "Store each sequence from the start of its cache"),
    }
    for name, (value, advice) in instead.items():
        if value is not None:
            msg = f"flash_attn_with_kvcache of flash_kernel takes no `{name}`. {advice}."
            raise ValueError(msg)

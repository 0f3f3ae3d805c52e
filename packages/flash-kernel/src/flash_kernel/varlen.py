"""Attention of many sequences of different lengths, packed one after the other."""

from typing import Any, Literal, overload

import torch
from torch import Tensor

from flash_kernel.autocast import autocast, is_autocast
from flash_kernel.packed_autograd import (
    attend_packed,
    checked_packed_call,
    checked_packed_variant,
)
from flash_kernel.sequence_ops import packed_forward_op
from flash_kernel.variant import Modifiers, Packing


@overload
def flash_attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    *,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    window: tuple[int | None, int | None] | None = None,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    return_lse: Literal[False] = False,
    impl: str = "auto",
    backward: str = "auto",
) -> Tensor: ...
@overload
def flash_attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    *,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    window: tuple[int | None, int | None] | None = None,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    return_lse: Literal[True],
    impl: str = "auto",
    backward: str = "auto",
) -> tuple[Tensor, Tensor]: ...
def flash_attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    *,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    window: tuple[int | None, int | None] | None = None,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    return_lse: bool = False,
    impl: str = "auto",
    backward: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """Return `flash_attention` of each of many sequences that lie packed in one tensor.

    Sequence b has the queries ``cu_seqlens_q[b] .. cu_seqlens_q[b + 1]`` and the keys
    ``cu_seqlens_k[b] .. cu_seqlens_k[b + 1]``, M_b and N_b of them, and attends to its own alone.
    A sequence's result does not depend on what it is packed with, to the bit.

        >>> import torch
        >>> from flash_kernel import flash_attention, flash_attention_varlen
        >>> x = torch.randn(12, 2, 16)  # sequences of 5, 0 and 7 rows; 2 heads
        >>> ends = torch.tensor([0, 5, 5, 12], dtype=torch.int32)
        >>> o = flash_attention_varlen(x, x, x, ends, ends, is_causal=True)
        >>> last = x[5:].transpose(0, 1)[None]  # [1, 2, 7, 16]
        >>> alone = flash_attention(last, last, last, is_causal=True)
        >>> torch.allclose(o[5:], alone[0].transpose(0, 1), atol=1e-6)
        True

    Args:
        q: Queries ``[total_q, H, D]``, any strides, float16, bfloat16, float32 or float64.
        k: Keys ``[total_k, H_kv, D]``; ``H_kv`` divides ``H``.
        v: Values ``[total_k, H_kv, D_v]``.
        cu_seqlens_q: Cumulative lengths of the queries, int32 or int64 ``[B + 1]``, on the device
            of q: from 0 up to ``total_q``.  Sequences may be empty.
        cu_seqlens_k: As much for the keys.
        max_seqlen_q: No sequence has more queries.  Nothing needs it, and nothing is faster for it.
        max_seqlen_k: No sequence has more keys.
        is_causal: Row i of a sequence sees its keys ``j <= i + N_b - M_b``.
        scale: Factor of the scores, ``D ** -0.5`` by default.
        window: ``(left, right)``: row i sees the keys from ``i + N_b - M_b - left`` to
            ``i + N_b - M_b + right``.  None for a side is unbounded.
        softcap: Scores become ``softcap * tanh(scores / softcap)``.
        alibi_slopes: ``[H]`` or ``[B, H]``; adds ``-slope * |i + N_b - M_b - j|``.
        sinks: ``[H]``; one more score in each row's denominator, without a value; learnable.
        return_lse: Also return the log-sum-exp of each row's scores.
        impl: As for `flash_attention`.  All but "hopper" and "triton" walk the sequences one by
            one.
        backward: As for `flash_attention`, but "hopper".  Bitwise repeatable with "triton".

    Returns:
        ``o [total_q, H, D_v]``; with ``return_lse`` also ``lse [H, total_q]``, the natural
        logarithm of each row's denominator, float32 (float64 for float64 inputs).  Both are
        differentiable once.

    Raises:
        TypeError: Not a tensor, or a dtype that is unsupported or not shared.
        ValueError: Shapes or devices that do not fit, or an option that does not exist.
        RuntimeError: An implementation asked for by name cannot run on this device.

    What ``cu_seqlens`` holds is checked where it lies on the CPU.  The kernels read it on the GPU
    and make nobody wait, so there it is not checked, and numbers that are not cumulative lengths
    read and write out of bounds.  Walking the sequences one by one makes a GPU wait, and checks.
    """
    modifiers = Modifiers(alibi_slopes=alibi_slopes, sinks=sinks)
    options = (is_causal, scale, window, softcap, return_lse, impl, backward)  # as in `Options`
    packing = Packing(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    if is_autocast(q):
        q, k, v = (autocast(x, q.device.type) for x in (q, k, v))
        with torch.autocast(q.device.type, enabled=False):
            o, lse = _dispatched(q, k, v, packing, modifiers, options)
    else:
        o, lse = _dispatched(q, k, v, packing, modifiers, options)
    return o if lse is None or not return_lse else (o, lse)


def _dispatched(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    packing: Packing,
    modifiers: Modifiers,
    options: tuple[Any, ...],
) -> tuple[Tensor, Tensor | None]:
    """Return o and lse from whichever implementation the call gets."""
    if torch.compiler.is_compiling():
        return _traced(q, k, v, packing, modifiers, options)
    call = checked_packed_call(q, k, v, packing, modifiers, options)
    return attend_packed(call, q, k, v, packing, modifiers)


def _traced(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    packing: Packing,
    modifiers: Modifiers,
    options: tuple[Any, ...],
) -> tuple[Tensor, Tensor]:
    """Return o and lse inside ``torch.compile``, by our operator."""
    variant = checked_packed_variant(q, k, v, packing, modifiers, options)
    impl, backward = options[-2:]
    if impl == "torch":
        msg = (
            "impl='torch' walks packed sequences one by one, which torch.compile cannot trace. "
            "Pass impl='auto' or impl='reference'."
        )
        raise ValueError(msg)
    slopes = modifiers.alibi_slopes
    if slopes is not None and slopes.requires_grad and torch.is_grad_enabled():
        msg = (
            "the gradient of `alibi_slopes` needs packed sequences to be walked one by one, which "
            "torch.compile cannot trace. Pass slopes without a gradient, or do not compile."
        )
        raise ValueError(msg)
    o, lse = packed_forward_op(
        q, k, v, *packing, modifiers.alibi_slopes, modifiers.sinks, *variant, impl, backward
    )  # fmt: skip
    return o, lse

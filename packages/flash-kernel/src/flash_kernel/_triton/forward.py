"""Forward pass, one program per (batch, head) and query tile.

    grid = (batch * num_heads, cdiv(seqlen_q, BLOCK_M))

          keys ->   n0   n1   n2   n3
    queries  m0     D    .    .    .      D  masked tile: the diagonal, or the end of the keys
             m1     x    D    .    .      x  full tile: no mask is evaluated
             m2     x    x    D    .      .  never visited when causal

FlashAttention-2 (Dao, 2023, arXiv 2307.08691), algorithm 1; lse is saved for the backward.
"""

import triton
import triton.language as tl

from flash_kernel._triton.primitives import (
    INF,
    LN_2,
    head_and_tile,
    key_range,
    load_rows,
    online_softmax_step,
    rows_of,
    store_rows,
    visible_keys,
)


@triton.jit
def attend(
    m_i, l_i, acc, q_i, k, v, row, start, end, seqlen_q, scale, scale_log2,
    MASKED: tl.constexpr, SPEC: tl.constexpr,
):  # fmt: skip
    """Fold the keys ``[start, end)``, tile by tile, into the running softmax of one query tile."""
    BLOCK_N: tl.constexpr = SPEC.BLOCK_N
    rows = row + tl.arange(0, SPEC.BLOCK_M)
    for col in tl.range(start, end, BLOCK_N):
        k_j = load_rows(k, col, BLOCK_N, SPEC)
        # K is seen as [D, BLOCK_N], so that s = q k is [BLOCK_M, BLOCK_N]
        s_ij = tl.dot(q_i, k_j.T, input_precision=SPEC.PRECISION)
        if SPEC.PRESCALED:
            s_ij = s_ij * scale
        if MASKED:
            cols = col + tl.arange(0, BLOCK_N)
            visible = visible_keys(rows[:, None], cols[None, :], seqlen_q, k.num_rows, SPEC)
            s_ij = tl.where(visible, s_ij, -INF)
        v_j = load_rows(v, col, BLOCK_N, SPEC)
        m_i, l_i, acc = online_softmax_step(m_i, l_i, acc, s_ij, v_j, scale_log2, SPEC)
    return m_i, l_i, acc


@triton.jit(do_not_specialize=["num_heads", "seqlen_q", "seqlen_k"])
def flash_attention_forward_kernel(
    q, k, v, o, lse_ptr, q_strides, k_strides, v_strides, o_strides,
    num_heads, seqlen_q, seqlen_k, scale, scale_log2, SPEC: tl.constexpr,
):  # fmt: skip
    """o = softmax(scale * q k^T) v and lse = log sum exp(scale * q k^T), one query tile a program.

    ``q, k, v, o``: pointers, with strides of ``[B, H, rows, D]``, or descriptors of
    ``[1, 1, BLOCK, BLOCK_D]`` blocks.  ``lse_ptr``: contiguous float32 ``[B, H, seqlen_q]``, in
    natural logarithm.  ``scale_log2`` is ``scale * log2(e)``; when PRESCALED, plain ``log2(e)``.
    """
    BLOCK_M: tl.constexpr = SPEC.BLOCK_M
    BLOCK_D: tl.constexpr = SPEC.BLOCK_D
    batch_head, tile = head_and_tile()
    if SPEC.IS_CAUSAL:
        tile = tl.num_programs(1) - 1 - tile  # the longest rows start first
    batch = (batch_head // num_heads).to(tl.int32)
    head = (batch_head % num_heads).to(tl.int32)
    row = tile * BLOCK_M

    q_rows = rows_of(q, q_strides, batch, head, seqlen_q, SPEC)
    k_rows = rows_of(k, k_strides, batch, head, seqlen_k, SPEC)
    v_rows = rows_of(v, v_strides, batch, head, seqlen_k, SPEC)
    o_rows = rows_of(o, o_strides, batch, head, seqlen_q, SPEC)

    q_i = load_rows(q_rows, row, BLOCK_M, SPEC)
    m_i = tl.full([BLOCK_M], -INF, tl.float32)
    l_i = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)

    full, end = key_range(row, seqlen_q, seqlen_k, SPEC)
    m_i, l_i, acc = attend(
        m_i, l_i, acc, q_i, k_rows, v_rows, row, 0, full, seqlen_q, scale, scale_log2, False, SPEC
    )
    m_i, l_i, acc = attend(
        m_i, l_i, acc, q_i, k_rows, v_rows, row, full, end, seqlen_q, scale, scale_log2, True, SPEC
    )

    # a row that sees nothing has l = 0 and acc = 0: its output is 0 and its lse is -inf
    denominator = tl.where(l_i == 0.0, 1.0, l_i)
    store_rows(o_rows, acc * (1.0 / denominator)[:, None], row, BLOCK_M, SPEC)
    lse_i = (m_i * scale_log2 + tl.math.log2(denominator)) * LN_2
    rows = row + tl.arange(0, BLOCK_M)
    tl.store(lse_ptr + batch_head * seqlen_q + rows, lse_i, mask=rows < seqlen_q)

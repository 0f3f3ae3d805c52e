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
    LOG2_E,
    bias_scores,
    cap_scores,
    head_and_tile,
    key_range,
    load_rows,
    modifiers_of,
    online_softmax_step,
    rows_of,
    store_rows,
    visible_keys,
)

# tiles that a program of the redo kernel looks at
REDO_TILES: tl.constexpr = tl.constexpr(16)


@triton.jit
def attend(
    m_i, l_i, acc, q_i, k, v, row, start, end, seqlen_q, scale, scale_log2, modifiers,
    MASKED: tl.constexpr, SPEC: tl.constexpr,
):  # fmt: skip
    """Fold the keys ``[start, end)``, tile by tile, into the running softmax of one query tile."""
    BLOCK_N: tl.constexpr = SPEC.BLOCK_N
    BLOCK_D: tl.constexpr = SPEC.BLOCK_D
    BLOCK_DV: tl.constexpr = SPEC.BLOCK_DV
    rows = (row + tl.arange(0, SPEC.BLOCK_M))[:, None]
    for col in tl.range(start, end, BLOCK_N):
        cols = (col + tl.arange(0, BLOCK_N))[None, :]
        k_j = load_rows(k, col, BLOCK_N, BLOCK_D, SPEC)
        # K is seen as [D, BLOCK_N], so that s = q k is [BLOCK_M, BLOCK_N]
        s_ij = tl.dot(q_i, k_j.T, input_precision=SPEC.PRECISION)
        s_ij = cap_scores(s_ij, scale, modifiers, SPEC)
        s_ij = bias_scores(s_ij, rows, cols, seqlen_q, k.num_rows, modifiers, SPEC)
        if MASKED:
            visible = visible_keys(rows, cols, seqlen_q, k.num_rows, modifiers, SPEC)
            s_ij = tl.where(visible, s_ij, -INF)
        v_j = load_rows(v, col, BLOCK_N, BLOCK_DV, SPEC)
        m_i, l_i, acc = online_softmax_step(m_i, l_i, acc, s_ij, v_j, scale_log2, SPEC)
    return m_i, l_i, acc


@triton.jit
def fold_sink(m_i, l_i, acc, sink, scale_log2):
    """Add one more key, whose score is ``sink`` and whose value is 0, to the running softmax."""
    m_new = tl.maximum(m_i, sink * LOG2_E / scale_log2)
    pivot = tl.where(m_new == -INF, 0.0, m_new * scale_log2)
    alpha = tl.math.exp2(m_i * scale_log2 - pivot)
    l_new = alpha * l_i + tl.math.exp2(sink * LOG2_E - pivot)
    return m_new, l_new, acc * alpha[:, None]


@triton.jit
def attend_tile(
    batch_head, tile, q, k, v, o, lse_ptr, slopes_ptr, bias_ptr, mask_ptr, sinks_ptr,
    q_strides, k_strides, v_strides, o_strides, slope_strides, bias_strides, mask_strides,
    num_heads, group, seqlen_q, seqlen_k, scale, scale_log2, left, right, softcap,
    SPEC: tl.constexpr,
):  # fmt: skip
    """Write o and lse of one query tile; the arguments are those of the kernels below."""
    BLOCK_M: tl.constexpr = SPEC.BLOCK_M
    BLOCK_D: tl.constexpr = SPEC.BLOCK_D
    BLOCK_DV: tl.constexpr = SPEC.BLOCK_DV
    HEAD_DIM: tl.constexpr = SPEC.HEAD_DIM
    HEAD_DIM_V: tl.constexpr = SPEC.HEAD_DIM_V
    batch = (batch_head // num_heads).to(tl.int32)
    head = (batch_head % num_heads).to(tl.int32)
    row = tile * BLOCK_M

    q_rows = rows_of(q, q_strides, batch, head, seqlen_q, HEAD_DIM, SPEC)
    k_rows = rows_of(k, k_strides, batch, head // group, seqlen_k, HEAD_DIM, SPEC)
    v_rows = rows_of(v, v_strides, batch, head // group, seqlen_k, HEAD_DIM_V, SPEC)
    o_rows = rows_of(o, o_strides, batch, head, seqlen_q, HEAD_DIM_V, SPEC)
    modifiers = modifiers_of(
        left, right, softcap, slopes_ptr, bias_ptr, mask_ptr, slope_strides, bias_strides,
        mask_strides, batch, head, SPEC,
    )  # fmt: skip

    q_i = load_rows(q_rows, row, BLOCK_M, BLOCK_D, SPEC)
    m_i = tl.full([BLOCK_M], -INF, tl.float32)
    l_i = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)

    start, full_start, full_end, end = key_range(row, seqlen_q, seqlen_k, modifiers, SPEC)
    if SPEC.HAS_LEFT:
        m_i, l_i, acc = attend(
            m_i, l_i, acc, q_i, k_rows, v_rows, row, start, tl.minimum(full_start, end), seqlen_q,
            scale, scale_log2, modifiers, True, SPEC,
        )  # fmt: skip
    m_i, l_i, acc = attend(
        m_i, l_i, acc, q_i, k_rows, v_rows, row, full_start, full_end, seqlen_q, scale, scale_log2,
        modifiers, False, SPEC,
    )  # fmt: skip
    m_i, l_i, acc = attend(
        m_i, l_i, acc, q_i, k_rows, v_rows, row, tl.maximum(full_start, full_end), end, seqlen_q,
        scale, scale_log2, modifiers, True, SPEC,
    )  # fmt: skip
    if SPEC.HAS_SINKS:
        m_i, l_i, acc = fold_sink(m_i, l_i, acc, tl.load(sinks_ptr + head), scale_log2)

    # a row that sees nothing has l = 0 and acc = 0: its output is 0 and its lse is -inf
    denominator = tl.where(l_i == 0.0, 1.0, l_i)
    store_rows(o_rows, acc * (1.0 / denominator)[:, None], row, BLOCK_M, BLOCK_DV, SPEC)
    lse_i = (m_i * scale_log2 + tl.math.log2(denominator)) * LN_2
    rows = row + tl.arange(0, BLOCK_M)
    tl.store(lse_ptr + batch_head * seqlen_q + rows, lse_i, mask=rows < seqlen_q)


@triton.jit(do_not_specialize=["num_heads", "group", "seqlen_q", "seqlen_k", "left", "right"])
def flash_attention_forward_kernel(
    q, k, v, o, lse_ptr, slopes_ptr, bias_ptr, mask_ptr, sinks_ptr,
    q_strides, k_strides, v_strides, o_strides, slope_strides, bias_strides, mask_strides,
    num_heads, group, seqlen_q, seqlen_k, scale, scale_log2, left, right, softcap,
    SPEC: tl.constexpr,
):  # fmt: skip
    """o = softmax(scores) v and lse = log sum exp(scores), one query tile a program.

    ``q, k, v, o``: pointers, with strides of ``[B, H, rows, D]``, or descriptors of
    ``[1, 1, BLOCK, BLOCK_D]`` blocks; ``group`` query heads share a head of k and v.
    ``lse_ptr``: contiguous float32 ``[B, H, seqlen_q]``, in natural logarithm.  ``scale_log2`` is
    ``scale * log2(e)``; when PRESCALED, plain ``log2(e)``.  Slopes, bias, mask and sinks are passed
    as some tensor, and not read, where SPEC says that there are none.
    """
    batch_head, tile = head_and_tile()
    if SPEC.HAS_RIGHT:
        tile = tl.num_programs(1) - 1 - tile  # the longest rows start first
    attend_tile(
        batch_head, tile, q, k, v, o, lse_ptr, slopes_ptr, bias_ptr, mask_ptr, sinks_ptr,
        q_strides, k_strides, v_strides, o_strides, slope_strides, bias_strides, mask_strides,
        num_heads, group, seqlen_q, seqlen_k, scale, scale_log2, left, right, softcap, SPEC,
    )  # fmt: skip


@triton.jit
def has_nan(x):
    return tl.max(tl.ravel(x != x).to(tl.int32), axis=0) != 0


@triton.jit(do_not_specialize=["num_heads", "group", "seqlen_q", "seqlen_k", "left", "right"])
def flash_attention_redo_kernel(
    q, k, v, o, lse_ptr, slopes_ptr, bias_ptr, mask_ptr, sinks_ptr,
    q_strides, k_strides, v_strides, o_strides, slope_strides, bias_strides, mask_strides,
    num_heads, group, seqlen_q, seqlen_k, scale, scale_log2, left, right, softcap,
    SPEC: tl.constexpr,
):  # fmt: skip
    """Compute o and lse as above, but only of query tiles in which some row's lse is NaN.

    It comes after a kernel whose softmax may fail for some rows, and that marks them so.  A program
    has several tiles of a head and looks at all of them at once, so that where nothing has failed
    the launch lasts for one load.
    """
    BLOCK_M: tl.constexpr = SPEC.BLOCK_M
    batch_head = tl.program_id(0).to(tl.int64)
    tile, programs = tl.program_id(1), tl.num_programs(1)
    tiles = tile + tl.arange(0, REDO_TILES) * programs
    rows = tiles[:, None] * BLOCK_M + tl.arange(0, BLOCK_M)[None, :]
    lse_head = lse_ptr + batch_head * seqlen_q
    if has_nan(tl.load(lse_head + rows, mask=rows < seqlen_q, other=0.0)):
        # in a `for`, Triton 3.6 would keep a buffer for o beside that of q
        while tile * BLOCK_M < seqlen_q:
            own_rows = tile * BLOCK_M + tl.arange(0, BLOCK_M)
            if has_nan(tl.load(lse_head + own_rows, mask=own_rows < seqlen_q, other=0.0)):
                attend_tile(
                    batch_head, tile, q, k, v, o, lse_ptr, slopes_ptr, bias_ptr, mask_ptr,
                    sinks_ptr, q_strides, k_strides, v_strides, o_strides, slope_strides,
                    bias_strides, mask_strides, num_heads, group, seqlen_q, seqlen_k, scale,
                    scale_log2, left, right, softcap, SPEC,
                )  # fmt: skip
            tile += programs

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
    find_sequence,
    head_and_tile,
    key_range,
    last_tile_first,
    load_rows,
    modifiers_of,
    online_softmax_step,
    rows_of,
    store_rows,
    visible_keys,
)


@triton.jit
def attend(
    m_i, l_i, acc, q_i, k, v, rows, start, end, seqlen_q, scale, scale_log2, modifiers,
    MASKED: tl.constexpr, SPEC: tl.constexpr,
):  # fmt: skip
    """Fold the keys ``[start, end)``, tile by tile, into the running softmax of one query tile.

    ``rows [BLOCK_M, 1]`` numbers the tile's queries within their sequence.
    """
    BLOCK_N: tl.constexpr = SPEC.BLOCK_N
    BLOCK_D: tl.constexpr = SPEC.BLOCK_D
    BLOCK_DV: tl.constexpr = SPEC.BLOCK_DV
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
def attend_range(
    m_i, l_i, acc, q_i, k, v, rows, start, full_start, full_end, end, seqlen_q, scale, scale_log2,
    modifiers, SPEC: tl.constexpr,
):  # fmt: skip
    """Fold the keys of a `key_range`: tiles that need the mask, and those between that do not."""
    if SPEC.HAS_LEFT:
        m_i, l_i, acc = attend(
            m_i, l_i, acc, q_i, k, v, rows, start, tl.minimum(full_start, end), seqlen_q, scale,
            scale_log2, modifiers, True, SPEC,
        )  # fmt: skip
    m_i, l_i, acc = attend(
        m_i, l_i, acc, q_i, k, v, rows, full_start, full_end, seqlen_q, scale, scale_log2,
        modifiers, False, SPEC,
    )  # fmt: skip
    return attend(
        m_i, l_i, acc, q_i, k, v, rows, tl.maximum(full_start, full_end), end, seqlen_q, scale,
        scale_log2, modifiers, True, SPEC,
    )  # fmt: skip


@triton.jit
def fold_sink(m_i, l_i, acc, sink, scale_log2):
    """Add one more key, whose score is ``sink`` and whose value is 0, to the running softmax."""
    m_new = tl.maximum(m_i, sink * LOG2_E / scale_log2)
    pivot = tl.where(m_new == -INF, 0.0, m_new * scale_log2)
    alpha = tl.math.exp2(m_i * scale_log2 - pivot)
    l_new = alpha * l_i + tl.math.exp2(sink * LOG2_E - pivot)
    return m_new, l_new, acc * alpha[:, None]


@triton.jit(
    do_not_specialize=[
        "num_heads",
        "group",
        "seqlen_q",
        "seqlen_k",
        "num_sequences",
        "left",
        "right",
    ]
)
def flash_attention_forward_kernel(
    q, k, v, o, lse_ptr, slopes_ptr, bias_ptr, mask_ptr, sinks_ptr, cu_seqlens_q_ptr,
    cu_seqlens_k_ptr, q_strides, k_strides, v_strides, o_strides, slope_strides, bias_strides,
    mask_strides, num_heads, group, seqlen_q, seqlen_k, num_sequences, scale, scale_log2, left,
    right, softcap, SPEC: tl.constexpr,
):  # fmt: skip
    """o = softmax(scores) v and lse = log sum exp(scores), one query tile a program.

    ``q, k, v, o``: pointers, with strides of ``[B, H, rows, D]``, or descriptors of
    ``[1, 1, BLOCK, BLOCK_D]`` blocks; ``group`` query heads share a head of k and v.
    ``lse_ptr``: contiguous float32 ``[B, H, seqlen_q]``, in natural logarithm.  ``scale_log2`` is
    ``scale * log2(e)``; when PRESCALED, plain ``log2(e)``.  Slopes, bias, mask and sinks are passed
    as some tensor, and not read, where SPEC says that there are none; so are ``cu_seqlens``, by
    which packed sequences take a grid ``(slots, num_heads)``, see `sequence_and_tile`.
    """
    BLOCK_M: tl.constexpr = SPEC.BLOCK_M
    BLOCK_D: tl.constexpr = SPEC.BLOCK_D
    BLOCK_DV: tl.constexpr = SPEC.BLOCK_DV
    HEAD_DIM: tl.constexpr = SPEC.HEAD_DIM
    HEAD_DIM_V: tl.constexpr = SPEC.HEAD_DIM_V
    batch_head, tile = head_and_tile(SPEC)
    if SPEC.HAS_RIGHT:
        tile = last_tile_first(tile, SPEC)
    batch = (batch_head // num_heads).to(tl.int32)
    head = (batch_head % num_heads).to(tl.int32)
    lse_ptr += batch_head * seqlen_q
    found, tile = find_sequence(
        tile, batch, seqlen_q, seqlen_k, cu_seqlens_q_ptr, cu_seqlens_k_ptr, num_sequences, False,
        SPEC,
    )  # fmt: skip
    sequence, q_start, seqlen_q, k_start, seqlen_k = found
    if SPEC.IS_PACKED:  # noqa: SIM102 - what is not packed must not even compare
        if tile * BLOCK_M >= seqlen_q:
            return
    row = tile * BLOCK_M

    q_rows = rows_of(q, q_strides, batch, head, q_start, seqlen_q, HEAD_DIM, SPEC)
    k_rows = rows_of(k, k_strides, batch, head // group, k_start, seqlen_k, HEAD_DIM, SPEC)
    v_rows = rows_of(v, v_strides, batch, head // group, k_start, seqlen_k, HEAD_DIM_V, SPEC)
    o_rows = rows_of(o, o_strides, batch, head, q_start, seqlen_q, HEAD_DIM_V, SPEC)
    modifiers = modifiers_of(
        left, right, softcap, slopes_ptr, bias_ptr, mask_ptr, slope_strides, bias_strides,
        mask_strides, sequence, head, SPEC,
    )  # fmt: skip

    q_i = load_rows(q_rows, row, BLOCK_M, BLOCK_D, SPEC)
    m_i = tl.full([BLOCK_M], -INF, tl.float32)
    l_i = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)

    rows = row + tl.arange(0, BLOCK_M)
    last_row = row + BLOCK_M - 1
    start, full_start, full_end, end = key_range(row, last_row, seqlen_q, seqlen_k, modifiers, SPEC)
    m_i, l_i, acc = attend_range(
        m_i, l_i, acc, q_i, k_rows, v_rows, rows[:, None], start, full_start, full_end, end,
        seqlen_q, scale, scale_log2, modifiers, SPEC,
    )  # fmt: skip
    if SPEC.HAS_SINKS:
        m_i, l_i, acc = fold_sink(m_i, l_i, acc, tl.load(sinks_ptr + head), scale_log2)

    # a row that sees nothing has l = 0 and acc = 0: its output is 0 and its lse is -inf
    denominator = tl.where(l_i == 0.0, 1.0, l_i)
    store_rows(o_rows, acc * (1.0 / denominator)[:, None], row, BLOCK_M, BLOCK_DV, SPEC)
    lse_i = (m_i * scale_log2 + tl.math.log2(denominator)) * LN_2
    tl.store(lse_ptr + q_start + rows, lse_i, mask=rows < seqlen_q)

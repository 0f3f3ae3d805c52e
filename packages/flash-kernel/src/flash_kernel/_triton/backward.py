"""Memory-linear backward: the scores are rebuilt tile by tile from q, k and the saved lse.

    p  = exp(s - lse)            dv = p^T do            dp = do v^T
    ds = p * (dp - delta)        dk = scale * ds^T q    dq = scale * ds k
    delta = rowsum(do * o) - dlse

FlashAttention-2 (Dao, 2023, arXiv 2307.08691), algorithm 2, as two kernels: one program owns a tile
of keys and walks the queries (dk, dv); another owns a tile of queries and walks the keys (dq).  The
scores are computed twice, seven matrix products instead of five, but nothing is added across
programs: the result is bitwise repeatable, and no float32 copy of dq is kept.
"""

import triton
import triton.language as tl

from flash_kernel._triton.primitives import (
    INF,
    LOG2_E,
    bias_scores,
    cap_scores,
    find_sequence,
    head_and_tile,
    key_range,
    last_tile_first,
    load_rows,
    modifiers_of,
    query_range,
    rows_of,
    store_rows,
    visible_keys,
)


@triton.jit(do_not_specialize=["num_heads", "seqlen_q"])
def flash_attention_row_statistics_kernel(
    o, do, lse_ptr, dlse_ptr, statistics_ptr, o_strides, do_strides, num_heads, seqlen_q, padded_q,
    HAS_DLSE: tl.constexpr, SPEC: tl.constexpr,
):  # fmt: skip
    """Write lse and delta = rowsum(do * o) - dlse as float32 ``[B, H, 2, padded_q]``.

    Rows past the end, and rows that saw no key (lse = -inf), get lse = +inf: their p is then 0, and
    the loops that read these rows need no mask for them.
    """
    BLOCK_M: tl.constexpr = SPEC.BLOCK_M
    BLOCK_DV: tl.constexpr = SPEC.BLOCK_DV
    HEAD_DIM_V: tl.constexpr = SPEC.HEAD_DIM_V
    batch_head, tile = head_and_tile(SPEC)
    batch = (batch_head // num_heads).to(tl.int32)
    head = (batch_head % num_heads).to(tl.int32)
    row = tile * BLOCK_M
    rows = row + tl.arange(0, BLOCK_M)
    o_rows = rows_of(o, o_strides, batch, head, 0, seqlen_q, HEAD_DIM_V, SPEC)
    do_rows = rows_of(do, do_strides, batch, head, 0, seqlen_q, HEAD_DIM_V, SPEC)
    o_i = load_rows(o_rows, row, BLOCK_M, BLOCK_DV, SPEC)
    do_i = load_rows(do_rows, row, BLOCK_M, BLOCK_DV, SPEC)
    delta = tl.sum(o_i.to(tl.float32) * do_i.to(tl.float32), axis=1)
    if HAS_DLSE:
        delta -= tl.load(dlse_ptr + batch_head * seqlen_q + rows, mask=rows < seqlen_q, other=0.0)
    lse = tl.load(lse_ptr + batch_head * seqlen_q + rows, mask=rows < seqlen_q, other=INF)
    lse = tl.where(lse == -INF, INF, lse)
    statistics_ptr += batch_head * 2 * padded_q
    tl.store(statistics_ptr + rows, lse, mask=rows < padded_q)
    tl.store(statistics_ptr + padded_q + rows, delta, mask=rows < padded_q)


@triton.jit
def load_row_statistics(statistics_ptr, row, padded_q, seqlen_q, SPEC: tl.constexpr):
    """Return lse and delta of one query tile, both ``[BLOCK_M]``."""
    rows = row + tl.arange(0, SPEC.BLOCK_M)
    if SPEC.IS_PACKED:  # past the end lie another sequence's
        inside = rows < seqlen_q
        lse = tl.load(statistics_ptr + rows, mask=inside, other=INF)
        delta = tl.load(statistics_ptr + padded_q + rows, mask=inside, other=0.0)
    else:
        lse = tl.load(statistics_ptr + rows)
        delta = tl.load(statistics_ptr + padded_q + rows)
    return lse, delta


@triton.jit
def probabilities(s, lse, scale, scale_log2, EXACT: tl.constexpr):
    """Rebuild p = exp(scale * s - lse); ``lse`` broadcasts against ``s``."""
    if EXACT:
        # the difference is small where p is not, so that bringing it to base 2 costs no digits;
        # lse times log2(e) alone, for an lse of 100, would cost p its last six bits
        p = tl.math.exp2((s * scale - lse) * LOG2_E)
    else:
        # one multiply-add a score; those bits are lost anyway when p is rounded for the product
        p = tl.math.exp2(s * scale_log2 - lse * LOG2_E)
    return p


@triton.jit
def rebuild_p(
    s, lse, rows, cols, seqlen_q, seqlen_k, scale, scale_log2, modifiers, MASKED: tl.constexpr,
    EXACT: tl.constexpr, SPEC: tl.constexpr,
):  # fmt: skip
    """Return p of one tile of raw products ``s``, and the capped scores.

    The tile may lie either way: rows, cols and lse broadcast against ``s``.
    """
    capped = cap_scores(s, scale, modifiers, SPEC)
    scores = bias_scores(capped, rows, cols, seqlen_q, seqlen_k, modifiers, SPEC)
    if SPEC.PRESCALED:
        p = probabilities(scores, lse, 1.0, LOG2_E, EXACT)
    else:
        p = probabilities(scores, lse, scale, scale_log2, EXACT)
    if MASKED:
        visible = visible_keys(rows, cols, seqlen_q, seqlen_k, modifiers, SPEC)
        p = tl.where(visible, p, 0.0)
    return p, capped


@triton.jit
def product_gradient(p, dp, delta, capped, modifiers, SPEC: tl.constexpr):
    """Return ds = p * (dp - delta), brought back through the softcap to the product q k."""
    ds = p * (dp - delta)
    if SPEC.HAS_SOFTCAP:
        tanh_s = capped / modifiers.softcap  # d/ds (c tanh(s / c)) = 1 - tanh(s / c)^2
        ds = ds * (1.0 - tanh_s * tanh_s)
    return ds


@triton.jit
def accumulate_dk_dv(
    dk_j, dv_j, k_j, v_j, q, do, statistics_ptr, padded_q, col, start, end, seqlen_k, scale,
    scale_log2, modifiers, MASKED: tl.constexpr, SPEC: tl.constexpr,
):  # fmt: skip
    """Add the query rows ``[start, end)`` of one head, tile by tile, to dk and dv of a key tile.

    Scores are built transposed, ``[BLOCK_N, BLOCK_M]``, so that p^T and ds^T feed the next products
    straight from registers.
    """
    BLOCK_M: tl.constexpr = SPEC.BLOCK_M
    BLOCK_D: tl.constexpr = SPEC.BLOCK_D
    BLOCK_DV: tl.constexpr = SPEC.BLOCK_DV
    cols = (col + tl.arange(0, SPEC.BLOCK_N))[:, None]
    for row in tl.range(start, end, BLOCK_M):
        row = tl.multiple_of(row, BLOCK_M)
        rows = (row + tl.arange(0, BLOCK_M))[None, :]
        q_i = load_rows(q, row, BLOCK_M, BLOCK_D, SPEC)
        lse, delta = load_row_statistics(statistics_ptr, row, padded_q, q.num_rows, SPEC)
        s_t = tl.dot(k_j, q_i.T, input_precision=SPEC.PRECISION)
        p_t, capped = rebuild_p(
            s_t, lse[None, :], rows, cols, q.num_rows, seqlen_k, scale, scale_log2, modifiers,
            MASKED, q_i.dtype == tl.float32, SPEC,
        )  # fmt: skip
        do_i = load_rows(do, row, BLOCK_M, BLOCK_DV, SPEC)
        # before dp: s and dp at once do not fit the registers
        dv_j = tl.dot(p_t.to(do_i.dtype), do_i, dv_j, input_precision=SPEC.PRECISION)
        dp_t = tl.dot(v_j, do_i.T, input_precision=SPEC.PRECISION)
        ds_t = product_gradient(p_t, dp_t, delta[None, :], capped, modifiers, SPEC)
        dk_j = tl.dot(ds_t.to(q_i.dtype), q_i, dk_j, input_precision=SPEC.PRECISION)
    return dk_j, dv_j


@triton.jit
def accumulate_head(
    dk_j, dv_j, k_j, v_j, q, do, statistics_ptr, slopes_ptr, bias_ptr, mask_ptr, q_strides,
    do_strides, slope_strides, bias_strides, mask_strides, batch, head, batch_head, sequence, col,
    q_start, seqlen_q, padded_q, seqlen_k, scale, scale_log2, left, right, softcap,
    SPEC: tl.constexpr,
):  # fmt: skip
    """Add all rows of one query head that see a key tile to its dk and dv."""
    HEAD_DIM: tl.constexpr = SPEC.HEAD_DIM
    HEAD_DIM_V: tl.constexpr = SPEC.HEAD_DIM_V
    q_rows = rows_of(q, q_strides, batch, head, q_start, seqlen_q, HEAD_DIM, SPEC)
    do_rows = rows_of(do, do_strides, batch, head, q_start, seqlen_q, HEAD_DIM_V, SPEC)
    statistics_ptr += batch_head * 2 * padded_q + q_start
    modifiers = modifiers_of(
        left, right, softcap, slopes_ptr, bias_ptr, mask_ptr, slope_strides, bias_strides,
        mask_strides, sequence, head, SPEC,
    )  # fmt: skip
    # rows past the end have p = 0 and keys past the end are not stored: neither needs a mask
    start, full_start, full_end, end = query_range(col, seqlen_q, seqlen_k, modifiers, SPEC)
    if SPEC.HAS_RIGHT:
        dk_j, dv_j = accumulate_dk_dv(
            dk_j, dv_j, k_j, v_j, q_rows, do_rows, statistics_ptr, padded_q, col, start,
            tl.minimum(full_start, end), seqlen_k, scale, scale_log2, modifiers, True, SPEC,
        )  # fmt: skip
    dk_j, dv_j = accumulate_dk_dv(
        dk_j, dv_j, k_j, v_j, q_rows, do_rows, statistics_ptr, padded_q, col, full_start, full_end,
        seqlen_k, scale, scale_log2, modifiers, False, SPEC,
    )  # fmt: skip
    if SPEC.HAS_LEFT or SPEC.HAS_MASK:
        dk_j, dv_j = accumulate_dk_dv(
            dk_j, dv_j, k_j, v_j, q_rows, do_rows, statistics_ptr, padded_q, col,
            tl.maximum(full_start, full_end), end, seqlen_k, scale, scale_log2, modifiers, True,
            SPEC,
        )  # fmt: skip
    return dk_j, dv_j


@triton.jit(
    do_not_specialize=[
        "num_heads_k",
        "group",
        "seqlen_q",
        "seqlen_k",
        "num_sequences",
        "left",
        "right",
    ]
)
def flash_attention_dk_dv_kernel(
    q, k, v, do, dk, dv, statistics_ptr, slopes_ptr, bias_ptr, mask_ptr, cu_seqlens_q_ptr,
    cu_seqlens_k_ptr, q_strides, k_strides, v_strides, do_strides, dk_strides, dv_strides,
    slope_strides, bias_strides, mask_strides, num_heads_k, group, seqlen_q, padded_q, seqlen_k,
    num_sequences, scale, scale_log2, left, right, softcap, SPEC: tl.constexpr,
):  # fmt: skip
    """dk and dv, one key tile a program; grid ``(batch * num_heads_k, cdiv(seqlen_k, BLOCK_N))``.

    The ``group`` query heads that share the keys are walked one after the other.  Packed sequences
    take a grid ``(slots, num_heads_k)``.
    """
    BLOCK_N: tl.constexpr = SPEC.BLOCK_N
    BLOCK_D: tl.constexpr = SPEC.BLOCK_D
    BLOCK_DV: tl.constexpr = SPEC.BLOCK_DV
    HEAD_DIM: tl.constexpr = SPEC.HEAD_DIM
    HEAD_DIM_V: tl.constexpr = SPEC.HEAD_DIM_V
    batch_head, tile = head_and_tile(SPEC)
    batch = (batch_head // num_heads_k).to(tl.int32)
    head_k = (batch_head % num_heads_k).to(tl.int32)
    found, tile = find_sequence(
        tile, batch, seqlen_q, seqlen_k, cu_seqlens_q_ptr, cu_seqlens_k_ptr, num_sequences, True,
        SPEC,
    )  # fmt: skip
    sequence, q_start, seqlen_q, k_start, seqlen_k = found
    if SPEC.IS_PACKED:  # noqa: SIM102 - what is not packed must not even compare
        if tile * BLOCK_N >= seqlen_k:
            return
    col = tile * BLOCK_N

    k_rows = rows_of(k, k_strides, batch, head_k, k_start, seqlen_k, HEAD_DIM, SPEC)
    v_rows = rows_of(v, v_strides, batch, head_k, k_start, seqlen_k, HEAD_DIM_V, SPEC)
    dk_rows = rows_of(dk, dk_strides, batch, head_k, k_start, seqlen_k, HEAD_DIM, SPEC)
    dv_rows = rows_of(dv, dv_strides, batch, head_k, k_start, seqlen_k, HEAD_DIM_V, SPEC)
    k_j = load_rows(k_rows, col, BLOCK_N, BLOCK_D, SPEC)
    v_j = load_rows(v_rows, col, BLOCK_N, BLOCK_DV, SPEC)
    dk_j = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    dv_j = tl.zeros([BLOCK_N, BLOCK_DV], tl.float32)

    if SPEC.IS_GROUPED:
        for member in range(group):
            dk_j, dv_j = accumulate_head(
                dk_j, dv_j, k_j, v_j, q, do, statistics_ptr, slopes_ptr, bias_ptr, mask_ptr,
                q_strides, do_strides, slope_strides, bias_strides, mask_strides, batch,
                head_k * group + member, batch_head * group + member, sequence, col, q_start,
                seqlen_q, padded_q, seqlen_k, scale, scale_log2, left, right, softcap, SPEC,
            )  # fmt: skip
    else:
        dk_j, dv_j = accumulate_head(
            dk_j, dv_j, k_j, v_j, q, do, statistics_ptr, slopes_ptr, bias_ptr, mask_ptr, q_strides,
            do_strides, slope_strides, bias_strides, mask_strides, batch, head_k, batch_head,
            sequence, col, q_start, seqlen_q, padded_q, seqlen_k, scale, scale_log2, left, right,
            softcap, SPEC,
        )  # fmt: skip
    store_rows(dk_rows, dk_j * scale, col, BLOCK_N, BLOCK_D, SPEC)
    store_rows(dv_rows, dv_j, col, BLOCK_N, BLOCK_DV, SPEC)


@triton.jit
def accumulate_dq(
    dq_i, q_i, do_i, lse, delta, k, v, row, start, end, seqlen_q, scale, scale_log2, modifiers,
    MASKED: tl.constexpr, SPEC: tl.constexpr,
):  # fmt: skip
    """Add the keys ``[start, end)``, tile by tile, to dq of one query tile."""
    BLOCK_N: tl.constexpr = SPEC.BLOCK_N
    BLOCK_D: tl.constexpr = SPEC.BLOCK_D
    BLOCK_DV: tl.constexpr = SPEC.BLOCK_DV
    rows = (row + tl.arange(0, SPEC.BLOCK_M))[:, None]
    for col in tl.range(start, end, BLOCK_N):
        cols = (col + tl.arange(0, BLOCK_N))[None, :]
        k_j = load_rows(k, col, BLOCK_N, BLOCK_D, SPEC)
        s_ij = tl.dot(q_i, k_j.T, input_precision=SPEC.PRECISION)
        p_ij, capped = rebuild_p(
            s_ij, lse[:, None], rows, cols, seqlen_q, k.num_rows, scale, scale_log2, modifiers,
            MASKED, q_i.dtype == tl.float32, SPEC,
        )  # fmt: skip
        v_j = load_rows(v, col, BLOCK_N, BLOCK_DV, SPEC)
        dp_ij = tl.dot(do_i, v_j.T, input_precision=SPEC.PRECISION)
        ds_ij = product_gradient(p_ij, dp_ij, delta[:, None], capped, modifiers, SPEC)
        dq_i = tl.dot(ds_ij.to(k_j.dtype), k_j, dq_i, input_precision=SPEC.PRECISION)
    return dq_i


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
def flash_attention_dq_kernel(
    q, k, v, do, dq, statistics_ptr, slopes_ptr, bias_ptr, mask_ptr, cu_seqlens_q_ptr,
    cu_seqlens_k_ptr, q_strides, k_strides, v_strides, do_strides, dq_strides, slope_strides,
    bias_strides, mask_strides, num_heads, group, seqlen_q, padded_q, seqlen_k, num_sequences,
    scale, scale_log2, left, right, softcap, SPEC: tl.constexpr,
):  # fmt: skip
    """dq, one query tile a program; grid ``(batch * num_heads, cdiv(seqlen_q, BLOCK_M))``.

    Packed sequences take ``(slots, num_heads)``.
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
    do_rows = rows_of(do, do_strides, batch, head, q_start, seqlen_q, HEAD_DIM_V, SPEC)
    dq_rows = rows_of(dq, dq_strides, batch, head, q_start, seqlen_q, HEAD_DIM, SPEC)
    modifiers = modifiers_of(
        left, right, softcap, slopes_ptr, bias_ptr, mask_ptr, slope_strides, bias_strides,
        mask_strides, sequence, head, SPEC,
    )  # fmt: skip

    q_i = load_rows(q_rows, row, BLOCK_M, BLOCK_D, SPEC)
    do_i = load_rows(do_rows, row, BLOCK_M, BLOCK_DV, SPEC)
    lse, delta = load_row_statistics(
        statistics_ptr + batch_head * 2 * padded_q + q_start, row, padded_q, seqlen_q, SPEC
    )
    dq_i = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)

    last_row = row + BLOCK_M - 1
    start, full_start, full_end, end = key_range(row, last_row, seqlen_q, seqlen_k, modifiers, SPEC)
    if SPEC.HAS_LEFT:
        dq_i = accumulate_dq(
            dq_i, q_i, do_i, lse, delta, k_rows, v_rows, row, start, tl.minimum(full_start, end),
            seqlen_q, scale, scale_log2, modifiers, True, SPEC,
        )  # fmt: skip
    dq_i = accumulate_dq(
        dq_i, q_i, do_i, lse, delta, k_rows, v_rows, row, full_start, full_end, seqlen_q, scale,
        scale_log2, modifiers, False, SPEC,
    )  # fmt: skip
    dq_i = accumulate_dq(
        dq_i, q_i, do_i, lse, delta, k_rows, v_rows, row, tl.maximum(full_start, full_end), end,
        seqlen_q, scale, scale_log2, modifiers, True, SPEC,
    )  # fmt: skip
    store_rows(dq_rows, dq_i * scale, row, BLOCK_M, BLOCK_D, SPEC)

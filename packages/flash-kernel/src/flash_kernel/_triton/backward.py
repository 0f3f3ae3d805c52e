"""Memory-linear backward: the scores are rebuilt tile by tile from q, k and the saved lse.

    p  = exp(s - lse)            dv = p^T do            dp = do v^T
    ds = p * (dp - delta)        dk = scale * ds^T q    dq = scale * ds k
    delta = rowsum(do * o) - dlse

FlashAttention-2 (Dao, 2023, arXiv 2307.08691), algorithm 2, as two kernels: one program owns a tile
of keys and walks the queries (dk, dv); another owns a tile of queries and walks the keys (dq).  The
scores are computed twice, seven matrix products instead of five, but nothing is added across
programs: the result is bitwise repeatable, and no float32 copy of dq is kept.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from flash_kernel._triton.exact import add_visible_row, is_finite, sees_exactly
from flash_kernel._triton.primitives import (
    LOG2_E,
    VARYING,
    bias_scores,
    cap_scores,
    find_sequence,
    head_and_tile,
    key_range,
    last_tile_first,
    query_range,
    scores_of,
    visible_keys,
)
from flash_kernel._triton.row_statistics import load_row_statistics, statistics_of
from flash_kernel._triton.tiles import (
    add_weighted_rows,
    load_rows,
    row_products,
    rows_of,
    scale_rows,
    store_rows,
    zero_rows,
)


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
    s, lse, rows, cols, x, MASKED: tl.constexpr, EXACT: tl.constexpr, SPEC: tl.constexpr
):  # fmt: skip
    """Return p of one tile of raw products ``s``, and the capped scores.

    The tile may lie either way: rows, cols and lse broadcast against ``s``.
    """
    capped = cap_scores(s, x, SPEC)
    scores = bias_scores(capped, rows, cols, x, SPEC)
    if SPEC.PRESCALED:
        p = probabilities(scores, lse, 1.0, LOG2_E, EXACT)
    else:
        p = probabilities(scores, lse, x.scale, x.scale_log2, EXACT)
    if MASKED:
        p = tl.where(visible_keys(rows, cols, x, SPEC), p, 0.0)
    return p, capped


@triton.jit
def product_gradient(p, dp, delta, capped, x, SPEC: tl.constexpr):
    """Return ds = p * (dp - delta), brought back through the softcap to the product q k."""
    ds = p * (dp - delta)
    if SPEC.HAS_SOFTCAP:
        tanh_s = capped / x.softcap  # d/ds (c tanh(s / c)) = 1 - tanh(s / c)^2
        ds = ds * (1.0 - tanh_s * tanh_s)
    return ds


@triton.jit
def accumulate_dk_dv(
    dk_j, dv_j, k_j, v_j, q, do, statistics_ptr, padded_q, col, start, end, x,
    MASKED: tl.constexpr, EXACT: tl.constexpr, SPEC: tl.constexpr,
):  # fmt: skip
    """Add the query rows ``[start, end)`` of one head, tile by tile, to dk and dv of a key tile.

    Scores are built transposed, ``[BLOCK_N, BLOCK_M]``, so that p^T and ds^T feed the next products
    straight from registers.
    """
    BLOCK_M: tl.constexpr = SPEC.BLOCK_M
    BLOCK_N: tl.constexpr = SPEC.BLOCK_N
    WIDTHS: tl.constexpr = SPEC.WIDTHS
    WIDTHS_V: tl.constexpr = SPEC.WIDTHS_V
    cols = (col + tl.arange(0, BLOCK_N))[:, None]
    for row in tl.range(start, end, BLOCK_M):
        row = tl.multiple_of(row, BLOCK_M)
        rows = (row + tl.arange(0, BLOCK_M))[None, :]
        q_i = load_rows(q, row, BLOCK_M, WIDTHS, SPEC)
        lse, delta = load_row_statistics(statistics_ptr, row, padded_q, SPEC)
        s_t = row_products(k_j, q_i, SPEC)
        p_t, capped = rebuild_p(
            s_t, lse[None, :], rows, cols, x, MASKED, q_i[0].dtype == tl.float32, SPEC
        )
        do_i = load_rows(do, row, BLOCK_M, WIDTHS_V, SPEC)
        if not EXACT:
            # before dp: s and dp at once do not fit the registers
            dv_j = add_weighted_rows(dv_j, p_t, do_i, SPEC)
        dp_t = row_products(v_j, do_i, SPEC)
        ds_t = product_gradient(p_t, dp_t, delta[None, :], capped, x, SPEC)
        if EXACT:
            for index in range(BLOCK_M):
                query = row + tl.full([1, 1], index, tl.int32)
                sees = sees_exactly(query, cols, x, SPEC)
                dv_j = add_visible_row(dv_j, p_t, do_i, index, sees)
                dk_j = add_visible_row(dk_j, ds_t, q_i, index, sees)
        else:
            dk_j = add_weighted_rows(dk_j, ds_t, q_i, SPEC)
    return dk_j, dv_j


class Queries(NamedTuple):
    """What the query heads that share a head of keys have in common."""

    q: Any
    do: Any
    statistics: Any
    slopes: Any
    bias: Any
    mask: Any
    q_strides: Any
    do_strides: Any
    slope_strides: Any
    bias_strides: Any
    mask_strides: Any
    batch: Any
    sequence: Any  # where sequences are packed; elsewhere the batch
    start: Any  # the sequence's first query row
    seqlen_q: Any
    padded_q: Any
    seqlen_k: Any
    scale: Any
    scale_log2: Any
    left: Any
    right: Any
    softcap: Any


@triton.jit
def accumulate_head(
    dk_j, dv_j, k_j, v_j, queries, head, batch_head, col, EXACT: tl.constexpr, SPEC: tl.constexpr
):  # fmt: skip
    """Add all rows of one query head that see a key tile to its dk and dv."""
    HEAD_DIM: tl.constexpr = SPEC.HEAD_DIM
    HEAD_DIM_V: tl.constexpr = SPEC.HEAD_DIM_V
    batch, q_start, seqlen_q, padded_q = (
        queries.batch, queries.start, queries.seqlen_q, queries.padded_q
    )  # fmt: skip
    q = rows_of(queries.q, queries.q_strides, batch, head, q_start, seqlen_q, HEAD_DIM, SPEC)
    do = rows_of(queries.do, queries.do_strides, batch, head, q_start, seqlen_q, HEAD_DIM_V, SPEC)
    statistics_ptr = statistics_of(
        queries.statistics, batch_head, padded_q, queries.sequence, q_start, SPEC
    )
    x = scores_of(
        seqlen_q, queries.seqlen_k, queries.scale, queries.scale_log2, queries.left, queries.right,
        queries.softcap, queries.slopes, queries.bias, queries.mask, queries.slope_strides,
        queries.bias_strides, queries.mask_strides, queries.sequence, head, SPEC,
    )  # fmt: skip
    # rows past the end have p = 0 and keys past the end are not stored: neither needs a mask
    start, full_start, full_end, end = query_range(col, x, SPEC)
    if EXACT:
        full_start = end  # all tiles in one loop
        full_end = end
    if SPEC.HAS_RIGHT or EXACT:
        dk_j, dv_j = accumulate_dk_dv(
            dk_j, dv_j, k_j, v_j, q, do, statistics_ptr, padded_q, col, start,
            tl.minimum(full_start, end), x, True, EXACT, SPEC,
        )  # fmt: skip
    if not EXACT:
        dk_j, dv_j = accumulate_dk_dv(
            dk_j, dv_j, k_j, v_j, q, do, statistics_ptr, padded_q, col, full_start, full_end, x,
            False, EXACT, SPEC,
        )  # fmt: skip
        if SPEC.HAS_LEFT or SPEC.HAS_MASK:
            dk_j, dv_j = accumulate_dk_dv(
                dk_j, dv_j, k_j, v_j, q, do, statistics_ptr, padded_q, col,
                tl.maximum(full_start, full_end), end, x, True, EXACT, SPEC,
            )  # fmt: skip
    return dk_j, dv_j


@triton.jit
def accumulate_heads(
    k_j, v_j, queries, head_k, batch_head, group, col, EXACT: tl.constexpr, SPEC: tl.constexpr
):  # fmt: skip
    """Return dk and dv of a key tile, from the query heads that share it, one after the other."""
    BLOCK_N: tl.constexpr = SPEC.BLOCK_N
    WIDTHS: tl.constexpr = SPEC.WIDTHS
    WIDTHS_V: tl.constexpr = SPEC.WIDTHS_V
    dk_j = zero_rows(BLOCK_N, WIDTHS)
    dv_j = zero_rows(BLOCK_N, WIDTHS_V)
    if SPEC.IS_GROUPED:
        for member in range(group):
            dk_j, dv_j = accumulate_head(
                dk_j, dv_j, k_j, v_j, queries, head_k * group + member, batch_head * group + member,
                col, EXACT, SPEC,
            )  # fmt: skip
    else:
        dk_j, dv_j = accumulate_head(
            dk_j, dv_j, k_j, v_j, queries, head_k, batch_head, col, EXACT, SPEC
        )
    return dk_j, dv_j


@triton.jit
def dk_dv_tile(
    batch_head, tile, q, k, v, do, dk, dv, statistics_ptr, slopes_ptr, bias_ptr, mask_ptr,
    cu_seqlens_q_ptr, cu_seqlens_k_ptr, q_strides, k_strides, v_strides, do_strides, dk_strides,
    dv_strides, slope_strides, bias_strides, mask_strides, num_heads_k, group, seqlen_q, padded_q,
    seqlen_k, num_sequences, scale, scale_log2, left, right, softcap, SPEC: tl.constexpr,
):  # fmt: skip
    """Write dk and dv of one key tile; the arguments are those of the kernels below."""
    BLOCK_N: tl.constexpr = SPEC.BLOCK_N
    WIDTHS: tl.constexpr = SPEC.WIDTHS
    WIDTHS_V: tl.constexpr = SPEC.WIDTHS_V
    HEAD_DIM: tl.constexpr = SPEC.HEAD_DIM
    HEAD_DIM_V: tl.constexpr = SPEC.HEAD_DIM_V
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
    k_j = load_rows(k_rows, col, BLOCK_N, WIDTHS, SPEC)
    v_j = load_rows(v_rows, col, BLOCK_N, WIDTHS_V, SPEC)
    queries = Queries(
        q, do, statistics_ptr, slopes_ptr, bias_ptr, mask_ptr, q_strides, do_strides, slope_strides,
        bias_strides, mask_strides, batch, sequence, q_start, seqlen_q, padded_q, seqlen_k, scale,
        scale_log2, left, right, softcap,
    )  # fmt: skip

    dk_j, dv_j = accumulate_heads(k_j, v_j, queries, head_k, batch_head, group, col, False, SPEC)
    if SPEC.HIDES_PAIRS:  # noqa: SIM102 - this is decided by the compiler, the next is not
        if not (is_finite(dk_j) and is_finite(dv_j)):
            dk_j, dv_j = accumulate_heads(
                k_j, v_j, queries, head_k, batch_head, group, col, True, SPEC
            )
    store_rows(dk_rows, scale_rows(dk_j, scale), col, SPEC)
    store_rows(dv_rows, dv_j, col, SPEC)


@triton.jit(do_not_specialize=["num_heads_k", *VARYING])
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
    batch_head, tile = head_and_tile(SPEC)
    dk_dv_tile(
        batch_head, tile, q, k, v, do, dk, dv, statistics_ptr, slopes_ptr, bias_ptr, mask_ptr,
        cu_seqlens_q_ptr, cu_seqlens_k_ptr, q_strides, k_strides, v_strides, do_strides, dk_strides,
        dv_strides, slope_strides, bias_strides, mask_strides, num_heads_k, group, seqlen_q,
        padded_q, seqlen_k, num_sequences, scale, scale_log2, left, right, softcap, SPEC,
    )  # fmt: skip


@triton.jit
def accumulate_dq(
    dq_i, q_i, do_i, lse, delta, k, v, row, start, end, x, MASKED: tl.constexpr,
    EXACT: tl.constexpr, SPEC: tl.constexpr,
):  # fmt: skip
    """Add the keys ``[start, end)``, tile by tile, to dq of one query tile."""
    BLOCK_M: tl.constexpr = SPEC.BLOCK_M
    BLOCK_N: tl.constexpr = SPEC.BLOCK_N
    WIDTHS: tl.constexpr = SPEC.WIDTHS
    WIDTHS_V: tl.constexpr = SPEC.WIDTHS_V
    rows = (row + tl.arange(0, BLOCK_M))[:, None]
    for col in tl.range(start, end, BLOCK_N):
        cols = (col + tl.arange(0, BLOCK_N))[None, :]
        k_j = load_rows(k, col, BLOCK_N, WIDTHS, SPEC)
        s_ij = row_products(q_i, k_j, SPEC)
        p_ij, capped = rebuild_p(
            s_ij, lse[:, None], rows, cols, x, MASKED, q_i[0].dtype == tl.float32, SPEC
        )
        v_j = load_rows(v, col, BLOCK_N, WIDTHS_V, SPEC)
        dp_ij = row_products(do_i, v_j, SPEC)
        ds_ij = product_gradient(p_ij, dp_ij, delta[:, None], capped, x, SPEC)
        if EXACT:
            for index in range(BLOCK_N):
                key = col + tl.full([1, 1], index, tl.int32)
                sees = sees_exactly(rows, key, x, SPEC)
                dq_i = add_visible_row(dq_i, ds_ij, k_j, index, sees)
        else:
            dq_i = add_weighted_rows(dq_i, ds_ij, k_j, SPEC)
    return dq_i


@triton.jit
def dq_tile(
    batch_head, tile, q, k, v, do, dq, statistics_ptr, slopes_ptr, bias_ptr, mask_ptr,
    cu_seqlens_q_ptr, cu_seqlens_k_ptr, q_strides, k_strides, v_strides, do_strides, dq_strides,
    slope_strides, bias_strides, mask_strides, num_heads, group, seqlen_q, padded_q, seqlen_k,
    num_sequences, scale, scale_log2, left, right, softcap, SPEC: tl.constexpr,
):  # fmt: skip
    """Write dq of one query tile; the arguments are those of the kernels below."""
    BLOCK_M: tl.constexpr = SPEC.BLOCK_M
    WIDTHS: tl.constexpr = SPEC.WIDTHS
    WIDTHS_V: tl.constexpr = SPEC.WIDTHS_V
    HEAD_DIM: tl.constexpr = SPEC.HEAD_DIM
    HEAD_DIM_V: tl.constexpr = SPEC.HEAD_DIM_V
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
    x = scores_of(
        seqlen_q, seqlen_k, scale, scale_log2, left, right, softcap, slopes_ptr, bias_ptr, mask_ptr,
        slope_strides, bias_strides, mask_strides, sequence, head, SPEC,
    )  # fmt: skip

    q_i = load_rows(q_rows, row, BLOCK_M, WIDTHS, SPEC)
    do_i = load_rows(do_rows, row, BLOCK_M, WIDTHS_V, SPEC)
    statistics_ptr = statistics_of(statistics_ptr, batch_head, padded_q, sequence, q_start, SPEC)
    lse, delta = load_row_statistics(statistics_ptr, row, padded_q, SPEC)
    dq_i = zero_rows(BLOCK_M, WIDTHS)
    start, full_start, full_end, end = key_range(row, row + BLOCK_M - 1, x, SPEC)
    if SPEC.HAS_LEFT:
        dq_i = accumulate_dq(
            dq_i, q_i, do_i, lse, delta, k_rows, v_rows, row, start, tl.minimum(full_start, end), x,
            True, False, SPEC,
        )  # fmt: skip
    dq_i = accumulate_dq(
        dq_i, q_i, do_i, lse, delta, k_rows, v_rows, row, full_start, full_end, x, False, False,
        SPEC,
    )  # fmt: skip
    dq_i = accumulate_dq(
        dq_i, q_i, do_i, lse, delta, k_rows, v_rows, row, tl.maximum(full_start, full_end), end, x,
        True, False, SPEC,
    )  # fmt: skip
    if SPEC.HIDES_PAIRS:  # noqa: SIM102 - this is decided by the compiler, the next is not
        if not is_finite(dq_i):
            dq_i = accumulate_dq(
                zero_rows(BLOCK_M, WIDTHS), q_i, do_i, lse, delta, k_rows, v_rows, row, start, end,
                x, True, True, SPEC,
            )  # fmt: skip
    store_rows(dq_rows, scale_rows(dq_i, scale), row, SPEC)


@triton.jit(do_not_specialize=["num_heads", *VARYING])
def flash_attention_dq_kernel(
    q, k, v, do, dq, statistics_ptr, slopes_ptr, bias_ptr, mask_ptr, cu_seqlens_q_ptr,
    cu_seqlens_k_ptr, q_strides, k_strides, v_strides, do_strides, dq_strides, slope_strides,
    bias_strides, mask_strides, num_heads, group, seqlen_q, padded_q, seqlen_k, num_sequences,
    scale, scale_log2, left, right, softcap, SPEC: tl.constexpr,
):  # fmt: skip
    """dq, one query tile a program; grid ``(batch * num_heads, cdiv(seqlen_q, BLOCK_M))``.

    Packed sequences take ``(slots, num_heads)``.
    """
    batch_head, tile = head_and_tile(SPEC)
    if SPEC.HAS_RIGHT:
        tile = last_tile_first(tile, SPEC)
    dq_tile(
        batch_head, tile, q, k, v, do, dq, statistics_ptr, slopes_ptr, bias_ptr, mask_ptr,
        cu_seqlens_q_ptr, cu_seqlens_k_ptr, q_strides, k_strides, v_strides, do_strides, dq_strides,
        slope_strides, bias_strides, mask_strides, num_heads, group, seqlen_q, padded_q, seqlen_k,
        num_sequences, scale, scale_log2, left, right, softcap, SPEC,
    )  # fmt: skip

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

from flash_kernel._triton.exact import add_visible_row, is_finite, sees_exactly
from flash_kernel._triton.primitives import (
    INF,
    LN_2,
    LOG2_E,
    VARYING,
    bias_scores,
    cap_scores,
    find_sequence,
    head_and_tile,
    key_range,
    last_tile_first,
    online_softmax_step,
    scores_of,
    slot_of_row,
    softmax_weights,
    visible_keys,
)
from flash_kernel._triton.tiles import (
    load_rows,
    row_products,
    rows_of,
    scale_rows,
    store_rows,
    zero_rows,
)

# tiles that a program of the redo kernel looks at
REDO_TILES: tl.constexpr = tl.constexpr(16)


@triton.jit
def attend(
    m_i, l_i, acc, q_i, k, v, rows, start, end, x, MASKED: tl.constexpr, EXACT: tl.constexpr,
    SPEC: tl.constexpr,
):  # fmt: skip
    """Fold the keys ``[start, end)``, tile by tile, into the running softmax of one query tile.

    ``rows [BLOCK_M, 1]`` numbers the tile's queries within their sequence.  EXACT keeps a NaN or
    inf from rows that do not see it: slowly, see `add_visible_row`.
    """
    BLOCK_N: tl.constexpr = SPEC.BLOCK_N
    WIDTHS: tl.constexpr = SPEC.WIDTHS
    WIDTHS_V: tl.constexpr = SPEC.WIDTHS_V
    for col in tl.range(start, end, BLOCK_N):
        cols = (col + tl.arange(0, BLOCK_N))[None, :]
        k_j = load_rows(k, col, BLOCK_N, WIDTHS, SPEC)
        s_ij = row_products(q_i, k_j, SPEC)
        s_ij = cap_scores(s_ij, x, SPEC)
        s_ij = bias_scores(s_ij, rows, cols, x, SPEC)
        if MASKED:
            s_ij = tl.where(visible_keys(rows, cols, x, SPEC), s_ij, -INF)
        v_j = load_rows(v, col, BLOCK_N, WIDTHS_V, SPEC)
        if EXACT:
            m_i, l_i, p_ij, alpha = softmax_weights(m_i, l_i, s_ij, x.scale_log2)
            acc = scale_rows(acc, alpha[:, None])
            for index in range(BLOCK_N):
                key = col + tl.full([1, 1], index, tl.int32)
                sees = sees_exactly(rows, key, x, SPEC)
                acc = add_visible_row(acc, p_ij, v_j, index, sees)
        else:
            m_i, l_i, acc = online_softmax_step(m_i, l_i, acc, s_ij, v_j, x.scale_log2, SPEC)
    return m_i, l_i, acc


@triton.jit
def attend_range(q_i, k, v, rows, start, full_start, full_end, end, x, SPEC: tl.constexpr):
    """Return m, l and acc of the keys of a `key_range`.

    The mask is evaluated for the tiles that need it alone, and not for those between.
    """
    BLOCK_M: tl.constexpr = SPEC.BLOCK_M
    WIDTHS_V: tl.constexpr = SPEC.WIDTHS_V
    m_i = tl.full([BLOCK_M], -INF, tl.float32)
    l_i = tl.zeros([BLOCK_M], tl.float32)
    acc = zero_rows(BLOCK_M, WIDTHS_V)
    if SPEC.HAS_LEFT:
        m_i, l_i, acc = attend(
            m_i, l_i, acc, q_i, k, v, rows, start, tl.minimum(full_start, end), x, True, False,
            SPEC,
        )  # fmt: skip
    m_i, l_i, acc = attend(
        m_i, l_i, acc, q_i, k, v, rows, full_start, full_end, x, False, False, SPEC
    )
    m_i, l_i, acc = attend(
        m_i, l_i, acc, q_i, k, v, rows, tl.maximum(full_start, full_end), end, x, True, False,
        SPEC,
    )  # fmt: skip
    if SPEC.HIDES_PAIRS:  # noqa: SIM102 - this is decided by the compiler, the next is not
        if not is_finite(acc):
            m_i, l_i, acc = attend(
                tl.full([BLOCK_M], -INF, tl.float32), tl.zeros([BLOCK_M], tl.float32),
                zero_rows(BLOCK_M, WIDTHS_V), q_i, k, v, rows, start, end, x, True, True, SPEC,
            )  # fmt: skip
    return m_i, l_i, acc


@triton.jit
def fold_sink(m_i, l_i, acc, sink, scale_log2):
    """Add one more key, whose score is ``sink`` and whose value is 0, to the running softmax."""
    m_new = tl.maximum(m_i, sink * LOG2_E / scale_log2)
    pivot = tl.where(m_new == -INF, 0.0, m_new)
    alpha = tl.math.exp2((m_i - pivot) * scale_log2)
    l_new = alpha * l_i + tl.math.exp2(sink * LOG2_E - pivot * scale_log2)
    return m_new, l_new, scale_rows(acc, alpha[:, None])


@triton.jit
def attend_tile(
    batch_head, tile, q, k, v, o, lse_ptr, slopes_ptr, bias_ptr, mask_ptr, sinks_ptr,
    cu_seqlens_q_ptr, cu_seqlens_k_ptr, q_strides, k_strides, v_strides, o_strides, slope_strides,
    bias_strides, mask_strides, num_heads, group, seqlen_q, seqlen_k, num_sequences, scale,
    scale_log2, left, right, softcap, SPEC: tl.constexpr,
):  # fmt: skip
    """Write o and lse of one query tile; the arguments are those of the kernels below."""
    BLOCK_M: tl.constexpr = SPEC.BLOCK_M
    WIDTHS: tl.constexpr = SPEC.WIDTHS
    HEAD_DIM: tl.constexpr = SPEC.HEAD_DIM
    HEAD_DIM_V: tl.constexpr = SPEC.HEAD_DIM_V
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
    x = scores_of(
        seqlen_q, seqlen_k, scale, scale_log2, left, right, softcap, slopes_ptr, bias_ptr, mask_ptr,
        slope_strides, bias_strides, mask_strides, sequence, head, SPEC,
    )  # fmt: skip

    q_i = load_rows(q_rows, row, BLOCK_M, WIDTHS, SPEC)
    rows = row + tl.arange(0, BLOCK_M)
    start, full_start, full_end, end = key_range(row, row + BLOCK_M - 1, x, SPEC)
    m_i, l_i, acc = attend_range(
        q_i, k_rows, v_rows, rows[:, None], start, full_start, full_end, end, x, SPEC
    )
    if SPEC.HAS_SINKS:
        m_i, l_i, acc = fold_sink(m_i, l_i, acc, tl.load(sinks_ptr + head), scale_log2)

    # a row that sees nothing has l = 0 and acc = 0: its output is 0 and its lse is -inf
    denominator = tl.where(l_i == 0.0, 1.0, l_i)
    store_rows(o_rows, scale_rows(acc, (1.0 / denominator)[:, None]), row, SPEC)
    lse_i = (m_i * scale_log2 + tl.math.log2(denominator)) * LN_2
    tl.store(lse_ptr + q_start + rows, lse_i, mask=rows < seqlen_q)


@triton.jit(do_not_specialize=["num_heads", *VARYING])
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
    batch_head, tile = head_and_tile(SPEC)
    if SPEC.HAS_RIGHT:
        tile = last_tile_first(tile, SPEC)
    attend_tile(
        batch_head, tile, q, k, v, o, lse_ptr, slopes_ptr, bias_ptr, mask_ptr, sinks_ptr,
        cu_seqlens_q_ptr, cu_seqlens_k_ptr, q_strides, k_strides, v_strides, o_strides,
        slope_strides, bias_strides, mask_strides, num_heads, group, seqlen_q, seqlen_k,
        num_sequences, scale, scale_log2, left, right, softcap, SPEC,
    )  # fmt: skip


@triton.jit
def has_nan(x):
    """Whether some entry is NaN."""
    return tl.max(tl.ravel(x != x).to(tl.int32), axis=0) != 0


@triton.jit
def tiles_at(index, cu_seqlens, num_rows, num_sequences, SPEC: tl.constexpr):
    """Return the first and the last tile that has some of the BLOCK_M rows of an index.

    Tiles of packed sequences begin where these do.
    """
    first, last = index, index
    if SPEC.IS_PACKED:
        BLOCK_M: tl.constexpr = SPEC.BLOCK_M
        first = slot_of_row(index * BLOCK_M, cu_seqlens, num_sequences, BLOCK_M)
        last_row = tl.minimum((index + 1) * BLOCK_M, num_rows) - 1
        last = slot_of_row(last_row, cu_seqlens, num_sequences, BLOCK_M)
    return first, last


@triton.jit
def is_marked(
    tile, lse_head, seqlen_q, cu_seqlens_q, cu_seqlens_k, num_sequences, SPEC: tl.constexpr
):  # fmt: skip
    """Whether the lse of some row of a tile is NaN."""
    BLOCK_M: tl.constexpr = SPEC.BLOCK_M
    found, tile = find_sequence(
        tile, 0, seqlen_q, 0, cu_seqlens_q, cu_seqlens_k, num_sequences, False, SPEC
    )
    _, start, seqlen_q, _, _ = found
    rows = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    return has_nan(tl.load(lse_head + start + rows, mask=rows < seqlen_q, other=0.0))


@triton.jit(do_not_specialize=["num_heads", *VARYING])
def flash_attention_redo_kernel(
    q, k, v, o, lse_ptr, slopes_ptr, bias_ptr, mask_ptr, sinks_ptr, cu_seqlens_q_ptr,
    cu_seqlens_k_ptr, q_strides, k_strides, v_strides, o_strides, slope_strides, bias_strides,
    mask_strides, num_heads, group, seqlen_q, seqlen_k, num_sequences, scale, scale_log2, left,
    right, softcap, SPEC: tl.constexpr,
):  # fmt: skip
    """Compute o and lse as above, but only of query tiles in which some row's lse is NaN.

    It comes after a kernel whose softmax may fail for some rows, and that marks them so.  The grid
    is that of tensors that are not packed.  A program has the rows of several tiles of a head and
    looks at all of them at once, so that where nothing has failed the launch lasts for one load.
    """
    BLOCK_M: tl.constexpr = SPEC.BLOCK_M
    batch_head = tl.program_id(0).to(tl.int64)
    index, programs = tl.program_id(1), tl.num_programs(1)
    indices = index + tl.arange(0, REDO_TILES) * programs
    rows = indices[:, None] * BLOCK_M + tl.arange(0, BLOCK_M)[None, :]
    lse_head = lse_ptr + batch_head * seqlen_q
    if has_nan(tl.load(lse_head + rows, mask=rows < seqlen_q, other=0.0)):
        # in a `for`, Triton 3.6 would keep a buffer for o beside that of q
        while index * BLOCK_M < seqlen_q:
            tile, last = tiles_at(index, cu_seqlens_q_ptr, seqlen_q, num_sequences, SPEC)
            while tile <= last:
                if is_marked(
                    tile, lse_head, seqlen_q, cu_seqlens_q_ptr, cu_seqlens_k_ptr, num_sequences,
                    SPEC,
                ):  # fmt: skip
                    # two programs may find a tile that begins among the rows of one and ends among
                    # those of the other: both write the same
                    attend_tile(
                        batch_head, tile, q, k, v, o, lse_ptr, slopes_ptr, bias_ptr, mask_ptr,
                        sinks_ptr, cu_seqlens_q_ptr, cu_seqlens_k_ptr, q_strides, k_strides,
                        v_strides, o_strides, slope_strides, bias_strides, mask_strides, num_heads,
                        group, seqlen_q, seqlen_k, num_sequences, scale, scale_log2, left, right,
                        softcap, SPEC,
                    )  # fmt: skip
                tile += 1
            index += programs

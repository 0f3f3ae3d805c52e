"""Attention over a key-value cache: few queries, many keys, and memory traffic is all that counts.

    grid = (batch * num_heads_k * cdiv(group * seqlen_q, BLOCK_M) * num_splits,)

The query heads that share a head of k and v are the rows of one tile, so that the cache is read
once.  One sequence alone would keep few programs busy: its keys are split, each program writes what
`flash_attention` would return for its part, and a second kernel joins the parts by their lse.

Flash-Decoding (Dao, Haziza, Massa, Sizov, 2023).
"""

import triton
import triton.language as tl

from flash_kernel._triton.forward import attend_range, fold_sink
from flash_kernel._triton.primitives import (
    INF,
    LN_2,
    LOG2_E,
    Scores,
    key_range,
)
from flash_kernel._triton.tiles import (
    INTERPRETED,
    in_pages,
    load_rows,
    rows_of,
    store_rows,
)


@triton.jit
def cache_rows(
    cache, strides, batch, head, pages_ptr, max_pages, num_rows, head_dim, SPEC: tl.constexpr
):  # fmt: skip
    """Return the `Rows` of one sequence and head of a cache, in pages or not."""
    if SPEC.PAGE_SIZE > 0:
        in_one = rows_of(cache, strides, 0, head, 0, num_rows, head_dim, SPEC)
        rows = in_pages(in_one, pages_ptr + batch.to(tl.int64) * max_pages, strides[0])
    else:
        rows = rows_of(cache, strides, batch, head, 0, num_rows, head_dim, SPEC)
    return rows


@triton.jit(do_not_specialize=["num_heads_k", "num_new", "capacity", "max_pages"])
def flash_attention_append_kernel(
    k, v, k_cache, v_cache, seqlens_ptr, pages_ptr, k_strides, v_strides, k_cache_strides,
    v_cache_strides, num_heads_k, num_new, capacity, max_pages, SPEC: tl.constexpr,
    CACHE_SPEC: tl.constexpr,
):  # fmt: skip
    """Copy new keys and values behind the cached ones; grid ``(batch * heads * tiles,)``.

    What lies beyond the capacity is dropped.
    """
    BLOCK_N: tl.constexpr = SPEC.BLOCK_N
    WIDTHS: tl.constexpr = SPEC.WIDTHS
    WIDTHS_V: tl.constexpr = SPEC.WIDTHS_V
    HEAD_DIM: tl.constexpr = SPEC.HEAD_DIM
    HEAD_DIM_V: tl.constexpr = SPEC.HEAD_DIM_V
    num_tiles = tl.cdiv(num_new, BLOCK_N)
    batch = tl.program_id(0) // num_tiles // num_heads_k
    head = tl.program_id(0) // num_tiles % num_heads_k
    row = tl.program_id(0) % num_tiles * BLOCK_N
    seqlen = tl.load(seqlens_ptr + batch).to(tl.int32)
    end = tl.minimum(seqlen + num_new, capacity)

    k_rows = rows_of(k, k_strides, batch, head, 0, num_new, HEAD_DIM, SPEC)
    v_rows = rows_of(v, v_strides, batch, head, 0, num_new, HEAD_DIM_V, SPEC)
    k_target = cache_rows(
        k_cache, k_cache_strides, batch, head, pages_ptr, max_pages, end, HEAD_DIM, CACHE_SPEC
    )
    v_target = cache_rows(
        v_cache, v_cache_strides, batch, head, pages_ptr, max_pages, end, HEAD_DIM_V, CACHE_SPEC
    )
    k_j = load_rows(k_rows, row, BLOCK_N, WIDTHS, SPEC)
    v_j = load_rows(v_rows, row, BLOCK_N, WIDTHS_V, SPEC)
    store_rows(k_target, k_j, seqlen + row, CACHE_SPEC)
    store_rows(v_target, v_j, seqlen + row, CACHE_SPEC)


@triton.jit
def split_range(start, end, split, num_splits, smallest, SPEC: tl.constexpr):
    """Return the part of the keys ``[start, end)`` that a split works on, in whole tiles."""
    share = tl.cdiv(tl.cdiv(end - start, num_splits), SPEC.BLOCK_N) * SPEC.BLOCK_N
    share = tl.maximum(share, smallest)
    first = start + split * share
    return first, tl.minimum(first + share, end)


@triton.jit
def query_offsets(
    strides, batch, heads, rows, is_row, head_dim, FIRST: tl.constexpr, WIDTH: tl.constexpr
):  # fmt: skip
    """Offsets and in-bounds mask of columns from FIRST on of a tile's queries."""
    cols = FIRST + tl.arange(0, WIDTH)
    offsets = batch * tl.cast(strides[0], tl.int64) + heads.to(tl.int64) * strides[1]
    offsets = (offsets + rows.to(tl.int64) * strides[2])[:, None] + cols[None, :] * strides[3]
    return offsets, is_row[:, None] & (cols < head_dim)[None, :]


@triton.jit(
    do_not_specialize=["num_heads_k", "group", "seqlen_q", "num_new", "capacity", "max_pages",
                       "num_splits", "smallest", "left", "right"]
)  # fmt: skip
def flash_attention_decode_kernel(
    q, k_cache, v_cache, o, lse_ptr, seqlens_ptr, pages_ptr, slopes_ptr, sinks_ptr, q_strides,
    k_strides, v_strides, o_strides, slope_strides, o_split_stride, num_heads_k, group, seqlen_q,
    num_new, capacity, max_pages, num_splits, smallest, scale, scale_log2, left, right, softcap,
    SPEC: tl.constexpr,
):  # fmt: skip
    """o and lse of one tile of queries over one part of a sequence's keys.

    ``seqlens_ptr [B]`` are the keys there were before ``num_new`` were appended.  With one split
    ``o [B, H, M, D_v]`` is the result; with more, ``o`` and ``lse`` have a leading dimension of
    splits, and a split that sees nothing writes lse = -inf alone.
    """
    BLOCK_M: tl.constexpr = SPEC.BLOCK_M
    WIDTHS: tl.constexpr = SPEC.WIDTHS
    HEAD_DIM: tl.constexpr = SPEC.HEAD_DIM
    HEAD_DIM_V: tl.constexpr = SPEC.HEAD_DIM_V
    num_parts = tl.cdiv(group * seqlen_q, BLOCK_M) * num_splits  # of one head's work
    batch = tl.program_id(0) // num_parts // num_heads_k
    head_k = tl.program_id(0) // num_parts % num_heads_k
    part = tl.program_id(0) % num_parts
    split = part % num_splits
    first_packed = part // num_splits * BLOCK_M
    packed = first_packed + tl.arange(0, BLOCK_M)
    rows = packed // group  # the queries of a tile, each once for each head of the group
    heads = head_k * group + packed % group
    is_row = rows < seqlen_q
    seqlen_k = tl.minimum(tl.load(seqlens_ptr + batch).to(tl.int32) + num_new, capacity)

    # [splits, B, H, M]
    num_heads = num_heads_k * group
    num_batches = tl.num_programs(0) // num_parts // num_heads_k
    lse_rows = (split.to(tl.int64) * num_batches + batch) * num_heads + heads
    lse_rows = lse_rows * seqlen_q + rows
    slope = softcap
    if SPEC.HAS_ALIBI:
        slopes_ptr += batch * slope_strides[0]
        slope = tl.load(slopes_ptr + heads * slope_strides[1], mask=is_row, other=0.0)[:, None]
    x = Scores(
        seqlen_q, seqlen_k, scale, scale_log2, left, right, softcap, slope, lse_ptr, 0, 0, lse_ptr,
        0, 0,
    )  # fmt: skip

    first_row = first_packed // group
    last_row = tl.minimum((first_packed + BLOCK_M - 1) // group, seqlen_q - 1)
    start, full_start, full_end, end = key_range(first_row, last_row, x, SPEC)
    start, end = split_range(start, end, split, num_splits, smallest, SPEC)
    if (start >= end) & (num_splits > 1):
        tl.store(lse_ptr + lse_rows, tl.full([BLOCK_M], -INF, tl.float32), mask=is_row)
        return
    full_start = tl.maximum(full_start, start)
    full_end = tl.minimum(full_end, end)

    q_i = ()
    for i in tl.static_range(len(WIDTHS)):
        offsets, mask = query_offsets(
            q_strides, batch, heads, rows, is_row, HEAD_DIM, i * tl.constexpr(WIDTHS[0]),
            tl.constexpr(WIDTHS[i]),
        )  # fmt: skip
        piece = tl.load(q + offsets, mask=mask, other=0.0)
        if INTERPRETED and piece.dtype == tl.bfloat16:
            piece = piece.to(tl.float32)
        q_i += (piece,)
    k_rows = cache_rows(
        k_cache, k_strides, batch, head_k, pages_ptr, max_pages, seqlen_k, HEAD_DIM, SPEC
    )
    v_rows = cache_rows(
        v_cache, v_strides, batch, head_k, pages_ptr, max_pages, seqlen_k, HEAD_DIM_V, SPEC
    )
    m_i, l_i, acc = attend_range(
        q_i, k_rows, v_rows, rows[:, None], start, full_start, full_end, end, x, SPEC
    )
    if SPEC.HAS_SINKS:
        sink = tl.load(sinks_ptr + heads, mask=is_row, other=0.0)
        m_i, l_i, acc = fold_sink(m_i, l_i, acc, sink, scale_log2)

    denominator = tl.where(l_i == 0.0, 1.0, l_i)
    lse_i = (m_i * scale_log2 + tl.math.log2(denominator)) * LN_2
    tl.store(lse_ptr + lse_rows, lse_i, mask=is_row)
    o += split * tl.cast(o_split_stride, tl.int64)
    for i in tl.static_range(len(acc)):
        offsets, mask = query_offsets(
            o_strides, batch, heads, rows, is_row, HEAD_DIM_V, i * acc[0].shape[1], acc[i].shape[1]
        )
        o_i = acc[i] * (1.0 / denominator)[:, None]
        tl.store(o + offsets, o_i.to(o.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_heads", "seqlen_q", "num_splits"])
def flash_attention_combine_kernel(
    o_parts, lse_parts_ptr, o, lse_ptr, sinks_ptr, o_strides, num_heads, seqlen_q, num_splits,
    SPLITS: tl.constexpr, SPEC: tl.constexpr,
):  # fmt: skip
    """Join the parts of one row: ``o = sum_s exp(lse_s - lse) o_s``; grid ``(B * H * M,)``.

    ``o_parts [splits, B * H * M, D_v]`` and ``lse_parts [splits, B * H * M]``, float32, contiguous.
    What no split wrote, lse = -inf, is not read.  SPLITS are worked on at a time.
    """
    BLOCK_DV: tl.constexpr = SPEC.BLOCK_DV
    num_rows = tl.num_programs(0).to(tl.int64)
    row = tl.program_id(0)
    head = row // seqlen_q % num_heads
    cols = tl.arange(0, BLOCK_DV)
    is_col = cols < SPEC.HEAD_DIM_V

    m = tl.full([], -INF, tl.float32)
    for first in range(0, num_splits, SPLITS):
        splits = first + tl.arange(0, SPLITS)
        lse_s = tl.load(
            lse_parts_ptr + splits * num_rows + row, mask=splits < num_splits, other=-INF
        )
        m = tl.maximum(m, tl.max(lse_s))
    if SPEC.HAS_SINKS:
        sink = tl.load(sinks_ptr + head)
        m = tl.maximum(m, sink)
    pivot = tl.where(m == -INF, 0.0, m)
    total = tl.full([], 0.0, tl.float32)
    if SPEC.HAS_SINKS:
        total += tl.math.exp2((sink - pivot) * LOG2_E)
    acc = tl.zeros([BLOCK_DV], tl.float32)
    for first in range(0, num_splits, SPLITS):
        splits = first + tl.arange(0, SPLITS)
        lse_s = tl.load(
            lse_parts_ptr + splits * num_rows + row, mask=splits < num_splits, other=-INF
        )
        weights = tl.math.exp2((lse_s - pivot) * LOG2_E)
        offsets = (splits * num_rows + row)[:, None] * SPEC.HEAD_DIM_V + cols[None, :]
        written = (lse_s != -INF)[:, None] & is_col[None, :]
        acc += tl.sum(
            weights[:, None] * tl.load(o_parts + offsets, mask=written, other=0.0), axis=0
        )
        total += tl.sum(weights)

    denominator = tl.where(total == 0.0, 1.0, total)
    lse = tl.where(total == 0.0, -INF, pivot + tl.math.log2(denominator) * LN_2)
    tl.store(lse_ptr + row, lse)
    o += (row // seqlen_q // num_heads) * tl.cast(o_strides[0], tl.int64)
    o += head * tl.cast(o_strides[1], tl.int64) + (row % seqlen_q) * tl.cast(o_strides[2], tl.int64)
    tl.store(o + cols * o_strides[3], (acc / denominator).to(o.dtype.element_ty), mask=is_col)

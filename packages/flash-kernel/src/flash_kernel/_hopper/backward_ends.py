"""The two small kernels around the backward: row statistics before it, dq out of its sums after it.

Both are bound by memory.  They are plain Triton, one program for each block of queries.
"""

import triton
import triton.language as tl

from flash_kernel._triton.primitives import INF, LOG2_E
from flash_kernel._triton.tiles import load_piece, rows_of, store_piece


@triton.jit(do_not_specialize=["num_heads", "seqlen_q", "padded_q", "num_blocks"])
def flash_attention_backward_start_kernel(
    o, do, lse_ptr, dlse_ptr, statistics_ptr, dq_sum_ptr, counters_ptr, portable_ptr, o_strides,
    do_strides, num_heads, seqlen_q, padded_q, num_blocks, head_dim, scale,
    HAS_DLSE: tl.constexpr, SPEC: tl.constexpr,
):  # fmt: skip
    """Write the statistics of each row, and clear what the backward adds to.

    statistics  float32 [B * H, blocks, 2, BLOCK_M]: -lse, and -delta = dlse - rowsum(do * o)
    dq_sum      float32 [B * H, blocks, SUMS, BLOCK_M * BLOCK_D]; left alone if SPEC.IS_ORDERED
    counters    int32 [1 + B * H * blocks * SUMS]: the next tile, and the turns of the blocks
    portable    float32 [B * H, 2, padded_q]: lse and delta as `_triton.row_statistics` has them,
                for the tiles that are done again; if SPEC.HIDES_PAIRS

    -lse is in units of log2 (it is added to scale_log2 * s), or divided by scale where it starts
    the accumulator of s.  Rows past the end, and rows that saw no key, get -inf: their p is 0, and
    no loop needs a mask for them.
    """
    BLOCK_M: tl.constexpr = SPEC.BLOCK_M
    BLOCK_D: tl.constexpr = SPEC.BLOCK_D
    SUMS: tl.constexpr = SPEC.SUMS
    block_row = tl.program_id(0).to(tl.int64)
    batch_head = (block_row // num_blocks).to(tl.int32)
    block = (block_row % num_blocks).to(tl.int32)
    batch = batch_head // num_heads
    head = batch_head % num_heads
    row = block * BLOCK_M
    rows = row + tl.arange(0, BLOCK_M)
    o_rows = rows_of(o, o_strides, batch, head, 0, seqlen_q, head_dim, SPEC)
    do_rows = rows_of(do, do_strides, batch, head, 0, seqlen_q, head_dim, SPEC)
    o_i = load_piece(o_rows, row, 0, BLOCK_D, BLOCK_M, SPEC)
    do_i = load_piece(do_rows, row, 0, BLOCK_D, BLOCK_M, SPEC)
    minus_delta = -tl.sum(o_i.to(tl.float32) * do_i.to(tl.float32), axis=1)
    at = batch_head.to(tl.int64) * seqlen_q + rows
    if HAS_DLSE:
        minus_delta += tl.load(dlse_ptr + at, mask=rows < seqlen_q, other=0.0)
    lse = tl.load(lse_ptr + at, mask=rows < seqlen_q, other=INF)
    lse = tl.where(lse == -INF, INF, lse)
    unit = -LOG2_E
    if SPEC.STATISTICS_FIRST:
        unit = -1.0 / scale
    statistics_ptr += block_row * (2 * BLOCK_M) + tl.arange(0, BLOCK_M)
    tl.store(statistics_ptr, lse * unit)
    tl.store(statistics_ptr + BLOCK_M, minus_delta)
    if SPEC.HIDES_PAIRS:
        portable_ptr += batch_head.to(tl.int64) * 2 * padded_q + rows
        tl.store(portable_ptr, lse)
        tl.store(portable_ptr + padded_q, -minus_delta)
        # the padding may end a block later
        later = rows + BLOCK_M
        is_padding = (later >= num_blocks * BLOCK_M) & (later < padded_q)
        tl.store(portable_ptr + BLOCK_M, tl.full([BLOCK_M], INF, tl.float32), mask=is_padding)
        tl.store(portable_ptr + padded_q + BLOCK_M, tl.zeros_like(lse), mask=is_padding)
    if SPEC.IS_ORDERED:
        for index in tl.static_range(SUMS):
            tl.store(counters_ptr + 1 + block_row * SUMS + index, 0)
    else:
        size: tl.constexpr = BLOCK_M * BLOCK_D
        tl.store(dq_sum_ptr + block_row * size + tl.arange(0, size), tl.zeros([size], tl.float32))
    if block_row == 0:
        tl.store(counters_ptr, 0)


@triton.jit(do_not_specialize=["num_heads", "seqlen_q", "num_blocks"])
def flash_attention_backward_end_kernel(
    dq, statistics_ptr, dq_sum_ptr, counters_ptr, marks_ptr, dq_strides, num_heads, seqlen_q,
    num_blocks, head_dim, scale, SPEC: tl.constexpr,
):  # fmt: skip
    """Write dq = scale * sum, bringing the sums' order of registers into rows and columns.

    Rows that saw no key have dq = 0; where no row of a block saw one, the sum was never written.
    Of two sums one may have no terms: its counter says so.  If SPEC.HIDES_PAIRS, mark each 64 rows
    whose dq is not finite, as what a hidden key holds may be why: ``marks`` are int32
    ``[B * H, cdiv(seqlen_q, 64)]``.
    """
    BLOCK_M: tl.constexpr = SPEC.BLOCK_M
    BLOCK_D: tl.constexpr = SPEC.BLOCK_D
    SUMS: tl.constexpr = SPEC.SUMS
    block_row = tl.program_id(0).to(tl.int64)
    batch_head = (block_row // num_blocks).to(tl.int32)
    block = (block_row % num_blocks).to(tl.int32)
    size: tl.constexpr = BLOCK_M * BLOCK_D
    dq_sum_ptr += block_row * (SUMS * size)
    total = tl.zeros([size], tl.float32)
    for index in tl.static_range(SUMS):
        dq_sum = tl.load(dq_sum_ptr + index * size + tl.arange(0, size))
        if SPEC.IS_ROTATED:
            terms = tl.load(counters_ptr + 1 + block_row * SUMS + index)
            dq_sum = tl.where(terms > 0, dq_sum, 0.0)
        total += dq_sum
    # `flat` in backward.py: column block, warp, row of 8, column pair, half of 16 rows, column
    total = tl.reshape(total, [BLOCK_M // 64, BLOCK_D // 8, 4, 8, 4, 2, 2])
    total = tl.reshape(tl.permute(total, [0, 2, 5, 3, 1, 4, 6]), [BLOCK_M, BLOCK_D])
    minus_lse = tl.load(statistics_ptr + block_row * (2 * BLOCK_M) + tl.arange(0, BLOCK_M))
    total = tl.where((tl.abs(minus_lse) == INF)[:, None], 0.0, total * scale)
    rows = rows_of(
        dq, dq_strides, batch_head // num_heads, batch_head % num_heads, 0, seqlen_q, head_dim, SPEC
    )
    if SPEC.HIDES_PAIRS:
        TILES: tl.constexpr = BLOCK_M // 64
        tiles = block * TILES + tl.arange(0, TILES)
        is_bad = tl.sum(tl.reshape(tl.sum(total, 1), [TILES, 64]), 1) * 0.0 != 0.0
        num_tiles = tl.cdiv(seqlen_q, 64)
        marks_ptr += batch_head.to(tl.int64) * num_tiles + tiles
        tl.store(marks_ptr, is_bad.to(tl.int32), mask=tiles < num_tiles)
    store_piece(rows, total, block * BLOCK_M, 0, SPEC)

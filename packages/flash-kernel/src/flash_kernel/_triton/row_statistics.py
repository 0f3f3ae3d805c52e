"""What the backward needs of each query row: lse, and delta = rowsum(do * o) - dlse."""

import triton
import triton.language as tl

from flash_kernel._triton.primitives import INF, head_and_tile
from flash_kernel._triton.tiles import load_piece, rows_of


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
    o_i = load_piece(o_rows, row, 0, BLOCK_DV, BLOCK_M, SPEC)
    do_i = load_piece(do_rows, row, 0, BLOCK_DV, BLOCK_M, SPEC)
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

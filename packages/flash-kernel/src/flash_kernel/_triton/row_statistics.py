"""What the backward needs of each query row: lse, and delta = rowsum(do * o) - dlse."""

import triton
import triton.language as tl

from flash_kernel._triton.config import STATISTICS_PADDING
from flash_kernel._triton.primitives import (
    INF,
    head_and_tile,
    sequence_and_tile,
    start_and_length,
)
from flash_kernel._triton.tiles import load_piece, rows_of

PADDING: tl.constexpr = tl.constexpr(STATISTICS_PADDING)


@triton.jit(do_not_specialize=["num_heads", "seqlen_q", "num_sequences"])
def flash_attention_row_statistics_kernel(
    o, do, lse_ptr, dlse_ptr, cu_seqlens_q_ptr, statistics_ptr, o_strides, do_strides, num_heads,
    seqlen_q, padded_q, num_sequences, HAS_DLSE: tl.constexpr, SPEC: tl.constexpr,
):  # fmt: skip
    """Write lse and delta = rowsum(do * o) - dlse as float32 ``[B, H, 2, padded_q]``.

    Rows past the end, and rows that saw no key (lse = -inf), get lse = +inf: their p is then 0, and
    the loops that read these rows need no mask for them.  Packed sequences are padded one by one,
    to the slots of `sequence_and_tile`.
    """
    BLOCK_M: tl.constexpr = SPEC.BLOCK_M
    BLOCK_DV: tl.constexpr = SPEC.BLOCK_DV
    HEAD_DIM_V: tl.constexpr = SPEC.HEAD_DIM_V
    batch_head, tile = head_and_tile(SPEC)
    batch = (batch_head // num_heads).to(tl.int32)
    head = (batch_head % num_heads).to(tl.int32)
    padded_row = tile * BLOCK_M
    row = padded_row
    q_start = tl.cast(0, tl.int32)
    statistics_ptr += batch_head * 2 * padded_q + padded_row + tl.arange(0, BLOCK_M)
    lse_head = batch_head * seqlen_q
    if SPEC.IS_PACKED:
        slot = padded_row // PADDING
        sequence, slot = sequence_and_tile(slot, cu_seqlens_q_ptr, num_sequences, PADDING)
        q_start, seqlen_q = start_and_length(cu_seqlens_q_ptr, sequence)
        row = slot * PADDING + padded_row % PADDING

    rows = row + tl.arange(0, BLOCK_M)
    o_rows = rows_of(o, o_strides, batch, head, q_start, seqlen_q, HEAD_DIM_V, SPEC)
    do_rows = rows_of(do, do_strides, batch, head, q_start, seqlen_q, HEAD_DIM_V, SPEC)
    o_i = load_piece(o_rows, row, 0, BLOCK_DV, BLOCK_M, SPEC)
    do_i = load_piece(do_rows, row, 0, BLOCK_DV, BLOCK_M, SPEC)
    delta = tl.sum(o_i.to(tl.float32) * do_i.to(tl.float32), axis=1)
    own_rows = lse_head + q_start + rows
    if HAS_DLSE:
        delta -= tl.load(dlse_ptr + own_rows, mask=rows < seqlen_q, other=0.0)
    lse = tl.load(lse_ptr + own_rows, mask=rows < seqlen_q, other=INF)
    lse = tl.where(lse == -INF, INF, lse)
    tl.store(statistics_ptr, lse)
    tl.store(statistics_ptr + padded_q, delta)


@triton.jit
def statistics_of(statistics_ptr, batch_head, padded_q, sequence, q_start, SPEC: tl.constexpr):
    """Return where the statistics of a sequence's first row are."""
    statistics_ptr += batch_head * 2 * padded_q
    if SPEC.IS_PACKED:
        statistics_ptr += (q_start // PADDING + sequence) * PADDING
    return statistics_ptr


@triton.jit
def load_row_statistics(statistics_ptr, row, padded_q, SPEC: tl.constexpr):
    """Return lse and delta of one query tile, both ``[BLOCK_M]``."""
    rows = row + tl.arange(0, SPEC.BLOCK_M)
    return tl.load(statistics_ptr + rows), tl.load(statistics_ptr + padded_q + rows)

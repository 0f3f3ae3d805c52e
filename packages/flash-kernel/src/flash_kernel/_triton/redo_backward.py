"""Do again, exactly, the tiles of the gradients that another kernel could not finish.

A kernel without a second pass of its own marks the tiles of its result in which not all is finite:
there 0 * NaN may have carried what a row does not see.
"""

import triton
import triton.language as tl

from flash_kernel._triton.backward import dk_dv_tile, dq_tile
from flash_kernel._triton.primitives import VARYING


@triton.jit
def next_marked(tile, marks, tiles):
    """Return the first tile from this one on, in steps of the grid, that has a mark.

    The grid is ``(heads, any number)``.
    """
    while (tile < tiles) and (tl.load(marks + tile, mask=tile < tiles, other=1) == 0):
        tile += tl.num_programs(1)
    return tile


@triton.jit(do_not_specialize=["num_heads_k", *VARYING])
def flash_attention_dk_dv_redo_kernel(
    q, k, v, do, dk, dv, statistics_ptr, slopes_ptr, bias_ptr, mask_ptr, cu_seqlens_q_ptr,
    cu_seqlens_k_ptr, marks_ptr, q_strides, k_strides, v_strides, do_strides, dk_strides,
    dv_strides, slope_strides, bias_strides, mask_strides, num_heads_k, group, seqlen_q, padded_q,
    seqlen_k, num_sequences, scale, scale_log2, left, right, softcap, SPEC: tl.constexpr,
):  # fmt: skip
    """Compute dk and dv as above, but only of key tiles that are marked; see `next_marked`."""
    batch_head = tl.program_id(0).to(tl.int64)
    tiles = tl.cdiv(seqlen_k, SPEC.BLOCK_N)
    tile = next_marked(tl.program_id(1), marks_ptr + batch_head * tiles, tiles)
    while tile < tiles:
        dk_dv_tile(
            batch_head, tile, q, k, v, do, dk, dv, statistics_ptr, slopes_ptr, bias_ptr, mask_ptr,
            cu_seqlens_q_ptr, cu_seqlens_k_ptr, q_strides, k_strides, v_strides, do_strides,
            dk_strides, dv_strides, slope_strides, bias_strides, mask_strides, num_heads_k, group,
            seqlen_q, padded_q, seqlen_k, num_sequences, scale, scale_log2, left, right, softcap,
            SPEC,
        )  # fmt: skip
        tile = next_marked(tile + tl.num_programs(1), marks_ptr + batch_head * tiles, tiles)


@triton.jit(do_not_specialize=["num_heads", *VARYING])
def flash_attention_dq_redo_kernel(
    q, k, v, do, dq, statistics_ptr, slopes_ptr, bias_ptr, mask_ptr, cu_seqlens_q_ptr,
    cu_seqlens_k_ptr, marks_ptr, q_strides, k_strides, v_strides, do_strides, dq_strides,
    slope_strides, bias_strides, mask_strides, num_heads, group, seqlen_q, padded_q, seqlen_k,
    num_sequences, scale, scale_log2, left, right, softcap, SPEC: tl.constexpr,
):  # fmt: skip
    """Compute dq as above, but only of query tiles that are marked; see `next_marked`."""
    batch_head = tl.program_id(0).to(tl.int64)
    tiles = tl.cdiv(seqlen_q, SPEC.BLOCK_M)
    tile = next_marked(tl.program_id(1), marks_ptr + batch_head * tiles, tiles)
    while tile < tiles:
        dq_tile(
            batch_head, tile, q, k, v, do, dq, statistics_ptr, slopes_ptr, bias_ptr, mask_ptr,
            cu_seqlens_q_ptr, cu_seqlens_k_ptr, q_strides, k_strides, v_strides, do_strides,
            dq_strides, slope_strides, bias_strides, mask_strides, num_heads, group, seqlen_q,
            padded_q, seqlen_k, num_sequences, scale, scale_log2, left, right, softcap, SPEC,
        )  # fmt: skip
        tile = next_marked(tile + tl.num_programs(1), marks_ptr + batch_head * tiles, tiles)

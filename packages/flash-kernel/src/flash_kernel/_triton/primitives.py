"""Device functions the kernels are composed of: access to tiles, visibility, the softmax step.

Shapes are written ``[BLOCK_M, BLOCK_N]``: M counts query rows, N key rows, and D is the head
dimension padded to BLOCK_D.  Running state is float32.

A member of SPEC reaches another device function by way of a local ``tl.constexpr``: Triton 3.6
would hand over a bare int.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl
from triton import knobs

LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)
LN_2: tl.constexpr = tl.constexpr(0.6931471805599453)
INF: tl.constexpr = tl.constexpr(float("inf"))

# Triton's interpreter multiplies bfloat16 tiles as if their bits were integers, so while it
# interprets, bfloat16 tiles are widened as they are loaded
INTERPRETED: tl.constexpr = tl.constexpr(bool(knobs.runtime.interpret))


class Rows(NamedTuple):
    """The rows of one head of a tensor: what `load_rows` reads and `store_rows` writes."""

    source: Any  # a descriptor over [B, H, rows, D], or a pointer to the head's first element
    batch: Any
    head: Any
    num_rows: Any
    stride_row: Any
    stride_col: Any


@triton.jit
def rows_of(tensor, strides, batch, head, num_rows, SPEC: tl.constexpr):
    """Return the `Rows` of one head; ``tensor`` is a pointer or a descriptor, as SPEC says."""
    if not SPEC.USE_DESCRIPTORS:
        # 64 bits: a tensor, and one head of a strided view, may span more than 2^31 elements
        tensor += batch * tl.cast(strides[0], tl.int64) + head * tl.cast(strides[1], tl.int64)
    stride_row = tl.cast(strides[2], tl.int64)
    stride_col = tl.cast(strides[3], tl.int64)
    return Rows(tensor, batch, head, num_rows, stride_row, stride_col)


@triton.jit
def tile_offsets(x, row, ROWS: tl.constexpr, SPEC: tl.constexpr):
    """Offsets and in-bounds mask, both ``[ROWS, BLOCK_D]``, of the tile that starts at ``row``."""
    rows = row + tl.arange(0, ROWS)
    cols = tl.arange(0, SPEC.BLOCK_D)
    offsets = rows.to(tl.int64)[:, None] * x.stride_row + cols[None, :] * x.stride_col
    mask = (rows < x.num_rows)[:, None] & (cols < SPEC.HEAD_DIM)[None, :]
    return offsets, mask


@triton.jit
def load_rows(x, row, ROWS: tl.constexpr, SPEC: tl.constexpr):
    """Rows ``row .. row + ROWS`` of `Rows` x as ``[ROWS, BLOCK_D]``, zero outside the tensor."""
    BLOCK_D: tl.constexpr = SPEC.BLOCK_D
    if SPEC.USE_DESCRIPTORS:
        tile = x.source.load([x.batch, x.head, row, 0]).reshape(ROWS, BLOCK_D)
    else:
        offsets, mask = tile_offsets(x, row, ROWS, SPEC)
        tile = tl.load(x.source + offsets, mask=mask, other=0.0)
    if INTERPRETED and tile.dtype == tl.bfloat16:
        tile = tile.to(tl.float32)
    return tile


@triton.jit
def store_rows(x, tile, row, ROWS: tl.constexpr, SPEC: tl.constexpr):
    """Write ``tile [ROWS, BLOCK_D]`` where `load_rows` would read it, clipped to the tensor."""
    BLOCK_D: tl.constexpr = SPEC.BLOCK_D
    if SPEC.USE_DESCRIPTORS:
        tile = tile.to(x.source.dtype).reshape(1, 1, ROWS, BLOCK_D)
        x.source.store([x.batch, x.head, row, 0], tile)
    else:
        offsets, mask = tile_offsets(x, row, ROWS, SPEC)
        tl.store(x.source + offsets, tile.to(x.source.dtype.element_ty), mask=mask)


@triton.jit
def head_and_tile():
    """Number the programs of the grid ``(heads, tiles)`` so that one head's tiles are neighbours.

    Programs start in the order of axis 0.  Numbered tile first, those that run together read the
    same keys and values and find them in the L2 cache.
    """
    num_tiles = tl.num_programs(1)
    program = tl.program_id(1).to(tl.int64) * tl.num_programs(0) + tl.program_id(0)
    return program // num_tiles, (program % num_tiles).to(tl.int32)


@triton.jit
def visible_keys(rows, cols, seqlen_q, seqlen_k, SPEC: tl.constexpr):
    """The one mask: True where query ``rows`` may attend to key ``cols`` (broadcast together).

    Causal is aligned to the bottom right: row i sees keys ``j <= i + seqlen_k - seqlen_q``.
    """
    visible = cols < seqlen_k
    if SPEC.IS_CAUSAL:
        visible = visible & (cols <= rows + (seqlen_k - seqlen_q))
    return visible


@triton.jit
def key_range(row, seqlen_q, seqlen_k, SPEC: tl.constexpr):
    """Keys that the query tile at ``row`` visits: ``[0, full)`` unmasked, ``[full, end)`` masked.

    Where ``seqlen_q == seqlen_k`` that is ``cdiv((tile + 1) * BLOCK_M, BLOCK_N)`` key tiles.
    """
    full = seqlen_k
    end = seqlen_k
    if SPEC.IS_CAUSAL:
        seen_by_first_row = row + 1 + (seqlen_k - seqlen_q)
        full = tl.maximum(tl.minimum(seqlen_k, seen_by_first_row), 0)
        end = tl.maximum(tl.minimum(seqlen_k, seen_by_first_row + SPEC.BLOCK_M - 1), 0)
    return full // SPEC.BLOCK_N * SPEC.BLOCK_N, end


@triton.jit
def query_range(col, seqlen_q, seqlen_k, SPEC: tl.constexpr):
    """Query rows that see the key tile at ``col``: ``[start, full)`` masked, then unmasked."""
    start = 0
    full = 0
    if SPEC.IS_CAUSAL:
        first_key_seen_from = col - (seqlen_k - seqlen_q)
        all_keys_seen_from = tl.maximum(first_key_seen_from + SPEC.BLOCK_N - 1, 0)
        start = tl.maximum(first_key_seen_from, 0) // SPEC.BLOCK_M * SPEC.BLOCK_M
        full = (all_keys_seen_from + SPEC.BLOCK_M - 1) // SPEC.BLOCK_M * SPEC.BLOCK_M
        full = tl.minimum(full, seqlen_q)
    return start, full


@triton.jit
def online_softmax_step(m_i, l_i, acc, s_ij, v_j, scale_log2, SPEC: tl.constexpr):
    """Fold one score tile into the running softmax.

        m' = max(m, rowmax(S))      alpha = exp(m - m')      P = exp(S - m')
        l' = alpha * l + rowsum(P)  acc' = alpha * acc + P V

    Invariant: after every step, acc / l is the attention output over the keys seen so far.
    ``s_ij`` is unscaled and ``scale_log2 > 0`` carries log2(e), so that a score costs one fused
    multiply-add and one exp2.
    Shapes: m_i, l_i [BLOCK_M]; acc [BLOCK_M, D]; s_ij [BLOCK_M, BLOCK_N]; v_j [BLOCK_N, D].
    """
    m_new = tl.maximum(m_i, tl.max(s_ij, axis=1))
    # a row that has seen no key keeps m = -inf; pivot on 0 so that -inf - (-inf) never occurs
    pivot = tl.where(m_new == -INF, 0.0, m_new * scale_log2)
    p_ij = tl.math.exp2(s_ij * scale_log2 - pivot[:, None])
    alpha = tl.math.exp2(m_i * scale_log2 - pivot)
    l_new = alpha * l_i + tl.sum(p_ij, axis=1)
    acc = tl.dot(p_ij.to(v_j.dtype), v_j, acc * alpha[:, None], input_precision=SPEC.PRECISION)
    return m_new, l_new, acc

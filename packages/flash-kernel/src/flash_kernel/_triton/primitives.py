"""Device functions the kernels are composed of: scores, visibility, the softmax step.

Shapes are written ``[BLOCK_M, BLOCK_N]``: M counts query rows, N key rows, and D is the head
dimension padded to BLOCK_D.  Running state is float32.

A member of SPEC reaches another device function by way of a local ``tl.constexpr``: Triton 3.6
would hand over a bare int.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from flash_kernel._triton.tiles import (
    add_weighted_rows,
    scale_rows,
)

LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)
LN_2: tl.constexpr = tl.constexpr(0.6931471805599453)
INF: tl.constexpr = tl.constexpr(float("inf"))

# arguments of the kernels that change from call to call: Triton would compile anew for a 1, or for
# a multiple of 16
VARYING = ("group", "seqlen_q", "seqlen_k", "num_sequences", "left", "right")


@triton.jit
def head_and_tile(SPEC: tl.constexpr):
    """Number the programs of the grid ``(heads, tiles)`` so that one head's tiles are neighbours.

    Programs start in the order of axis 0.  Numbered tile first, those that run together read the
    same keys and values and find them in the L2 cache.  Packed sequences have few heads and any
    number of tiles, so that their grid is ``(tiles, heads)``, in this order as it is.
    """
    if SPEC.IS_PACKED:
        head = tl.program_id(1).to(tl.int64)
        tile = tl.program_id(0)
    else:
        num_tiles = tl.num_programs(1)
        program = tl.program_id(1).to(tl.int64) * tl.num_programs(0) + tl.program_id(0)
        head = program // num_tiles
        tile = (program % num_tiles).to(tl.int32)
    return head, tile


@triton.jit
def last_tile_first(tile, SPEC: tl.constexpr):
    """Number the tiles backwards: where a mask hides what comes after, the last take longest."""
    return tl.num_programs(0 if SPEC.IS_PACKED else 1) - 1 - tile


@triton.jit
def sequence_and_tile(slot, cu_seqlens, num_sequences, BLOCK: tl.constexpr):
    """Return the packed sequence that a slot belongs to, and which tile of it is meant.

    Sequence b owns the slots from ``cu_seqlens[b] // BLOCK + b`` on: room for all its tiles, and at
    most for one too many, which its caller finds to start past the end.  So a slot's owner is the
    last sequence that starts no later, and no number of tiles need be summed up.
    """
    sequence = -1
    for first in range(0, num_sequences, 128):
        b = first + tl.arange(0, 128)
        starts = tl.load(cu_seqlens + b, mask=b < num_sequences, other=0x7FFFFFFF).to(tl.int32)
        sequence += tl.sum((starts // BLOCK + b <= slot).to(tl.int32))
    first_slot = tl.load(cu_seqlens + sequence).to(tl.int32) // BLOCK + sequence
    return sequence, slot - first_slot


@triton.jit
def slot_of_row(row, cu_seqlens, num_sequences, BLOCK: tl.constexpr):
    """Return the slot that a row of the packed tensor belongs to; see `sequence_and_tile`."""
    sequence = -1
    for first in range(0, num_sequences, 128):
        b = first + tl.arange(0, 128)
        starts = tl.load(cu_seqlens + b, mask=b < num_sequences, other=0x7FFFFFFF).to(tl.int32)
        sequence += tl.sum((starts <= row).to(tl.int32))
    start = tl.load(cu_seqlens + sequence).to(tl.int32)
    return start // BLOCK + sequence + (row - start) // BLOCK


@triton.jit
def start_and_length(cu_seqlens, sequence):
    """Return the first row of a packed sequence, and how many there are."""
    start = tl.load(cu_seqlens + sequence).to(tl.int32)
    return start, tl.load(cu_seqlens + sequence + 1).to(tl.int32) - start


class Sequence(NamedTuple):
    """The sequence that a program works on."""

    index: Any
    q_start: Any  # its first query row, where sequences are packed; 0 elsewhere
    seqlen_q: Any
    k_start: Any
    seqlen_k: Any


@triton.jit
def find_sequence(
    tile, batch, seqlen_q, seqlen_k, cu_seqlens_q, cu_seqlens_k, num_sequences,
    OF_KEYS: tl.constexpr, SPEC: tl.constexpr,
):  # fmt: skip
    """Return the `Sequence` of a program, and which tile of its queries, or keys, is meant.

    Where sequences are packed, the tile may start past the sequence's end.
    """
    if SPEC.IS_PACKED:
        BLOCK: tl.constexpr = SPEC.BLOCK_N if OF_KEYS else SPEC.BLOCK_M
        cu_seqlens = cu_seqlens_k if OF_KEYS else cu_seqlens_q
        sequence, tile = sequence_and_tile(tile, cu_seqlens, num_sequences, BLOCK)
        q_start, seqlen_q = start_and_length(cu_seqlens_q, sequence)
        k_start, seqlen_k = start_and_length(cu_seqlens_k, sequence)
        found = Sequence(sequence, q_start, seqlen_q, k_start, seqlen_k)
    else:
        found = Sequence(batch, tl.cast(0, tl.int32), seqlen_q, tl.cast(0, tl.int32), seqlen_k)
    return found, tile


class Scores(NamedTuple):
    """How the products of one head's queries and keys become scores, and which of them count."""

    seqlen_q: Any
    seqlen_k: Any
    scale: Any
    scale_log2: Any  # scale * log2(e); where SPEC has the scores PRESCALED, plain log2(e)
    left: Any  # keys seen before a row's own position
    right: Any  # keys seen after it, 0 when causal
    softcap: Any
    slope: Any  # ALiBi
    bias: Any  # pointers to the head's first entry
    bias_row: Any
    bias_col: Any
    mask: Any
    mask_row: Any
    mask_col: Any


@triton.jit
def scores_of(
    seqlen_q, seqlen_k, scale, scale_log2, left, right, softcap, slopes, bias, mask, slope_strides,
    bias_strides, mask_strides, batch, head, SPEC: tl.constexpr,
):  # fmt: skip
    """Return the `Scores` of one head; what SPEC says is absent is never read."""
    slope = softcap
    if SPEC.HAS_ALIBI:
        slope = tl.load(slopes + batch * slope_strides[0] + head * slope_strides[1])
    bias += batch * tl.cast(bias_strides[0], tl.int64) + head * tl.cast(bias_strides[1], tl.int64)
    mask += batch * tl.cast(mask_strides[0], tl.int64) + head * tl.cast(mask_strides[1], tl.int64)
    return Scores(
        seqlen_q, seqlen_k, scale, scale_log2, left, right, softcap, slope,
        bias, tl.cast(bias_strides[2], tl.int64), tl.cast(bias_strides[3], tl.int64),
        mask, tl.cast(mask_strides[2], tl.int64), tl.cast(mask_strides[3], tl.int64),
    )  # fmt: skip


@triton.jit
def tanh(x):
    """tanh to float32 precision; near 0, where the closed form cancels, by its series."""
    x2 = x * x
    series = x * (1 + x2 * (-1 / 3 + x2 * (2 / 15 + x2 * (-17 / 315 + x2 * (62 / 2835)))))
    closed = 1 - 2 / (1 + tl.exp(2.0 * x))
    return tl.where(tl.abs(x) < 0.25, series, closed)


@triton.jit
def cap_scores(s, x, SPEC: tl.constexpr):
    """Scale the scores where SPEC says so, and cap them softly: ``softcap * tanh(s / softcap)``."""
    if SPEC.PRESCALED:
        s = s * x.scale
    if SPEC.HAS_SOFTCAP:
        s = x.softcap * tanh(s / x.softcap)
    return s


@triton.jit
def bias_scores(s, rows, cols, x, SPEC: tl.constexpr):
    """Add ALiBi, ``-slope * |i + seqlen_k - seqlen_q - j|``, and the bias of each pair."""
    if SPEC.HAS_ALIBI:
        distance = tl.abs(rows + (x.seqlen_k - x.seqlen_q) - cols)
        s = s - x.slope * distance.to(tl.float32)
    if SPEC.HAS_BIAS:
        bias = load_bias(rows, cols, x)
        s = tl.where(bias == -INF, -INF, s + bias)  # -inf hides a score, also if that is NaN
    return s


@triton.jit
def load_bias(rows, cols, x):
    """Bias of each pair in float32, 0 past the ends."""
    offsets = rows.to(tl.int64) * x.bias_row + cols.to(tl.int64) * x.bias_col
    inside = (rows < x.seqlen_q) & (cols < x.seqlen_k)
    return tl.load(x.bias + offsets, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def visible_keys(rows, cols, x, SPEC: tl.constexpr):
    """The one mask: True where query ``rows`` may attend to key ``cols`` (broadcast together).

    Windows are aligned to the bottom right: row i stands at ``i + x.seqlen_k - seqlen_q`` and sees
    the keys from ``left`` before to ``right`` after that position.
    """
    visible = cols < x.seqlen_k
    position = rows + (x.seqlen_k - x.seqlen_q)
    if SPEC.HAS_RIGHT:
        visible = visible & (cols <= position + x.right)
    if SPEC.HAS_LEFT:
        visible = visible & (cols >= position - x.left)
    if SPEC.HAS_MASK:
        offsets = rows.to(tl.int64) * x.mask_row + cols.to(tl.int64) * x.mask_col
        inside = (rows < x.seqlen_q) & (cols < x.seqlen_k)
        visible = visible & (tl.load(x.mask + offsets, mask=inside, other=0) != 0)
    return visible


@triton.jit
def key_range(first_row, last_row, x, SPEC: tl.constexpr):
    """Keys that a tile of query rows visits: ``start, full_start, full_end, end``.

    Tiles in ``[full_start, full_end)`` are seen whole by every row; those before and after need the
    mask.  When causal with ``seqlen_q == seqlen_k``, the loop ends after
    ``cdiv((tile + 1) * BLOCK_M, BLOCK_N)`` key tiles.
    """
    first = first_row + (x.seqlen_k - x.seqlen_q)  # their positions among the keys
    last = last_row + (x.seqlen_k - x.seqlen_q)
    start = 0
    full_start = 0
    full_end = x.seqlen_k
    end = x.seqlen_k
    if SPEC.HAS_RIGHT:
        full_end = tl.maximum(tl.minimum(x.seqlen_k, first + x.right + 1), 0)
        end = tl.maximum(tl.minimum(x.seqlen_k, last + x.right + 1), 0)
    if SPEC.HAS_LEFT:
        start = tl.maximum(first - x.left, 0) // SPEC.BLOCK_N * SPEC.BLOCK_N
        full_start = tl.cdiv(tl.maximum(last - x.left, 0), SPEC.BLOCK_N) * SPEC.BLOCK_N
    full_end = full_end // SPEC.BLOCK_N * SPEC.BLOCK_N
    if SPEC.HAS_MASK:
        full_start = start
        full_end = start
    return start, full_start, full_end, end


@triton.jit
def query_range(col, x, SPEC: tl.constexpr):
    """Query rows that see the key tile at ``col``; the four bounds are those of `key_range`.

    Rows past the end have p = 0, so that the last tile of rows needs no mask.
    """
    first = col - (x.seqlen_k - x.seqlen_q)  # the row that stands at the tile's first key
    last = first + SPEC.BLOCK_N - 1
    start = 0
    full_start = 0
    full_end = x.seqlen_q
    end = x.seqlen_q
    if SPEC.HAS_RIGHT:
        start = tl.maximum(first - x.right, 0) // SPEC.BLOCK_M * SPEC.BLOCK_M
        full_start = tl.cdiv(tl.maximum(last - x.right, 0), SPEC.BLOCK_M) * SPEC.BLOCK_M
    if SPEC.HAS_LEFT:
        full_end = tl.maximum(tl.minimum(x.seqlen_q, first + x.left + 1), 0)
        full_end = full_end // SPEC.BLOCK_M * SPEC.BLOCK_M
        end = tl.maximum(tl.minimum(x.seqlen_q, last + x.left + 1), 0)
    if SPEC.HAS_MASK:
        full_start = start
        full_end = start
    return start, full_start, full_end, end


@triton.jit
def softmax_weights(m_i, l_i, s_ij, scale_log2):
    """Return the new m and l of a score tile, its P, and alpha: see `online_softmax_step`.

    ``s_ij`` is unscaled and ``scale_log2 > 0`` carries log2(e), so that a score costs one fused
    multiply-add and one exp2.
    """
    m_new = tl.maximum(m_i, tl.max(s_ij, axis=1))
    # a row that has seen no key keeps m = -inf; pivot on 0 so that -inf - (-inf) never occurs
    pivot = tl.where(m_new == -INF, 0.0, m_new)
    p_ij = tl.math.exp2(s_ij * scale_log2 - (pivot * scale_log2)[:, None])
    # the difference first, so that alpha is 1 while the maximum stays: scaled first, its exponent
    # would be the rounding that a multiply-add lays bare, and add up over thousands of tiles
    alpha = tl.math.exp2((m_i - pivot) * scale_log2)
    return m_new, alpha * l_i + tl.sum(p_ij, axis=1), p_ij, alpha


@triton.jit
def online_softmax_step(m_i, l_i, acc, s_ij, v_j, scale_log2, SPEC: tl.constexpr):
    """Fold one score tile into the running softmax.

        m' = max(m, rowmax(S))      alpha = exp(m - m')      P = exp(S - m')
        l' = alpha * l + rowsum(P)  acc' = alpha * acc + P V

    Invariant: after every step, acc / l is the attention output over the keys seen so far.
    Shapes: m_i, l_i [BLOCK_M]; s_ij [BLOCK_M, BLOCK_N]; acc and v_j are tiles of BLOCK_M and
    BLOCK_N rows.
    """
    m_i, l_i, p_ij, alpha = softmax_weights(m_i, l_i, s_ij, scale_log2)
    acc = add_weighted_rows(scale_rows(acc, alpha[:, None]), p_ij, v_j, SPEC)
    return m_i, l_i, acc

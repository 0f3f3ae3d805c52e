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

from flash_kernel._triton.config import PACKED_ROWS

LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)
LN_2: tl.constexpr = tl.constexpr(0.6931471805599453)
INF: tl.constexpr = tl.constexpr(float("inf"))

PRETENDED_ROWS: tl.constexpr = tl.constexpr(PACKED_ROWS)

# Triton's interpreter multiplies bfloat16 tiles as if their bits were integers, so while it
# interprets, bfloat16 tiles are widened as they are loaded
INTERPRETED: tl.constexpr = tl.constexpr(bool(knobs.runtime.interpret))


class Rows(NamedTuple):
    """The rows of one head of a tensor: what `load_rows` reads and `store_rows` writes."""

    source: Any  # a descriptor over [B, H, rows, D], or a pointer to the first row's first element
    batch: Any
    head: Any
    start: Any  # the first row, where sequences are packed; 0 elsewhere
    num_rows: Any
    head_dim: Any
    stride_row: Any
    stride_col: Any
    pages: Any  # pointer to the numbers of the pages that hold the rows, where SPEC has pages
    stride_page: Any


@triton.jit
def rows_of(tensor, strides, batch, head, start, num_rows, head_dim, SPEC: tl.constexpr):
    """Return the `Rows` of one head; ``tensor`` is a pointer or a descriptor, as SPEC says."""
    stride_row = tl.cast(strides[2], tl.int64)
    stride_col = tl.cast(strides[3], tl.int64)
    if not SPEC.USE_DESCRIPTORS:
        # 64 bits: a tensor, and one head of a strided view, may span more than 2^31 elements
        tensor += batch * tl.cast(strides[0], tl.int64) + head * tl.cast(strides[1], tl.int64)
        tensor += start * stride_row
    head_dim = tl.cast(head_dim, tl.int32)
    # what is not in pages never looks at the last two
    return Rows(
        tensor, batch, head, start, num_rows, head_dim, stride_row, stride_col, tensor, stride_row
    )


@triton.jit
def in_pages(x, pages, stride_page):
    """Return `Rows` x as rows of pages, whose numbers lie at the pointer ``pages`` in order."""
    return Rows(
        x.source, x.batch, x.head, x.start, x.num_rows, x.head_dim, x.stride_row, x.stride_col,
        pages, tl.cast(stride_page, tl.int64),
    )  # fmt: skip


@triton.jit
def tile_offsets(x, row, ROWS: tl.constexpr, BLOCK_D: tl.constexpr, SPEC: tl.constexpr):
    """Offsets and in-bounds mask, both ``[ROWS, BLOCK_D]``, of the tile that starts at ``row``."""
    rows = row + tl.arange(0, ROWS)
    cols = tl.arange(0, BLOCK_D)
    inside = rows < x.num_rows
    if SPEC.PAGE_SIZE > 0:
        pages = tl.load(x.pages + rows // SPEC.PAGE_SIZE, mask=inside, other=0).to(tl.int64)
        row_offsets = pages * x.stride_page + (rows % SPEC.PAGE_SIZE) * x.stride_row
    else:
        row_offsets = rows.to(tl.int64) * x.stride_row
    offsets = row_offsets[:, None] + cols[None, :] * x.stride_col
    return offsets, inside[:, None] & (cols < x.head_dim)[None, :]


@triton.jit
def coordinates(x, row, SPEC: tl.constexpr):
    """Where a descriptor finds the tile of `Rows` x that starts at ``row``."""
    if SPEC.IS_PACKED:
        # the sequence's last row is the descriptor's last, so that both end at once
        in_last = PRETENDED_ROWS - x.num_rows + row
        at = (PRETENDED_ROWS, x.start + x.num_rows, x.head, in_last, 0)
    else:
        at = (x.batch, x.head, row, 0)
    return at


@triton.jit
def load_rows(x, row, ROWS: tl.constexpr, BLOCK_D: tl.constexpr, SPEC: tl.constexpr):
    """Rows ``row .. row + ROWS`` of `Rows` x as ``[ROWS, BLOCK_D]``, zero outside the tensor."""
    if SPEC.USE_DESCRIPTORS:
        tile = x.source.load(coordinates(x, row, SPEC)).reshape(ROWS, BLOCK_D)
    else:
        offsets, mask = tile_offsets(x, row, ROWS, BLOCK_D, SPEC)
        tile = tl.load(x.source + offsets, mask=mask, other=0.0)
    if INTERPRETED and tile.dtype == tl.bfloat16:
        tile = tile.to(tl.float32)
    return tile


@triton.jit
def store_rows(
    x, tile, row, ROWS: tl.constexpr, BLOCK_D: tl.constexpr, SPEC: tl.constexpr
):  # fmt: skip
    """Write ``tile [ROWS, BLOCK_D]`` where `load_rows` would read it, clipped to the tensor."""
    if SPEC.USE_DESCRIPTORS:
        tile = tile.to(x.source.dtype).reshape(x.source.block_shape)
        x.source.store(coordinates(x, row, SPEC), tile)
    else:
        offsets, mask = tile_offsets(x, row, ROWS, BLOCK_D, SPEC)
        tl.store(x.source + offsets, tile.to(x.source.dtype.element_ty), mask=mask)


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


class Modifiers(NamedTuple):
    """What is done to the scores of one head between the product and the softmax."""

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
def modifiers_of(
    left, right, softcap, slopes, bias, mask, slope_strides, bias_strides, mask_strides, batch,
    head, SPEC: tl.constexpr,
):  # fmt: skip
    """Return the `Modifiers` of one head; what SPEC says is absent is never read."""
    slope = softcap
    if SPEC.HAS_ALIBI:
        slope = tl.load(slopes + batch * slope_strides[0] + head * slope_strides[1])
    bias += batch * tl.cast(bias_strides[0], tl.int64) + head * tl.cast(bias_strides[1], tl.int64)
    mask += batch * tl.cast(mask_strides[0], tl.int64) + head * tl.cast(mask_strides[1], tl.int64)
    return Modifiers(
        left, right, softcap, slope,
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
def cap_scores(s, scale, x, SPEC: tl.constexpr):
    """Scale the scores where SPEC says so, and cap them softly: ``softcap * tanh(s / softcap)``."""
    if SPEC.PRESCALED:
        s = s * scale
    if SPEC.HAS_SOFTCAP:
        s = x.softcap * tanh(s / x.softcap)
    return s


@triton.jit
def bias_scores(s, rows, cols, seqlen_q, seqlen_k, x, SPEC: tl.constexpr):
    """Add ALiBi, ``-slope * |i + seqlen_k - seqlen_q - j|``, and the bias of each pair."""
    if SPEC.HAS_ALIBI:
        distance = tl.abs(rows + (seqlen_k - seqlen_q) - cols)
        s = s - x.slope * distance.to(tl.float32)
    if SPEC.HAS_BIAS:
        offsets = rows.to(tl.int64) * x.bias_row + cols.to(tl.int64) * x.bias_col
        inside = (rows < seqlen_q) & (cols < seqlen_k)
        s = s + tl.load(x.bias + offsets, mask=inside, other=0.0).to(tl.float32)
    return s


@triton.jit
def visible_keys(rows, cols, seqlen_q, seqlen_k, x, SPEC: tl.constexpr):
    """The one mask: True where query ``rows`` may attend to key ``cols`` (broadcast together).

    Windows are aligned to the bottom right: row i stands at ``i + seqlen_k - seqlen_q`` and sees
    the keys from ``left`` before to ``right`` after that position.
    """
    visible = cols < seqlen_k
    position = rows + (seqlen_k - seqlen_q)
    if SPEC.HAS_RIGHT:
        visible = visible & (cols <= position + x.right)
    if SPEC.HAS_LEFT:
        visible = visible & (cols >= position - x.left)
    if SPEC.HAS_MASK:
        offsets = rows.to(tl.int64) * x.mask_row + cols.to(tl.int64) * x.mask_col
        inside = (rows < seqlen_q) & (cols < seqlen_k)
        visible = visible & (tl.load(x.mask + offsets, mask=inside, other=0) != 0)
    return visible


@triton.jit
def key_range(first_row, last_row, seqlen_q, seqlen_k, x, SPEC: tl.constexpr):
    """Keys that a tile of query rows visits: ``start, full_start, full_end, end``.

    Tiles in ``[full_start, full_end)`` are seen whole by every row; those before and after need the
    mask.  When causal with ``seqlen_q == seqlen_k``, the loop ends after
    ``cdiv((tile + 1) * BLOCK_M, BLOCK_N)`` key tiles.
    """
    first = first_row + (seqlen_k - seqlen_q)  # their positions among the keys
    last = last_row + (seqlen_k - seqlen_q)
    start = 0
    full_start = 0
    full_end = seqlen_k
    end = seqlen_k
    if SPEC.HAS_RIGHT:
        full_end = tl.maximum(tl.minimum(seqlen_k, first + x.right + 1), 0)
        end = tl.maximum(tl.minimum(seqlen_k, last + x.right + 1), 0)
    if SPEC.HAS_LEFT:
        start = tl.maximum(first - x.left, 0) // SPEC.BLOCK_N * SPEC.BLOCK_N
        full_start = tl.cdiv(tl.maximum(last - x.left, 0), SPEC.BLOCK_N) * SPEC.BLOCK_N
    full_end = full_end // SPEC.BLOCK_N * SPEC.BLOCK_N
    if SPEC.HAS_MASK:
        full_start = start
        full_end = start
    return start, full_start, full_end, end


@triton.jit
def query_range(col, seqlen_q, seqlen_k, x, SPEC: tl.constexpr):
    """Query rows that see the key tile at ``col``; the four bounds are those of `key_range`.

    Rows past the end have p = 0, so that the last tile of rows needs no mask.
    """
    first = col - (seqlen_k - seqlen_q)  # the row that stands at the tile's first key
    last = first + SPEC.BLOCK_N - 1
    start = 0
    full_start = 0
    full_end = seqlen_q
    end = seqlen_q
    if SPEC.HAS_RIGHT:
        start = tl.maximum(first - x.right, 0) // SPEC.BLOCK_M * SPEC.BLOCK_M
        full_start = tl.cdiv(tl.maximum(last - x.right, 0), SPEC.BLOCK_M) * SPEC.BLOCK_M
    if SPEC.HAS_LEFT:
        full_end = tl.maximum(tl.minimum(seqlen_q, first + x.left + 1), 0)
        full_end = full_end // SPEC.BLOCK_M * SPEC.BLOCK_M
        end = tl.maximum(tl.minimum(seqlen_q, last + x.left + 1), 0)
    if SPEC.HAS_MASK:
        full_start = start
        full_end = start
    return start, full_start, full_end, end


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

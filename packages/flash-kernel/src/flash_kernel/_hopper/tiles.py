"""What producer and consumers of the forward share: records, barriers, and where a tile lies."""

from typing import Any, NamedTuple

from flash_kernel._hopper.compat import gl, gluon
from flash_kernel._triton.config import PACKED_ROWS

# Named barriers, 5 to 15; one for each consumer, q buffer, or stage.
TURN: gl.constexpr = gl.constexpr(5)
Q_FREE: gl.constexpr = gl.constexpr(8)
DO_FREE: gl.constexpr = gl.constexpr(9)  # in place of q's second buffer
K_FREE: gl.constexpr = gl.constexpr(10)
V_FREE: gl.constexpr = gl.constexpr(13)

END: gl.constexpr = gl.constexpr(-1)  # the batch of what is posted in place of a tile
PRETENDED_ROWS: gl.constexpr = gl.constexpr(PACKED_ROWS)
POSTED: gl.constexpr = gl.constexpr(8)  # numbers of a tile
# workspace
NEXT_TILE: gl.constexpr = gl.constexpr(0)
CTAS_DONE: gl.constexpr = gl.constexpr(1)


class Tensors(NamedTuple):
    """Global memory: descriptors over [B, H, rows, D], one for each piece, and pointers."""

    q: Any
    k: Any
    v: Any
    o: Any
    lse: Any  # [B, H, M]
    workspace: Any  # int32 [2], zero between launches
    cu_seqlens_q: Any  # where sequences are packed: the first row of each, and the end
    cu_seqlens_k: Any


class Shape(NamedTuple):
    """Sizes, and how tiles are numbered."""

    seqlen_q: Any  # of all sequences together, where they are packed
    seqlen_k: Any
    left: Any  # keys seen before a row's own position
    right: Any  # keys seen after it, 0 when causal
    num_heads: Any
    group: Any  # query heads that share a head of k and v
    units: Any  # B * H, or that by CONSUMERS where these share keys
    row_tiles: Any  # tiles of one unit
    swath: Any  # units that run together
    num_sequences: Any
    scale_log2: Any  # scale * log2(e); with a softcap, softcap * log2(e)
    cap_log2: Any  # 2 * log2(e) * scale / softcap


class Buffers(NamedTuple):
    """Shared memory, and the mbarriers that say what has landed."""

    q: Any  # [Q_BUFFERS * CONSUMERS, 1, 1, 64, D], by pieces
    k: Any  # [STAGES, 1, 1, BLOCK_N, D]
    v: Any
    o: Any  # [CONSUMERS, 1, 1, 64, D]; q's own where there is one buffer of it
    tile: Any  # [Q_BUFFERS, POSTED]: the tile whose q it is
    q_full: Any
    k_full: Any
    v_full: Any


class Tile(NamedTuple):
    """Where a tile lies, and the blocks of keys it visits, counted from ``edge`` leftwards.

    Rows and keys are counted within their sequence.
    """

    batch: Any
    head: Any  # of the first consumer
    row: Any  # of the first consumer
    edge: Any  # key after the rightmost block
    blocks: Any
    start: Any  # first row of the sequence, where sequences are packed; 0 elsewhere
    seqlen_q: Any
    seqlen_k: Any


class Rows(NamedTuple):
    """The rows of one head of one sequence, as the copy engine finds them."""

    batch: Any
    head: Any
    start: Any
    num_rows: Any


class Ring(NamedTuple):
    """The consumer's place in the rings of K and V."""

    k: Any
    k_phase: Any
    v: Any
    v_phase: Any


@gluon.jit
def coordinates(rows, row, COLUMN: gl.constexpr, SPEC: gl.constexpr):
    """Where a descriptor finds the block that begins at ``row`` of `Rows` and at COLUMN."""
    if SPEC.IS_PACKED:
        # the sequence's last row is the descriptor's last, so that both end at once
        in_last = PRETENDED_ROWS - rows.num_rows + row
        return (PRETENDED_ROWS, rows.start + rows.num_rows, rows.head, in_last, COLUMN)
    else:  # noqa: RET505 - to the compiler, what follows a return is still there
        return (rows.batch, rows.head, row, COLUMN)


@gluon.jit
def right_end(row, seqlen_q, seqlen_k, shape, SPEC: gl.constexpr):
    """The key after the last that the 64 rows from ``row`` see, rounded up past the last key.

    Rounded in steps of 64, so that the ends of a tile's warpgroups differ by multiples of 64: each
    row then sees a key in the first block that its warpgroup visits, and has a reference.
    """
    end = seqlen_k
    if SPEC.HAS_RIGHT:
        end = row + 64 + (seqlen_k - seqlen_q) + shape.right
        excess = gl.maximum(end - seqlen_k, 0)
        end = end - excess // 64 * 64
    return end


@gluon.jit
def left_end(row, seqlen_q, seqlen_k, shape, SPEC: gl.constexpr):
    """The first key that ``row`` sees."""
    start = row * 0
    if SPEC.HAS_LEFT:
        start = gl.maximum(row + (seqlen_k - seqlen_q) - shape.left, 0)
    return start


@gluon.jit
def unit_and_slot(number, shape, SPEC: gl.constexpr):
    """Return the unit of a tile, and which of the unit's tiles it is.

    Heads come in swaths whose keys and values fit the L2 cache, equal in size, because a short last
    one leaves SMs idle (d = 128 causal, n = 4k: 576 -> 613 TFLOP/s).  When causal, the longest rows
    of all heads of a swath come first.
    """
    swath = number // (shape.swath * shape.row_tiles)
    first = swath * shape.swath
    rest = number - first * shape.row_tiles
    if SPEC.HAS_RIGHT or SPEC.IS_PACKED:
        units = gl.minimum(shape.swath, shape.units - first)
        slot = shape.row_tiles - 1 - rest // units
        unit = first + rest % units
    else:
        unit = first + rest // shape.row_tiles
        slot = rest % shape.row_tiles
    return unit, slot


@gluon.jit
def sequence_and_tile(slot, tensors, shape, ROWS: gl.constexpr):
    """Return which packed sequence a slot belongs to, and which of its tiles.

    See the function of this name in `_triton.primitives`; here 32 lanes look for the sequence.
    """
    layout: gl.constexpr = gl.BlockedLayout([4], [32], [1], [0])
    sequence = slot * 0 - 1
    for first in range(0, shape.num_sequences, 128):
        b = first + gl.arange(0, 128, layout)
        starts = gl.load(tensors.cu_seqlens_q + b, mask=b < shape.num_sequences, other=0x7FFFFFFF)
        sequence += gl.sum((starts.to(gl.int32) // ROWS + b <= slot).to(gl.int32), 0)
    first_slot = gl.load(tensors.cu_seqlens_q + sequence).to(gl.int32) // ROWS + sequence
    return sequence, slot - first_slot


@gluon.jit
def rows_of_sequence(cu_seqlens, sequence):
    """Return the first row of a packed sequence, and how many there are."""
    start = gl.load(cu_seqlens + sequence).to(gl.int32)
    return start, gl.load(cu_seqlens + sequence + 1).to(gl.int32) - start


@gluon.jit
def locate(number, tensors, shape, SPEC: gl.constexpr):
    """Return the `Tile` of a number, and the first row of its sequence's keys.

    Where sequences are packed, the tile may begin past its sequence's end.
    """
    BLOCK_N: gl.constexpr = SPEC.BLOCK_N
    HEADS: gl.constexpr = SPEC.CONSUMERS if SPEC.SHARES_KEYS else 1
    ROWS: gl.constexpr = 64 if SPEC.SHARES_KEYS else 64 * SPEC.CONSUMERS
    unit, slot = unit_and_slot(number, shape, SPEC)
    batch = unit * HEADS // shape.num_heads
    head = unit * HEADS - batch * shape.num_heads
    start, k_start, seqlen_q, seqlen_k = unit * 0, unit * 0, shape.seqlen_q, shape.seqlen_k
    if SPEC.IS_PACKED:
        sequence, slot = sequence_and_tile(slot, tensors, shape, ROWS)
        start, seqlen_q = rows_of_sequence(tensors.cu_seqlens_q, sequence)
        k_start, seqlen_k = rows_of_sequence(tensors.cu_seqlens_k, sequence)
    row = slot * ROWS
    edge = right_end(row + (ROWS - 64), seqlen_q, seqlen_k, shape, SPEC)
    if not (SPEC.HAS_RIGHT and SPEC.MASKS_LAST):  # blocks begin at multiples of BLOCK_N
        edge = (edge + BLOCK_N - 1) // BLOCK_N * BLOCK_N
    visited = gl.maximum(edge - left_end(row, seqlen_q, seqlen_k, shape, SPEC), 0)
    blocks = (visited + BLOCK_N - 1) // BLOCK_N
    if SPEC.IS_PACKED:
        blocks = gl.where(seqlen_k > 0, blocks, 0)
    return Tile(batch, head, row, edge, blocks, start, seqlen_q, seqlen_k), k_start


@gluon.jit
def part_of(tile, W: gl.constexpr, shape, SPEC: gl.constexpr):
    """Return what warpgroup W has of a tile, and how many blocks others of the tile see first.

    Each warpgroup begins at its own diagonal block, so that none has a row wholly hidden, and one
    block a tile needs the mask.
    """
    BLOCK_N: gl.constexpr = SPEC.BLOCK_N
    batch, head, row, edge, blocks, start, seqlen_q, seqlen_k = tile
    if SPEC.SHARES_KEYS:
        head += W
    else:
        row += W * 64
    skipped = blocks * 0
    if SPEC.HAS_RIGHT:
        hidden = (edge - right_end(row, seqlen_q, seqlen_k, shape, SPEC)) // BLOCK_N
        skipped = gl.minimum(hidden, blocks)
    if SPEC.IS_PACKED:
        skipped = gl.where(row < seqlen_q, skipped, blocks)
    edge -= skipped * BLOCK_N
    return Tile(batch, head, row, edge, blocks - skipped, start, seqlen_q, seqlen_k), skipped


@gluon.jit
def q_free(buffer):
    return Q_FREE + buffer

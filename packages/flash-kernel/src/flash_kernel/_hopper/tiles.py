"""What producer and consumers of the forward share: records, barriers, and where a tile lies."""

from typing import Any, NamedTuple

from flash_kernel._hopper.compat import gl, gluon

# Named barriers, 5 to 15; one for each consumer, q buffer, or stage.
TURN: gl.constexpr = gl.constexpr(5)
Q_FREE: gl.constexpr = gl.constexpr(8)
K_FREE: gl.constexpr = gl.constexpr(10)
V_FREE: gl.constexpr = gl.constexpr(13)

END: gl.constexpr = gl.constexpr(-1)  # posted in place of a tile
# workspace
NEXT_TILE: gl.constexpr = gl.constexpr(0)
CTAS_DONE: gl.constexpr = gl.constexpr(1)


class Tensors(NamedTuple):
    """Global memory: descriptors over [B, H, rows, D], and pointers."""

    q: Any
    k: Any
    v: Any
    o: Any
    lse: Any  # [B, H, M]
    workspace: Any  # int32 [2], zero between launches


class Shape(NamedTuple):
    """Sizes, and how tiles are numbered."""

    seqlen_q: Any
    seqlen_k: Any
    left: Any  # keys seen before a row's own position
    right: Any  # keys seen after it, 0 when causal
    num_heads: Any
    group: Any  # query heads that share a head of k and v
    units: Any  # B * H, or that by CONSUMERS where these share keys
    row_tiles: Any  # tiles of one unit
    swath: Any  # units that run together
    scale_log2: Any  # scale * log2(e)


class Buffers(NamedTuple):
    """Shared memory, and the mbarriers that say what has landed."""

    q: Any  # [Q_BUFFERS * CONSUMERS, 1, 1, 64, D]
    k: Any  # [STAGES, 1, 1, BLOCK_N, D]
    v: Any
    o: Any  # [CONSUMERS, 1, 1, 64, D]; q's own where there is one buffer of it
    tile: Any  # [Q_BUFFERS, 1]: the number of the tile whose q it is
    q_full: Any
    k_full: Any
    v_full: Any


class Tile(NamedTuple):
    """Where a tile lies, and the blocks of keys it visits, counted from ``edge`` leftwards."""

    batch: Any
    head: Any  # of the first consumer
    row: Any  # of the first consumer
    edge: Any  # key after the rightmost block
    blocks: Any


class Ring(NamedTuple):
    """The consumer's place in the rings of K and V."""

    k: Any
    k_phase: Any
    v: Any
    v_phase: Any


@gluon.jit
def right_end(row, shape, SPEC: gl.constexpr):
    """The key after the last that the 64 rows from ``row`` see, rounded up past the last key.

    Rounded in steps of 64, so that the ends of a tile's warpgroups differ by multiples of 64: each
    row then sees a key in the first block that its warpgroup visits, and has a reference.
    """
    end = shape.seqlen_k
    if SPEC.HAS_RIGHT:
        end = row + 64 + (shape.seqlen_k - shape.seqlen_q) + shape.right
        excess = gl.maximum(end - shape.seqlen_k, 0)
        end = end - excess // 64 * 64
    return end


@gluon.jit
def left_end(row, shape, SPEC: gl.constexpr):
    """The first key that ``row`` sees."""
    start = row * 0
    if SPEC.HAS_LEFT:
        start = gl.maximum(row + (shape.seqlen_k - shape.seqlen_q) - shape.left, 0)
    return start


@gluon.jit
def locate(tile, shape, SPEC: gl.constexpr):
    """Return the `Tile` of a number.

    Heads come in swaths whose keys and values fit the L2 cache, equal in size, because a short last
    one leaves SMs idle (d = 128 causal, n = 4k: 576 -> 613 TFLOP/s).  When causal, the longest rows
    of all heads of a swath come first.
    """
    CONSUMERS: gl.constexpr = SPEC.CONSUMERS
    BLOCK_N: gl.constexpr = SPEC.BLOCK_N
    HEADS: gl.constexpr = CONSUMERS if SPEC.SHARES_KEYS else 1
    ROWS: gl.constexpr = 64 if SPEC.SHARES_KEYS else 64 * CONSUMERS
    swath = tile // (shape.swath * shape.row_tiles)
    first = swath * shape.swath
    rest = tile - first * shape.row_tiles
    if SPEC.HAS_RIGHT:
        units = gl.minimum(shape.swath, shape.units - first)
        row_tile = shape.row_tiles - 1 - rest // units
        unit = first + rest % units
    else:
        unit = first + rest // shape.row_tiles
        row_tile = rest % shape.row_tiles
    head = unit * HEADS
    batch = head // shape.num_heads
    row = row_tile * ROWS
    edge = right_end(row + (ROWS - 64), shape, SPEC)
    if not (SPEC.HAS_RIGHT and SPEC.MASKS_LAST):  # blocks begin at multiples of BLOCK_N
        edge = (edge + BLOCK_N - 1) // BLOCK_N * BLOCK_N
    visited = gl.maximum(edge - left_end(row, shape, SPEC), 0)
    blocks = (visited + BLOCK_N - 1) // BLOCK_N
    return Tile(batch, head - batch * shape.num_heads, row, edge, blocks)


@gluon.jit
def q_free(buffer):
    return Q_FREE + buffer

"""What the parts of the backward share: its records, its rings, and which tile comes when."""

from typing import Any, NamedTuple

from flash_kernel._hopper.compat import gl, gluon
from flash_kernel._triton.primitives import key_range, query_range

# of the ring of q and do; ds and dq have two buffers as well, and share its stage and phase
STAGES: gl.constexpr = gl.constexpr(2)
NO_TILE: gl.constexpr = gl.constexpr(-1)  # the tile number that ends a CTA


class Problem(NamedTuple):
    """The numbers of a launch."""

    num_heads_k: Any
    group: Any  # query heads that share a head of k and v
    seqlen_q: Any
    seqlen_k: Any
    num_blocks: Any  # of BLOCK_M queries, in a head
    heads_together: Any  # heads of k whose tiles are handed out in turn
    num_tiles: Any  # of BLOCK_N keys, in all heads
    blocks_apart: Any  # query blocks between those at which neighbouring tiles begin, if rotated
    left: Any  # keys seen before a row's own position, and after it
    right: Any


class Buffers(NamedTuple):
    """Shared memory."""

    tile: Any  # [1] the number of the tile whose k and v are here
    k: Any  # [2, 1, 1, 64, D] by warpgroup
    v: Any
    q: Any  # [stage, 1, 1, BLOCK_M, D]
    do: Any
    statistics: Any  # [stage, 2 * BLOCK_M]: -lse and -delta, scaled as `backward_ends` says
    ds: Any  # [2 * warpgroup + stage, 64, BLOCK_M]
    dq: Any  # [2 * stage + warpgroup, 16, 256]


class Barriers(NamedTuple):
    """mbarriers; the diagram above says who waits for whom."""

    k_full: Any
    v_full: Any
    tile_empty: Any
    ds_empty: Any
    q_full: Any
    do_full: Any
    q_empty: Any
    ds_full: Any
    dq_full: Any
    dq_empty: Any


@gluon.jit
def tile_of(number, x, SPEC: gl.constexpr):
    """Return the key head and the key tile that a number stands for.

    Heads go in groups whose q, do and dq fit in the L2 cache together.  Inside a group the heads
    take turns: neighbouring tiles of a head, whose dq are added in this order, start some time
    apart.  When causal, the first tiles have the most work.
    """
    tiles_k = gl.cdiv(x.seqlen_k, SPEC.BLOCK_N)
    in_group = x.heads_together * tiles_k
    group = number // in_group
    rest = number - group * in_group
    heads = gl.minimum(x.heads_together, x.num_tiles // tiles_k - group * x.heads_together)
    return group * x.heads_together + rest % heads, rest // heads


@gluon.jit
def block_range(tile_k, x, SPEC: gl.constexpr):
    """Query blocks that see a tile: ``first, split, last``; those below ``split`` need masks."""
    col = tile_k * SPEC.BLOCK_N
    start, full_start, _, end = query_range(col, x, SPEC)
    first = start // SPEC.BLOCK_M
    last = gl.maximum(gl.cdiv(end, SPEC.BLOCK_M), first)
    split = first
    if SPEC.HAS_RIGHT:
        split = gl.minimum(full_start // SPEC.BLOCK_M, last)
    if SPEC.HAS_TAIL:
        # keys past the end are rows of zeros: harmless, unless a very negative lse makes p overflow
        split = gl.where(col + SPEC.BLOCK_N > x.seqlen_k, last, split)
    if SPEC.HAS_LEFT:
        split = last
    return first, split, last


@gluon.jit
def pivot_of(tile_k, x):
    """Return the query block at which a rotated tile would begin."""
    return gl.minimum(tile_k * x.blocks_apart, x.num_blocks - 1)


@gluon.jit
def first_block(tile_k, split, last, x, SPEC: gl.constexpr):
    """Return the query block at which a tile begins, and from where on it walks downwards.

    All tiles begin with the last block; or, rotated, each some blocks after its neighbour.  Then
    they go on with the last block where those that need no mask end, and leave the masks for last.
    A tile whose pivot needs a mask is not rotated.
    """
    begin = last - 1
    if SPEC.IS_ROTATED:
        pivot = pivot_of(tile_k, x)
        begin = gl.where(pivot < split, begin, gl.minimum(pivot, begin))
    return begin


@gluon.jit
def next_block(block, head, begin, split, last, x, SPEC: gl.constexpr):
    """Return the query block and the head within the group that are worked on next.

    The heads of a group take turns at a block, so that tiles of different lengths keep in step.
    """
    following = block - 1
    if SPEC.IS_ROTATED:
        following = gl.where((block == split) & (begin != last - 1), last - 1, following)
        following = gl.where(block == begin + 1, split - 1, following)
    if SPEC.IS_GROUPED:
        head = head + 1
        wraps = head == x.group
        head = gl.where(wraps, 0, head)
        following = gl.where(wraps, following, block)
    return following, head


@gluon.jit
def turn_of(block, tile_k, row, x, SPEC: gl.constexpr):
    """Return which sum a tile adds a block's dq to, and how many terms come before.

    ``row`` counts the blocks of all heads.  Rotated, the blocks up to a tile's pivot have one sum
    and those beyond, which it reaches later, another: so in each, the tiles come in their order.
    """
    first_row = block * SPEC.BLOCK_M
    first_key, _, _, _ = key_range(first_row, first_row + SPEC.BLOCK_M - 1, x, SPEC)
    first_tile = first_key // SPEC.BLOCK_N
    if SPEC.IS_ROTATED:
        is_late = block > pivot_of(tile_k, x)
        # the pivots of tiles before this one lie before the block
        first_early = gl.maximum(first_tile, gl.cdiv(block, x.blocks_apart))
        first_tile = gl.where(is_late, first_tile, first_early)
        row = row * 2 + is_late.to(gl.int32)
    return row, tile_k - first_tile


@gluon.jit
def read_tile(buffers):
    """Return the number of the tile that the producer left beside k."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    return gl.max(buffers.tile.load(layout), 0)

"""What the parts of the backward share: its records, its rings, and which tile comes when."""

from typing import Any, NamedTuple

from flash_kernel._hopper.compat import gl, gluon
from flash_kernel._triton.primitives import query_range

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
    """Query blocks that see a key tile: ``first, split, last``; those below ``split`` need masks.

    They are walked from the last to the first, so that all tiles of a head begin with the same one.
    """
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
def next_block(block, head, x, SPEC: gl.constexpr):
    """Return the query block and the head within the group that are worked on next.

    The heads of a group take turns at a block, so that tiles of different lengths keep in step.
    """
    steps = 1
    if SPEC.IS_GROUPED:
        head = head + 1
        wraps = head == x.group
        head = gl.where(wraps, 0, head)
        steps = wraps.to(gl.int32)
    return block - steps, head


@gluon.jit
def read_tile(buffers):
    """Return the number of the tile that the producer left beside k."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    return gl.max(buffers.tile.load(layout), 0)

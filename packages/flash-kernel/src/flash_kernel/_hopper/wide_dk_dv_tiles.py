"""What the parts of the kernel for dk and dv share: records, barriers, and where a tile lies."""

from typing import Any, NamedTuple

from flash_kernel._hopper.backward_tiles import tile_of
from flash_kernel._hopper.compat import gl, gluon, mbarrier
from flash_kernel._hopper.primitives import number_at
from flash_kernel._hopper.tiles import POSTED
from flash_kernel._triton.primitives import query_range

# Named barriers: one for each stage, or for each warpgroup.
Q_FREE: gl.constexpr = gl.constexpr(5)
DO_FREE: gl.constexpr = gl.constexpr(7)
P_FULL: gl.constexpr = gl.constexpr(9)
TILE_FREE: gl.constexpr = gl.constexpr(11)  # k, and then v
# Threads at them: of both warpgroups and a producer, of one and a producer, or both, ...
BOTH: gl.constexpr = gl.constexpr(288)
ONE: gl.constexpr = gl.constexpr(160)
OTHER_TOO: gl.constexpr = gl.constexpr(192)
PAIR: gl.constexpr = gl.constexpr(256)  # of the two warpgroups


class Tensors(NamedTuple):
    """Global memory: descriptors over [B, H, rows, D], one for each piece, and pointers."""

    q: Any
    k: Any
    v: Any
    do: Any
    dk: Any
    dv: Any
    statistics: Any  # descriptor over [B * H * 2 * padded M]: lse and delta of each head
    marks: Any  # int32 [B, H_kv, tiles]
    workspace: Any  # int32 [2], zero between launches


class Problem(NamedTuple):
    """The numbers of a launch."""

    num_heads_k: Any
    group: Any  # query heads that share a head of k and v
    seqlen_q: Any
    seqlen_k: Any
    padded_q: Any  # rows of the statistics of a head
    heads_together: Any  # heads of k whose tiles are handed out in turn
    num_tiles: Any  # in all heads
    left: Any  # keys seen before a row's own position, and after it
    right: Any
    scale: Any
    scale_log2: Any


class Buffers(NamedTuple):
    """Shared memory, and the mbarriers that say what has landed."""

    tile: Any  # [2, POSTED]: the tile whose k it is, and whose v
    k: Any  # [1, 1, 1, 64, D], by pieces
    v: Any
    q: Any  # [STAGES, 1, 1, 64, D]
    do: Any
    lse: Any  # [STAGES, 64]
    delta: Any
    p: Any  # [STAGES, 4096]: in the order of the accumulator's registers
    dv: Any  # [2, 1, 1, 64, 64]: columns on their way out
    k_full: Any
    v_full: Any
    q_full: Any
    do_full: Any


class Tile(NamedTuple):
    """Where a tile of keys lies, and the blocks of queries that see it."""

    batch: Any
    head: Any
    col: Any
    first: Any  # block of queries
    last: Any  # the one after
    full_start: Any  # rows from here on see all keys of the tile,
    full_end: Any  # up to here
    index: Any  # among all tiles


@gluon.jit
def locate(number, x, SPEC: gl.constexpr):
    """Return the `Tile` of a number."""
    head_k, tile_k = tile_of(number, x, SPEC)
    col = tile_k * SPEC.BLOCK_N
    start, full_start, full_end, end = query_range(col, x, SPEC)
    first = start // SPEC.BLOCK_M
    last = gl.maximum(gl.cdiv(end, SPEC.BLOCK_M), first)
    batch = head_k // x.num_heads_k
    index = head_k * gl.cdiv(x.seqlen_k, SPEC.BLOCK_N) + tile_k
    full_start, full_end = full_start + col * 0, full_end + col * 0  # they may be constants
    return Tile(
        batch, head_k - batch * x.num_heads_k, col, first, last, full_start, full_end, index
    )


@gluon.jit
def read_tile(W: gl.constexpr, parity, buffers):
    """Wait for k (warpgroup 0) or v of the next tile; return the tile posted with it."""
    full = buffers.k_full if W == 0 else buffers.v_full
    mbarrier.wait(full, parity)
    layout: gl.constexpr = gl.BlockedLayout([POSTED], [32], [gl.num_warps()], [0])
    index = gl.arange(0, POSTED, layout)
    numbers = buffers.tile.index(W).load(layout)
    return Tile(
        number_at(0, index, numbers), number_at(1, index, numbers), number_at(2, index, numbers),
        number_at(3, index, numbers), number_at(4, index, numbers), number_at(5, index, numbers),
        number_at(6, index, numbers), number_at(7, index, numbers),
    )  # fmt: skip

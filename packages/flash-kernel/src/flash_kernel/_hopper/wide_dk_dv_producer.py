"""The producers of dk and dv: a warp copies k and q in, another v and do."""

from flash_kernel._hopper.compat import gl, gluon, mbarrier, tma_load
from flash_kernel._hopper.pieces import load_tile
from flash_kernel._hopper.primitives import barrier_arrive, barrier_sync, following
from flash_kernel._hopper.producer import leave_counter, post
from flash_kernel._hopper.tiles import END, NEXT_TILE, Rows
from flash_kernel._hopper.wide_dk_dv_tiles import (
    BOTH,
    DO_FREE,
    ONE,
    OTHER_TOO,
    Q_FREE,
    TILE_FREE,
    Tile,
    locate,
    read_tile,
)


@gluon.jit
def load_keys(W: gl.constexpr, tile, tensors, x, buffers, SPEC: gl.constexpr):
    """Post a tile for warpgroup W, and copy its k (0) or v (1)."""
    READERS: gl.constexpr = OTHER_TOO if W == 0 else ONE
    barrier_sync(gl.to_tensor(TILE_FREE + W), READERS)
    post(tile, buffers, W)
    rows = Rows(tile.batch, tile.head, tile.col * 0, x.seqlen_k)
    full = buffers.k_full if W == 0 else buffers.v_full
    mbarrier.expect(full, SPEC.BLOCK_N * SPEC.ROW_BYTES)
    if W == 0:
        load_tile(tensors.k, rows, tile.col, full, buffers.k, 0, SPEC)
    else:
        load_tile(tensors.v, rows, tile.col, full, buffers.v, 0, SPEC)


@gluon.jit
def load_queries(W: gl.constexpr, tile, stage, tensors, x, buffers, SPEC: gl.constexpr):
    """Copy the blocks that see a tile, of q and lse (0) or of do and delta (1); return the stage.

    From the last block to the first, head by head.
    """
    BLOCK_M: gl.constexpr = SPEC.BLOCK_M
    FREE: gl.constexpr = Q_FREE if W == 0 else DO_FREE
    head = tile.head * x.group
    block = tile.last - 1
    for _ in range((tile.last - tile.first) * x.group):
        rows = Rows(tile.batch, head, block * 0, x.seqlen_q)
        row = block * BLOCK_M
        at = ((tile.batch * x.num_heads_k * x.group + head) * 2 + W) * x.padded_q + row
        full = (buffers.q_full if W == 0 else buffers.do_full).index(stage)
        barrier_sync(FREE + stage, BOTH)
        mbarrier.expect(full, BLOCK_M * (SPEC.ROW_BYTES + 4))
        if W == 0:
            tma_load(tensors.statistics, [at], full, buffers.lse.index(stage))
            load_tile(tensors.q, rows, row, full, buffers.q, stage, SPEC)
        else:
            tma_load(tensors.statistics, [at], full, buffers.delta.index(stage))
            load_tile(tensors.do, rows, row, full, buffers.do, stage, SPEC)
        stage = following(stage, SPEC.STAGES)
        is_done = block == tile.first
        head = gl.where(is_done, head + 1, head)
        block = gl.where(is_done, tile.last, block) - 1
    return stage


@gluon.jit
def produce_q(tensors, x, buffers, SPEC: gl.constexpr):
    """Hand out tiles, from a counter in memory, until there are none; copy k, q and lse."""
    STAGES: gl.constexpr = SPEC.STAGES
    programs = gl.num_programs(0)
    stage = gl.to_tensor(0)
    number = gl.program_id(0)
    while number < x.num_tiles:
        # a tile ahead, so that nobody waits for the counter
        upcoming = programs + gl.atomic_add(tensors.workspace + NEXT_TILE, 1)
        tile = locate(number, x, SPEC)
        load_keys(0, tile, tensors, x, buffers, SPEC)
        stage = load_queries(0, tile, stage, tensors, x, buffers, SPEC)
        number = upcoming
    leave_counter(tensors.workspace, programs)
    barrier_sync(gl.to_tensor(TILE_FREE), OTHER_TOO)
    zero = gl.to_tensor(0)
    post(Tile(END + zero, zero, zero, zero, zero, zero, zero, zero), buffers, 0)
    mbarrier.arrive(buffers.k_full, count=1)
    for i in gl.static_range(STAGES):  # no barrier may end half full
        barrier_sync(gl.to_tensor(Q_FREE + i), BOTH)


@gluon.jit
def produce_do(tensors, x, buffers, SPEC: gl.constexpr):
    """Copy v, do and delta of the tiles that the other producer hands out."""
    STAGES: gl.constexpr = SPEC.STAGES
    stage = gl.to_tensor(0)
    parity = gl.to_tensor(0)
    barrier_arrive(gl.to_tensor(TILE_FREE), OTHER_TOO)
    tile = read_tile(0, parity, buffers)
    while tile.batch != END:
        barrier_arrive(gl.to_tensor(TILE_FREE), OTHER_TOO)
        load_keys(1, tile, tensors, x, buffers, SPEC)
        stage = load_queries(1, tile, stage, tensors, x, buffers, SPEC)
        parity = parity ^ 1
        tile = read_tile(0, parity, buffers)
    barrier_sync(gl.to_tensor(TILE_FREE + 1), ONE)
    post(tile, buffers, 1)
    mbarrier.arrive(buffers.v_full, count=1)
    for i in gl.static_range(STAGES):
        barrier_sync(gl.to_tensor(DO_FREE + i), BOTH)

"""The producer of dq: one warp that hands out tiles and has them copied to shared memory."""

from flash_kernel._hopper.compat import gl, gluon, mbarrier
from flash_kernel._hopper.primitives import barrier_sync
from flash_kernel._hopper.producer import leave_counter, load_block, load_rows, post
from flash_kernel._hopper.tiles import (
    DO_FREE,
    END,
    K_FREE,
    NEXT_TILE,
    Q_FREE,
    V_FREE,
    Rows,
    Tile,
    locate,
)


@gluon.jit
def produce(tensors, shape, buffers, SPEC: gl.constexpr):
    """Hand out tiles until there are none, and have their q and do, K and V copied."""
    programs = gl.num_programs(0)
    tiles = shape.units * shape.row_tiles
    k_stage = gl.to_tensor(0)
    v_stage = gl.to_tensor(0)
    number = gl.program_id(0)
    while number < tiles:
        # a tile ahead, so that nobody waits for the counter
        upcoming = programs + gl.atomic_add(tensors.workspace + NEXT_TILE, 1)
        tile, _ = locate(number, tensors, shape, SPEC)
        barrier_sync(gl.to_tensor(Q_FREE), SPEC.THREADS)
        post(tile, buffers, 0)
        load_rows(tensors.q, tile, buffers.q_full.index(0), buffers.q, 0, SPEC)
        k_stage, v_stage = load_keys(tile, k_stage, v_stage, tensors, shape, buffers, SPEC)
        number = upcoming
    leave_counter(tensors.workspace, programs)
    finish(buffers, SPEC)


@gluon.jit
def load_keys(tile, k_stage, v_stage, tensors, shape, buffers, SPEC: gl.constexpr):
    """Copy a tile's do, and its blocks of K and V as stages come free; return the next stages.

    The first K goes ahead: do's buffer may still hold the dq of the tile before.
    """
    BLOCK_N: gl.constexpr = SPEC.BLOCK_N
    rows = Rows(tile.batch, tile.head // shape.group, 0, tile.seqlen_k)
    for i in range(tile.blocks):
        key = tile.edge - (i + 1) * BLOCK_N
        k_stage = load_block(tensors.k, rows, key, buffers.k_full, buffers.k, K_FREE, k_stage, SPEC)
        if i == 0:
            load_gradients(tile, tensors, buffers, SPEC)
        v_stage = load_block(tensors.v, rows, key, buffers.v_full, buffers.v, V_FREE, v_stage, SPEC)
    if SPEC.MAY_BE_EMPTY and tile.blocks == 0:
        load_gradients(tile, tensors, buffers, SPEC)
    return k_stage, v_stage


@gluon.jit
def load_gradients(tile, tensors, buffers, SPEC: gl.constexpr):
    """Copy a tile's do, once the dq of the tile before has left its buffer."""
    barrier_sync(gl.to_tensor(DO_FREE), SPEC.THREADS)
    load_rows(tensors.do, tile, buffers.do_full.index(0), buffers.do, 0, SPEC)


@gluon.jit
def finish(buffers, SPEC: gl.constexpr):
    """Tell the consumers that there are no more tiles, and take back what they give back last."""
    STAGES: gl.constexpr = SPEC.STAGES
    zero = gl.to_tensor(0)
    barrier_sync(gl.to_tensor(Q_FREE), SPEC.THREADS)
    post(Tile(END + zero, zero, zero, zero, zero, zero, zero, zero), buffers, 0)
    mbarrier.arrive(buffers.q_full.index(0), count=1)
    # no barrier may end half full
    barrier_sync(gl.to_tensor(DO_FREE), SPEC.THREADS)
    barrier_sync(gl.to_tensor(V_FREE), SPEC.THREADS)
    for stage in gl.static_range(STAGES):
        barrier_sync(gl.to_tensor(K_FREE + stage), SPEC.THREADS)

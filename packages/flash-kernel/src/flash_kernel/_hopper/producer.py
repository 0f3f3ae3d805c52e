"""The forward's producer: one warp that hands out tiles and has them copied to shared memory."""

from flash_kernel._hopper.compat import gl, gluon, mbarrier
from flash_kernel._hopper.pieces import load_tile
from flash_kernel._hopper.primitives import barrier_sync, following
from flash_kernel._hopper.tiles import (
    CTAS_DONE,
    END,
    K_FREE,
    NEXT_TILE,
    POSTED,
    V_FREE,
    Rows,
    Tile,
    locate,
    q_free,
)


@gluon.jit
def post(tile, buffers, buffer):
    """Leave a tile for the consumers, who read it when ``q_full`` completes.

    So they are spared the divisions by which it was located.
    """
    layout: gl.constexpr = gl.BlockedLayout([POSTED], [32], [1], [0])
    index = gl.arange(0, POSTED, layout)
    numbers = index * 0
    for i in gl.static_range(POSTED):
        numbers = gl.where(index == i, tile[i], numbers)
    buffers.tile.index(buffer).store(numbers)


@gluon.jit
def load_rows(tensor, tile, full, buffers, buffer, SPEC: gl.constexpr):
    """Copy a tile's rows of q, or of another tensor of its shape."""
    CONSUMERS: gl.constexpr = SPEC.CONSUMERS
    mbarrier.expect(full, CONSUMERS * 64 * SPEC.ROW_BYTES)
    for w in gl.static_range(CONSUMERS):
        if SPEC.SHARES_KEYS:
            head, row = tile.head + w, tile.row
        else:
            head, row = tile.head, tile.row + w * 64
        rows = Rows(tile.batch, head, tile.start, tile.seqlen_q)
        load_tile(tensor, rows, row, full, buffers, buffer * CONSUMERS + w, SPEC)


@gluon.jit
def load_block(tensor, rows, key, full, buffers, free, stage, SPEC: gl.constexpr):
    """Copy a block of K or V to a stage, once that is free; return the next stage.

    A block that would begin before key 0 begins there; `hide` leaves out what others have seen.
    """
    BLOCK_N: gl.constexpr = SPEC.BLOCK_N
    STAGES: gl.constexpr = buffers[0].shape[0]
    barrier_sync(free + stage, SPEC.THREADS)
    mbarrier.expect(full.index(stage), BLOCK_N * SPEC.ROW_BYTES)
    load_tile(tensor, rows, gl.maximum(key, 0), full.index(stage), buffers, stage, SPEC)
    return following(stage, STAGES)


@gluon.jit
def load_keys(tile, k_start, k_stage, v_stage, tensors, shape, buffers, SPEC: gl.constexpr):
    """Copy a tile's blocks of K and V as stages come free; return the next stages.

    K of the next block goes ahead of V of this one, so that the next scores never wait for V.
    """
    BLOCK_N: gl.constexpr = SPEC.BLOCK_N
    rows = Rows(tile.batch, tile.head // shape.group, k_start, tile.seqlen_k)
    for i in range(tile.blocks + 1):
        key = tile.edge - (i + 1) * BLOCK_N
        if i < tile.blocks:
            k_stage = load_block(
                tensors.k, rows, key, buffers.k_full, buffers.k, K_FREE, k_stage, SPEC
            )
        if i > 0:
            v_stage = load_block(
                tensors.v, rows, key + BLOCK_N, buffers.v_full, buffers.v, V_FREE, v_stage, SPEC
            )
    return k_stage, v_stage


@gluon.jit
def producer(tensors, shape, buffers, SPEC: gl.constexpr):
    """Hand out tiles until there are none.

    Tiles come from a counter in memory: against a fixed order, d = 128 causal at n = 16k went from
    618 to 660 TFLOP/s, d = 256 causal from 497 to 640.  The last CTA leaves the counter as it found
    it, so that a launch needs no other to clear it.
    """
    programs = gl.num_programs(0)
    tiles = shape.units * shape.row_tiles
    k_stage = gl.to_tensor(0)
    v_stage = gl.to_tensor(0)
    buffer = gl.to_tensor(0)
    number = gl.program_id(0)
    while number < tiles:
        # a tile ahead, so that nobody waits for the counter
        upcoming = programs + gl.atomic_add(tensors.workspace + NEXT_TILE, 1)
        tile, k_start = locate(number, tensors, shape, SPEC)
        if tile.row < tile.seqlen_q:
            barrier_sync(q_free(buffer), SPEC.THREADS)
            post(tile, buffers, buffer)
            load_rows(tensors.q, tile, buffers.q_full.index(buffer), buffers.q, buffer, SPEC)
            k_stage, v_stage = load_keys(
                tile, k_start, k_stage, v_stage, tensors, shape, buffers, SPEC
            )
            buffer = following(buffer, SPEC.Q_BUFFERS)
        number = upcoming
    leave_counter(tensors.workspace, programs)
    finish(buffer, buffers, SPEC)


@gluon.jit
def leave_counter(workspace, programs):
    """Count a CTA that takes no more tiles; the last one clears the workspace."""
    if gl.atomic_add(workspace + CTAS_DONE, 1) == programs - 1:
        gl.store(workspace + NEXT_TILE, 0)
        gl.store(workspace + CTAS_DONE, 0)


@gluon.jit
def finish(buffer, buffers, SPEC: gl.constexpr):
    """Tell the consumers that there are no more tiles, and take back what they give back last."""
    STAGES: gl.constexpr = SPEC.STAGES
    zero = gl.to_tensor(0)
    barrier_sync(q_free(buffer), SPEC.THREADS)
    if SPEC.Q_BUFFERS == 2:  # the last tile may still be at work, in the other buffer
        barrier_sync(q_free(1 - buffer), SPEC.THREADS)
    post(Tile(END + zero, zero, zero, zero, zero, zero, zero, zero), buffers, buffer)
    mbarrier.arrive(buffers.q_full.index(buffer), count=1)
    # no barrier may end half full
    for stage in gl.static_range(STAGES):
        barrier_sync(gl.to_tensor(K_FREE + stage), SPEC.THREADS)
        barrier_sync(gl.to_tensor(V_FREE + stage), SPEC.THREADS)

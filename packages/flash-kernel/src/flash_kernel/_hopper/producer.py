"""The forward's producer: one warp that hands out tiles and has them copied to shared memory."""

from flash_kernel._hopper.compat import gl, gluon, mbarrier, tma_load
from flash_kernel._hopper.primitives import barrier_sync
from flash_kernel._hopper.tiles import (
    CTAS_DONE,
    END,
    K_FREE,
    NEXT_TILE,
    V_FREE,
    locate,
    q_free,
)


@gluon.jit
def post(number, buffers, buffer):
    """Leave a tile's number for the consumers, who read it when ``q_full`` completes."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    buffers.tile.index(buffer).store(gl.full([1], 0, gl.int32, layout) + number)


@gluon.jit
def load_tile(number, buffer, k_stage, v_stage, tensors, shape, buffers, SPEC: gl.constexpr):
    """Copy a tile's q, and its blocks of K and V as stages come free; return the next stages.

    K of the next block goes ahead of V of this one, so that the next scores never wait for V.
    """
    CONSUMERS: gl.constexpr = SPEC.CONSUMERS
    BLOCK_N: gl.constexpr = SPEC.BLOCK_N
    STAGES: gl.constexpr = SPEC.STAGES
    ROW_BYTES: gl.constexpr = SPEC.HEAD_DIM * 2
    THREADS: gl.constexpr = CONSUMERS * 128 + 32
    tile = locate(number, shape, SPEC)
    head_k = tile.head // shape.group
    post(number, buffers, buffer)
    full = buffers.q_full.index(buffer)
    mbarrier.expect(full, CONSUMERS * 64 * ROW_BYTES)
    for w in gl.static_range(CONSUMERS):
        if SPEC.SHARES_KEYS:
            where = [tile.batch, tile.head + w, tile.row, 0]
        else:
            where = [tile.batch, tile.head, tile.row + w * 64, 0]
        tma_load(tensors.q, where, full, buffers.q.index(buffer * CONSUMERS + w))
    for i in range(tile.blocks + 1):
        key = tile.edge - (i + 1) * BLOCK_N
        if i < tile.blocks:
            barrier_sync(K_FREE + k_stage, THREADS)
            full = buffers.k_full.index(k_stage)
            mbarrier.expect(full, BLOCK_N * ROW_BYTES)
            tma_load(tensors.k, [tile.batch, head_k, key, 0], full, buffers.k.index(k_stage))
            k_stage = gl.where(k_stage == STAGES - 1, 0, k_stage + 1)
        if i > 0:
            barrier_sync(V_FREE + v_stage, THREADS)
            full = buffers.v_full.index(v_stage)
            mbarrier.expect(full, BLOCK_N * ROW_BYTES)
            before = [tile.batch, head_k, key + BLOCK_N, 0]
            tma_load(tensors.v, before, full, buffers.v.index(v_stage))
            v_stage = gl.where(v_stage == STAGES - 1, 0, v_stage + 1)
    return k_stage, v_stage


@gluon.jit
def producer(tensors, shape, buffers, SPEC: gl.constexpr):
    """Hand out tiles until there are none.

    Tiles come from a counter in memory: against a fixed order, d = 128 causal at n = 16k went from
    618 to 660 TFLOP/s, d = 256 causal from 497 to 640.  The last CTA leaves the counter as it found
    it, so that a launch needs no other to clear it.
    """
    Q_BUFFERS: gl.constexpr = SPEC.Q_BUFFERS
    STAGES: gl.constexpr = SPEC.STAGES
    THREADS: gl.constexpr = SPEC.CONSUMERS * 128 + 32
    programs = gl.num_programs(0)
    tiles = shape.units * shape.row_tiles
    k_stage = gl.to_tensor(0)
    v_stage = gl.to_tensor(0)
    buffer = gl.to_tensor(0)
    number = gl.program_id(0)
    barrier_sync(q_free(buffer), THREADS)
    while number < tiles:
        # a tile ahead, so that nobody waits for the counter
        upcoming = programs + gl.atomic_add(tensors.workspace + NEXT_TILE, 1)
        k_stage, v_stage = load_tile(
            number, buffer, k_stage, v_stage, tensors, shape, buffers, SPEC
        )  # fmt: skip
        buffer = (buffer + 1) % Q_BUFFERS
        barrier_sync(q_free(buffer), THREADS)
        number = upcoming
    if gl.atomic_add(tensors.workspace + CTAS_DONE, 1) == programs - 1:
        # nobody takes a tile any more
        gl.store(tensors.workspace + NEXT_TILE, 0)
        gl.store(tensors.workspace + CTAS_DONE, 0)
    if Q_BUFFERS == 2:  # the last tile is still at work, in the other buffer
        barrier_sync(q_free(1 - buffer), THREADS)
    post(gl.to_tensor(END), buffers, buffer)
    mbarrier.arrive(buffers.q_full.index(buffer), count=1)
    # take the last releases: no barrier may end half full
    for stage in gl.static_range(STAGES):
        barrier_sync(gl.to_tensor(K_FREE + stage), THREADS)
        barrier_sync(gl.to_tensor(V_FREE + stage), THREADS)

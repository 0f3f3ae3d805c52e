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
def post(word, buffers, buffer):
    """Leave a word for the consumers, who read it when ``q_full`` completes."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    buffers.tile.index(buffer).store(gl.full([1], 0, gl.int32, layout) + word)


@gluon.jit
def load_queries(word, tile, buffer, tensors, buffers, SPEC: gl.constexpr):
    """Copy a tile's q to its buffer, and say which tile it is."""
    CONSUMERS: gl.constexpr = SPEC.CONSUMERS
    ROW_BYTES: gl.constexpr = SPEC.HEAD_DIM * 2
    post(word, buffers, buffer)
    full = buffers.q_full.index(buffer)
    mbarrier.expect(full, CONSUMERS * 64 * ROW_BYTES)
    for w in gl.static_range(CONSUMERS):
        if SPEC.SHARES_KEYS:
            where = [tile.batch, tile.head + w, tile.row, 0]
        else:
            where = [tile.batch, tile.head, tile.row + w * 64, 0]
        tma_load(tensors.q, where, full, buffers.q.index(buffer * CONSUMERS + w))


@gluon.jit
def load_tile(
    word, buffer, k_stage, v_stage, tensors, shape, buffers, AWAITS_Q: gl.constexpr,
    SPEC: gl.constexpr,
):  # fmt: skip
    """Copy a tile's q, and its blocks of K and V as stages come free; return the next stages.

    K of the next block goes ahead of V of this one, so that the next scores never wait for V; the
    first K and V go ahead of q where its buffer is still in use.
    """
    BLOCK_N: gl.constexpr = SPEC.BLOCK_N
    STAGES: gl.constexpr = SPEC.STAGES
    ROW_BYTES: gl.constexpr = SPEC.HEAD_DIM * 2
    THREADS: gl.constexpr = SPEC.CONSUMERS * 128 + 32
    tile = locate(word >> 1, shape, SPEC)
    head_k = tile.head // shape.group
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
        if i == gl.minimum(tile.blocks, 1):
            if AWAITS_Q:
                barrier_sync(q_free(buffer), THREADS)
            load_queries(word, tile, buffer, tensors, buffers, SPEC)
    return k_stage, v_stage


@gluon.jit
def must_repeat(word, position, buffers, CONSUMERS: gl.constexpr):
    """Say whether a tile that is done must be done again, by the verdicts on its rows."""
    layout: gl.constexpr = gl.BlockedLayout([2], [32], [1], [0])
    again = word * 0
    if (word & 1) == 0:
        for w in gl.static_range(CONSUMERS):
            verdict = buffers.verdict.index((position & 1) * CONSUMERS + w)
            again = again | gl.max(verdict.load(layout), 0)
    return again != 0


@gluon.jit
def producer(tensors, shape, buffers, SPEC: gl.constexpr):
    """Hand out tiles until there are none, and those again whose softmax overflowed.

    Tiles come from a counter in memory: against a fixed order, d = 128 causal at n = 16k went from
    618 to 660 TFLOP/s, d = 256 causal from 497 to 640.  The last CTA leaves the counter as it found
    it, so that a launch needs no other to clear it.

    A tile is chosen once the last but one is done; so the verdict on a tile comes one tile late.
    """
    CONSUMERS: gl.constexpr = SPEC.CONSUMERS
    Q_BUFFERS: gl.constexpr = SPEC.Q_BUFFERS
    STAGES: gl.constexpr = SPEC.STAGES
    THREADS: gl.constexpr = CONSUMERS * 128 + 32
    ONE: gl.constexpr = Q_BUFFERS == 1
    programs = gl.num_programs(0)
    tiles = shape.units * shape.row_tiles
    k_stage = gl.to_tensor(0)
    v_stage = gl.to_tensor(0)
    position = gl.to_tensor(0)
    upcoming = gl.to_tensor(0)
    word = 2 * gl.program_id(0)
    before = gl.to_tensor(END)  # the word of the position before
    if not ONE:
        barrier_sync(q_free(position), THREADS)
    while word != END:
        k_stage, v_stage = load_tile(
            word, position % Q_BUFFERS, k_stage, v_stage, tensors, shape, buffers, ONE, SPEC
        )  # fmt: skip
        if (word & 1) == 0:
            # early: the answer takes as long as a block of keys
            upcoming = programs + gl.atomic_add(tensors.workspace + NEXT_TILE, 1, sem="relaxed")
        position += 1
        if not ONE:
            barrier_sync(q_free(position % Q_BUFFERS), THREADS)
        following = gl.to_tensor(END)
        if must_repeat(before, position, buffers, CONSUMERS):
            following = before | 1
        elif upcoming < tiles:
            following = 2 * upcoming
        before = word
        word = following
    if gl.atomic_add(tensors.workspace + CTAS_DONE, 1) == programs - 1:
        # nobody takes a tile any more
        gl.store(tensors.workspace + NEXT_TILE, 0)
        gl.store(tensors.workspace + CTAS_DONE, 0)
    barrier_sync(q_free((position - 1) % Q_BUFFERS), THREADS)  # the last tile is done
    if must_repeat(before, position - 1, buffers, CONSUMERS):
        k_stage, v_stage = load_tile(
            before | 1, position % Q_BUFFERS, k_stage, v_stage, tensors, shape, buffers, False, SPEC
        )  # fmt: skip
        barrier_sync(q_free(position % Q_BUFFERS), THREADS)
        position += 1
    post(gl.to_tensor(END), buffers, position % Q_BUFFERS)
    mbarrier.arrive(buffers.q_full.index(position % Q_BUFFERS), count=1)
    # take the last releases: no barrier may end half full
    for stage in gl.static_range(STAGES):
        barrier_sync(gl.to_tensor(K_FREE + stage), THREADS)
        barrier_sync(gl.to_tensor(V_FREE + stage), THREADS)

"""The single warps of the backward: one copies inputs in, two add dq to memory."""

from flash_kernel._hopper.backward_tiles import (
    NO_TILE,
    STAGES,
    block_range,
    first_block,
    next_block,
    read_tile,
    tile_of,
    turn_of,
)
from flash_kernel._hopper.compat import gl, gluon, mbarrier, tma_load, tma_store, tma_store_wait
from flash_kernel._hopper.primitives import next_stage
from flash_kernel._hopper.reduce import reductions_have_landed, tma_reduce_add


@gluon.jit
def post_tile(number, buffers):
    """Leave a tile's number for the other warps; k_full tells them."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    buffers.tile.store(gl.full([1], 0, gl.int32, layout) + number)


@gluon.jit
def load_keys(source, full, buffer, batch, head, row, SPEC: gl.constexpr):
    """Copy the two 64-row halves of a tile of k or v."""
    mbarrier.expect(full, 128 * SPEC.BLOCK_D * 2)
    tma_load(source, [batch, head, row, 0], full, buffer.index(0))
    tma_load(source, [batch, head, row + 64, 0], full, buffer.index(1))


@gluon.jit
def produce(
    q, k, v, do, statistics, counter_ptr, x, buffers, barriers, SPEC: gl.constexpr
):  # fmt: skip
    """Take tiles from the counter until there are none; copy each one's inputs."""
    BLOCK_M: gl.constexpr = SPEC.BLOCK_M
    BYTES: gl.constexpr = BLOCK_M * SPEC.BLOCK_D * 2
    parity = gl.to_tensor(0)  # of the tile
    stage = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    number = gl.atomic_add(counter_ptr, 1)
    while number < x.num_tiles:
        head_k, tile_k = tile_of(number, x, SPEC)
        batch = head_k // x.num_heads_k
        head = head_k % x.num_heads_k
        mbarrier.wait(barriers.tile_empty, parity ^ 1)
        post_tile(number, buffers)
        load_keys(k, barriers.k_full, buffers.k, batch, head, tile_k * SPEC.BLOCK_N, SPEC)
        load_keys(v, barriers.v_full, buffers.v, batch, head, tile_k * SPEC.BLOCK_N, SPEC)
        first, split, last = block_range(tile_k, x, SPEC)
        begin = first_block(tile_k, split, last, x, SPEC)
        block = begin
        member = gl.to_tensor(0)
        for _ in range((last - first) * x.group):
            q_full = barriers.q_full.index(stage)
            do_full = barriers.do_full.index(stage)
            head_q = head * x.group + member
            row = (head_k * x.group + member) * x.num_blocks + block
            mbarrier.wait(barriers.q_empty.index(stage), phase ^ 1)
            mbarrier.expect(q_full, BYTES)
            tma_load(q, [batch, head_q, block * BLOCK_M, 0], q_full, buffers.q.index(stage))
            mbarrier.expect(do_full, BYTES + BLOCK_M * 8)
            tma_load(statistics, [row * (2 * BLOCK_M)], do_full, buffers.statistics.index(stage))
            tma_load(do, [batch, head_q, block * BLOCK_M, 0], do_full, buffers.do.index(stage))
            stage, phase = next_stage(stage, phase, STAGES)
            block, member = next_block(block, member, begin, split, last, x, SPEC)
        parity = parity ^ 1
        # now, while the consumers still have two blocks to work on, an atomic costs them nothing
        number = gl.atomic_add(counter_ptr, 1)
    mbarrier.wait(barriers.tile_empty, parity ^ 1)
    post_tile(NO_TILE, buffers)
    mbarrier.arrive(barriers.k_full, count=1)


@gluon.jit
def wait_for_turn(turn_ptr, rank):
    """Wait until ``rank`` terms are in a query block's sum."""
    seen = gl.atomic_add(turn_ptr, 0, sem="acquire")
    while seen < rank:
        seen = gl.atomic_add(turn_ptr, 0, sem="acquire")


@gluon.jit
def reduce_block(
    dq_sum, turn_ptr, row, rank, slot, phase, buffers, barriers, SPEC: gl.constexpr
):  # fmt: skip
    """Add a block's dq: in the ordered mode when it is its turn, and give the turn on."""
    ROWS: gl.constexpr = SPEC.BLOCK_M * SPEC.BLOCK_D // 256
    if SPEC.IS_ORDERED:
        wait_for_turn(turn_ptr, rank)
    for w in gl.static_range(2):
        mbarrier.wait(barriers.dq_full.index(slot + w), phase)
        if SPEC.IS_ORDERED and rank == 0:
            tma_store(dq_sum, [row * ROWS + w * 16, 0], buffers.dq.index(slot + w))
        else:
            tma_reduce_add(dq_sum, [row * ROWS + w * 16, 0], buffers.dq.index(slot + w))
    tma_store_wait(0)
    for w in gl.static_range(2):
        mbarrier.arrive(barriers.dq_empty.index(slot + w), count=1)
    if SPEC.IS_ORDERED:
        reductions_have_landed()
        gl.atomic_add(turn_ptr, 1, sem="release")


@gluon.jit
def reduce_dq(STAGE: gl.constexpr, dq_sum, turns_ptr, x, buffers, barriers, SPEC: gl.constexpr):
    """Add the dq of every second block, those in buffers ``STAGE``, to the sums in global memory.

    In the ordered mode a block takes its turn, the addition and the way there and back to the L2
    cache, longer than the products of a block; so two warps take them alternately.
    """
    parity = gl.to_tensor(0)
    stage = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    mbarrier.wait(barriers.k_full, parity)
    number = read_tile(buffers)
    mbarrier.arrive(barriers.tile_empty, count=1)  # the number has been read
    while number != NO_TILE:
        head_k, tile_k = tile_of(number, x, SPEC)
        first, split, last = block_range(tile_k, x, SPEC)
        begin = first_block(tile_k, split, last, x, SPEC)
        block = begin
        member = gl.to_tensor(0)
        for _ in range((last - first) * x.group):
            if stage == STAGE:
                row = (head_k * x.group + member) * x.num_blocks + block
                row, rank = turn_of(block, tile_k, row, x, SPEC)
                reduce_block(
                    dq_sum, turns_ptr + row, row, rank, STAGE * 2, phase, buffers, barriers, SPEC
                )
            stage, phase = next_stage(stage, phase, STAGES)
            block, member = next_block(block, member, begin, split, last, x, SPEC)
        parity = parity ^ 1
        mbarrier.wait(barriers.k_full, parity)
        number = read_tile(buffers)
        mbarrier.arrive(barriers.tile_empty, count=1)

"""The backward in five matrix products: one CTA owns a tile of 128 keys and walks the queries.

    s^T = k q^T          p^T = exp(s^T - lse)             dv += p^T do
    dp^T = v do^T        ds^T = p^T * (dp^T - delta)      dk += ds^T q       dq += ds k

FlashAttention-2 (Dao, 2023, arXiv 2307.08691), algorithm 2, in the division of labour of
FlashAttention-3 (Shah et al., 2024, arXiv 2407.08608).  dk and dv stay in registers.  A dq is the
sum of one term from each key tile: the terms are added in float32 in global memory, in the order of
the accumulators' registers, which makes each of them contiguous; `backward_ends` brings the sums
into the layout and dtype of dq.

Each warp has one trade, and they meet at mbarriers only:

    producer, 1 warp               takes tiles from a counter; copies k, v, q, do, lse and delta in
    consumers, 2 warpgroups        64 keys each: the five products
    reducers, 2 warps              add dq to global memory, by turns (only if SPEC.DQ_BY_TMA)

    who waits               for                          on           who arrives
    consumers, reducers     k, and the tile's number     k_full       producer (TMA)
    consumers               v                            v_full       producer (TMA)
    consumers               q of a block                 q_full       producer (TMA)
    consumers               do, lse, delta of a block    do_full      producer (TMA)
    each consumer           ds of the other one          ds_full      both consumers
    reducers                dq of a block                dq_full      that consumer
    consumers               room for the next dq         dq_empty     reducer
    producer                room for q and do            q_empty      both consumers
    producer                room for k and v             tile_empty   consumers, reducers
    each consumer           room for dv and dk           ds_empty     both consumers, once a tile

k and v of a tile stay; q, do and the statistics come through a ring of two stages; ds and dq have
two buffers each.  Within a tile ds needs no "empty" barrier: a warpgroup passes ds_full of block
j + 1 only when both have read ds of block j.  At its end dv and dk leave through ds, and k and v
of the next tile are on their way already.

**Deterministic dq** (SPEC.IS_ORDERED).  A reducer adds the terms of a query block in the order of
the key tiles: it waits until the block's counter says that all earlier tiles are in.  Tiles are
numbered so that a tile waits only for lower numbers, and numbers are given out by an atomic counter
as CTAs come to take them: whatever order the GPU starts CTAs in, the lowest unfinished number waits
for nobody.  The first term is stored, not added, so that nothing has to clear the sums.

Tiles that begin with the same block wait for each other there, and keep that distance.  So in long
sequences (SPEC.IS_ROTATED) each tile begins some blocks after its neighbour, and wraps at the end.
A block is then reached by some tiles before they wrap and by others after, in ascending order both
times, and has a sum for each: a tile still waits only for lower numbers.
"""

from flash_kernel._hopper.backward_copies import produce, reduce_dq
from flash_kernel._hopper.backward_step import step
from flash_kernel._hopper.backward_tiles import (
    NO_TILE,
    STAGES,
    Barriers,
    Buffers,
    Problem,
    block_range,
    first_block,
    next_block,
    read_tile,
    tile_of,
)
from flash_kernel._hopper.compat import (
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    tma_store,
    tma_store_wait,
)
from flash_kernel._hopper.primitives import accumulator_layout, next_stage
from flash_kernel._hopper.reduce import reinterpret


@gluon.jit
def walk_blocks(
    dk, dv, stage, phase, block, member, count, begin, split, last, head_k, col, scale_log2, x,
    dq_sum_ptr, buffers, barriers, W: gl.constexpr, MASKED: gl.constexpr, SPEC: gl.constexpr,
):  # fmt: skip
    """Work on ``count`` pairs of a query block and a head of the group."""
    for _ in range(count):
        block_row = (head_k * x.group + member) * x.num_blocks + block
        dk, dv = step(
            dk, dv, stage, phase, scale_log2, block, block_row, col, x, dq_sum_ptr, buffers,
            barriers, W, MASKED, SPEC,
        )  # fmt: skip
        stage, phase = next_stage(stage, phase, STAGES)
        block, member = next_block(block, member, begin, split, last, x, SPEC)
    return dk, dv, stage, phase, block, member


@gluon.jit
def store_tile(
    dk, dv, dk_out, dv_out, batch, head, row, parity, W: gl.constexpr, buffers, barriers,
    SPEC: gl.constexpr,
):  # fmt: skip
    """Write dv and dk by way of this warpgroup's ds, while k and v of the next tile come in."""
    dtype: gl.constexpr = buffers.q.dtype
    TILES: gl.constexpr = 2 * SPEC.BLOCK_M // SPEC.BLOCK_D  # that this warpgroup's ds has room for
    mbarrier.arrive(barriers.tile_empty, count=1)
    mbarrier.arrive(barriers.ds_empty, count=1)
    mbarrier.wait(barriers.ds_empty, parity)
    outgoing = reinterpret(buffers.ds, [2 * TILES, 1, 1, 64, SPEC.BLOCK_D], buffers.k.layout)
    outgoing.index(W * TILES).reshape(dv.shape).store(dv.to(dtype))
    fence_async_shared()
    tma_store(dv_out, [batch, head, row, 0], outgoing.index(W * TILES))
    if TILES == 1:
        tma_store_wait(0)
    outgoing.index((W + 1) * TILES - 1).reshape(dk.shape).store(dk.to(dtype))
    fence_async_shared()
    tma_store(dk_out, [batch, head, row, 0], outgoing.index((W + 1) * TILES - 1))


@gluon.jit
def mark_keys(dk, head_k, col, marks_ptr, x):
    """Mark 64 keys whose gradients are not finite, as what a hidden row holds may be why.

    dk alone tells; see `wide_dk_dv_consumer.mark`.
    """
    if col < x.seqlen_k:
        is_bad = gl.sum(gl.sum(dk, 1), 0) * 0.0 != 0.0
        gl.store(marks_ptr + head_k * gl.cdiv(x.seqlen_k, 64) + col // 64, is_bad.to(gl.int32))


@gluon.jit
def consume(
    W: gl.constexpr, dk_out, dv_out, dq_sum_ptr, marks_ptr, scale, scale_log2, x, buffers, barriers,
    SPEC: gl.constexpr,
):  # fmt: skip
    """Make dk and dv of 64 keys of each tile, and half of each block's dq."""
    D: gl.constexpr = SPEC.BLOCK_D
    OUT: gl.constexpr = accumulator_layout(D)
    parity = gl.to_tensor(0)
    stage = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    mbarrier.wait(barriers.k_full, parity)
    number = read_tile(buffers)
    while number != NO_TILE:
        head_k, tile_k = tile_of(number, x, SPEC)
        first, split, last = block_range(tile_k, x, SPEC)
        col = tile_k * SPEC.BLOCK_N + W * 64
        tma_store_wait(0)  # of the tile before, out of ds
        mbarrier.wait(barriers.v_full, parity)
        dk = gl.zeros([64, D], gl.float32, OUT)
        dv = gl.zeros([64, D], gl.float32, OUT)
        begin = first_block(tile_k, split, last, x, SPEC)
        block = begin
        member = gl.to_tensor(0)
        # masks in a loop of their own: a branch around the mask in one loop costs spills
        if not SPEC.HAS_LEFT:
            dk, dv, stage, phase, block, member = walk_blocks(
                dk, dv, stage, phase, block, member, (last - split) * x.group, begin, split, last,
                head_k, col, scale_log2, x, dq_sum_ptr, buffers, barriers, W, False, SPEC,
            )  # fmt: skip
        if SPEC.IS_MASKED:
            dk, dv, stage, phase, block, member = walk_blocks(
                dk, dv, stage, phase, block, member, (split - first) * x.group, begin, split, last,
                head_k, col, scale_log2, x, dq_sum_ptr, buffers, barriers, W, True, SPEC,
            )  # fmt: skip
        batch, head = head_k // x.num_heads_k, head_k % x.num_heads_k
        store_tile(
            dk * scale, dv, dk_out, dv_out, batch, head, col, parity, W, buffers, barriers, SPEC
        )
        if SPEC.HIDES_PAIRS:  # while dk and dv leave
            mark_keys(dk, head_k, col, marks_ptr, x)
        parity = parity ^ 1
        mbarrier.wait(barriers.k_full, parity)
        number = read_tile(buffers)
    tma_store_wait(0)


@gluon.jit
def make_barriers(SPEC: gl.constexpr):
    """Return the barriers, initialised."""
    ONE: gl.constexpr = mbarrier.MBarrierLayout()
    k_full = gl.allocate_shared_memory(gl.int64, [1], ONE)
    v_full = gl.allocate_shared_memory(gl.int64, [1], ONE)
    tile_empty = gl.allocate_shared_memory(gl.int64, [1], ONE)
    ds_empty = gl.allocate_shared_memory(gl.int64, [1], ONE)
    q_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], ONE)
    do_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], ONE)
    q_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], ONE)
    ds_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], ONE)
    dq_full = gl.allocate_shared_memory(gl.int64, [4, 1], ONE)
    dq_empty = gl.allocate_shared_memory(gl.int64, [4, 1], ONE)
    mbarrier.init(k_full, count=1)
    mbarrier.init(v_full, count=1)
    mbarrier.init(tile_empty, count=4 if SPEC.DQ_BY_TMA else 2)
    mbarrier.init(ds_empty, count=2)
    for i in gl.static_range(STAGES):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(do_full.index(i), count=1)
        mbarrier.init(q_empty.index(i), count=2)
        mbarrier.init(ds_full.index(i), count=2)
    for i in gl.static_range(4):
        mbarrier.init(dq_full.index(i), count=1)
        mbarrier.init(dq_empty.index(i), count=1)
    fence_async_shared()
    return Barriers(
        k_full, v_full, tile_empty, ds_empty, q_full, do_full, q_empty, ds_full, dq_full, dq_empty,
    )  # fmt: skip


@gluon.jit
def make_buffers(q, k, v, do, statistics, dq_sum, SPEC: gl.constexpr):
    """Return the buffers, laid out as the descriptors say."""
    dtype: gl.constexpr = q.dtype
    M: gl.constexpr = SPEC.BLOCK_M
    D: gl.constexpr = SPEC.BLOCK_D
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    SWIZZLED: gl.constexpr = gl.NVMMASharedLayout(
        swizzle_byte_width=128, element_bitwidth=16, rank=2
    )
    tile = gl.allocate_shared_memory(gl.int32, [1], PLAIN)
    k_buffer = gl.allocate_shared_memory(dtype, [2, 1, 1, 64, D], k.layout)
    v_buffer = gl.allocate_shared_memory(dtype, [2, 1, 1, 64, D], v.layout)
    q_buffer = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, M, D], q.layout)
    do_buffer = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, M, D], do.layout)
    statistics_buffer = gl.allocate_shared_memory(gl.float32, [STAGES, 2 * M], statistics.layout)
    ds = gl.allocate_shared_memory(dtype, [4, 64, M], SWIZZLED)
    dq = statistics_buffer  # not used
    if SPEC.DQ_BY_TMA:
        dq = gl.allocate_shared_memory(gl.float32, [4, 16, 256], dq_sum.layout)
    return Buffers(tile, k_buffer, v_buffer, q_buffer, do_buffer, statistics_buffer, ds, dq)


@gluon.jit(
    do_not_specialize=[
        "num_heads_k", "group", "seqlen_q", "seqlen_k", "num_blocks", "heads_together",
        "num_tiles", "blocks_apart", "left", "right",
    ]
)  # fmt: skip
def flash_attention_backward_kernel(
    q, k, v, do, dk, dv, statistics, dq_sum, dq_sum_ptr, counters_ptr, marks_ptr, num_heads_k,
    group, seqlen_q, seqlen_k, num_blocks, heads_together, num_tiles, blocks_apart, left, right,
    scale, scale_log2, SPEC: gl.constexpr,
):  # fmt: skip
    """Write dk and dv, and add dq to ``dq_sum``.

    ``q .. dv`` are descriptors over ``[B, H, rows, D]``, ``statistics`` and ``dq_sum`` over what
    `backward_ends` made; ``counters`` are int32 zeros: the next tile, then the turns of the blocks;
    ``marks`` are int32 ``[B * H_kv, cdiv(seqlen_k, 64)]``, written if SPEC.HIDES_PAIRS.
    """
    x = Problem(
        num_heads_k, group, seqlen_q, seqlen_k, num_blocks, heads_together, num_tiles, blocks_apart,
        left, right,
    )  # fmt: skip
    buffers = make_buffers(q, k, v, do, statistics, dq_sum, SPEC)
    barriers = make_barriers(SPEC)
    turns_ptr = counters_ptr + 1
    # a constexpr stays one only in tuples that are written inside the call
    if SPEC.DQ_BY_TMA:
        gl.warp_specialize([
            (consume, (0, dk, dv, dq_sum_ptr, marks_ptr, scale, scale_log2, x, buffers, barriers,
                       SPEC)),
            (consume, (1, dk, dv, dq_sum_ptr, marks_ptr, scale, scale_log2, x, buffers, barriers,
                       SPEC)),
            (produce, (q, k, v, do, statistics, counters_ptr, x, buffers, barriers, SPEC)),
            (reduce_dq, (0, dq_sum, turns_ptr, x, buffers, barriers, SPEC)),
            (reduce_dq, (1, dq_sum, turns_ptr, x, buffers, barriers, SPEC)),
        ], [4, 1, 1, 1], [240, 24, 24, 24])  # fmt: skip
    else:
        gl.warp_specialize([
            (consume, (0, dk, dv, dq_sum_ptr, marks_ptr, scale, scale_log2, x, buffers, barriers,
                       SPEC)),
            (consume, (1, dk, dv, dq_sum_ptr, marks_ptr, scale, scale_log2, x, buffers, barriers,
                       SPEC)),
            (produce, (q, k, v, do, statistics, counters_ptr, x, buffers, barriers, SPEC)),
        ], [4, 1], [240, 24])  # fmt: skip

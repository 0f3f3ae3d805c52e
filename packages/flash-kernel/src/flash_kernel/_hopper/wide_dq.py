"""dq for head dims above 128: a CTA owns 128 query rows and walks the keys, as in the forward.

    s = q k^T        p = exp(s - lse)
    dp = do v^T      ds = p * (dp - delta)      dq += ds k

The tiles, their order, the producer and the masks are the forward's.  q and do of a tile stay in
shared memory, which leaves room for two blocks of K and one of V:

    producer (1 warp)             who frees it, and when
    ───────────────────────────   ─────────────────────────────────────────────────
    q   of a tile                 a warpgroup, when its last scores are there
    do  of a tile                 a warpgroup, when its dq, which leaves through it, has left
    K   of a block                a warpgroup, when the product with ds is there
    V   of a block                a warpgroup, when dp is there

A warpgroup issues the scores of the next block together with the product of this one, so that the
exponentials lie under it, and dp of the next block under both:

    wait for dp      ds = p (dp - delta)
    issue s' = q k', dq += ds k
    wait for s'      p' = exp(s' - lse)
    issue dp' = do v'
    wait for dq
"""

from typing import Any, NamedTuple

from flash_kernel._hopper.compat import (
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    tma_store_wait,
    warpgroup_mma_wait,
)
from flash_kernel._hopper.consumer import read_tile
from flash_kernel._hopper.pieces import (
    allocate,
    issue_output,
    issue_scores,
    put,
    row_sums,
    stage_of,
    store_tile,
    wait_for_output,
    zeros,
)
from flash_kernel._hopper.primitives import (
    accumulator_layout,
    barrier_arrive,
    barrier_sync,
    hidden,
    next_stage,
)
from flash_kernel._hopper.producer import leave_counter, load_block, load_rows, post
from flash_kernel._hopper.softmax import hide
from flash_kernel._hopper.tiles import (
    END,
    K_FREE,
    NEXT_TILE,
    POSTED,
    Q_FREE,
    V_FREE,
    Ring,
    Rows,
    Tile,
    left_end,
    locate,
    part_of,
)

LOG2_E: gl.constexpr = gl.constexpr(1.4426950408889634)
DO_FREE: gl.constexpr = gl.constexpr(9)  # beside the forward's Q_FREE, of which one buffer is left


class Tensors(NamedTuple):
    """Global memory: descriptors over [B, H, rows, D], one for each piece, and pointers."""

    q: Any
    k: Any
    v: Any
    do: Any
    dq: Any
    statistics: Any  # float32 [B, H, 2, padded_q]: lse, +inf where a row has none, and delta
    marks: Any  # int32 [B, H, tiles of 64 rows]
    workspace: Any  # int32 [2], zero between launches


class Shape(NamedTuple):
    """Sizes, and how tiles are numbered: the forward's, and what the gradient takes."""

    seqlen_q: Any
    seqlen_k: Any
    left: Any
    right: Any
    num_heads: Any
    group: Any
    units: Any
    row_tiles: Any
    swath: Any
    padded_q: Any  # rows of the statistics of a head
    scale: Any
    scale_log2: Any


class Buffers(NamedTuple):
    """Shared memory, and the mbarriers that say what has landed."""

    q: Any  # [CONSUMERS, 1, 1, 64, D], by pieces
    do: Any
    k: Any  # [STAGES, 1, 1, BLOCK_N, D]
    v: Any  # [1, 1, 1, BLOCK_N, D]
    tile: Any  # [1, POSTED]
    q_full: Any
    do_full: Any
    k_full: Any
    v_full: Any


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


@gluon.jit
def next_k(ring, SPEC: gl.constexpr):
    k, k_phase = next_stage(ring.k, ring.k_phase, SPEC.STAGES)
    return Ring(k, k_phase, ring.v, ring.v_phase)


@gluon.jit
def skip_blocks(count, ring, buffers, SPEC: gl.constexpr):
    """Let blocks pass that this warpgroup does not see, but the other does.

    A stage may be released only once it has landed, or its release would count for an earlier use.
    """
    for _ in range(count):
        mbarrier.wait(buffers.k_full.index(ring.k), ring.k_phase)
        barrier_arrive(K_FREE + ring.k, SPEC.THREADS)
        mbarrier.wait(buffers.v_full.index(0), ring.v_phase)
        barrier_arrive(V_FREE + ring.v, SPEC.THREADS)
        k, k_phase = next_stage(ring.k, ring.k_phase, SPEC.STAGES)
        ring = Ring(k, k_phase, ring.v, ring.v_phase ^ 1)
    return ring


@gluon.jit
def probabilities(s, tile, i, lse_log2, shape, MASKED: gl.constexpr, SPEC: gl.constexpr):
    """Return p of block i of a tile, from its products."""
    if MASKED:
        s = hide(s, tile, tile.edge - (i + 1) * SPEC.BLOCK_N, shape, SPEC)
    return gl.exp2(s * shape.scale_log2 - lse_log2[:, None])


@gluon.jit
def score_gradients(p, dp, delta, dtype: gl.constexpr, SPEC: gl.constexpr):
    """Return ds, as the first factor of a product with K."""
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, accumulator_layout(SPEC.WIDTHS[0]), k_width=2)
    return gl.convert_layout((p * (dp - delta[:, None])).to(dtype), OPERAND)


@gluon.jit
def step(
    dq, p, dp_flying, lse_log2, delta, ring, tile, i, shape, buffers, W: gl.constexpr,
    MASKED: gl.constexpr, SPEC: gl.constexpr,
):  # fmt: skip
    """Add block i - 1 of a tile to dq; scores of block i, of which dp is in flight at the end.

    ``ring`` is that of block i - 1.
    """
    upcoming = next_k(ring, SPEC)
    mbarrier.wait(buffers.k_full.index(upcoming.k), upcoming.k_phase)
    dp = warpgroup_mma_wait(0, deps=[dp_flying])
    barrier_arrive(V_FREE + ring.v, SPEC.THREADS)
    ds = score_gradients(p, dp, delta, buffers.k[0].dtype, SPEC)
    s_flying = issue_scores(stage_of(buffers.q, hidden(W)), stage_of(buffers.k, upcoming.k))
    dq = issue_output(dq, ds, stage_of(buffers.k, ring.k))
    s = warpgroup_mma_wait(len(dq), deps=[s_flying])
    p = probabilities(s, tile, i, lse_log2, shape, MASKED, SPEC)
    # this spin loop ends a basic block, so that the exponentials stay before the wait for dq
    mbarrier.wait(buffers.v_full.index(0), ring.v_phase ^ 1)
    dp_flying = issue_scores(stage_of(buffers.do, hidden(W)), stage_of(buffers.v, ring.v))
    dq, ds, p = wait_for_dq(dq, ds, p, SPEC)
    barrier_arrive(K_FREE + ring.k, SPEC.THREADS)
    return dq, p, dp_flying, Ring(upcoming.k, upcoming.k_phase, ring.v, ring.v_phase ^ 1)


@gluon.jit
def wait_for_dq(dq, ds, kept, SPEC: gl.constexpr):
    """Wait until dq is there, and leave dp, issued later, in flight."""
    LATER: gl.constexpr = len(SPEC.WIDTHS)
    if len(dq) == 1:
        first, ds, kept = warpgroup_mma_wait(LATER, deps=[dq[0], ds, kept])
        return (first,), ds, kept
    else:  # noqa: RET505 - to the compiler, what follows a return is still there
        first, second, ds, kept = warpgroup_mma_wait(LATER, deps=[dq[0], dq[1], ds, kept])
        return (first, second), ds, kept


@gluon.jit
def first_scores(tile, lse_log2, ring, shape, buffers, W: gl.constexpr, SPEC: gl.constexpr):
    """Return p of a tile's first block."""
    mbarrier.wait(buffers.k_full.index(ring.k), ring.k_phase)
    q = stage_of(buffers.q, hidden(W))
    s = warpgroup_mma_wait(0, deps=[issue_scores(q, stage_of(buffers.k, ring.k))])
    return probabilities(s, tile, 0, lse_log2, shape, SPEC.MASKS_FIRST, SPEC)


@gluon.jit
def walk_blocks(
    lse_log2, delta, ring, tile, parity, shape, buffers, W: gl.constexpr, SPEC: gl.constexpr
):  # fmt: skip
    """Return dq of the 64 rows of one warpgroup, from the blocks of a tile, and the next stages."""
    p = first_scores(tile, lse_log2, ring, shape, buffers, W, SPEC)
    dq = zeros(SPEC)
    mbarrier.wait(buffers.do_full.index(0), parity)
    mbarrier.wait(buffers.v_full.index(0), ring.v_phase)
    dp = issue_scores(stage_of(buffers.do, hidden(W)), stage_of(buffers.v, ring.v))
    full_blocks = tile.blocks
    if SPEC.MASKS_LAST:
        left = left_end(tile.row + 63, tile.seqlen_q, tile.seqlen_k, shape, SPEC)
        whole = (tile.edge - left) // SPEC.BLOCK_N
        full_blocks = gl.minimum(gl.maximum(whole, 1), tile.blocks)
    for i in range(1, full_blocks):
        dq, p, dp, ring = step(
            dq, p, dp, lse_log2, delta, ring, tile, i, shape, buffers, W, False, SPEC
        )
    if SPEC.MASKS_LAST:
        for i in range(full_blocks, tile.blocks):
            dq, p, dp, ring = step(
                dq, p, dp, lse_log2, delta, ring, tile, i, shape, buffers, W, True, SPEC
            )
    barrier_arrive(gl.to_tensor(Q_FREE), SPEC.THREADS)
    dp = warpgroup_mma_wait(0, deps=[dp])
    barrier_arrive(V_FREE + ring.v, SPEC.THREADS)
    ds = score_gradients(p, dp, delta, buffers.k[0].dtype, SPEC)
    dq = issue_output(dq, ds, stage_of(buffers.k, ring.k))
    dq, ds, p = wait_for_output(dq, ds, p)
    barrier_arrive(K_FREE + ring.k, SPEC.THREADS)
    k, k_phase = next_stage(ring.k, ring.k_phase, SPEC.STAGES)
    return dq, Ring(k, k_phase, ring.v, ring.v_phase ^ 1)


@gluon.jit
def store(dq, tile, tensors, shape, buffers, W: gl.constexpr, SPEC: gl.constexpr):
    """Write scale * dq by way of do's buffer, and whether the tile has to be done again.

    0 * NaN is NaN: where not all is finite, it may be for a value that the row does not see.
    """
    BY_ROW: gl.constexpr = gl.SliceLayout(1, accumulator_layout(SPEC.WIDTHS[0]))
    rows = gl.arange(0, 64, BY_ROW)
    put(dq, shape.scale + gl.zeros([64], gl.float32, BY_ROW), buffers.do, W)
    fence_async_shared()
    of_head = Rows(tile.batch, tile.head, 0, tile.seqlen_q)
    store_tile(tensors.dq, of_head, tile.row, buffers.do, W, SPEC)
    if SPEC.HAS_LEFT or SPEC.HAS_RIGHT:
        is_finite = row_sums(dq, rows) * 0.0 == 0.0
        mark = gl.max(gl.where(is_finite, 0, 1), 0)
        tiles = (shape.seqlen_q + 63) // 64
        batch_head = tile.batch * shape.num_heads + tile.head
        if tile.row < shape.seqlen_q:
            gl.store(tensors.marks + batch_head.to(gl.int64) * tiles + tile.row // 64, mark)
    tma_store_wait(0)
    barrier_arrive(gl.to_tensor(DO_FREE), SPEC.THREADS)


@gluon.jit
def consume(W: gl.constexpr, tensors, shape, buffers, SPEC: gl.constexpr):
    """Warpgroup W of a CTA: its 64 rows of one tile after the other."""
    BY_ROW: gl.constexpr = gl.SliceLayout(1, accumulator_layout(SPEC.BLOCK_N))
    STAGES: gl.constexpr = SPEC.STAGES
    barrier_arrive(gl.to_tensor(Q_FREE), SPEC.THREADS)  # everything starts free
    barrier_arrive(gl.to_tensor(DO_FREE), SPEC.THREADS)
    barrier_arrive(gl.to_tensor(V_FREE), SPEC.THREADS)
    for stage in gl.static_range(STAGES):
        barrier_arrive(gl.to_tensor(K_FREE + stage), SPEC.THREADS)
    zero = gl.to_tensor(0)
    ring = Ring(zero, zero, zero, zero)
    position = zero
    tile = read_tile(position, shape, buffers, SPEC)
    while tile.batch != END:
        part, skipped = part_of(tile, W, shape, SPEC)
        head = (part.batch * shape.num_heads + part.head).to(gl.int64)
        statistics = tensors.statistics + head * 2 * shape.padded_q + part.row
        rows = gl.arange(0, 64, BY_ROW)
        lse_log2 = gl.load(statistics + rows) * LOG2_E
        delta = gl.load(statistics + shape.padded_q + rows)
        if SPEC.HAS_RIGHT:
            ring = skip_blocks(skipped, ring, buffers, SPEC)
        if SPEC.MAY_BE_EMPTY and part.blocks == 0:
            barrier_arrive(gl.to_tensor(Q_FREE), SPEC.THREADS)
            mbarrier.wait(buffers.do_full.index(0), position & 1)
            dq = zeros(SPEC)
        else:
            dq, ring = walk_blocks(
                lse_log2, delta, ring, part, position & 1, shape, buffers, W, SPEC
            )
        store(dq, part, tensors, shape, buffers, W, SPEC)
        position += 1
        tile = read_tile(position, shape, buffers, SPEC)


@gluon.jit
def prepared_buffers(tensors, SPEC: gl.constexpr):
    """Return the CTA's shared memory, its barriers ready."""
    STAGES: gl.constexpr = SPEC.STAGES
    numbers: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    bars: gl.constexpr = mbarrier.MBarrierLayout()
    q_full = gl.allocate_shared_memory(gl.int64, [1, 1], bars)
    do_full = gl.allocate_shared_memory(gl.int64, [1, 1], bars)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bars)
    v_full = gl.allocate_shared_memory(gl.int64, [1, 1], bars)
    mbarrier.init(q_full.index(0), count=1)
    mbarrier.init(do_full.index(0), count=1)
    mbarrier.init(v_full.index(0), count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=1)
    fence_async_shared()
    return Buffers(
        allocate(tensors.q, SPEC.CONSUMERS),
        allocate(tensors.do, SPEC.CONSUMERS),
        allocate(tensors.k, STAGES),
        allocate(tensors.v, 1),
        gl.allocate_shared_memory(gl.int32, [1, POSTED], numbers),
        q_full,
        do_full,
        k_full,
        v_full,
    )


@gluon.jit(
    do_not_specialize=[
        "seqlen_q", "seqlen_k", "left", "right", "num_heads", "group", "units", "row_tiles",
        "swath", "padded_q",
    ]
)  # fmt: skip
def flash_attention_wide_dq_kernel(
    q, k, v, do, dq, q_rest, k_rest, v_rest, do_rest, dq_rest, statistics_ptr, marks_ptr,
    workspace_ptr, seqlen_q, seqlen_k, left, right, num_heads, group, units, row_tiles, swath,
    padded_q, scale, scale_log2, SPEC: gl.constexpr,
):  # fmt: skip
    """dq, and a mark for each tile of 64 rows that is not finite, where pairs may be hidden.

    ``q .. dq``: descriptors over [B, H, rows, D] of blocks of 64 (q, do, dq) and BLOCK_N rows and
    as many columns as the first piece of a tile has.  ``.._rest`` are those of the second; where
    SPEC has but one, any tensor.  ``workspace_ptr``: two int32, zero, and zero again after.
    """
    if len(SPEC.WIDTHS) == 1:
        parts = (q,), (k,), (v,), (do,), (dq,)
    else:
        parts = (q, q_rest), (k, k_rest), (v, v_rest), (do, do_rest), (dq, dq_rest)
    tensors = Tensors(
        parts[0], parts[1], parts[2], parts[3], parts[4], statistics_ptr, marks_ptr, workspace_ptr
    )
    shape = Shape(
        seqlen_q, seqlen_k, left, right, num_heads, group, units, row_tiles, swath, padded_q, scale,
        scale_log2,
    )  # fmt: skip
    CREGS: gl.constexpr = SPEC.CONSUMER_REGISTERS
    PREGS: gl.constexpr = SPEC.PRODUCER_REGISTERS
    buffers = prepared_buffers(tensors, SPEC)
    # SPEC and W stay constants only in tuples written within the call
    gl.warp_specialize([
        (consume, (0, tensors, shape, buffers, SPEC)),
        (consume, (1, tensors, shape, buffers, SPEC)),
        (produce, (tensors, shape, buffers, SPEC)),
    ], [4, 1], [CREGS, PREGS])  # fmt: skip

"""The consumer of dq: a warpgroup that owns 64 query rows of each tile."""

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
    hidden,
    next_stage,
    stay_here,
)
from flash_kernel._hopper.softmax import hide
from flash_kernel._hopper.tiles import (
    DO_FREE,
    END,
    K_FREE,
    Q_FREE,
    V_FREE,
    Ring,
    Rows,
    left_end,
    part_of,
)
from flash_kernel._triton.primitives import LOG2_E


@gluon.jit
def next_block(ring, SPEC: gl.constexpr):
    """Return the place in the rings of the block after this one; V has one stage."""
    k, k_phase = next_stage(ring.k, ring.k_phase, SPEC.STAGES)
    return Ring(k, k_phase, ring.v, ring.v_phase ^ 1)


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
        ring = next_block(ring, SPEC)
    return ring


@gluon.jit
def step(
    dq, lse_log2, delta, ring, tile, i, parity, shape, buffers, W: gl.constexpr,
    MASKED: gl.constexpr, FIRST: gl.constexpr, SPEC: gl.constexpr,
):  # fmt: skip
    """Add block i of a tile to dq; with the FIRST wait for do, of that parity.

    The exponentials lie under dp.  Nothing is in flight from one block to the next: what this
    warpgroup leaves of the tensor cores, the other one uses.
    """
    BLOCK_N: gl.constexpr = SPEC.BLOCK_N
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, accumulator_layout(SPEC.WIDTHS[0]), k_width=2)
    own = hidden(W)
    mbarrier.wait(buffers.k_full.index(ring.k), ring.k_phase)
    s_flying = issue_scores(stage_of(buffers.q, own), stage_of(buffers.k, ring.k))
    if FIRST:  # it comes later than q: the dq of the tile before left by way of its buffer
        mbarrier.wait(buffers.do_full.index(0), parity)
    mbarrier.wait(buffers.v_full.index(0), ring.v_phase)
    dp_flying = issue_scores(stage_of(buffers.do, own), stage_of(buffers.v, ring.v))
    s = warpgroup_mma_wait(len(dq), deps=[s_flying])
    if MASKED:
        s = hide(s, tile, tile.edge - (i + 1) * BLOCK_N, shape, SPEC)
    p = gl.exp2(s * shape.scale_log2 - lse_log2[:, None])
    stay_here(p, BLOCK_N // 2)
    dp, p = warpgroup_mma_wait(0, deps=[dp_flying, p])
    barrier_arrive(V_FREE + ring.v, SPEC.THREADS)
    ds = gl.convert_layout((p * (dp - delta[:, None])).to(buffers.k[0].dtype), OPERAND)
    dq = issue_output(dq, ds, stage_of(buffers.k, ring.k))
    dq, ds, p = wait_for_output(dq, ds, p)
    barrier_arrive(K_FREE + ring.k, SPEC.THREADS)
    return dq, next_block(ring, SPEC)


@gluon.jit
def walk_blocks(
    lse_log2, delta, ring, tile, parity, shape, buffers, W: gl.constexpr, SPEC: gl.constexpr
):  # fmt: skip
    """Return dq of the 64 rows of one warpgroup, from the blocks of a tile, and the next stages."""
    MASKED: gl.constexpr = SPEC.MASKS_FIRST
    dq, ring = step(
        zeros(SPEC), lse_log2, delta, ring, tile, 0, parity, shape, buffers, W, MASKED, True, SPEC
    )
    full_blocks = tile.blocks
    if SPEC.MASKS_LAST:
        left = left_end(tile.row + 63, tile.seqlen_q, tile.seqlen_k, shape, SPEC)
        whole = (tile.edge - left) // SPEC.BLOCK_N
        full_blocks = gl.minimum(gl.maximum(whole, 1), tile.blocks)
    for i in range(1, full_blocks):
        dq, ring = step(
            dq, lse_log2, delta, ring, tile, i, parity, shape, buffers, W, False, False, SPEC
        )
    if SPEC.MASKS_LAST:
        for i in range(full_blocks, tile.blocks):
            dq, ring = step(
                dq, lse_log2, delta, ring, tile, i, parity, shape, buffers, W, True, False, SPEC
            )
    return dq, ring


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
            mbarrier.wait(buffers.do_full.index(0), position & 1)
            dq = zeros(SPEC)
        else:
            dq, ring = walk_blocks(
                lse_log2, delta, ring, part, position & 1, shape, buffers, W, SPEC
            )
        barrier_arrive(gl.to_tensor(Q_FREE), SPEC.THREADS)
        store(dq, part, tensors, shape, buffers, W, SPEC)
        position += 1
        tile = read_tile(position, shape, buffers, SPEC)

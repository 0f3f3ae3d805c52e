"""The forward's consumer: a warpgroup that owns 64 rows of each tile."""

from flash_kernel._hopper.compat import fence_async_shared, gl, gluon, mbarrier, tma_store_wait
from flash_kernel._hopper.pieces import (
    issue_output,
    put,
    row_sums,
    stage_of,
    store_tile,
    wait_for_output,
    zeros,
)
from flash_kernel._hopper.primitives import (
    LN_2,
    accumulator_layout,
    barrier_arrive,
    barrier_sync,
    next_stage,
    number_at,
)
from flash_kernel._hopper.softmax import first_step, give_turn, step, take_turn
from flash_kernel._hopper.tiles import (
    END,
    K_FREE,
    POSTED,
    TURN,
    V_FREE,
    Ring,
    Rows,
    Tile,
    left_end,
    part_of,
    q_free,
)


@gluon.jit
def skip_blocks(count, ring, buffers, W: gl.constexpr, SPEC: gl.constexpr):
    """Let blocks pass that this warpgroup does not see, but others of the tile do.

    A stage may be released only once it has landed, or its release would count for an earlier use.
    """
    for _ in range(count):
        mbarrier.wait(buffers.k_full.index(ring.k), ring.k_phase)
        mbarrier.wait(buffers.v_full.index(ring.v), ring.v_phase)
        barrier_arrive(K_FREE + ring.k, SPEC.THREADS)
        barrier_arrive(V_FREE + ring.v, SPEC.THREADS)
        k, k_phase = next_stage(ring.k, ring.k_phase, SPEC.STAGES)
        v, v_phase = next_stage(ring.v, ring.v_phase, SPEC.STAGES)
        ring = Ring(k, k_phase, v, v_phase)
        take_turn(W)
        give_turn(W, SPEC.CONSUMERS)
    return ring


@gluon.jit
def sees_a_key(rows, tile, shape, SPEC: gl.constexpr):
    """Say which rows exist, and see a key if not all do."""
    exists = rows < tile.seqlen_q
    if SPEC.MAY_BE_EMPTY and SPEC.HAS_RIGHT:
        exists = exists & (rows + (tile.seqlen_k - tile.seqlen_q) + shape.right >= 0)
    return exists


@gluon.jit
def has_failed(acc, total, rows, tile, shape, SPEC: gl.constexpr):
    """Say for which rows the fixed reference was too far from the scores.

    The sum bounds every p.  It is at least that of the first block's maximum, 1 before the shift,
    for every row that sees a key.  An O that is not finite has overflowed, or been reached by a
    hidden value, which is 0 * NaN here and left out by the other kernel.
    """
    HALF: gl.constexpr = SPEC.SHIFT > 0
    MOST: gl.constexpr = 2.0**15 if HALF else 2.0**64
    LEAST: gl.constexpr = 2.0 ** -(SPEC.SHIFT + 1)
    holds = (total < MOST) & (total > LEAST)  # not for NaN
    is_finite = row_sums(acc, rows) * 0.0 == 0.0
    return (sees_a_key(rows, tile, shape, SPEC) & (holds == 0)) | (is_finite == 0)


@gluon.jit
def store(
    acc, factor, lse, rows, tile, tensors, shape, buffers, W: gl.constexpr, SPEC: gl.constexpr
):
    """Write lse, and acc times a factor for each row as o.

    o goes through shared memory; the copy engine leaves out the rows past the sequence's end.
    """
    row = (tile.batch * shape.num_heads + tile.head).to(gl.int64) * shape.seqlen_q + tile.start
    gl.store(tensors.lse + row + rows, lse, mask=rows < tile.seqlen_q)
    tma_store_wait(0)
    put(acc, factor, buffers.o, W)
    fence_async_shared()
    of_head = Rows(tile.batch, tile.head, tile.start, tile.seqlen_q)
    store_tile(tensors.o, of_head, tile.row, buffers.o, W, SPEC)


@gluon.jit
def attend_tile(
    q, ring, tile, tensors, shape, buffers, W: gl.constexpr, SPEC: gl.constexpr
):  # fmt: skip
    """The 64 rows of one warpgroup against the blocks of a tile."""
    BY_ROW: gl.constexpr = gl.SliceLayout(1, accumulator_layout(SPEC.WIDTHS[0]))
    acc, p, reference, l, ring = first_step(q, ring, tile, shape, buffers, W, SPEC)
    full_blocks = tile.blocks
    if SPEC.MASKS_LAST:
        left = left_end(tile.row + 63, tile.seqlen_q, tile.seqlen_k, shape, SPEC)
        whole = (tile.edge - left) // SPEC.BLOCK_N
        full_blocks = gl.minimum(gl.maximum(whole, 1), tile.blocks)
    for i in range(1, full_blocks):
        acc, p, l, ring = step(
            q, acc, p, reference, l, ring, tile, i, shape, buffers, W, False, SPEC
        )
    if SPEC.MASKS_LAST:
        for i in range(full_blocks, tile.blocks):
            acc, p, l, ring = step(
                q, acc, p, reference, l, ring, tile, i, shape, buffers, W, True, SPEC
            )
    acc = issue_output(acc, p, stage_of(buffers.v, ring.v))
    # the statistics of the rows are made while the product runs
    rows = tile.row + gl.arange(0, 64, BY_ROW)
    total = gl.convert_layout(gl.sum(l, 1), BY_ROW)
    factor = 1.0 / gl.where(total == 0.0, 1.0, total)
    lse = gl.convert_layout(reference, BY_ROW) * LN_2 + gl.log(total)
    acc, p, total = wait_for_output(acc, p, total)
    barrier_arrive(V_FREE + ring.v, SPEC.THREADS)
    v, v_phase = next_stage(ring.v, ring.v_phase, SPEC.STAGES)
    lse = gl.where(has_failed(acc, total, rows, tile, shape, SPEC), float("nan"), lse)
    store(acc, factor, lse, rows, tile, tensors, shape, buffers, W, SPEC)
    return Ring(ring.k, ring.k_phase, v, v_phase)


@gluon.jit
def empty_tile(tile, tensors, shape, buffers, W: gl.constexpr, SPEC: gl.constexpr):
    """Rows that see no key: o = 0, lse = -inf."""
    BY_ROW: gl.constexpr = gl.SliceLayout(1, accumulator_layout(SPEC.WIDTHS[0]))
    rows = tile.row + gl.arange(0, 64, BY_ROW)
    lse = gl.full([64], float("-inf"), gl.float32, BY_ROW)
    factor = gl.zeros([64], gl.float32, BY_ROW)
    store(zeros(SPEC), factor, lse, rows, tile, tensors, shape, buffers, W, SPEC)


@gluon.jit
def read_tile(position, shape, buffers, SPEC: gl.constexpr):
    """Wait for the q of a position in the sequence of tiles; return the tile posted with it."""
    buffer = position % SPEC.Q_BUFFERS
    mbarrier.wait(buffers.q_full.index(buffer), (position // SPEC.Q_BUFFERS) & 1)
    layout: gl.constexpr = gl.BlockedLayout([POSTED], [32], [4], [0])
    index = gl.arange(0, POSTED, layout)
    numbers = buffers.tile.index(buffer).load(layout)
    batch, head, row, edge, blocks, start, seqlen_q, seqlen_k = (
        number_at(0, index, numbers), number_at(1, index, numbers), number_at(2, index, numbers),
        number_at(3, index, numbers), number_at(4, index, numbers), number_at(5, index, numbers),
        number_at(6, index, numbers), number_at(7, index, numbers),
    )  # fmt: skip
    if not SPEC.IS_PACKED:
        start, seqlen_q, seqlen_k = start * 0, shape.seqlen_q, shape.seqlen_k
    return Tile(batch, head, row, edge, blocks, start, seqlen_q, seqlen_k)


@gluon.jit
def consumer(W: gl.constexpr, tensors, shape, buffers, SPEC: gl.constexpr):
    """Warpgroup W of a CTA: its 64 rows of one tile after the other."""
    Q_BUFFERS: gl.constexpr = SPEC.Q_BUFFERS
    STAGES: gl.constexpr = SPEC.STAGES
    for i in gl.static_range(Q_BUFFERS):  # everything starts free
        barrier_arrive(q_free(gl.to_tensor(i)), SPEC.THREADS)
    for stage in gl.static_range(STAGES):
        barrier_arrive(gl.to_tensor(K_FREE + stage), SPEC.THREADS)
        barrier_arrive(gl.to_tensor(V_FREE + stage), SPEC.THREADS)
    if W == SPEC.CONSUMERS - 1:  # warpgroup 0 has the first turn
        barrier_arrive(gl.to_tensor(TURN), 256)
    zero = gl.to_tensor(0)
    ring = Ring(zero, zero, zero, zero)
    position = zero
    tile = read_tile(position, shape, buffers, SPEC)
    while tile.batch != END:
        buffer = position % Q_BUFFERS
        part, skipped = part_of(tile, W, shape, SPEC)
        if SPEC.HAS_RIGHT or SPEC.IS_PACKED:
            ring = skip_blocks(skipped, ring, buffers, W, SPEC)
        if SPEC.MAY_BE_EMPTY and part.blocks == 0:
            empty_tile(part, tensors, shape, buffers, W, SPEC)
        else:
            q = stage_of(buffers.q, buffer * SPEC.CONSUMERS + W)
            ring = attend_tile(q, ring, part, tensors, shape, buffers, W, SPEC)
        if Q_BUFFERS == 1:
            # o leaves from q's buffer; by one thread, whose warp's arrival is among those below
            tma_store_wait(0)
        barrier_arrive(q_free(buffer), SPEC.THREADS)
        position += 1
        tile = read_tile(position, shape, buffers, SPEC)
    if W == 0:
        barrier_sync(gl.to_tensor(TURN), 256)  # take back the turn that was handed out last
    tma_store_wait(0)

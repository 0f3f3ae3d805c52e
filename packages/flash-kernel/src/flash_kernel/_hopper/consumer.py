"""The forward's consumer: a warpgroup that owns 64 rows of each tile."""

from flash_kernel._hopper.compat import (
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    tma_store,
    tma_store_wait,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from flash_kernel._hopper.primitives import (
    LN_2,
    barrier_arrive,
    barrier_sync,
    next_stage,
    sums_by_thread,
)
from flash_kernel._hopper.softmax import first_step, give_turn, step, take_turn
from flash_kernel._hopper.tiles import (
    END,
    K_FREE,
    TURN,
    V_FREE,
    Ring,
    left_end,
    locate,
    q_free,
    right_end,
)


@gluon.jit
def skip_blocks(count, ring, buffers, W: gl.constexpr, SPEC: gl.constexpr):
    """Let blocks pass that this warpgroup does not see, but others of the tile do.

    A stage may be released only once it has landed, or its release would count for an earlier use.
    """
    CONSUMERS: gl.constexpr = SPEC.CONSUMERS
    STAGES: gl.constexpr = SPEC.STAGES
    THREADS: gl.constexpr = CONSUMERS * 128 + 32
    for _ in range(count):
        mbarrier.wait(buffers.k_full.index(ring.k), ring.k_phase)
        mbarrier.wait(buffers.v_full.index(ring.v), ring.v_phase)
        barrier_arrive(K_FREE + ring.k, THREADS)
        barrier_arrive(V_FREE + ring.v, THREADS)
        k, k_phase = next_stage(ring.k, ring.k_phase, STAGES)
        v, v_phase = next_stage(ring.v, ring.v_phase, STAGES)
        ring = Ring(k, k_phase, v, v_phase)
        take_turn(W)
        give_turn(W, CONSUMERS)
    return ring


@gluon.jit
def last_product(acc, p, ring, buffers, SPEC: gl.constexpr):
    """Start the product of a tile's last block."""
    BLOCK_N: gl.constexpr = SPEC.BLOCK_N
    HEAD_DIM: gl.constexpr = SPEC.HEAD_DIM
    values = buffers.v.index(ring.v).reshape([BLOCK_N, HEAD_DIM])
    return warpgroup_mma(p, values, acc, is_async=True)


@gluon.jit
def sees_a_key(rows, shape, SPEC: gl.constexpr):
    """Say which rows exist, and see a key if not all do."""
    exists = rows < shape.seqlen_q
    if SPEC.MAY_BE_EMPTY:
        exists = exists & (rows + (shape.seqlen_k - shape.seqlen_q) + shape.right >= 0)
    return exists


@gluon.jit
def store_output(acc, batch, head, row, tensors, buffers, W: gl.constexpr):
    """Send o through shared memory; the copy engine leaves out the rows past the end."""
    HEAD_DIM: gl.constexpr = acc.shape[1]
    tma_store_wait(0)
    o = buffers.o.index(W)
    o.reshape([64, HEAD_DIM]).store(acc.to(buffers.o.dtype))
    fence_async_shared()
    tma_store(tensors.o, [batch, head, row, 0], o)


@gluon.jit
def attend_tile(
    q, ring, batch, head, row, edge, blocks, tensors, shape, buffers, W: gl.constexpr,
    SPEC: gl.constexpr, SL: gl.constexpr, OL: gl.constexpr, PL: gl.constexpr,
):  # fmt: skip
    """The 64 rows of one warpgroup against the ``blocks`` blocks left of ``edge``."""
    BLOCK_N: gl.constexpr = SPEC.BLOCK_N
    STAGES: gl.constexpr = SPEC.STAGES
    THREADS: gl.constexpr = SPEC.CONSUMERS * 128 + 32
    acc, p, reference, l, ring = first_step(
        q, ring, row, edge - BLOCK_N, blocks > 1, shape, buffers, W, SPEC, SL, OL, PL
    )
    full_blocks = blocks
    if SPEC.MASKS_LAST:
        whole = (edge - left_end(row + 63, shape, SPEC)) // BLOCK_N
        full_blocks = gl.minimum(gl.maximum(whole, 1), blocks)
    for i in range(1, full_blocks):
        acc, p, l, ring = step(
            q, acc, p, reference, l, ring, row, edge - (i + 1) * BLOCK_N, i < blocks - 1, shape,
            buffers, W, False, SPEC, SL, PL,
        )  # fmt: skip
    if SPEC.MASKS_LAST:
        for i in range(full_blocks, blocks):
            acc, p, l, ring = step(
                q, acc, p, reference, l, ring, row, edge - (i + 1) * BLOCK_N, i < blocks - 1, shape,
                buffers, W, True, SPEC, SL, PL,
            )  # fmt: skip
    acc_token = last_product(acc, p, ring, buffers, SPEC)
    # the statistics of the rows are made while the product runs
    rows = row + gl.arange(0, 64, gl.SliceLayout(1, OL))
    total = gl.convert_layout(gl.sum(l, 1), gl.SliceLayout(1, OL))
    denominator = gl.where(total == 0.0, 1.0, total)
    lse = gl.convert_layout(reference, gl.SliceLayout(1, OL)) * LN_2 + gl.log(total)
    acc, p = warpgroup_mma_wait(0, deps=[acc_token, p])
    barrier_arrive(V_FREE + ring.v, THREADS)
    v, v_phase = next_stage(ring.v, ring.v_phase, STAGES)
    lse = gl.where(has_failed(acc, total, rows, shape, SPEC), float("nan"), lse)
    store_lse(lse, rows, batch, head, tensors, shape)
    store_output(acc * (1.0 / denominator)[:, None], batch, head, row, tensors, buffers, W)
    return Ring(ring.k, ring.k_phase, v, v_phase)


@gluon.jit
def has_failed(acc, total, rows, shape, SPEC: gl.constexpr):
    """Say for which rows the fixed reference was too far from the scores.

    The sum bounds every p.  It is at least that of the first block's maximum, 1 before the shift,
    for every row that sees a key.  An O that is not finite has overflowed, or been reached by a
    hidden value, which is 0 * NaN here and left out by the other kernel.
    """
    HEAD_DIM: gl.constexpr = acc.shape[1]
    HALF: gl.constexpr = SPEC.SHIFT > 0
    MOST: gl.constexpr = 2.0**15 if HALF else 2.0**64
    LEAST: gl.constexpr = 2.0 ** -(SPEC.SHIFT + 1)
    sums = gl.convert_layout(gl.sum(sums_by_thread(acc, HEAD_DIM), 1), total.type.layout)
    holds = (total < MOST) & (total > LEAST)  # not for NaN
    is_finite = sums * 0.0 == 0.0
    return (sees_a_key(rows, shape, SPEC) & (holds == 0)) | (is_finite == 0)


@gluon.jit
def store_lse(lse, rows, batch, head, tensors, shape):
    start = (batch * shape.num_heads + head) * shape.seqlen_q
    gl.store(tensors.lse + start + rows, lse, mask=rows < shape.seqlen_q)


@gluon.jit
def empty_tile(batch, head, row, tensors, shape, buffers, W: gl.constexpr, OL: gl.constexpr):
    """Rows that see no key: o = 0, lse = -inf."""
    HEAD_DIM: gl.constexpr = buffers.q.shape[4]
    rows = row + gl.arange(0, 64, gl.SliceLayout(1, OL))
    lse = gl.full([64], float("-inf"), gl.float32, gl.SliceLayout(1, OL))
    store_lse(lse, rows, batch, head, tensors, shape)
    store_output(gl.zeros([64, HEAD_DIM], gl.float32, OL), batch, head, row, tensors, buffers, W)


@gluon.jit
def read_tile(position, buffers, Q_BUFFERS: gl.constexpr):
    """Wait for the q of a position in the sequence of tiles; return what was posted with it."""
    buffer = position % Q_BUFFERS
    mbarrier.wait(buffers.q_full.index(buffer), (position // Q_BUFFERS) & 1)
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    return gl.max(buffers.tile.index(buffer).load(layout), 0)


@gluon.jit
def part_of(tile, W: gl.constexpr, shape, SPEC: gl.constexpr):
    """Return head and first row of warpgroup W, and how many blocks others of the tile see first.

    Each warpgroup begins at its own diagonal block, so that none has a row wholly hidden, and one
    block a tile needs the mask.
    """
    BLOCK_N: gl.constexpr = SPEC.BLOCK_N
    head = tile.head
    row = tile.row
    if SPEC.SHARES_KEYS:
        head += W
    else:
        row += W * 64
    skipped = tile.blocks * 0
    if SPEC.HAS_RIGHT:
        hidden = (tile.edge - right_end(row, shape, SPEC)) // BLOCK_N
        skipped = gl.minimum(hidden, tile.blocks)
    return head, row, skipped


@gluon.jit
def consumer(W: gl.constexpr, tensors, shape, buffers, SPEC: gl.constexpr):
    """Warpgroup W of a CTA: its 64 rows of one tile after the other."""
    CONSUMERS: gl.constexpr = SPEC.CONSUMERS
    BLOCK_N: gl.constexpr = SPEC.BLOCK_N
    HEAD_DIM: gl.constexpr = SPEC.HEAD_DIM
    STAGES: gl.constexpr = SPEC.STAGES
    Q_BUFFERS: gl.constexpr = SPEC.Q_BUFFERS
    THREADS: gl.constexpr = CONSUMERS * 128 + 32
    SL: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])  # of S
    OL: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])  # of O
    PL: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=OL, k_width=2)  # of P
    for i in gl.static_range(Q_BUFFERS):  # everything starts free
        barrier_arrive(q_free(gl.to_tensor(i)), THREADS)
    for stage in gl.static_range(STAGES):
        barrier_arrive(gl.to_tensor(K_FREE + stage), THREADS)
        barrier_arrive(gl.to_tensor(V_FREE + stage), THREADS)
    if W == CONSUMERS - 1:  # warpgroup 0 has the first turn
        barrier_arrive(gl.to_tensor(TURN), 256)
    zero = gl.to_tensor(0)
    ring = Ring(zero, zero, zero, zero)
    position = zero
    number = read_tile(position, buffers, Q_BUFFERS)
    while number != END:
        buffer = position % Q_BUFFERS
        tile = locate(number, shape, SPEC)
        head, row, skipped = part_of(tile, W, shape, SPEC)
        if SPEC.HAS_RIGHT:
            ring = skip_blocks(skipped, ring, buffers, W, SPEC)
        edge = tile.edge - skipped * BLOCK_N
        blocks = tile.blocks - skipped
        q = buffers.q.index(buffer * CONSUMERS + W).reshape([64, HEAD_DIM])
        if SPEC.MAY_BE_EMPTY and blocks == 0:
            empty_tile(tile.batch, head, row, tensors, shape, buffers, W, OL)
        else:
            ring = attend_tile(
                q, ring, tile.batch, head, row, edge, blocks, tensors, shape, buffers, W, SPEC, SL,
                OL, PL,
            )  # fmt: skip
        if Q_BUFFERS == 1:
            # o leaves from q's buffer; by one thread, whose warp's arrival is among those below
            tma_store_wait(0)
        barrier_arrive(q_free(buffer), THREADS)
        position += 1
        number = read_tile(position, buffers, Q_BUFFERS)
    if W == 0:
        barrier_sync(gl.to_tensor(TURN), 256)  # take back the turn that was handed out last
    tma_store_wait(0)

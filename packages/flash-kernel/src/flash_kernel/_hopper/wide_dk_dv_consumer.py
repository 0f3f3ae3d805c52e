"""The two consumers: a warpgroup that sums dv of each tile of keys, and one that sums dk."""

from flash_kernel._hopper.compat import (
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    tma_store,
    tma_store_wait,
    warpgroup_mma_wait,
)
from flash_kernel._hopper.pieces import (
    issue_output,
    issue_scores,
    put,
    row_sums,
    stage_of,
    store_tile,
    zeros,
)
from flash_kernel._hopper.primitives import (
    accumulator_layout,
    barrier_arrive,
    barrier_sync,
    next_stage,
)
from flash_kernel._hopper.tiles import END, Rows
from flash_kernel._hopper.wide_dk_dv_tiles import (
    BOTH,
    DO_FREE,
    ONE,
    OTHER_TOO,
    P_FULL,
    PAIR,
    Q_FREE,
    TILE_FREE,
    read_tile,
)
from flash_kernel._triton.primitives import LOG2_E, visible_keys


@gluon.jit
def flat(p):
    """``p [64, 64]`` in 16 bits as its accumulator's registers have it, 16 bytes at a time.

    From slow to fast: 16 columns, warp, row of 8, pair of columns, half of 16 columns, half of 16
    rows, column.  So no thread's data moves, and no two threads touch one bank.
    """
    parts = p.reshape([4, 2, 8, 4, 2, 4, 2]).permute([3, 0, 2, 5, 4, 1, 6]).reshape([4096])
    return gl.convert_layout(parts, gl.BlockedLayout([8], [32], [4], [0]), assert_trivial=True)


@gluon.jit
def unflattened(p):
    """The ``[64, 64]`` of which `flat` made ``p``."""
    parts = p.reshape([4, 4, 8, 4, 2, 2, 2]).permute([1, 5, 2, 0, 4, 3, 6]).reshape([64, 64])
    return gl.convert_layout(parts, accumulator_layout(64), assert_trivial=True)


@gluon.jit
def make_p(s, lse, block, stage, tile, x, buffers, SPEC: gl.constexpr):
    """Return p^T in 16 bits, as the operand of dv, and leave it for the other warpgroup."""
    S: gl.constexpr = accumulator_layout(64)
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, accumulator_layout(SPEC.WIDTHS[0]), k_width=2)
    p = gl.exp2(s * x.scale_log2 - (lse * LOG2_E)[None, :])
    if SPEC.HIDES_PAIRS:
        row = block * SPEC.BLOCK_M
        if (row < tile.full_start) | (row >= tile.full_end):
            rows = row + gl.arange(0, 64, gl.SliceLayout(0, S))
            cols = tile.col + gl.arange(0, 64, gl.SliceLayout(1, S))
            p = gl.where(visible_keys(rows[None, :], cols[:, None], x, SPEC), p, 0.0)
    p = p.to(buffers.q[0].dtype)
    # there is room: q of this stage has come, so that of two blocks ago, and its p, are done with
    buffers.p.index(stage).store(flat(p))
    barrier_arrive(P_FULL + stage, PAIR)
    return gl.convert_layout(p, OPERAND)


@gluon.jit
def make_ds(dp, delta, stage, buffers, SPEC: gl.constexpr):
    """Return ds^T in 16 bits, as the operand of dk, from the p^T that the other warpgroup left."""
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, accumulator_layout(SPEC.WIDTHS[0]), k_width=2)
    barrier_sync(P_FULL + stage, PAIR)
    p = buffers.p.index(stage).load(gl.BlockedLayout([8], [32], [4], [0]))
    p = unflattened(p).to(gl.float32)
    ds = (p * (dp - delta[None, :])).to(buffers.q[0].dtype)
    return gl.convert_layout(ds, OPERAND)


@gluon.jit
def make_operand(W: gl.constexpr, scores, row, block, stage, tile, x, buffers, SPEC: gl.constexpr):
    """Return p^T (warpgroup 0) or ds^T of a block, from its first product and its statistics."""
    if W == 0:
        return make_p(scores, row, block, stage, tile, x, buffers, SPEC)
    else:  # noqa: RET505 - to the compiler, what follows a return is still there
        return make_ds(scores, row, stage, buffers, SPEC)


@gluon.jit
def sides(W: gl.constexpr, buffers):
    """Return what a warpgroup's first product reads and awaits, and what its second does."""
    if W == 0:
        return (
            buffers.k, buffers.q, buffers.q_full, buffers.lse, buffers.do, buffers.do_full
        )  # fmt: skip
    else:  # noqa: RET505
        return (
            buffers.v, buffers.do, buffers.do_full, buffers.delta, buffers.q, buffers.q_full
        )  # fmt: skip


@gluon.jit
def wait_for_product(acc, operand, OTHERS: gl.constexpr):
    """Wait until the product in acc is there, and its operand read; OTHERS may be in flight."""
    if len(acc) == 1:
        first, operand = warpgroup_mma_wait(OTHERS, deps=[acc[0], operand])
        return (first,), operand
    else:  # noqa: RET505
        first, second, operand = warpgroup_mma_wait(OTHERS, deps=[acc[0], acc[1], operand])
        return (first, second), operand


@gluon.jit
def walk_blocks(W: gl.constexpr, tile, stage, phase, x, buffers, SPEC: gl.constexpr):
    """Return dv (warpgroup 0) or dk of a tile, from all blocks and heads that see it."""
    FIRST_FREE: gl.constexpr = Q_FREE if W == 0 else DO_FREE
    SECOND_FREE: gl.constexpr = DO_FREE if W == 0 else Q_FREE
    PIECES: gl.constexpr = len(SPEC.WIDTHS)
    BY_COLUMN: gl.constexpr = gl.SliceLayout(0, accumulator_layout(64))
    keys, first, first_full, statistics, second, second_full = sides(W, buffers)
    keys = stage_of(keys, 0)
    block = tile.last - 1
    mbarrier.wait(first_full.index(stage), phase)
    row = statistics.index(stage).load(BY_COLUMN)
    scores = warpgroup_mma_wait(0, deps=[issue_scores(keys, stage_of(first, stage))])
    barrier_arrive(FIRST_FREE + stage, BOTH)
    operand = make_operand(W, scores, row, block, stage, tile, x, buffers, SPEC)
    acc = zeros(SPEC)
    for _ in range((tile.last - tile.first) * x.group - 1):
        mbarrier.wait(second_full.index(stage), phase)
        acc = issue_output(acc, operand, stage_of(second, stage))
        this_stage = stage
        stage, phase = next_stage(stage, phase, SPEC.STAGES)
        block = gl.where(block == tile.first, tile.last, block) - 1
        mbarrier.wait(first_full.index(stage), phase)
        row = statistics.index(stage).load(BY_COLUMN)
        scores = issue_scores(keys, stage_of(first, stage))
        acc, operand = wait_for_product(acc, operand, PIECES)
        barrier_arrive(SECOND_FREE + this_stage, BOTH)
        scores = warpgroup_mma_wait(0, deps=[scores])
        barrier_arrive(FIRST_FREE + stage, BOTH)
        operand = make_operand(W, scores, row, block, stage, tile, x, buffers, SPEC)
    if W == 0:  # k of the next tile may come
        barrier_arrive(gl.to_tensor(TILE_FREE), OTHER_TOO)
    mbarrier.wait(second_full.index(stage), phase)
    acc = issue_output(acc, operand, stage_of(second, stage))
    acc, operand = wait_for_product(acc, operand, 0)
    barrier_arrive(SECOND_FREE + stage, BOTH)
    stage, phase = next_stage(stage, phase, SPEC.STAGES)
    return acc, stage, phase


@gluon.jit
def mark(dk, tile, tensors, x, SPEC: gl.constexpr):
    """Mark a tile whose gradients are not finite, as what a hidden row holds may be why.

    dk alone tells: a row of q, of do or of the statistics that is not finite makes dk NaN, through
    0 * q, or through 0 * (dp - delta), also where it makes dv NaN.
    """
    BY_ROW: gl.constexpr = gl.SliceLayout(1, accumulator_layout(SPEC.WIDTHS[0]))
    cols = tile.col + gl.arange(0, 64, BY_ROW)
    is_bad = (row_sums(dk, cols) * 0.0 != 0.0) & (cols < x.seqlen_k)
    gl.store(tensors.marks + tile.index, gl.max(is_bad.to(gl.int32), 0))


@gluon.jit
def store_columns(acc, FIRST: gl.constexpr, tile, tensors, buffers):
    """Write the columns of dv from FIRST on, 64 at a time, by way of two buffers."""
    COLUMNS: gl.constexpr = acc.shape[1]
    if COLUMNS == 64:
        BUFFER: gl.constexpr = FIRST // 64 % 2
        tma_store_wait(1)
        out = buffers.dv.index(BUFFER)
        out.reshape([64, 64]).store(acc.to(out.dtype))
        fence_async_shared()
        tma_store(tensors.dv, [tile.batch, tile.head, tile.col, FIRST], out)
    else:
        HALF: gl.constexpr = COLUMNS // 2
        left, right = gl.split(acc.reshape([64, 2, HALF]).permute([0, 2, 1]))
        layout: gl.constexpr = accumulator_layout(HALF)
        left = gl.convert_layout(left, layout, assert_trivial=True)
        right = gl.convert_layout(right, layout, assert_trivial=True)
        store_columns(left, FIRST, tile, tensors, buffers)
        store_columns(right, FIRST + HALF, tile, tensors, buffers)


@gluon.jit
def store(W: gl.constexpr, acc, tile, tensors, x, buffers, SPEC: gl.constexpr):
    """Write dv (warpgroup 0), or dk times scale and its mark."""
    BY_ROW: gl.constexpr = gl.SliceLayout(1, accumulator_layout(SPEC.WIDTHS[0]))
    rows = Rows(tile.batch, tile.head, tile.col * 0, x.seqlen_k)
    if W == 0:
        tma_store_wait(0)
        for i in gl.static_range(len(acc)):
            store_columns(acc[i], i * SPEC.WIDTHS[0], tile, tensors, buffers)
    else:
        if SPEC.HIDES_PAIRS:
            mark(acc, tile, tensors, x, SPEC)
        put(acc, gl.zeros([64], gl.float32, BY_ROW) + x.scale, buffers.v, 0)
        fence_async_shared()
        store_tile(tensors.dk, rows, tile.col, buffers.v, 0, SPEC)
        tma_store_wait(0)
        barrier_arrive(gl.to_tensor(TILE_FREE + 1), ONE)


@gluon.jit
def consume(W: gl.constexpr, tensors, x, buffers, SPEC: gl.constexpr):
    """Make dv (warpgroup 0) or dk of one tile after the other."""
    STAGES: gl.constexpr = SPEC.STAGES
    for i in gl.static_range(STAGES):  # everything starts free
        barrier_arrive(gl.to_tensor(Q_FREE + i), BOTH)
        barrier_arrive(gl.to_tensor(DO_FREE + i), BOTH)
    barrier_arrive(gl.to_tensor(TILE_FREE + W), OTHER_TOO if W == 0 else ONE)
    stage = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    parity = gl.to_tensor(0)
    tile = read_tile(W, parity, buffers)
    while tile.batch != END:
        if SPEC.HIDES_PAIRS and tile.first == tile.last:  # nobody sees it
            if W == 0:
                barrier_arrive(gl.to_tensor(TILE_FREE), OTHER_TOO)
            store(W, zeros(SPEC), tile, tensors, x, buffers, SPEC)
        else:
            acc, stage, phase = walk_blocks(W, tile, stage, phase, x, buffers, SPEC)
            store(W, acc, tile, tensors, x, buffers, SPEC)
        parity = parity ^ 1
        tile = read_tile(W, parity, buffers)
    tma_store_wait(0)

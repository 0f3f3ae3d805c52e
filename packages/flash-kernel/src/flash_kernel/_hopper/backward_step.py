"""One query block in one warpgroup of the backward: the five products, and what lies between."""

from flash_kernel._hopper.compat import (
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from flash_kernel._hopper.primitives import accumulator_layout, computed_here, hidden, stay_here
from flash_kernel._triton.primitives import visible_keys


@gluon.jit
def flat(acc):
    """A ``[64, 64]`` accumulator in the order of its registers, so that no data moves.

    From slow to fast: block of 8 columns, warp, row of 8, pair of columns, half of 16 rows, column.
    """
    parts = acc.reshape([4, 2, 8, 8, 4, 2]).permute([3, 0, 2, 4, 1, 5]).reshape([4096])
    return gl.convert_layout(parts, gl.BlockedLayout([4], [32], [4], [0]), assert_trivial=True)


@gluon.jit
def issue_scores(stage, phase, w, buffers, barriers, SPEC: gl.constexpr):
    """Issue s^T = k q^T and dp^T = v do^T, in flight together: the exponentials lie under dp^T."""
    BLOCK_M: gl.constexpr = SPEC.BLOCK_M
    S: gl.constexpr = accumulator_layout(BLOCK_M)
    TILE: gl.constexpr = [64, SPEC.BLOCK_D]
    w = hidden(w)
    k = buffers.k.index(w).reshape(TILE)
    v = buffers.v.index(w).reshape(TILE)
    q = buffers.q.index(stage).reshape([SPEC.BLOCK_M, SPEC.BLOCK_D])
    do = buffers.do.index(stage).reshape([SPEC.BLOCK_M, SPEC.BLOCK_D])
    zero = gl.zeros([64, BLOCK_M], gl.float32, S)
    if SPEC.STATISTICS_FIRST:
        # the accumulators start at -lse / scale and -delta: no register holds those meanwhile
        row: gl.constexpr = gl.SliceLayout(0, S)
        statistics = buffers.statistics.index(stage)
        mbarrier.wait(barriers.do_full.index(stage), phase)
        # each in registers of its own by now: a copy made beside a product has ptxas end that first
        dp_0 = computed_here(zero + statistics.slice(BLOCK_M, BLOCK_M).load(row)[None, :])
        s_0 = computed_here(zero + statistics.slice(0, BLOCK_M).load(row)[None, :])
        mbarrier.wait(barriers.q_full.index(stage), phase)
        s = warpgroup_mma(k, q.permute((1, 0)), s_0, is_async=True)
        dp = warpgroup_mma(v, do.permute((1, 0)), dp_0, is_async=True)
    else:
        mbarrier.wait(barriers.q_full.index(stage), phase)
        s = warpgroup_mma(k, q.permute((1, 0)), zero, use_acc=False, is_async=True)
        mbarrier.wait(barriers.do_full.index(stage), phase)
        dp = warpgroup_mma(v, do.permute((1, 0)), zero, use_acc=False, is_async=True)
    return s, dp


@gluon.jit
def score_gradients(
    s_flying, dp_flying, stage, phase, scale_log2, row, col, x, buffers, barriers,
    MASKED: gl.constexpr, SPEC: gl.constexpr,
):  # fmt: skip
    """Return p^T and ds^T ``[64, BLOCK_M]``, p^T in float32."""
    BLOCK_M: gl.constexpr = SPEC.BLOCK_M
    S: gl.constexpr = accumulator_layout(BLOCK_M)
    by_row: gl.constexpr = gl.SliceLayout(0, S)
    dtype: gl.constexpr = buffers.q.dtype
    statistics = buffers.statistics.index(stage)
    if SPEC.STATISTICS_FIRST:
        s = warpgroup_mma_wait(1, deps=[s_flying])
        p = gl.exp2(s * scale_log2)
    else:
        minus_lse = statistics.slice(0, BLOCK_M).load(by_row)
        s = warpgroup_mma_wait(1, deps=[s_flying])
        p = gl.exp2(s * scale_log2 + minus_lse[None, :])
    if MASKED:
        rows = row + gl.arange(0, BLOCK_M, by_row)
        cols = col + gl.arange(0, 64, gl.SliceLayout(1, S))
        visible = visible_keys(rows[None, :], cols[:, None], x, SPEC)
        p = gl.where(visible, p, 0.0)
    stay_here(p, BLOCK_M // 2)
    dp, p = warpgroup_mma_wait(0, deps=[dp_flying, p])
    if SPEC.STATISTICS_FIRST:
        ds = (p * dp).to(dtype)
    else:
        ds = (p * (dp + statistics.slice(BLOCK_M, BLOCK_M).load(by_row)[None, :])).to(dtype)
    return p, ds


@gluon.jit
def issue_dq(stage, W: gl.constexpr, buffers, SPEC: gl.constexpr):
    """Issue this warpgroup's ``[64, 64]`` part of dq = ds k, from the ds of both.

    With 64 query rows the parts are the left and the right columns, with 128 the upper and the
    lower rows.
    """
    ROW: gl.constexpr = W * (SPEC.BLOCK_M - 64)
    COLUMN: gl.constexpr = W * (SPEC.BLOCK_D - 64)
    TILE: gl.constexpr = [64, SPEC.BLOCK_D]
    ds_0 = buffers.ds.index(stage).slice(ROW, 64, dim=1).permute((1, 0))
    ds_1 = buffers.ds.index(stage + 2).slice(ROW, 64, dim=1).permute((1, 0))
    zeroth = hidden(0)
    k_0 = buffers.k.index(zeroth).reshape(TILE).slice(COLUMN, 64, dim=1)
    k_1 = buffers.k.index(zeroth + 1).reshape(TILE).slice(COLUMN, 64, dim=1)
    zero = gl.zeros([64, 64], gl.float32, accumulator_layout(64))
    dq = warpgroup_mma(ds_0, k_0, zero, use_acc=False, is_async=True)
    return warpgroup_mma(ds_1, k_1, dq, is_async=True)


@gluon.jit
def hand_over_dq(
    dq, dq_sum_ptr, block_row, stage, phase, W: gl.constexpr, buffers, barriers, SPEC: gl.constexpr
):
    """Give a part of dq to the reducer, or add it right here, straight from the registers."""
    if SPEC.DQ_BY_TMA:
        slot = stage * 2 + W
        mbarrier.wait(barriers.dq_empty.index(slot), phase ^ 1)
        buffers.dq.index(slot).store(flat(dq).reshape([16, 256]))
        fence_async_shared()
        mbarrier.arrive(barriers.dq_full.index(slot), count=1)
    else:
        # red.global.add.v4.f32: no shared memory, no further warp
        SIZE: gl.constexpr = SPEC.BLOCK_M * SPEC.BLOCK_D
        offsets = gl.arange(0, 4096, layout=gl.BlockedLayout([4], [32], [4], [0]))
        start = block_row.to(gl.int64) * SIZE + W * 4096
        gl.atomic_add(dq_sum_ptr + start + offsets, flat(dq), sem="relaxed")


@gluon.jit
def step(
    dk, dv, stage, phase, scale_log2, block, block_row, col, x, dq_sum_ptr, buffers, barriers,
    W: gl.constexpr, MASKED: gl.constexpr, SPEC: gl.constexpr,
):  # fmt: skip
    """Work on one query block: all five products of this warpgroup's 64 keys."""
    dtype: gl.constexpr = buffers.q.dtype
    D: gl.constexpr = SPEC.BLOCK_D
    OUT: gl.constexpr = accumulator_layout(D)
    OPERAND: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=OUT, k_width=2)
    q = buffers.q.index(stage).reshape([SPEC.BLOCK_M, SPEC.BLOCK_D])
    do = buffers.do.index(stage).reshape([SPEC.BLOCK_M, SPEC.BLOCK_D])
    s_flying, dp_flying = issue_scores(stage, phase, W, buffers, barriers, SPEC)
    row = block * SPEC.BLOCK_M
    p, ds = score_gradients(
        s_flying, dp_flying, stage, phase, scale_log2, row, col, x, buffers, barriers, MASKED, SPEC
    )
    buffers.ds.index(stage + 2 * W).store(ds)
    p_operand = gl.convert_layout(p.to(dtype), OPERAND)
    ds_operand = gl.convert_layout(ds, OPERAND)
    dv_flying = warpgroup_mma(p_operand, do, dv, is_async=True)
    fence_async_shared()
    mbarrier.arrive(barriers.ds_full.index(stage), count=1)
    mbarrier.wait(barriers.ds_full.index(stage), phase)
    dq_flying = issue_dq(stage, W, buffers, SPEC)
    dk_flying = warpgroup_mma(ds_operand, q, dk, is_async=True)
    dq, dv, p_operand = warpgroup_mma_wait(1, deps=[dq_flying, dv_flying, p_operand])
    # dq leaves under the product dk
    hand_over_dq(dq, dq_sum_ptr, block_row, stage, phase, W, buffers, barriers, SPEC)
    dk, ds_operand = warpgroup_mma_wait(0, deps=[dk_flying, ds_operand])
    mbarrier.arrive(barriers.q_empty.index(stage), count=1)
    return dk, dv

"""The forward's step: scores, mask and softmax of one block of keys, products overlapped."""

from flash_kernel._hopper.compat import gl, gluon, mbarrier, warpgroup_mma_wait
from flash_kernel._hopper.pieces import (
    issue_output,
    issue_scores,
    stage_of,
    wait_for_output,
    zeros,
)
from flash_kernel._hopper.primitives import (
    accumulator_layout,
    barrier_arrive,
    barrier_sync,
    computed_here,
    next_stage,
    sums_by_thread,
)
from flash_kernel._hopper.tiles import K_FREE, TURN, V_FREE, Ring


@gluon.jit
def take_turn(W: gl.constexpr):
    """Wait until the warpgroup before this one has issued its products.

    Taking turns keeps one warpgroup's products running under the other's exponentials: without, d =
    128 loses 1 to 6%; handing on later, when the scores are there, loses 5 to 13%.
    """
    barrier_sync(gl.to_tensor(TURN + W), 256)


@gluon.jit
def give_turn(W: gl.constexpr, CONSUMERS: gl.constexpr):
    barrier_arrive(gl.to_tensor(TURN + (W + 1) % CONSUMERS), 256)


@gluon.jit
def capped(s, shape, SPEC: gl.constexpr):
    """Return scores for which ``scale_log2`` is the factor that remains.

    With a softcap they are tanh(scale / softcap * s), as 1 - 2 / (1 + exp(2 x)): exact to 1e-7, of
    1, and so is the score to 1e-7 of the softcap.
    """
    if SPEC.HAS_SOFTCAP:
        s = 1.0 - 2.0 / (1.0 + gl.exp2(s * shape.cap_log2))
    return s


@gluon.jit
def hide(s, tile, key, shape, SPEC: gl.constexpr):
    """The one mask: -inf where row ``tile.row + i`` does not see the key of column j.

    Row i stands at ``i + seqlen_k - seqlen_q`` among the keys, and sees those from ``left`` before
    to ``right`` after that position.  A block that would begin before key 0 begins there, and those
    of its keys are left out that were seen in the block before it.
    """
    BLOCK_N: gl.constexpr = SPEC.BLOCK_N
    SL: gl.constexpr = accumulator_layout(BLOCK_N)
    cols = (gl.maximum(key, 0) + gl.arange(0, BLOCK_N, gl.SliceLayout(0, SL)))[None, :]
    rows = tile.row + gl.arange(0, 64, gl.SliceLayout(1, SL))
    position = rows + (tile.seqlen_k - tile.seqlen_q)
    limit = gl.minimum(key + BLOCK_N, tile.seqlen_k)
    if SPEC.HAS_RIGHT:
        end = gl.minimum(position + shape.right + 1, limit)
        s = gl.where(cols < end[:, None], s, float("-inf"))
    else:
        s = gl.where(cols < limit, s, float("-inf"))
    if SPEC.HAS_LEFT:
        start = position - shape.left
        s = gl.where(cols >= start[:, None], s, float("-inf"))
    return s


@gluon.jit
def step(
    q, acc, p, reference, l, ring, tile, i, shape, buffers, W: gl.constexpr, MASKED: gl.constexpr,
    SPEC: gl.constexpr,
):  # fmt: skip
    """Scores and softmax of block i of a tile, under the product ``acc += p v`` of the one before.

    On entry K of this block and V of the one before have landed.  The loop is SASS of the form

        HGMMA (S), HGMMA (O), wait until S is there, EX2 ..., wait for all

    so that the exponentials run beside the second product.
    """
    BLOCK_N: gl.constexpr = SPEC.BLOCK_N
    PL: gl.constexpr = p.type.layout
    take_turn(W)
    s_token = issue_scores(q, stage_of(buffers.k, ring.k))
    acc = issue_output(acc, p, stage_of(buffers.v, ring.v))
    give_turn(W, SPEC.CONSUMERS)
    s = warpgroup_mma_wait(len(acc), deps=[s_token])
    barrier_arrive(K_FREE + ring.k, SPEC.THREADS)
    s = capped(s, shape, SPEC)
    if MASKED:
        s = hide(s, tile, tile.edge - (i + 1) * BLOCK_N, shape, SPEC)
    p32 = gl.exp2(s * shape.scale_log2 - reference[:, None])
    l = computed_here(l + sums_by_thread(p32, BLOCK_N))
    k, k_phase = next_stage(ring.k, ring.k_phase, SPEC.STAGES)
    v, v_phase = next_stage(ring.v, ring.v_phase, SPEC.STAGES)
    # These spin loops end a basic block.  In one block ptxas moves the second wait over the
    # exponentials, whatever the order here, and nothing overlaps any more.
    mbarrier.wait(buffers.k_full.index(k), k_phase, pred=i < tile.blocks - 1)
    mbarrier.wait(buffers.v_full.index(v), v_phase)
    acc, p, p32 = wait_for_output(acc, p, p32)
    barrier_arrive(V_FREE + ring.v, SPEC.THREADS)
    p = gl.convert_layout(p32.to(p.dtype), PL)
    return acc, p, l, Ring(k, k_phase, v, v_phase)


@gluon.jit
def first_step(q, ring, tile, shape, buffers, W: gl.constexpr, SPEC: gl.constexpr):
    """Scores and softmax of a tile's first block, which gives the rows their reference."""
    BLOCK_N: gl.constexpr = SPEC.BLOCK_N
    PL: gl.constexpr = gl.DotOperandLayout(0, accumulator_layout(SPEC.WIDTHS[0]), k_width=2)
    mbarrier.wait(buffers.k_full.index(ring.k), ring.k_phase)
    take_turn(W)
    s_token = issue_scores(q, stage_of(buffers.k, ring.k))
    give_turn(W, SPEC.CONSUMERS)
    s = warpgroup_mma_wait(0, deps=[s_token])
    barrier_arrive(K_FREE + ring.k, SPEC.THREADS)
    s = capped(s, shape, SPEC)
    if SPEC.MASKS_FIRST:
        s = hide(s, tile, tile.edge - BLOCK_N, shape, SPEC)
    m = gl.max(s, 1)
    # a row that has seen no key has m = -inf and gets 0: -inf - (-inf) never occurs
    reference = gl.where(m == float("-inf"), 0.0, m * shape.scale_log2 + SPEC.SHIFT)
    p32 = gl.exp2(s * shape.scale_log2 - reference[:, None])
    l = sums_by_thread(p32, BLOCK_N)
    p = gl.convert_layout(p32.to(buffers.q[0].dtype), PL)
    k, k_phase = next_stage(ring.k, ring.k_phase, SPEC.STAGES)
    mbarrier.wait(buffers.k_full.index(k), k_phase, pred=tile.blocks > 1)
    mbarrier.wait(buffers.v_full.index(ring.v), ring.v_phase)
    return zeros(SPEC), p, reference, l, Ring(k, k_phase, ring.v, ring.v_phase)

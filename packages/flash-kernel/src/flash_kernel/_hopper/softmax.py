"""The forward's step: scores, mask and softmax of one block of keys, products overlapped."""

from flash_kernel._hopper.compat import gl, gluon, mbarrier, warpgroup_mma, warpgroup_mma_wait
from flash_kernel._hopper.primitives import (
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
def issue_scores(q, keys, SPEC: gl.constexpr, SL: gl.constexpr):
    """Start S = q k' of one block."""
    BLOCK_N: gl.constexpr = SPEC.BLOCK_N
    HEAD_DIM: gl.constexpr = SPEC.HEAD_DIM
    keys = keys.reshape([BLOCK_N, HEAD_DIM]).permute((1, 0))
    zeros = gl.zeros([64, BLOCK_N], gl.float32, SL)
    return warpgroup_mma(q, keys, zeros, use_acc=False, is_async=True)


@gluon.jit
def hide(s, row, key, shape, SPEC: gl.constexpr, SL: gl.constexpr):
    """The one mask: -inf where row ``row + i`` does not see key ``key + j``.

    Row i stands at ``i + seqlen_k - seqlen_q`` among the keys, and sees those from ``left`` before
    to ``right`` after that position.
    """
    BLOCK_N: gl.constexpr = SPEC.BLOCK_N
    cols = (key + gl.arange(0, BLOCK_N, gl.SliceLayout(0, SL)))[None, :]
    position = row + gl.arange(0, 64, gl.SliceLayout(1, SL)) + (shape.seqlen_k - shape.seqlen_q)
    if SPEC.HAS_RIGHT:
        end = gl.minimum(position + shape.right + 1, shape.seqlen_k)
        s = gl.where(cols < end[:, None], s, float("-inf"))
    else:
        s = gl.where(cols < shape.seqlen_k, s, float("-inf"))
    if SPEC.HAS_LEFT:
        start = gl.maximum(position - shape.left, 0)
        s = gl.where(cols >= start[:, None], s, float("-inf"))
    elif SPEC.MASKS_LAST:
        s = gl.where(cols >= 0, s, float("-inf"))
    return s


@gluon.jit
def step(
    q, acc, p, reference, l, ring, row, key, has_next, shape, buffers, W: gl.constexpr,
    MASKED: gl.constexpr, SPEC: gl.constexpr, SL: gl.constexpr, PL: gl.constexpr,
):  # fmt: skip
    """Scores and softmax of one block, under the product ``acc += p v`` of the block before.

    On entry K of this block and V of the one before have landed.  The loop is SASS of the form

        HGMMA (S), HGMMA (O), wait <= 1, EX2 ..., wait <= 0

    so that the exponentials run beside the second product.
    """
    CONSUMERS: gl.constexpr = SPEC.CONSUMERS
    BLOCK_N: gl.constexpr = SPEC.BLOCK_N
    HEAD_DIM: gl.constexpr = SPEC.HEAD_DIM
    STAGES: gl.constexpr = SPEC.STAGES
    THREADS: gl.constexpr = CONSUMERS * 128 + 32
    take_turn(W)
    s_token = issue_scores(q, buffers.k.index(ring.k), SPEC, SL)
    values = buffers.v.index(ring.v).reshape([BLOCK_N, HEAD_DIM])
    acc_token = warpgroup_mma(p, values, acc, is_async=True)
    give_turn(W, CONSUMERS)
    s = warpgroup_mma_wait(1, deps=[s_token])
    barrier_arrive(K_FREE + ring.k, THREADS)
    if MASKED:
        s = hide(s, row, key, shape, SPEC, SL)
    p32 = gl.exp2(s * shape.scale_log2 - reference[:, None])
    l = computed_here(l + sums_by_thread(p32, BLOCK_N))
    k, k_phase = next_stage(ring.k, ring.k_phase, STAGES)
    v, v_phase = next_stage(ring.v, ring.v_phase, STAGES)
    # These spin loops end a basic block.  In one block ptxas moves the second wait over the
    # exponentials, whatever the order here, and nothing overlaps any more.
    mbarrier.wait(buffers.k_full.index(k), k_phase, pred=has_next)
    mbarrier.wait(buffers.v_full.index(v), v_phase)
    # p stays in the wait's operands until the product has read it
    acc, p, p32 = warpgroup_mma_wait(0, deps=[acc_token, p, p32])
    barrier_arrive(V_FREE + ring.v, THREADS)
    p = gl.convert_layout(p32.to(p.dtype), PL)
    return acc, p, l, Ring(k, k_phase, v, v_phase)


@gluon.jit
def first_step(
    q, ring, row, key, has_next, shape, buffers, W: gl.constexpr, SPEC: gl.constexpr,
    SL: gl.constexpr, OL: gl.constexpr, PL: gl.constexpr,
):  # fmt: skip
    """Scores and softmax of a tile's first block, which gives the rows their reference."""
    CONSUMERS: gl.constexpr = SPEC.CONSUMERS
    BLOCK_N: gl.constexpr = SPEC.BLOCK_N
    HEAD_DIM: gl.constexpr = SPEC.HEAD_DIM
    STAGES: gl.constexpr = SPEC.STAGES
    mbarrier.wait(buffers.k_full.index(ring.k), ring.k_phase)
    take_turn(W)
    s_token = issue_scores(q, buffers.k.index(ring.k), SPEC, SL)
    give_turn(W, CONSUMERS)
    s = warpgroup_mma_wait(0, deps=[s_token])
    barrier_arrive(K_FREE + ring.k, CONSUMERS * 128 + 32)
    if SPEC.MASKS_FIRST:
        s = hide(s, row, key, shape, SPEC, SL)
    m = gl.max(s, 1)
    # a row that has seen no key has m = -inf and gets 0: -inf - (-inf) never occurs
    reference = gl.where(m == float("-inf"), 0.0, m * shape.scale_log2 + SPEC.SHIFT)
    p32 = gl.exp2(s * shape.scale_log2 - reference[:, None])
    l = sums_by_thread(p32, BLOCK_N)
    acc = gl.zeros([64, HEAD_DIM], gl.float32, OL)
    p = gl.convert_layout(p32.to(buffers.q.dtype), PL)
    k, k_phase = next_stage(ring.k, ring.k_phase, STAGES)
    mbarrier.wait(buffers.k_full.index(k), k_phase, pred=has_next)
    mbarrier.wait(buffers.v_full.index(ring.v), ring.v_phase)
    return acc, p, reference, l, Ring(k, k_phase, ring.v, ring.v_phase)

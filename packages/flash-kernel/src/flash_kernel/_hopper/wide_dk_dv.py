"""dk and dv for head dims above 128: a CTA owns a tile of 64 keys and walks the queries.

    warpgroup 0    s^T = k q^T      p^T = exp(s^T - lse)           dv += p^T do
    warpgroup 1    dp^T = v do^T    ds^T = p^T * (dp^T - delta)    dk += ds^T q

An accumulator of 64 keys and 256 columns takes half the registers of a warpgroup: so dv has one
warpgroup and dk another, and p^T goes from the first to the second through shared memory.  Query
heads that share keys are walked one after the other, and their sums never leave the registers:
nothing is added in memory, and the bits of a key's gradients depend on nothing else in the batch.

    who waits                   for                        at           who arrives
    warpgroup 0, producer 1     k, and the tile            k_full       producer 0 (TMA)
    warpgroup 1                 v, and the tile            v_full       producer 1 (TMA)
    both warpgroups             q and lse of a block       q_full       producer 0 (TMA)
    both warpgroups             do and delta of a block    do_full      producer 1 (TMA)
    warpgroup 1                 p of a block               P_FULL       warpgroup 0
    producer 0                  room for q                 Q_FREE       both warpgroups
    producer 1                  room for do                DO_FREE      both warpgroups
    producer 0                  room for k and the tile    TILE_FREE    warpgroup 0, producer 1
    producer 1                  room for v and the tile    .. + 1       warpgroup 1

``*_full`` are mbarriers, completed by the copy engine; the others are named barriers.  The
producers are warps of their own because q and do, of which two blocks each are there, are done
with at different times: in one warp, waiting for the room of one would hold up the other.

Each warpgroup has its second product of a block and the first of the next in flight together, and
then none while it makes p or ds: that time belongs to the other one's products.  The other order,
with its own product under the exponentials, needs the next block earlier than it can be there.

dv leaves by way of two small buffers, so that k of the next tile comes while the last product runs;
dk by way of v, which only warpgroup 1 reads.  While that waits for the next v, warpgroup 0 can be
two blocks ahead.
"""

from flash_kernel._hopper.compat import fence_async_shared, gl, gluon, mbarrier
from flash_kernel._hopper.pieces import allocate
from flash_kernel._hopper.tiles import POSTED
from flash_kernel._hopper.wide_dk_dv_consumer import consume
from flash_kernel._hopper.wide_dk_dv_producer import produce_do, produce_q
from flash_kernel._hopper.wide_dk_dv_tiles import Buffers, Problem, Tensors


@gluon.jit
def prepared_buffers(tensors, SPEC: gl.constexpr):
    """Return the CTA's shared memory, its barriers ready."""
    STAGES: gl.constexpr = SPEC.STAGES
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    rows: gl.constexpr = tensors.statistics.layout
    k_full = gl.allocate_shared_memory(gl.int64, [1, 1], BARRIER)
    v_full = gl.allocate_shared_memory(gl.int64, [1, 1], BARRIER)
    q_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    do_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    mbarrier.init(k_full.index(0), count=1)
    mbarrier.init(v_full.index(0), count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(do_full.index(i), count=1)
    fence_async_shared()
    return Buffers(
        gl.allocate_shared_memory(gl.int32, [2, POSTED], PLAIN),
        allocate(tensors.k, 1),
        allocate(tensors.v, 1),
        allocate(tensors.q, STAGES),
        allocate(tensors.do, STAGES),
        gl.allocate_shared_memory(gl.float32, [STAGES, SPEC.BLOCK_M], rows),
        gl.allocate_shared_memory(gl.float32, [STAGES, SPEC.BLOCK_M], rows),
        gl.allocate_shared_memory(tensors.q[0].dtype, [STAGES, 4096], PLAIN),
        gl.allocate_shared_memory(tensors.dv.dtype, [2, 1, 1, 64, 64], tensors.dv.layout),
        k_full.index(0),
        v_full.index(0),
        q_full,
        do_full,
    )


@gluon.jit(
    do_not_specialize=[
        "num_heads_k", "group", "seqlen_q", "seqlen_k", "padded_q", "heads_together", "num_tiles",
        "left", "right",
    ]
)  # fmt: skip
def flash_attention_wide_dk_dv_kernel(
    q, k, v, do, dk, dv, q_rest, k_rest, v_rest, do_rest, dk_rest, dv_rest, statistics, marks_ptr,
    workspace_ptr, num_heads_k, group, seqlen_q, seqlen_k, padded_q, heads_together, num_tiles,
    left, right, scale, scale_log2, SPEC: gl.constexpr,
):  # fmt: skip
    """Write dk and dv.

    ``q .. dv`` are descriptors over [B, H, rows, D] of blocks of 64 rows and as many columns as the
    first piece of a tile has.  ``.._rest`` are those of the second; where SPEC has but one, any
    tensor.  ``statistics``: a descriptor over the lse and delta of each head, [B, H, 2, padded_q].
    ``marks_ptr``: int32 [B, H_kv, tiles], written if SPEC.HIDES_PAIRS: 1 where a gradient is not
    finite.  ``workspace_ptr``: two int32, zero, and zero again after.
    """
    if len(SPEC.WIDTHS) == 1:
        parts = (q,), (k,), (v,), (do,), (dk,)
    else:
        parts = (q, q_rest), (k, k_rest), (v, v_rest), (do, do_rest), (dk, dk_rest)
    tensors = Tensors(
        parts[0], parts[1], parts[2], parts[3], parts[4], dv, statistics, marks_ptr, workspace_ptr
    )
    x = Problem(
        num_heads_k, group, seqlen_q, seqlen_k, padded_q, heads_together, num_tiles, left, right,
        scale, scale_log2,
    )  # fmt: skip
    buffers = prepared_buffers(tensors, SPEC)
    # SPEC and W stay constants only in tuples written within the call
    gl.warp_specialize([
        (consume, (0, tensors, x, buffers, SPEC)),
        (consume, (1, tensors, x, buffers, SPEC)),
        (produce_q, (tensors, x, buffers, SPEC)),
        (produce_do, (tensors, x, buffers, SPEC)),
    ], [4, 1, 1], [240, 24, 24])  # fmt: skip

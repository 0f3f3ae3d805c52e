"""Forward for Hopper: a producer warp feeds warpgroups that multiply, through shared memory.

A CTA stays on its SM and takes tiles of query rows from a counter until there are none.  Each
consumer warpgroup owns 64 of a tile's rows; all walk the same blocks of keys, right to left:

    producer (1 warp)            copy engine             consumers (4 warps each)
    ─────────────────            ───────────             ───────────────────────────────────────
    wait q_free      ◄──────────────────────────────────  arrive q_free        tile done
    post the tile, expect q ──►  q ─► arrive q_full ───►  wait q_full          read the tile
    wait k_free      ◄──────────────────────────────────  arrive k_free        scores are there
    expect k         ─────────►  k ─► arrive k_full ───►  wait k_full ┐
    wait v_free      ◄──────────────────────────────────  arrive v_free        product is there
    expect v         ─────────►  v ─► arrive v_full ───►  wait v_full ┤
                                                          take turn   │        from the last one
                                                          issue S = q k', O += p v  ◄┘
                                                          give turn            to the next one
                                                          softmax of S while O += p v runs

``*_full`` are mbarriers, completed by the copy engine; ``*_free`` and the turns are named barriers.

**The softmax has a fixed reference.**  Softmax does not depend on what is subtracted from a row's
scores, as long as nothing overflows.  So the row maximum of the first block alone scales the whole
row: the loop computes no maximum, moves nothing between lanes and never rescales O, 463 -> 309
instructions a step at d = 128, with which d = 128 at n = 16k went from 631 to over 700 TFLOP/s.
Where the sum of a row's exponentials passes 2^64 relative to that reference (2^15 for float16), or
is NaN, or O is not finite, the fixed reference has failed for that row.  Its lse is written as NaN,
and the launch that follows computes such tiles anew by the portable kernel's online softmax.  So
what a row gets depends on its own tile alone, and has the same bits whatever else is in the batch.

Measured on an H200; docs/hopper-log.md has the numbers and what did not help.
"""

from flash_kernel._hopper.compat import fence_async_shared, gl, gluon, mbarrier
from flash_kernel._hopper.consumer import consumer
from flash_kernel._hopper.pieces import allocate
from flash_kernel._hopper.producer import producer
from flash_kernel._hopper.tiles import POSTED, Buffers, Shape, Tensors


@gluon.jit(
    do_not_specialize=[
        "seqlen_q", "seqlen_k", "left", "right", "num_heads", "group", "units", "row_tiles",
        "swath", "num_sequences",
    ]
)  # fmt: skip
def flash_attention_hopper_forward_kernel(
    q, k, v, o, q_rest, k_rest, v_rest, o_rest, lse_ptr, workspace_ptr, cu_seqlens_q_ptr,
    cu_seqlens_k_ptr, seqlen_q, seqlen_k, left, right, num_heads, group, units, row_tiles, swath,
    num_sequences, scale_log2, cap_log2, SPEC: gl.constexpr,
):  # fmt: skip
    """o = softmax(scores) v and lse = log sum exp(scores), NaN where the fixed reference failed.

    ``q, k, v, o``: descriptors over [B, H, rows, D] of blocks of 64 (q, o) and BLOCK_N rows and as
    many columns as the first piece of a tile has.  ``.._rest`` are those of the second; where SPEC
    has but one, any tensor, as for ``cu_seqlens`` where it says that nothing is packed.
    ``workspace_ptr``: two int32, zero, and zero again after.
    """
    if len(SPEC.WIDTHS) == 1:
        parts = (q,), (k,), (v,), (o,)
    else:
        parts = (q, q_rest), (k, k_rest), (v, v_rest), (o, o_rest)
    tensors = Tensors(
        parts[0], parts[1], parts[2], parts[3], lse_ptr, workspace_ptr, cu_seqlens_q_ptr,
        cu_seqlens_k_ptr,
    )  # fmt: skip
    shape = Shape(
        seqlen_q, seqlen_k, left, right, num_heads, group, units, row_tiles, swath, num_sequences,
        scale_log2, cap_log2,
    )  # fmt: skip
    CONSUMERS: gl.constexpr = SPEC.CONSUMERS
    CREGS: gl.constexpr = SPEC.CONSUMER_REGISTERS
    PREGS: gl.constexpr = SPEC.PRODUCER_REGISTERS
    buffers = prepared_buffers(tensors, SPEC)
    # SPEC and W stay constants only in tuples written within the call
    if CONSUMERS == 2:
        gl.warp_specialize([
            (consumer, (0, tensors, shape, buffers, SPEC)),
            (consumer, (1, tensors, shape, buffers, SPEC)),
            (producer, (tensors, shape, buffers, SPEC)),
        ], [4, 1], [CREGS, PREGS])  # fmt: skip
    else:
        gl.static_assert(CONSUMERS == 3)
        gl.warp_specialize([
            (consumer, (0, tensors, shape, buffers, SPEC)),
            (consumer, (1, tensors, shape, buffers, SPEC)),
            (consumer, (2, tensors, shape, buffers, SPEC)),
            (producer, (tensors, shape, buffers, SPEC)),
        ], [4, 4, 1], [CREGS, CREGS, PREGS])  # fmt: skip


@gluon.jit
def prepared_buffers(tensors, SPEC: gl.constexpr):
    """Return the CTA's shared memory, its barriers ready."""
    Q_BUFFERS: gl.constexpr = SPEC.Q_BUFFERS
    STAGES: gl.constexpr = SPEC.STAGES
    q = allocate(tensors.q, Q_BUFFERS * SPEC.CONSUMERS)
    o = q if Q_BUFFERS == 1 else allocate(tensors.o, SPEC.CONSUMERS)
    numbers: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    bars: gl.constexpr = mbarrier.MBarrierLayout()
    q_full = gl.allocate_shared_memory(gl.int64, [Q_BUFFERS, 1], bars)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bars)
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bars)
    for i in gl.static_range(Q_BUFFERS):
        mbarrier.init(q_full.index(i), count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(v_full.index(i), count=1)
    fence_async_shared()
    return Buffers(
        q,
        allocate(tensors.k, STAGES),
        allocate(tensors.v, STAGES),
        o,
        gl.allocate_shared_memory(gl.int32, [Q_BUFFERS, POSTED], numbers),
        q_full,
        k_full,
        v_full,
    )

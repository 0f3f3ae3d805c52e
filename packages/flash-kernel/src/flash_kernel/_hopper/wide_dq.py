"""dq for head dims above 128: a CTA owns 128 query rows and walks the keys, as in the forward.

    s = q k^T        p = exp(s - lse)
    dp = do v^T      ds = p * (dp - delta)      dq += ds k

The tiles, their order, the producer and the masks are the forward's.  q and do of a tile stay in
shared memory, which leaves room for two blocks of K and one of V:

    who waits       for                   at          who arrives
    warpgroups      q, and the tile       q_full      producer (TMA)
    warpgroups      do                    do_full     producer (TMA)
    warpgroups      K, V of a block       k_full ..   producer (TMA)
    producer        room for q            Q_FREE      both, when a tile's products are there
    producer        room for do           DO_FREE     both, when dq has left by way of it
    producer        room for V            V_FREE      both, when dp is there
    producer        room for K            K_FREE ..   both, when the product with ds is there

``*_full`` are mbarriers, completed by the copy engine; the others are named barriers.
"""

from typing import Any, NamedTuple

from flash_kernel._hopper.compat import fence_async_shared, gl, gluon, mbarrier
from flash_kernel._hopper.pieces import allocate
from flash_kernel._hopper.tiles import POSTED
from flash_kernel._hopper.wide_dq_consumer import consume
from flash_kernel._hopper.wide_dq_producer import produce


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

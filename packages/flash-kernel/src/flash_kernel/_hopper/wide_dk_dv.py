"""dk and dv of wide heads: a CTA owns a tile of 64 keys and walks the queries.

    warpgroup 0    s^T = k q^T      p^T = exp(s^T - lse)             dv += p^T do
    warpgroup 1    dp^T = v do^T    ds^T = p^T * (dp^T - delta)      dk += ds^T q

An accumulator of 64 keys and 256 columns takes half the registers of a warpgroup: so dv has one
warpgroup and dk another, and p^T goes from the first to the second through shared memory.  Query
heads that share keys are walked one after the other, and their sums never leave the registers:
nothing is added in memory, and the bits of a key's gradients depend on nothing else in the batch.

    who waits       for                            at          who arrives
    warpgroup 0     k, and the tile                k_full      producer (TMA)
    warpgroup 1     v, and the tile                v_full      producer (TMA)
    both            q and lse of a block           q_full      producer (TMA)
    both            do and delta of a block        do_full     producer (TMA)
    warpgroup 1     p of a block                   P_FULL      warpgroup 0
    warpgroup 0     room for p                     P_FREE      warpgroup 1
    producer        room for q, for do             Q_FREE ..   both
    producer        room for k; for v              K_FREE ..   warpgroup 0; warpgroup 1

``*_full`` are mbarriers, completed by the copy engine; the others are named barriers.  dv leaves by
way of k's buffer, which only warpgroup 0 reads, and dk by way of v's, which only warpgroup 1 does.

Each warpgroup has its second product of a block and the first of the next in flight together, and
then none while it makes p or ds: that time belongs to the other one's products.
"""

from typing import Any, NamedTuple

from flash_kernel._hopper.backward_tiles import tile_of
from flash_kernel._hopper.compat import (
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    tma_load,
    tma_store_wait,
    warpgroup_mma_wait,
)
from flash_kernel._hopper.consumer import number_at
from flash_kernel._hopper.pieces import (
    allocate,
    issue_output,
    issue_scores,
    load_tile,
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
from flash_kernel._hopper.producer import post
from flash_kernel._hopper.tiles import CTAS_DONE, END, NEXT_TILE, POSTED, Rows
from flash_kernel._triton.primitives import LOG2_E, query_range, visible_keys

# Named barriers: one for each stage, or one.
Q_FREE: gl.constexpr = gl.constexpr(5)
DO_FREE: gl.constexpr = gl.constexpr(7)
P_FREE: gl.constexpr = gl.constexpr(9)
P_FULL: gl.constexpr = gl.constexpr(11)
TILE_FREE: gl.constexpr = gl.constexpr(13)  # k, and then v
# threads at them: a warpgroup is 128, the producer 32
BOTH: gl.constexpr = gl.constexpr(288)
ONE: gl.constexpr = gl.constexpr(160)
PAIR: gl.constexpr = gl.constexpr(256)


class Tensors(NamedTuple):
    """Global memory: descriptors over [B, H, rows, D], one for each piece, and pointers."""

    q: Any
    k: Any
    v: Any
    do: Any
    dk: Any
    dv: Any
    statistics: Any  # descriptor over [B * H * 2 * padded M]: lse and delta of each head
    marks: Any  # int32 [B, H_kv, tiles]
    workspace: Any  # int32 [2], zero between launches


class Problem(NamedTuple):
    """The numbers of a launch."""

    num_heads_k: Any
    group: Any  # query heads that share a head of k and v
    seqlen_q: Any
    seqlen_k: Any
    padded_q: Any  # rows of the statistics of a head
    heads_together: Any  # heads of k whose tiles are handed out in turn
    num_tiles: Any  # in all heads
    left: Any  # keys seen before a row's own position, and after it
    right: Any
    scale: Any
    scale_log2: Any


class Buffers(NamedTuple):
    """Shared memory, and the mbarriers that say what has landed."""

    tile: Any  # [2, POSTED]: the tile whose k it is, and whose v
    k: Any  # [1, 1, 1, 64, D], by pieces
    v: Any
    q: Any  # [STAGES, 1, 1, 64, D]
    do: Any
    lse: Any  # [STAGES, 64]
    delta: Any
    p: Any  # [STAGES, 4096]: in the order of the accumulator's registers
    k_full: Any
    v_full: Any
    q_full: Any
    do_full: Any


class Tile(NamedTuple):
    """Where a tile of keys lies, and the blocks of queries that see it."""

    batch: Any
    head: Any
    col: Any
    first: Any  # block of queries
    last: Any  # the one after
    full_start: Any  # rows from here on see all keys of the tile,
    full_end: Any  # up to here
    index: Any  # among all tiles


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
    barrier_sync(P_FREE + stage, PAIR)
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
    barrier_arrive(P_FREE + stage, PAIR)
    return gl.convert_layout(ds, OPERAND)


@gluon.jit
def weights(W: gl.constexpr, scores, row, block, stage, tile, x, buffers, SPEC: gl.constexpr):
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
def walk_blocks(
    W: gl.constexpr, tile, stage, phase, x, buffers, SPEC: gl.constexpr
):  # fmt: skip
    """Return dv (warpgroup 0) or dk of a tile, from all blocks and heads that see it."""
    FIRST_FREE: gl.constexpr = Q_FREE if W == 0 else DO_FREE
    SECOND_FREE: gl.constexpr = DO_FREE if W == 0 else Q_FREE
    PIECES: gl.constexpr = len(SPEC.WIDTHS)
    BY_COLUMN: gl.constexpr = gl.SliceLayout(0, accumulator_layout(64))
    SCORES_FIRST: gl.constexpr = SPEC.SCORES_FIRST[W]
    keys, first, first_full, statistics, second, second_full = sides(W, buffers)
    keys = stage_of(keys, 0)
    block = tile.last - 1
    mbarrier.wait(first_full.index(stage), phase)
    row = statistics.index(stage).load(BY_COLUMN)
    scores = warpgroup_mma_wait(0, deps=[issue_scores(keys, stage_of(first, stage))])
    barrier_arrive(FIRST_FREE + stage, BOTH)
    a = weights(W, scores, row, block, stage, tile, x, buffers, SPEC)
    acc = zeros(SPEC)
    for _ in range((tile.last - tile.first) * x.group - 1):
        following, following_phase = next_stage(stage, phase, SPEC.STAGES)
        block = gl.where(block == tile.first, tile.last, block) - 1
        if SCORES_FIRST:
            mbarrier.wait(first_full.index(following), following_phase)
            flying = issue_scores(keys, stage_of(first, following))
            mbarrier.wait(second_full.index(stage), phase)
            acc = issue_output(acc, a, stage_of(second, stage))
            row = statistics.index(following).load(BY_COLUMN)
            scores = warpgroup_mma_wait(PIECES, deps=[flying])
            barrier_arrive(FIRST_FREE + following, BOTH)
            b = weights(W, scores, row, block, following, tile, x, buffers, SPEC)
            acc, a = wait_for_product(acc, a, 0)
            barrier_arrive(SECOND_FREE + stage, BOTH)
            a = b
        else:
            mbarrier.wait(second_full.index(stage), phase)
            acc = issue_output(acc, a, stage_of(second, stage))
            mbarrier.wait(first_full.index(following), following_phase)
            row = statistics.index(following).load(BY_COLUMN)
            flying = issue_scores(keys, stage_of(first, following))
            acc, a = wait_for_product(acc, a, PIECES)
            barrier_arrive(SECOND_FREE + stage, BOTH)
            scores = warpgroup_mma_wait(0, deps=[flying])
            barrier_arrive(FIRST_FREE + following, BOTH)
            a = weights(W, scores, row, block, following, tile, x, buffers, SPEC)
        stage, phase = following, following_phase
    mbarrier.wait(second_full.index(stage), phase)
    acc = issue_output(acc, a, stage_of(second, stage))
    acc, a = wait_for_product(acc, a, 0)
    barrier_arrive(SECOND_FREE + stage, BOTH)
    stage, phase = next_stage(stage, phase, SPEC.STAGES)
    return acc, stage, phase


@gluon.jit
def wait_for_product(acc, a, OTHERS: gl.constexpr):
    """Wait until the product in acc is there, and the operand ``a`` read, with OTHERS in flight."""
    if len(acc) == 1:
        first, a = warpgroup_mma_wait(OTHERS, deps=[acc[0], a])
        return (first,), a
    else:  # noqa: RET505
        first, second, a = warpgroup_mma_wait(OTHERS, deps=[acc[0], acc[1], a])
        return (first, second), a


@gluon.jit
def mark(dk, tile, tensors, x, SPEC: gl.constexpr):
    """Say whether a tile's gradients are not finite: what hidden rows hold may have got there.

    dk alone tells.  What is not finite in a hidden row of q, do or the statistics is multiplied by
    ds = 0, or makes that NaN: a row of do that makes dv NaN makes all of its dp NaN or infinite.
    """
    BY_ROW: gl.constexpr = gl.SliceLayout(1, accumulator_layout(SPEC.WIDTHS[0]))
    cols = tile.col + gl.arange(0, 64, BY_ROW)
    is_bad = (row_sums(dk, cols) * 0.0 != 0.0) & (cols < x.seqlen_k)
    gl.store(tensors.marks + tile.index, gl.max(is_bad.to(gl.int32), 0))


@gluon.jit
def read_tile(W: gl.constexpr, parity, buffers):
    """Wait for k (warpgroup 0) or v of the next tile; return the tile posted with it."""
    full = buffers.k_full if W == 0 else buffers.v_full
    mbarrier.wait(full, parity)
    layout: gl.constexpr = gl.BlockedLayout([POSTED], [32], [4], [0])
    index = gl.arange(0, POSTED, layout)
    numbers = buffers.tile.index(W).load(layout)
    return Tile(
        number_at(0, index, numbers), number_at(1, index, numbers), number_at(2, index, numbers),
        number_at(3, index, numbers), number_at(4, index, numbers), number_at(5, index, numbers),
        number_at(6, index, numbers), number_at(7, index, numbers),
    )  # fmt: skip


@gluon.jit
def store(W: gl.constexpr, acc, tile, tensors, x, buffers, SPEC: gl.constexpr):
    """Write dv, or dk times scale, by way of the buffer of k, or v."""
    BY_ROW: gl.constexpr = gl.SliceLayout(1, accumulator_layout(SPEC.WIDTHS[0]))
    rows = Rows(tile.batch, tile.head, tile.col * 0, x.seqlen_k)
    if W == 0:
        put(acc, gl.full([64], 1.0, gl.float32, BY_ROW), buffers.k, 0)
        fence_async_shared()
        store_tile(tensors.dv, rows, tile.col, buffers.k, 0, SPEC)
    else:
        if SPEC.HIDES_PAIRS:
            mark(acc, tile, tensors, x, SPEC)
        put(acc, gl.zeros([64], gl.float32, BY_ROW) + x.scale, buffers.v, 0)
        fence_async_shared()
        store_tile(tensors.dk, rows, tile.col, buffers.v, 0, SPEC)


@gluon.jit
def consume(W: gl.constexpr, tensors, x, buffers, SPEC: gl.constexpr):
    """Make dv (warpgroup 0) or dk of one tile after the other."""
    STAGES: gl.constexpr = SPEC.STAGES
    for i in gl.static_range(STAGES):  # everything starts free
        barrier_arrive(gl.to_tensor(Q_FREE + i), BOTH)
        barrier_arrive(gl.to_tensor(DO_FREE + i), BOTH)
        if W == 1:
            barrier_arrive(gl.to_tensor(P_FREE + i), PAIR)
    barrier_arrive(gl.to_tensor(TILE_FREE + W), ONE)
    stage = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    parity = gl.to_tensor(0)
    tile = read_tile(W, parity, buffers)
    while tile.batch != END:
        if SPEC.HIDES_PAIRS and tile.first == tile.last:  # nobody sees it
            store(W, zeros(SPEC), tile, tensors, x, buffers, SPEC)
        else:
            acc, stage, phase = walk_blocks(W, tile, stage, phase, x, buffers, SPEC)
            store(W, acc, tile, tensors, x, buffers, SPEC)
        tma_store_wait(0)
        barrier_arrive(gl.to_tensor(TILE_FREE + W), ONE)
        parity = parity ^ 1
        tile = read_tile(W, parity, buffers)
    if W == 0:  # no barrier may end half full
        for i in gl.static_range(STAGES):
            barrier_sync(gl.to_tensor(P_FREE + i), PAIR)


@gluon.jit
def locate(number, x, SPEC: gl.constexpr):
    """Return the `Tile` of a number."""
    head_k, tile_k = tile_of(number, x, SPEC)
    col = tile_k * SPEC.BLOCK_N
    start, full_start, full_end, end = query_range(col, x, SPEC)
    first = start // SPEC.BLOCK_M
    last = gl.maximum(gl.cdiv(end, SPEC.BLOCK_M), first)
    batch = head_k // x.num_heads_k
    index = head_k * gl.cdiv(x.seqlen_k, SPEC.BLOCK_N) + tile_k
    full_start, full_end = full_start + col * 0, full_end + col * 0  # they may be constants
    return Tile(
        batch, head_k - batch * x.num_heads_k, col, first, last, full_start, full_end, index
    )


@gluon.jit
def load_keys(W: gl.constexpr, tile, tensors, x, buffers, SPEC: gl.constexpr):
    """Post a tile for warpgroup W, and copy its k (0) or v (1)."""
    barrier_sync(gl.to_tensor(TILE_FREE + W), ONE)
    post(tile, buffers, W)
    rows = Rows(tile.batch, tile.head, tile.col * 0, x.seqlen_k)
    full = buffers.k_full if W == 0 else buffers.v_full
    mbarrier.expect(full, SPEC.BLOCK_N * SPEC.ROW_BYTES)
    if W == 0:
        load_tile(tensors.k, rows, tile.col, full, buffers.k, 0, SPEC)
    else:
        load_tile(tensors.v, rows, tile.col, full, buffers.v, 0, SPEC)


@gluon.jit
def load_queries(
    W: gl.constexpr, tile, block, member, stage, tensors, x, buffers, SPEC: gl.constexpr
):  # fmt: skip
    """Copy a block of q and lse (0) or of do and delta (1) to a stage, once that is free."""
    BLOCK_M: gl.constexpr = SPEC.BLOCK_M
    head = tile.head * x.group + member
    rows = Rows(tile.batch, head, block * 0, x.seqlen_q)
    row = block * BLOCK_M
    statistics = ((tile.batch * x.num_heads_k * x.group + head) * 2 + W) * x.padded_q + row
    full = (buffers.q_full if W == 0 else buffers.do_full).index(stage)
    barrier_sync((Q_FREE if W == 0 else DO_FREE) + stage, BOTH)
    mbarrier.expect(full, BLOCK_M * (SPEC.ROW_BYTES + 4))
    if W == 0:
        tma_load(tensors.statistics, [statistics], full, buffers.lse.index(stage))
        load_tile(tensors.q, rows, row, full, buffers.q, stage, SPEC)
    else:
        tma_load(tensors.statistics, [statistics], full, buffers.delta.index(stage))
        load_tile(tensors.do, rows, row, full, buffers.do, stage, SPEC)


@gluon.jit
def load_blocks(tile, stage, tensors, x, buffers, SPEC: gl.constexpr):
    """Copy v, and the blocks that see a tile from the last to the first, head by head."""
    block = tile.last - 1
    member = block * 0
    count = (tile.last - tile.first) * x.group
    if count > 0:
        load_queries(0, tile, block, member, stage, tensors, x, buffers, SPEC)
    load_keys(1, tile, tensors, x, buffers, SPEC)
    for i in range(count):
        # do first: its room is free before that of q
        load_queries(1, tile, block, member, stage, tensors, x, buffers, SPEC)
        if i > 0:
            load_queries(0, tile, block, member, stage, tensors, x, buffers, SPEC)
        stage = gl.where(stage == SPEC.STAGES - 1, 0, stage + 1)
        member = gl.where(block == tile.first, member + 1, member)
        block = gl.where(block == tile.first, tile.last, block) - 1
    return stage


@gluon.jit
def produce(tensors, x, buffers, SPEC: gl.constexpr):
    """Hand out tiles, from a counter in memory, until there are none; copy what they need."""
    STAGES: gl.constexpr = SPEC.STAGES
    programs = gl.num_programs(0)
    stage = gl.to_tensor(0)
    number = gl.program_id(0)
    while number < x.num_tiles:
        # a tile ahead, so that nobody waits for the counter
        upcoming = programs + gl.atomic_add(tensors.workspace + NEXT_TILE, 1)
        tile = locate(number, x, SPEC)
        load_keys(0, tile, tensors, x, buffers, SPEC)
        stage = load_blocks(tile, stage, tensors, x, buffers, SPEC)
        number = upcoming
    if gl.atomic_add(tensors.workspace + CTAS_DONE, 1) == programs - 1:
        # nobody takes a tile any more
        gl.store(tensors.workspace + NEXT_TILE, 0)
        gl.store(tensors.workspace + CTAS_DONE, 0)
    zero = gl.to_tensor(0)
    for w in gl.static_range(2):
        barrier_sync(gl.to_tensor(TILE_FREE + w), ONE)
        post(Tile(END + zero, zero, zero, zero, zero, zero, zero, zero), buffers, w)
    mbarrier.arrive(buffers.k_full, count=1)
    mbarrier.arrive(buffers.v_full, count=1)
    for i in gl.static_range(STAGES):  # no barrier may end half full
        barrier_sync(gl.to_tensor(Q_FREE + i), BOTH)
        barrier_sync(gl.to_tensor(DO_FREE + i), BOTH)


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
        parts = (q,), (k,), (v,), (do,), (dk,), (dv,)
    else:
        parts = (
            (q, q_rest), (k, k_rest), (v, v_rest), (do, do_rest), (dk, dk_rest), (dv, dv_rest)
        )  # fmt: skip
    tensors = Tensors(
        parts[0], parts[1], parts[2], parts[3], parts[4], parts[5], statistics, marks_ptr,
        workspace_ptr,
    )  # fmt: skip
    x = Problem(
        num_heads_k, group, seqlen_q, seqlen_k, padded_q, heads_together, num_tiles, left, right,
        scale, scale_log2,
    )  # fmt: skip
    buffers = prepared_buffers(tensors, SPEC)
    # SPEC and W stay constants only in tuples written within the call
    gl.warp_specialize([
        (consume, (0, tensors, x, buffers, SPEC)),
        (consume, (1, tensors, x, buffers, SPEC)),
        (produce, (tensors, x, buffers, SPEC)),
    ], [4, 1], [240, 24])  # fmt: skip

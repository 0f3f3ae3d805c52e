"""Tiles of rows in one or two pieces side by side.

Triton's shapes are powers of two, so that 96 columns are 64 + 32, and 192 are 128 + 64.  A tile is
a tuple of its pieces: descriptors, shared memory ``[STAGES, ..., ROWS, WIDTH]``, views of a stage
``[ROWS, WIDTH]``, or accumulators ``[64, WIDTH]``.
"""

from flash_kernel._hopper.compat import (
    gl,
    gluon,
    tma_load,
    tma_store,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from flash_kernel._hopper.primitives import accumulator_layout, sums_by_thread
from flash_kernel._hopper.tiles import coordinates


@gluon.jit
def allocate(tensor, STAGES: gl.constexpr):
    """Return shared memory for so many tiles of a tensor."""
    SHAPE: gl.constexpr = [STAGES] + tensor[0].block_shape  # noqa: RUF005 - Triton unpacks no list
    first = gl.allocate_shared_memory(tensor[0].dtype, SHAPE, tensor[0].layout)
    if len(tensor) == 1:
        return (first,)
    else:  # noqa: RET505 - to the compiler, what follows a return is still there
        REST: gl.constexpr = [STAGES] + tensor[1].block_shape  # noqa: RUF005
        return (first, gl.allocate_shared_memory(tensor[1].dtype, REST, tensor[1].layout))


@gluon.jit
def stage_of(buffers, stage):
    """Return the tile of one stage, ready for a product."""
    ROWS: gl.constexpr = buffers[0].shape[-2]
    FIRST: gl.constexpr = buffers[0].shape[-1]
    first = buffers[0].index(stage).reshape([ROWS, FIRST])
    if len(buffers) == 1:
        return (first,)
    else:  # noqa: RET505
        SECOND: gl.constexpr = buffers[1].shape[-1]
        return (first, buffers[1].index(stage).reshape([ROWS, SECOND]))


@gluon.jit
def load_tile(tensor, rows, row, barrier, buffers, stage, SPEC: gl.constexpr):
    """Have the tile that begins at ``row`` copied into a stage; zeros where there is nothing."""
    FIRST: gl.constexpr = SPEC.WIDTHS[0]
    tma_load(tensor[0], coordinates(rows, row, 0, SPEC), barrier, buffers[0].index(stage))
    if len(tensor) == 2:
        tma_load(tensor[1], coordinates(rows, row, FIRST, SPEC), barrier, buffers[1].index(stage))


@gluon.jit
def store_tile(tensor, rows, row, buffers, stage, SPEC: gl.constexpr):
    """Have a stage copied to where `load_tile` would read it; what lies outside is left out."""
    FIRST: gl.constexpr = SPEC.WIDTHS[0]
    tma_store(tensor[0], coordinates(rows, row, 0, SPEC), buffers[0].index(stage))
    if len(tensor) == 2:
        tma_store(tensor[1], coordinates(rows, row, FIRST, SPEC), buffers[1].index(stage))


@gluon.jit
def zeros(SPEC: gl.constexpr):
    """Return accumulators of 64 rows."""
    FIRST: gl.constexpr = SPEC.WIDTHS[0]
    first = gl.zeros([64, FIRST], gl.float32, accumulator_layout(FIRST))
    if len(SPEC.WIDTHS) == 1:
        return (first,)
    else:  # noqa: RET505
        SECOND: gl.constexpr = SPEC.WIDTHS[1]
        return (first, gl.zeros([64, SECOND], gl.float32, accumulator_layout(SECOND)))


@gluon.jit
def issue_scores(q, k):
    """Start ``q k'``, the products of the rows of two tiles."""
    BLOCK_N: gl.constexpr = k[0].shape[0]
    zero = gl.zeros([64, BLOCK_N], gl.float32, accumulator_layout(BLOCK_N))
    s = warpgroup_mma(q[0], k[0].permute((1, 0)), zero, use_acc=False, is_async=True)
    if len(q) == 2:
        s = warpgroup_mma(q[1], k[1].permute((1, 0)), s, is_async=True)
    return s


@gluon.jit
def issue_output(acc, p, v):
    """Start ``acc + p v``: a product, and a token, for each piece."""
    first = warpgroup_mma(p, v[0], acc[0], is_async=True)
    if len(v) == 1:
        return (first,)
    else:  # noqa: RET505
        # the same registers: of p's layout the width of the other factor is a part by name alone
        PL: gl.constexpr = gl.DotOperandLayout(0, accumulator_layout(v[1].shape[1]), k_width=2)
        return (first, warpgroup_mma(gl.convert_layout(p, PL), v[1], acc[1], is_async=True))


@gluon.jit
def wait_for_output(acc, p, kept):
    """Wait for all products; ``kept`` stays computed before.  Returns acc, p and ``kept``."""
    # p stays in the wait's operands until the product has read it
    if len(acc) == 1:
        first, p, kept = warpgroup_mma_wait(0, deps=[acc[0], p, kept])
        return (first,), p, kept
    else:  # noqa: RET505
        first, second, p, kept = warpgroup_mma_wait(0, deps=[acc[0], acc[1], p, kept])
        return (first, second), p, kept


@gluon.jit
def put(acc, factor, buffers, stage):
    """Write accumulators, times a factor for each row, to shared memory."""
    views = stage_of(buffers, stage)
    for i in gl.static_range(len(acc)):
        put_piece(acc[i], factor, views[i])


@gluon.jit
def put_piece(x, factor, view):
    BY_ROW: gl.constexpr = gl.SliceLayout(1, x.type.layout)
    x = x * gl.convert_layout(factor, BY_ROW)[:, None]
    view.store(x.to(view.dtype))


@gluon.jit
def row_sums(acc, rows):
    """Return the sum of each row of accumulators, laid out like ``rows [64]``."""
    BY_ROW: gl.constexpr = rows.type.layout
    sums = gl.zeros([64], gl.float32, BY_ROW)
    for i in gl.static_range(len(acc)):
        by_thread = sums_by_thread(acc[i], acc[i].shape[1])
        sums += gl.convert_layout(gl.sum(by_thread, 1), BY_ROW)
    return sums

"""Where a result is not finite: keep NaN and inf from the rows that do not see them.

In a product ``P V`` a NaN or inf in a row of V reaches every row of the result, since 0 * NaN is
NaN.  So each kernel looks at its result once, at the end.  Where it is not finite, and rows may be
kept from keys, the kernel computes it a second time: row by row, slowly, and exactly.
"""

import triton
import triton.language as tl

from flash_kernel._triton.primitives import INF, load_bias, visible_keys


@triton.jit
def is_finite(tile):
    """Whether no entry of a tile is NaN or infinite."""
    finite = tl.min((tl.abs(tile[0]) < INF).to(tl.int32))
    for i in tl.static_range(1, len(tile)):
        finite = tl.minimum(finite, tl.min((tl.abs(tile[i]) < INF).to(tl.int32)))
    return finite == 1


@triton.jit
def add_visible_row(acc, weights, b, index, sees):
    """Add row ``index`` of b, by its column of the weights, to the rows of acc that see it.

    Over all rows this is ``acc + weights b``.  Shapes: weights [ROWS of acc, ROWS of b]; sees
    [ROWS of acc, 1].
    """
    is_row = tl.arange(0, b[0].shape[0]) == index
    rounded = weights.to(b[0].dtype)
    weight = tl.sum(tl.where(is_row[None, :], rounded, 0.0).to(tl.float32), axis=1)[:, None]
    total = ()
    for i in tl.static_range(len(acc)):
        total += (acc[i] + weighted_row(weight, b[i], is_row, sees),)
    return total


@triton.jit
def weighted_row(weight, b, is_row, sees):
    """Return ``weight [M, 1]`` times the one row of b that ``is_row``, 0 where not seen."""
    b_row = tl.sum(tl.where(is_row[:, None], b, 0.0).to(tl.float32), axis=0)
    return tl.where(sees, weight * b_row[None, :], 0.0)


@triton.jit
def sees_exactly(rows, cols, x, SPEC: tl.constexpr):
    """`visible_keys`, less rows past the end and pairs that a bias of -inf hides."""
    visible = visible_keys(rows, cols, x, SPEC) & (rows < x.seqlen_q)
    if SPEC.HAS_BIAS:
        visible = visible & (load_bias(rows, cols, x) != -INF)
    return visible

"""Where a result is not finite: keep NaN and inf from the rows that do not see them.

In a product ``P V`` a NaN or inf in a row of V reaches every row of the result, since 0 * NaN is
NaN.  So each kernel looks at its result once, at the end.  Where it is not finite, and rows may be
kept from keys, the kernel computes it a second time: row by row, slowly, and exactly.
"""

import triton
import triton.language as tl

from flash_kernel._triton.primitives import INF, load_bias, visible_keys


@triton.jit
def is_finite(x):
    """Whether no entry of a tile is NaN or infinite."""
    return tl.min((tl.abs(x) < INF).to(tl.int32)) == 1


@triton.jit
def add_visible_row(acc, a, b, index, sees):
    """Add row ``index`` of b, weighed by its column of a, to the rows of acc that see it.

    Over all rows this is ``acc + a b``.  Shapes: acc [M, N]; a [M, K]; b [K, N]; sees [M, 1].
    """
    is_row = tl.arange(0, b.shape[0]) == index
    a_column = tl.sum(tl.where(is_row[None, :], a.to(b.dtype), 0.0).to(tl.float32), axis=1)
    b_row = tl.sum(tl.where(is_row[:, None], b, 0.0).to(tl.float32), axis=0)
    return acc + tl.where(sees, a_column[:, None] * b_row[None, :], 0.0)


@triton.jit
def sees_exactly(rows, cols, seqlen_q, seqlen_k, x, SPEC: tl.constexpr):
    """`visible_keys`, less rows past the end and pairs that a bias of -inf hides."""
    visible = visible_keys(rows, cols, seqlen_q, seqlen_k, x, SPEC) & (rows < seqlen_q)
    if SPEC.HAS_BIAS:
        visible = visible & (load_bias(rows, cols, seqlen_q, seqlen_k, x) != -INF)
    return visible

"""How much work a case is.  The only place that counts floating-point operations."""

from attn_bench.case import Case

FLOP_CONVENTION = (
    "fwd 4*B*H*P*D, bwd 2.5x fwd, P = visible (query, key) pairs, so causal counts about half"
)

# backward in units of the forward: five matmuls (S again, dV, dP, dQ, dK) against two
_WORK = {"fwd": 1.0, "bwd": 2.5, "fwd+bwd": 3.5}


def visible_pairs(seqlen_q: int, seqlen_k: int, *, is_causal: bool) -> int:
    """Return how many (query, key) pairs the mask lets through.

    Causal and bottom-right aligned, query i of M sees ``clamp(i + 1 + N - M, 0, N)`` of N keys.
    That is an arithmetic series from ``N - M + 1`` (or 1, where the first rows see nothing) to N.
    """
    if not is_causal:
        return seqlen_q * seqlen_k
    seeing_rows = min(seqlen_q, seqlen_k)
    first = seqlen_k - seeing_rows + 1
    return seeing_rows * (first + seqlen_k) // 2


def attention_flops(case: Case) -> float:
    """Return the floating-point operations of one run, by `FLOP_CONVENTION`.

    The forward has two matmuls over the visible pairs (S = Q K^T and O = P V) of 2 D operations
    a pair each.  The softmax is not counted.  What a kernel recomputes beyond this, or spends on
    masked pairs, is its own loss.
    """
    pairs = visible_pairs(case.seqlen_q, case.seqlen_k, is_causal=case.is_causal)
    forward = 4 * case.batch * case.num_heads * pairs * case.head_dim
    return _WORK[case.mode] * forward


def tflops(case: Case, milliseconds: float) -> float:
    """Return the rate in TFLOP/s of one run that took `milliseconds`."""
    return attention_flops(case) / (milliseconds * 1e-3) / 1e12

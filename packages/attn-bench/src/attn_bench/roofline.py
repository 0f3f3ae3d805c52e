"""How much work a case is, and how fast this device could do it.

The only place that counts floating-point operations.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cache, partial
from statistics import median

import torch

from attn_bench.case import DTYPES, Case
from attn_bench.mask import bounds
from attn_bench.timing import Clock
from attn_bench.workload import Workload

FLOP_CONVENTION = (
    "fwd 4*B*H*P*D, bwd 2.5x fwd, P = visible (query, key) pairs, so causal counts about half"
)

# backward in units of the forward: five matmuls (S again, dV, dP, dQ, dK) against two
_WORK = {"fwd": 1.0, "bwd": 2.5, "fwd+bwd": 3.5}


@cache
def visible_pairs(case: Case) -> int:
    """Return how many (query, key) pairs the mask of a case lets through.

    Query i of M stands at key ``i + N - M`` and sees the keys from ``window`` before it (or from
    the first) to itself if causal, else to ``window`` behind it (or to the last).
    """
    before, after = bounds(case)
    last = case.seqlen_k - 1
    shift = case.seqlen_k - case.seqlen_q
    total = 0
    if before is None and after is None:
        return case.seqlen_q * case.seqlen_k
    for position in range(shift, shift + case.seqlen_q):
        left = 0 if before is None else max(0, position - before)
        right = last if after is None else min(last, position + after)
        total += max(0, right - left + 1)
    return total


def attention_flops(case: Case) -> float:
    """Return the floating-point operations of one run, by `FLOP_CONVENTION`.

    The forward has two matmuls over the visible pairs (S = Q K^T and O = P V) of 2 D operations
    a pair each.  The softmax is not counted.  What a kernel recomputes beyond this, or spends on
    masked pairs, is its own loss.
    """
    pairs = visible_pairs(case)
    forward = 4 * case.batch * case.num_heads * pairs * case.head_dim
    return _WORK[case.mode] * forward


def unmasked_flops(case: Case) -> float:
    """Return the operations by the other convention: every pair counts, masked or not."""
    return attention_flops(replace(case, is_causal=False, window=None))


def attention_bytes(case: Case) -> int:
    """Return the bytes that one run must at least read and write: inputs and results once each.

    Forward: q, k, v and o.  Backward: q, k, v, o and do, and dq, dk, dv.  The statistics of the
    softmax, 4 bytes a row, are left out.
    """
    size = 4 if case.dtype == "fp32" else 2
    queries = case.batch * case.num_heads * case.seqlen_q * case.head_dim * size
    keys = case.batch * case.kv_heads * case.seqlen_k * case.head_dim * size
    forward, backward = 2 * queries + 2 * keys, 4 * queries + 4 * keys
    return {"fwd": forward, "bwd": backward, "fwd+bwd": forward + backward}[case.mode]


def tflops(flops: float, milliseconds: float) -> float:
    """Return the rate in TFLOP/s of `flops` in `milliseconds`."""
    return flops / (milliseconds * 1e-3) / 1e12


@dataclass(frozen=True)
class Ceilings:
    """What this device reached in this run: TFLOP/s of a large matmul by dtype, GB/s of a copy."""

    matmul_tflops: dict[str, float]
    copy_gb_s: float

    def least_milliseconds(self, case: Case) -> float:
        """Return the time that the ceilings allow for one run of a case."""
        arithmetic = attention_flops(case) / (self.matmul_tflops[case.dtype] * 1e12)
        traffic = attention_bytes(case) / (self.copy_gb_s * 1e9)
        return 1e3 * max(arithmetic, traffic)


def measure_ceilings(device: torch.device, dtypes: Iterable[str]) -> Ceilings:
    """Measure a square matmul per dtype and a copy: medians on an idle device with a cold L2."""
    clock = Clock(device)
    side, size = (8192, 2**30) if device.type == "cuda" else (512, 2**24)
    rates = {}
    for dtype in dict.fromkeys(dtypes):
        a = torch.randn(side, side, device=device).to(getattr(torch, DTYPES[dtype]))
        rates[dtype] = tflops(2.0 * side**3, _median_ms(clock, partial(torch.matmul, a, a)))
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    copied = _median_ms(clock, partial(torch.empty_like(source).copy_, source))
    return Ceilings(rates, 2 * size / (copied * 1e-3) / 1e9)


def describe_ceilings(ceilings: Ceilings) -> str:
    """Return the ceilings in one line."""
    rates = [f"matmul {dtype} {rate:.3g} TFLOP/s" for dtype, rate in ceilings.matmul_tflops.items()]
    return ", ".join([*rates, f"copy {ceilings.copy_gb_s:.3g} GB/s"])


def _median_ms(clock: Clock, run: Callable[[], object]) -> float:
    workload = Workload(lambda: None, lambda _: run())
    return median([clock.milliseconds(workload) for _ in range(12)][2:])

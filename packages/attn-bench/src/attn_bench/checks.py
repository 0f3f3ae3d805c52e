"""Is a provider right?  Output and gradients against dense attention in float64.

Truth and tolerance are `flash_kernel.testing.expect`'s: at most twice the error that dense
attention makes in the inputs' own dtype, plus a floor of a few rounding units.

A check compares the very tensors that are timed.  Where float64 would take too long, some heads
stand for all.  Where a head's score matrix does not fit, o and dq are compared on slabs of query
rows, and dk and dv at a shorter length.  `Check.scope` says which it was.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import isqrt
from typing import Self

from torch import Tensor

from attn_bench.case import Case
from attn_bench.mask import bounds, visible
from attn_bench.truth import Tensors, error_of, expect_masked, with_sums_in_order
from attn_bench.workload import Inputs, make_inputs
from flash_kernel.testing import AttentionErrors, Expectation, TensorError, expect


@dataclass(frozen=True)
class Limits:
    """What a float64 check may cost.

    Attributes:
        work: Operations in all.
        scores: Entries of one score matrix.
        entries: Entries of k, and of v, of all heads that are compared.
    """

    work: float
    scores: int
    entries: int = 2**27


# 4096^2 scores take 128 MiB in float64, 16384^2 take 2 GiB; 2^27 entries of k take 1 GiB
LIMITS = {"cpu": Limits(2e10, 4096**2), "cuda": Limits(2e13, 16384**2)}

# query rows of a slab, where slabs stand for all rows
SLAB_ROWS = 64


@dataclass(frozen=True)
class Check:
    """The largest absolute error of each tensor, what was allowed, and what was compared.

    `violations` also covers the mean errors, which have bounds of their own.
    """

    errors: dict[str, float]
    bounds: dict[str, float]
    violations: tuple[str, ...]
    scope: str

    @property
    def is_right(self) -> bool:
        """True if every error is within its bound."""
        return not self.violations

    def joined(self, other: Self) -> Self:
        """Return both checks as one, with the worse of two errors of the same tensor."""
        errors, bounds = dict(self.errors), dict(self.bounds)
        for name, error in other.errors.items():
            if name not in errors or error * bounds[name] > errors[name] * other.bounds[name]:
                errors[name], bounds[name] = error, other.bounds[name]
        scopes = dict.fromkeys((self.scope, other.scope))
        violations = self.violations + other.violations
        return replace(
            self, errors=errors, bounds=bounds, violations=violations, scope=", ".join(scopes)
        )


@dataclass(frozen=True)
class Piece:
    """A part of the truth: some heads and query rows, and the tensors that it determines.

    `heads` are heads of k and v, counted over the batch, with the heads of q that share them.
    """

    expectation: Expectation
    kv_heads: int
    heads: list[int]
    rows: slice
    names: tuple[str, ...]
    scope: str

    def check(self, tensors: Tensors) -> Check:
        """Compare a provider's tensors ``[B, H, ., D]`` with this piece."""
        measured = {}
        for name in self.names:
            tensor = getattr(tensors, name)
            if tensor is None:  # of a provider without a backward
                continue
            some = by_kv_head(tensor.detach(), self.kv_heads)[self.heads]
            rows = self.rows if name in ("o", "dq") else slice(None)
            measured[name] = error_of(some[..., rows, :], self.expectation.results[name])
        # a tensor that this piece says nothing about counts as right
        right = TensorError(0.0, 0.0)
        o, dq, dk, dv = (measured.get(name, right) for name in Tensors._fields)
        errors = AttentionErrors(o=o, lse=None, dq=dq, dk=dk, dv=dv)
        bounds = dict(self.expectation.bounds.items())
        return Check(
            {name: error.max for name, error in measured.items()},
            {name: bounds[name].max for name in measured},
            tuple(self.expectation.violations(errors)),
            self.scope,
        )


class Oracle:
    """The truth about one set of inputs, made once and used for every provider."""

    def __init__(self, case: Case, inputs: Inputs, limits: Limits) -> None:
        self._short: tuple[Case, Inputs, Oracle] | None = None
        groups = case.num_heads // case.kv_heads
        if groups * case.seqlen_q * case.seqlen_k <= limits.scores:
            heads = pick_heads(case, limits)
            some = (
                "all heads" if len(heads) == case.batch * case.kv_heads else heads_of(case, heads)
            )
            names = ("o", "dq", "dk", "dv")
            self._pieces = [piece(case, inputs, heads, (0, case.seqlen_q), names, some)]
            return
        # one head, and slabs at the beginning, in the middle and at the end of the rows
        heads = [case.batch * case.kv_heads - 1]
        rows = min(SLAB_ROWS, case.seqlen_q)
        starts = sorted({0, (case.seqlen_q - rows) // 2, case.seqlen_q - rows})
        scope = f"o and dq in {len(starts)} x {rows} rows of {heads_of(case, heads)}"
        self._pieces = [
            piece(case, inputs, heads, (start, start + rows), ("o", "dq"), scope, is_slab=True)
            for start in starts
            if visible_length(case, start + rows) > 0
        ]
        side = isqrt(limits.scores // groups)
        short = replace(
            case,
            batch=1,
            num_heads=groups,
            num_kv_heads=None if case.num_kv_heads is None else 1,
            seqlen_q=min(case.seqlen_q, side),
            seqlen_k=min(case.seqlen_k, side),
        )
        short_inputs = make_inputs(short, inputs.q.device)
        self._short = short, short_inputs, Oracle(short, short_inputs, limits)

    def check(
        self, tensors: Tensors, call: Callable[[Case, Inputs], Tensors] | None = None
    ) -> Check:
        """Compare a provider's tensors with the truth.

        `call` runs the provider on other inputs.  It is needed beyond ``limits.scores``, where dk
        and dv are compared at a shorter length.
        """
        check, *more = (each.check(tensors) for each in self._pieces)
        for each in more:
            check = check.joined(each)
        if self._short is not None and call is not None:
            short, inputs, oracle = self._short
            at_short = oracle.check(call(short, inputs))
            lengths = f"{short.seqlen_q} x {short.seqlen_k}"
            check = check.joined(replace(at_short, scope=f"everything at n = {lengths}"))
        return check


def piece(
    case: Case,
    inputs: Inputs,
    heads: list[int],
    rows: tuple[int, int],
    names: tuple[str, ...],
    scope: str,
    *,
    is_slab: bool = False,
) -> Piece:
    """Return the truth of `rows` of `heads`.

    Bottom-right alignment makes the rows up to `stop` an attention problem of their own: they see
    no key at or beyond ``stop + N - M``; with those keys cut off the alignment holds again.
    """
    keys = visible_length(case, rows[1])
    chosen = slice(*rows)
    q, k, v, do = (by_kv_head(each.detach(), case.kv_heads)[heads] for each in inputs)
    q, do, k, v = q[..., chosen, :], do[..., chosen, :], k[..., :keys, :], v[..., :keys, :]
    seen = visible(case, q.device, chosen, keys)
    if case.window is None and case.num_kv_heads is None:
        expectation = expect(q, k, v, do, is_causal=case.is_causal)
    else:
        expectation = expect_masked(q, k, v, do, seen)
    if is_slab:
        expectation = with_sums_in_order(expectation, seen)
    return Piece(expectation, case.kv_heads, heads, chosen, names, scope)


def by_kv_head(tensor: Tensor, kv_heads: int) -> Tensor:
    """Return ``[B, H, N, D]`` as ``[B * H_kv, N, D]``, or with H / H_kv heads before N if more."""
    batch, num_heads, *rest = tensor.shape
    grouped = tensor.reshape(batch * kv_heads, num_heads // kv_heads, *rest)
    return grouped.squeeze(1) if num_heads == kv_heads else grouped


def visible_length(case: Case, stop: int) -> int:
    """Return how many keys, from the first, the query rows before `stop` can see."""
    _, after = bounds(case)
    if after is None:
        return case.seqlen_k
    return min(case.seqlen_k, max(stop + case.seqlen_k - case.seqlen_q + after, 0))


def pick_heads(case: Case, limits: Limits) -> list[int]:
    """Return which of all batch * kv_heads are compared: all, or evenly spaced ones."""
    total = case.batch * case.kv_heads
    # forward and backward are 7 matmuls of 2 M N D operations
    groups = case.num_heads // case.kv_heads
    entries = case.seqlen_k * case.head_dim
    fitting = min(limits.work / (14 * groups * case.seqlen_q * entries), limits.entries / entries)
    count = min(total, max(1, int(fitting)))
    return [index * total // count for index in range(count)]


def heads_of(case: Case, heads: list[int]) -> str:
    """Return ``3 of 16 heads``."""
    return f"{len(heads)} of {case.batch * case.kv_heads} heads"

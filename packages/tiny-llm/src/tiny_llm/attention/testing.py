"""A conformance kit: run any backend through what `AttentionFn` promises.

    from tiny_llm.attention.testing import assert_conforms
    assert_conforms("mine", device="cuda", dtypes=("float32", "bfloat16"))

What a backend says it cannot do is not held against it; what it says it can, must be right.  The
reference is computed row by row in float64.  The bound on the error is that of plain attention in
the same dtype, twice over, and a few roundings.
"""

import dataclasses
import functools
from collections.abc import Iterable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from tiny_llm.attention import registry
from tiny_llm.attention.backend import AttentionBackend, AttentionFn
from tiny_llm.attention.cases import CASES, Case, attention_by_rows, make_inputs
from tiny_llm.attention.eager import scaled_dot_product_attention
from tiny_llm.attention.request import AttentionRequest

# a gradient that is 0 comes out as the difference of two sums of D products
ROUNDINGS = 32
NAMES = ("o", "dq", "dk", "dv")


@dataclasses.dataclass(frozen=True)
class Check:
    """Result of one case: "passed", "failed", or "refused" (the backend says it cannot)."""

    case: str
    dtype: str
    outcome: Literal["passed", "failed", "refused"]
    detail: str = ""


def assert_conforms(
    name: str,
    *,
    device: str = "cpu",
    dtypes: Iterable[str] = ("float64", "float32"),
    cases: Sequence[Case] = CASES,
) -> list[Check]:
    """Raise unless a backend passes every case it does not refuse; return the checks.

    Args:
        name: Of the backend.
        device: Where to run it.
        dtypes: Each case is tried in each of them.
        cases: Which; the fewer, the less there is to compile.

    Raises:
        AssertionError: A case failed, or every one was refused; the message lists them.
    """
    checks = check_backend(name, device=device, dtypes=dtypes, cases=cases)
    failed = [check for check in checks if check.outcome == "failed"]
    if failed or all(check.outcome == "refused" for check in checks):
        lines = [f"{each.case} [{each.dtype}]: {each.detail}" for each in failed or checks]
        raise AssertionError(f"attention {name!r} does not conform:\n  " + "\n  ".join(lines))
    return checks


def check_backend(
    name: str,
    *,
    device: str = "cpu",
    dtypes: Iterable[str] = ("float64", "float32"),
    head_dim: int = 32,
    cases: Sequence[Case] = CASES,
) -> list[Check]:
    """Run every case in every dtype, with gradients where the backend has a backward.

    Raises:
        UnknownAttentionError: Nothing is registered under `name`.
    """
    backend = registry.backend(name)
    return [
        check_case(backend, case, dtype=dtype, device=device, head_dim=head_dim)
        for dtype in dtypes
        for case in cases
    ]


def check_case(
    backend: AttentionBackend, case: Case, *, dtype: str, device: str, head_dim: int = 32
) -> Check:
    """Compare one call's output and gradients with the reference."""
    q, k, v = make_inputs(case, dtype=dtype, device=device, head_dim=head_dim)
    request = AttentionRequest.from_tensors(
        q,
        k,
        is_causal=case.is_causal,
        window=case.window,
        scale=case.scale,
        ragged=case.key_lengths is not None,
        packed=case.documents is not None,
    )
    traits = backend.traits(request)
    has_backward = traits.backward != "none"
    if not has_backward:
        request = dataclasses.replace(request, needs_grad=False)
    reasons = backend.reasons(request)
    if reasons:
        return Check(case.name, dtype, "refused", "; ".join(map(str, reasons)))
    try:
        got = _results(backend.load(), (q, k, v), case.options(device), has_backward)
        reference = _reference(case, dtype, head_dim, has_backward)
        problem = _problem(case, (q, k, v), got, reference)
        if not problem and traits.deterministic:
            again = _results(backend.load(), (q, k, v), case.options(device), has_backward)
            problem = _difference(got, again)
    # whatever a backend under test raises is its result
    except Exception as error:
        problem = f"{type(error).__name__}: {error}"
    return Check(case.name, dtype, "failed" if problem else "passed", problem)


@functools.cache
def _reference(case: Case, dtype: str, head_dim: int, has_backward: bool) -> tuple[Tensor, ...]:
    """Return what is right for a case's inputs, by rows in float64; all backends share it."""
    inputs = make_inputs(case, dtype=dtype, device="cpu", head_dim=head_dim)
    wide = tuple(x.detach().double().requires_grad_() for x in inputs)
    return _results(attention_by_rows, wide, case.options("cpu"), has_backward)


def _problem(
    case: Case, inputs: tuple[Tensor, ...], got: tuple[Tensor, ...], expected: tuple[Tensor, ...]
) -> str:
    """Return what is wrong with a backend's results, "" if nothing."""
    if got[0].dtype != inputs[0].dtype:
        return f"o must have the dtype of q, {inputs[0].dtype}, got {got[0].dtype}"
    options = case.options(inputs[0].device.type)
    plain = _results(scaled_dot_product_attention, inputs, options, len(expected) > 1)
    problems = []
    for name, x, reference, usual in zip(NAMES, got, expected, plain, strict=False):
        if x.shape != reference.shape:
            return f"{name} must have shape {list(reference.shape)}, got {list(x.shape)}"
        error, usual_error = (_largest_error(each, reference) for each in (x, usual))
        size = reference.abs().max().item()
        bound = 2 * usual_error + ROUNDINGS * torch.finfo(x.dtype).eps * max(size, 1.0)
        if not error <= bound:  # a NaN fails too
            problems.append(f"{name} is off by {error:.2e}, allowed {bound:.2e}")
    return ", ".join(problems)


def _difference(first: tuple[Tensor, ...], second: tuple[Tensor, ...]) -> str:
    names = [
        name for name, a, b in zip(NAMES, first, second, strict=False) if not torch.equal(a, b)
    ]
    return f"declared deterministic, but {', '.join(names)} differed when repeated" if names else ""


def _results(
    function: AttentionFn, inputs: tuple[Tensor, ...], options: dict[str, Any], has_backward: bool
) -> tuple[Tensor, ...]:
    """Return o, and dq, dk, dv for a fixed gradient of o."""
    if not has_backward:
        with torch.no_grad():
            return (function(*[x.detach() for x in inputs], **options),)
    o = function(*inputs, **options)
    generator = torch.Generator().manual_seed(1)
    do = torch.randn(o.shape, generator=generator, dtype=torch.float64)
    return (o.detach(), *torch.autograd.grad(o, inputs, do.to(o)))


def _largest_error(x: Tensor, reference: Tensor) -> float:
    return (x.detach().cpu().double() - reference.detach()).abs().max().item()

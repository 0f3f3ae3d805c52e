"""A conformance kit: run any backend through what `AttentionFn` promises.

    from tiny_llm.attention.testing import assert_conforms
    assert_conforms("mine", device="cuda", dtypes=("float32", "bfloat16"))

What a backend says it cannot do is not held against it; what it says it can, must be right.  The
reference is computed row by row in float64.  The bound on the error is that of plain attention in
the same dtype, twice over, and a few roundings.
"""

import dataclasses
from collections.abc import Iterable
from typing import Any, Literal

import torch
from torch import Tensor

from tiny_llm.attention import registry
from tiny_llm.attention.backend import AttentionBackend, AttentionFn
from tiny_llm.attention.eager import scaled_dot_product_attention
from tiny_llm.attention.request import AttentionRequest

# a gradient that is 0 comes out as the difference of two sums of D products
ROUNDINGS = 32
NAMES = ("o", "dq", "dk", "dv")


@dataclasses.dataclass(frozen=True)
class Case:
    """One call to test; lengths are odd on purpose.

    Attributes:
        name: What it is about.
        seqlen_q: Query rows M.
        seqlen_k: Keys N.
        is_causal: Bottom-right aligned.
        num_kv_heads: Of 4 query heads.
        window: Keys a row sees.
        scale: Factor of the scores.
        key_lengths: Of the 2 sequences.
        transposed: Hand over views of ``[B, M, H, D]`` memory.
    """

    name: str
    seqlen_q: int = 33
    seqlen_k: int = 33
    is_causal: bool = True
    num_kv_heads: int = 4
    window: int | None = None
    scale: float | None = None
    key_lengths: tuple[int, int] | None = None
    transposed: bool = False

    def options(self, device: str) -> dict[str, Any]:
        """Return the keywords of the call, without those that are not needed."""
        given: dict[str, Any] = {"is_causal": self.is_causal}
        if self.window is not None:
            given["window"] = self.window
        if self.scale is not None:
            given["scale"] = self.scale
        if self.key_lengths is not None:
            given["key_lengths"] = torch.tensor(self.key_lengths, device=device)
        return given


CASES = (
    Case("causal"),
    Case("not causal", is_causal=False),
    Case("one token", seqlen_q=1, seqlen_k=1),
    Case("decoding with a cache", seqlen_q=1),
    Case("a chunk with a cache", seqlen_q=5),
    Case("cross attention", seqlen_q=5, is_causal=False),
    Case("rows that see no key", seqlen_q=40, seqlen_k=17),
    Case("transposed memory", transposed=True),
    Case("scale", scale=0.3),
    Case("shared heads", num_kv_heads=2),
    Case("one key head", num_kv_heads=1, seqlen_q=5),
    Case("window", window=7),
    Case("window with a cache", seqlen_q=5, window=7),
    Case("window above the length", window=100),
    Case("window and shared heads", window=7, num_kv_heads=2),
    Case("key lengths", seqlen_q=3, key_lengths=(33, 9)),
    Case("key lengths, decoding", seqlen_q=1, key_lengths=(20, 33), num_kv_heads=2),
    Case("key lengths and window", seqlen_q=3, key_lengths=(33, 9), window=7),
    Case("key lengths, not causal", seqlen_q=3, key_lengths=(33, 9), is_causal=False),
    Case("key lengths and rows that see no key", seqlen_q=5, key_lengths=(33, 2)),
)


@dataclasses.dataclass(frozen=True)
class Check:
    """Result of one case: "passed", "failed", or "refused" (the backend says it cannot)."""

    case: str
    dtype: str
    outcome: Literal["passed", "failed", "refused"]
    detail: str = ""


def assert_conforms(
    name: str, *, device: str = "cpu", dtypes: Iterable[str] = ("float64", "float32")
) -> list[Check]:
    """Raise unless a backend passes every case it does not refuse; return the checks.

    Raises:
        AssertionError: A case failed, or every one was refused; the message lists them.
    """
    checks = check_backend(name, device=device, dtypes=dtypes)
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
) -> list[Check]:
    """Run every case in every dtype, with gradients where the backend has a backward.

    Raises:
        UnknownAttentionError: Nothing is registered under `name`.
    """
    backend = registry.backend(name)
    return [
        check_case(backend, case, dtype=dtype, device=device, head_dim=head_dim)
        for dtype in dtypes
        for case in CASES
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
    )
    has_backward = backend.traits(request).backward != "none"
    if not has_backward:
        request = dataclasses.replace(request, needs_grad=False)
    reasons = backend.reasons(request)
    if reasons:
        return Check(case.name, dtype, "refused", "; ".join(map(str, reasons)))
    try:
        problem = _compare(backend, case, (q, k, v), has_backward=has_backward)
    # whatever a backend under test raises is its result
    except Exception as error:
        problem = f"{type(error).__name__}: {error}"
    return Check(case.name, dtype, "failed" if problem else "passed", problem)


def make_inputs(case: Case, *, dtype: str, device: str, head_dim: int) -> tuple[Tensor, ...]:
    """Return q, k, v of a case, the same at every call, as leaves that want gradients."""
    generator = torch.Generator().manual_seed(0)
    inputs = []
    for heads, length in ((4, case.seqlen_q), *[(case.num_kv_heads, case.seqlen_k)] * 2):
        shape = (2, length, heads, head_dim) if case.transposed else (2, heads, length, head_dim)
        x = torch.randn(shape, generator=generator, dtype=torch.float64)
        x = x.to(device=device, dtype=getattr(torch, dtype))
        inputs.append((x.transpose(1, 2) if case.transposed else x).requires_grad_())
    return tuple(inputs)


def attention_by_rows(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    is_causal: bool,
    window: int | None = None,
    scale: float | None = None,
    key_lengths: Tensor | None = None,
) -> Tensor:
    """Return attention from its definition: for each sequence, head and row a softmax and a sum."""
    batch, num_heads, seqlen_q, head_dim = q.shape
    group = num_heads // k.shape[1]
    scale = head_dim**-0.5 if scale is None else scale
    lengths = [k.shape[2]] * batch if key_lengths is None else key_lengths.tolist()
    rows = []
    for b, length in enumerate(lengths):
        for h in range(num_heads):
            for i in range(seqlen_q):
                end = i + length - seqlen_q + 1 if is_causal else length
                start = 0 if window is None else max(0, end - window)
                if end <= 0:
                    rows.append(q[b, h, i] * 0.0)
                    continue
                keys, values = k[b, h // group, start:end], v[b, h // group, start:end]
                rows.append(torch.softmax(scale * (keys @ q[b, h, i]), dim=0) @ values)
    return torch.stack(rows).reshape(batch, num_heads, seqlen_q, head_dim)


def _compare(
    backend: AttentionBackend, case: Case, inputs: tuple[Tensor, ...], *, has_backward: bool
) -> str:
    """Return what is wrong with a backend's results, "" if nothing."""
    options = case.options(inputs[0].device.type)
    wide = tuple(x.detach().cpu().double().requires_grad_() for x in inputs)
    expected = _results(attention_by_rows, wide, case.options("cpu"), has_backward)
    plain = _results(scaled_dot_product_attention, inputs, options, has_backward)
    got = _results(backend.load(), inputs, options, has_backward)
    if got[0].dtype != inputs[0].dtype:
        return f"o must have the dtype of q, {inputs[0].dtype}, got {got[0].dtype}"
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

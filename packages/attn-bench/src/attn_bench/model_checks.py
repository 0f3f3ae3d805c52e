"""Every attention on the q, k and v of a trained model: checked against float64, as a table."""

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby, product

import torch
from tabulate import tabulate

from attn_bench.case import Case
from attn_bench.checks import LIMITS, Oracle
from attn_bench.interpreter import run_interpreted
from attn_bench.providers import FLASH_PROVIDERS, Provider
from attn_bench.results import Row
from attn_bench.runner import check_provider, judged
from attn_bench.tables import reasons
from attn_bench.training import with_gradient
from attn_bench.workload import Inputs

CHECK_SUITE = "quick_check"
CHECK_DTYPES = ("fp32", "bf16")
INTERPRETED_LENGTH = 128
# worst first
BAD_STATES = ("wrong", "error", "oom", "unsupported")

Problem = tuple[Case, Inputs]
# a dtype, whether causal, and the provider to check under them
PlannedCheck = tuple[str, bool, Provider]


def checks_to_make(providers: Sequence[Provider], device: torch.device) -> list[PlannedCheck]:
    """Return every provider under both masks in each dtype.

    On a GPU a provider that compiles anew for every mask, for seconds each time, is checked under
    the causal one only.
    """
    return [
        (dtype, is_causal, provider)
        for dtype, is_causal, provider in product(CHECK_DTYPES, (True, False), providers)
        if is_causal or not provider.compiles or device.type == "cpu"
    ]


def check_captured(
    captured: Inputs,
    checks: Sequence[PlannedCheck],
    device: torch.device,
    on_check: Callable[[], object],
) -> Iterator[Row]:
    """Make the checks on all captured layers."""
    for (dtype, is_causal), group in groupby(checks, key=lambda check: check[:2]):
        torch.compiler.reset()  # as `Runner.rows` does
        problem = as_problem(captured, dtype, is_causal=is_causal)
        oracle = Oracle(*problem, LIMITS[device.type])
        for _, _, provider in group:
            checked = check_provider(provider, CHECK_SUITE, *problem, oracle)
            on_check()
            yield checked if isinstance(checked, Row) else checked.row


def check_interpreted(captured: Inputs) -> list[Row]:
    """Check the Triton kernels in Triton's interpreter on slices of the first layer."""
    q, k, v, _ = captured
    n = min(INTERPRETED_LENGTH, q.shape[-2])
    whole = with_gradient([each[:1, :, :n] for each in (q, k, v)])
    # fewer queries than keys, and a length that is no multiple of a tile
    ragged = with_gradient([q[:1, :, : n // 2 + 1], k[:1, :, : n - 1], v[:1, :, : n - 1]])
    problems = [
        as_problem(whole, "fp32", is_causal=True),
        as_problem(ragged, "fp32", is_causal=True),
        as_problem(ragged, "fp32", is_causal=False),
    ]
    interpreted = run_interpreted(problems)
    if interpreted.reason:
        name, case = "flash-triton (interpreted)", problems[0][0]
        return [Row(CHECK_SUITE, name, case, interpreted.state, interpreted.reason)]
    oracles = [Oracle(*problem, LIMITS["cpu"]) for problem in problems]
    return [
        judged(Row(CHECK_SUITE, name, case, "ok"), oracle.check(tensors))
        for name, results in interpreted.tensors.items()
        for (case, _), oracle, tensors in zip(problems, oracles, results, strict=True)
    ]


def as_problem(inputs: Inputs, dtype: str, *, is_causal: bool) -> Problem:
    """Return the inputs in `dtype`, and the case that describes them."""
    batch, num_heads, seqlen_q, head_dim = inputs.q.shape
    seqlen_k = inputs.k.shape[-2]
    case = Case(dtype, batch, num_heads, seqlen_q, seqlen_k, head_dim, is_causal, "fwd+bwd")
    q, k, v, do = (each.detach().to(case.torch_dtype) for each in inputs)
    return case, Inputs(q.requires_grad_(), k.requires_grad_(), v.requires_grad_(), do)


def check_table(rows: Sequence[Row], device: torch.device) -> str:
    """Return the worst error of each implementation and dtype over all layers and masks."""
    body = []
    for name, dtype in dict.fromkeys((row.provider, row.case.dtype) for row in rows):
        own = [row for row in rows if (row.provider, row.case.dtype) == (name, dtype)]
        states = {row.state for row in own}
        verdict = next((state for state in BAD_STATES if state in states), "right")
        errors = (worst(own, tensor) for tensor in ("o", "dq", "dk", "dv"))
        body.append([name, dtype, *errors, verdict])
    headers = ["implementation", "dtype", "o", "dq", "dk", "dv", "verdict"]
    table = tabulate(body, headers, disable_numparse=True)
    absent = [
        f"{name}: unavailable: {reason}"
        for name, provider in FLASH_PROVIDERS.items()
        if (reason := provider.why_unavailable(device))
    ]
    title = "largest error against float64 on the model's own q, k, v (share of what is allowed)"
    return "\n".join([title, table, *reasons(rows), *absent, ""])


def worst(rows: Sequence[Row], tensor: str) -> str:
    """Return the error nearest to its bound, with its share of the bound."""
    pairs = [(row.errors[tensor], row.bounds[tensor]) for row in rows if tensor in row.errors]
    if not pairs:
        return ""
    error, bound = max(pairs, key=lambda pair: pair[0] / max(pair[1], 1e-300))
    return f"{error:.1e} ({error / max(bound, 1e-300):.0%})"

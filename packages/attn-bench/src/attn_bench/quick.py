"""The main job: train the tiny LLM, check every attention on its q, k and v, time them.

1. Prepare the standard library's sources as training text.
2. Train with the readable attention and with the flash backend from one seed: the losses agree.
3. Capture q, k and v of the trained model, and check every implementation on them, forward and
   gradients, against float64; on a CPU also the Triton kernels, in Triton's interpreter.
4. Time what this machine allows.
"""

import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate
from tqdm import tqdm

from attn_bench.case import Case, Grid
from attn_bench.checks import LIMITS, Oracle
from attn_bench.environment import summarize
from attn_bench.interpreter import run_interpreted
from attn_bench.providers import FLASH_PROVIDERS, Provider, pick_providers
from attn_bench.results import Row
from attn_bench.roofline import FLOP_CONVENTION
from attn_bench.runner import Runner, check_provider, judged
from attn_bench.suites import FLASH_ATTENTION
from attn_bench.tables import reasons, terminal_table
from attn_bench.timing import Budget
from attn_bench.training import (
    Parity,
    Plan,
    capture,
    make_plan,
    prepare_text,
    train,
    with_gradient,
)
from attn_bench.workload import Inputs

CHECK_SUITE, SPEED_SUITE = "quick_check", "quick_speed"
INTERPRETED_LENGTH = 128
CHECK_DTYPES = ("fp32", "bf16")
# worst first
BAD_STATES = ("wrong", "error", "oom", "unsupported")

SPEED_GRIDS = {
    "cpu": Grid(
        dtypes=("fp32",),
        seqlens_q=(128, 512),
        num_heads=(4,),
        head_dims=(64,),
        batches=(1,),
        causal=(True,),
        modes=("fwd", "fwd+bwd"),
    ),
    "cuda": Grid(
        dtypes=("bf16",),
        seqlens_q=(1024, 2048, 4096, 8192),
        d_models=(2048,),
        head_dims=(64, 128),
        total_tokens=16384,
        causal=(True,),
        modes=("fwd", "bwd"),
    ),
}
BUDGETS = {"cpu": Budget(seconds=0.2), "cuda": Budget(seconds=0.3)}

Problem = tuple[Case, Inputs]


class Report:
    """Prints above one progress bar that covers the whole job."""

    def __init__(self, total: int) -> None:
        self._bar = tqdm(total=total, unit="step", dynamic_ncols=True)
        self._start = time.monotonic()

    def stage(self, name: str) -> None:
        """Name what is going on beside the bar."""
        self._bar.set_description(name)

    def advance(self, _: object = None) -> None:
        """Move the bar by one step."""
        self._bar.update()

    def say(self, text: str) -> None:
        """Print to standard output."""
        with self._bar.external_write_mode(file=sys.stdout):
            print(text, flush=True)

    def close(self) -> float:
        """Remove the bar and return the seconds since the beginning."""
        self._bar.close()
        return time.monotonic() - self._start


def quick(
    device: torch.device,
    environment: dict[str, Any],
    *,
    steps: int,
    on_row: Callable[[Row], object] = lambda _: None,
) -> bool:
    """Run the main job, print its report, and return True if everything agrees.

    Args:
        device: Where to run.
        environment: As `attn_bench.environment.describe_environment` returns it.
        steps: Training steps of each of the two trainings.
        on_row: Receives every row, checks first, then speed.
    """
    plan = make_plan(device, steps)
    providers = pick_providers(FLASH_PROVIDERS, None, device)
    cases = SPEED_GRIDS[device.type].cases()
    checks = 2 * len(CHECK_DTYPES)  # under both masks
    report = Report(2 * steps + (checks + len(cases)) * len(providers))
    report.say(f"attn-bench quick on {summarize(environment)}\n")
    with tempfile.TemporaryDirectory(prefix="attn-bench-") as folder:
        parity, captured = train_both(plan, Path(folder), device, report)
    rows = list(check_captured(captured, providers, device, report))
    if device.type == "cpu":
        rows += check_interpreted(captured, report)
    report.say(check_table(rows, device))
    speed = time_providers(cases, providers, device, report)
    for row in [*rows, *speed]:
        on_row(row)
    agrees = parity.agrees and not any(row.state in ("wrong", "error") for row in [*rows, *speed])
    seconds = report.close()
    print(
        f"{'everything agrees' if agrees else 'SOMETHING DISAGREES, see above'} ({seconds:.0f} s)"
    )
    return agrees


def train_both(
    plan: Plan, folder: Path, device: torch.device, report: Report
) -> tuple[Parity, Inputs]:
    """Train with each attention, print the losses, and capture q, k, v of the second model."""
    report.stage("text")
    tokens = prepare_text(folder)
    report.say(f"text: {len(tokens):,} bytes of the standard library's sources")
    report.say(describe(plan, device))
    losses = {}
    for attention in ("eager", "flash"):
        report.stage(f"train with {attention}")
        model, losses[attention] = train(plan, attention, tokens, device, report.advance)
    parity = Parity(losses["eager"], losses["flash"])
    report.say(parity_table(parity))
    return parity, capture(model, tokens, plan)


def describe(plan: Plan, device: torch.device) -> str:
    """Return the model, its training, and what the flash backend is on this device."""
    model, training = plan.model, plan.training
    flash = "its Triton kernels" if device.type == "cuda" else "its path for CPU tensors"
    return (
        f"model: {model.num_layers} layers, d_model {model.d_model}, {model.num_heads} heads; "
        f"{training.steps} steps of {training.batch_size} x {training.seq_len} tokens\n"
        f"attention: eager is tiny-llm's readable one, flash is flash-kernel ({flash})\n"
    )


def parity_table(parity: Parity) -> str:
    """Return both loss curves at a few steps, and the verdict."""
    last = len(parity.eager) - 1
    steps = sorted({last * each // 5 for each in range(6)})
    body = [[step + 1, f"{parity.eager[step]:.6f}", f"{parity.flash[step]:.6f}"] for step in steps]
    headers = ["step", "loss, attention eager", "loss, attention flash"]
    table = tabulate(body, headers, disable_numparse=True)
    verdict = "the losses agree" if parity.agrees else "THE LOSSES DISAGREE"
    bound = f"largest difference {parity.difference:.1e}, allowed {parity.bound:.0e}"
    return f"{table}\n{verdict}: {bound}\n"


def check_captured(
    captured: Inputs,
    providers: Sequence[Provider],
    device: torch.device,
    report: Report,
) -> Iterator[Row]:
    """Check every provider on all captured layers, under both masks."""
    report.stage("check")
    for dtype, is_causal in product(CHECK_DTYPES, (True, False)):
        torch.compiler.reset()  # as `Runner.rows` does
        problem = as_problem(captured, dtype, is_causal=is_causal)
        oracle = Oracle(*problem, LIMITS[device.type])
        for provider in providers:
            checked = check_provider(provider, CHECK_SUITE, *problem, oracle)
            report.advance()
            yield checked if isinstance(checked, Row) else checked.row


def check_interpreted(captured: Inputs, report: Report) -> list[Row]:
    """Check the Triton kernels in Triton's interpreter on slices of the first layer."""
    report.stage("Triton's interpreter")
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
        verdict = next(
            (s for s in ("wrong", "error", "oom", "unsupported") if s in states), "right"
        )
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


def time_providers(
    cases: Sequence[Case], providers: Sequence[Provider], device: torch.device, report: Report
) -> list[Row]:
    """Time every provider on this machine's cases and print the table."""
    report.stage("time")
    runner = Runner(SPEED_SUITE, providers, device, BUDGETS[device.type])
    rows = []
    for row in runner.rows(cases):
        rows.append(row)
        report.advance()
    baseline = FLASH_ATTENTION.baseline(rows)
    report.say(f"FLOPs: {FLOP_CONVENTION}\n\n{terminal_table(rows, baseline)}\n")
    return rows

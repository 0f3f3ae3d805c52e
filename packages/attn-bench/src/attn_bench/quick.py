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
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate
from tqdm import tqdm

from attn_bench.case import Case
from attn_bench.environment import summarize
from attn_bench.grid import Grid
from attn_bench.model_checks import (
    check_captured,
    check_interpreted,
    check_table,
    checks_to_make,
)
from attn_bench.providers import FLASH_PROVIDERS, Provider, pick_providers
from attn_bench.results import Row
from attn_bench.roofline import FLOP_CONVENTION
from attn_bench.runner import Runner
from attn_bench.suites import FLASH_ATTENTION
from attn_bench.tables import terminal_table, terminal_width
from attn_bench.timing import Budget
from attn_bench.training import (
    Parity,
    Plan,
    capture,
    make_plan,
    prepare_text,
    train,
)
from attn_bench.workload import Inputs

SPEED_SUITE = "quick_speed"

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

# what the speed table of a GPU holds: fast without compiling, so that the job takes a minute
TIMED_ON_GPU = ("sdpa-flash", "sdpa-cudnn", "flash-auto")
# torch.compile over attentions that are checked without it as well
NOT_CHECKED = ("dense-compiled", "layer-compiled")


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
    available = pick_providers(FLASH_PROVIDERS, None, device)
    providers = [each for each in available if each.name not in NOT_CHECKED]
    timed = [each for each in providers if device.type == "cpu" or each.name in TIMED_ON_GPU]
    cases = SPEED_GRIDS[device.type].cases()
    checks = checks_to_make(providers, device)
    report = Report(2 * steps + len(checks) + len(cases) * len(timed))
    report.say(f"attn-bench quick on {summarize(environment)}\n")
    with tempfile.TemporaryDirectory(prefix="attn-bench-") as folder:
        parity, captured = train_both(plan, Path(folder), device, report)
    report.stage("check")
    rows = list(check_captured(captured, checks, device, report.advance))
    if device.type == "cpu":
        report.stage("Triton's interpreter")
        rows += check_interpreted(captured)
    report.say(check_table(rows, device))
    speed = time_providers(cases, timed, device, report)
    report.say(left_out(available, timed))
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
    if not rows:
        report.say("no provider to time\n")
        return rows
    baseline = FLASH_ATTENTION.baseline(rows)
    report.say(f"FLOPs: {FLOP_CONVENTION}\n\n{terminal_table(rows, baseline, terminal_width())}\n")
    return rows


def left_out(providers: Sequence[Provider], timed: Sequence[Provider]) -> str:
    """Return a line that says what was not timed, and on a GPU what was checked only once."""
    names = [each.name for each in providers if each not in timed]
    if not names:
        return ""
    compiling = [each.name for each in providers if each.compiles]
    once = [name for name in compiling if name not in NOT_CHECKED]
    unchecked = [name for name in compiling if name in NOT_CHECKED]
    return (
        f"left out of the speed table to stay short: {', '.join(names)} (`attn-bench flash` times "
        f"them)\nchecked under the causal mask only, as each compiles anew: "
        f"{', '.join(once) or 'none'}; not checked here: {', '.join(unchecked) or 'none'}\n"
    )

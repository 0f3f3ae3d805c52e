"""``attn-bench overhead``: what an eager call costs the host.

A call this small is done on a GPU before the host has prepared the next one.  So the time of calls
in a row is the host's: of Python, torch, the launches, and with a backward of autograd.
"""

import time
from argparse import Namespace
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from tabulate import tabulate

from attn_bench.case import Case
from attn_bench.checks import LIMITS, Oracle
from attn_bench.environment import describe_environment, one_thread, pick_device, summarize
from attn_bench.failures import failure_state, one_line
from attn_bench.providers import Provider, pick_providers
from attn_bench.results import Row, exit_status, saving
from attn_bench.runner import Ready, check_provider
from attn_bench.stability import with_times
from attn_bench.suites import FLASH_ATTENTION
from attn_bench.timing import Budget, Clock, time_interleaved
from attn_bench.workload import Workload, make_inputs, make_workload

SUITE = "overhead"
SHAPE = Case("bf16", 1, 8, 128, 128, 64, is_causal=False, mode="fwd")
MODES = ("fwd", "fwd+bwd")
PROVIDERS = ("sdpa-flash", "sdpa-cudnn", "flash-triton", "flash-auto")
CALLS = 30  # in a row: the queue of launches must not fill, or the host waits for the GPU


class HostClock(Clock):
    """Times the host: milliseconds of one of `CALLS` runs in a row that begin on an idle device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.was_late = False

    def milliseconds(self, workload: Workload) -> float:
        """Return the time of one run, its `prepare` left out."""
        states = [workload.prepare() for _ in range(CALLS)]
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        start = time.perf_counter()
        for state in states:
            workload.run(state)
        return (time.perf_counter() - start) * 1e3 / CALLS


def run_overhead(arguments: Namespace) -> int:
    """Check and time every provider; 1 if one is wrong or failed, else 0."""
    device = pick_device(arguments.device)
    names = arguments.provider or [*PROVIDERS]
    providers = pick_providers(FLASH_ATTENTION.providers, names, device)
    with one_thread(device):
        environment = describe_environment(device)
        print(f"{SUITE} on {summarize(environment)}\n{SHAPE.shape}")
        with saving(arguments.save, environment) as save:
            rows = []
            for row in measure_overhead(providers, SHAPE, device):
                rows.append(row)
                save(row)
    print(overhead_table(rows))
    return exit_status(rows)


def measure_overhead(
    providers: Sequence[Provider], shape: Case, device: torch.device, budget: Budget | None = None
) -> Iterator[Row]:
    """Yield one row per mode and provider; its times are the host's."""
    inputs = make_inputs(shape, device)
    oracle = Oracle(shape, inputs, LIMITS[device.type])
    checked = [check_provider(each, SUITE, shape, inputs, oracle) for each in providers]
    ready = {each.provider.name: each.attention for each in checked if isinstance(each, Ready)}
    clock = HostClock(device)
    for mode in MODES:
        failed: dict[str, Exception] = {}
        workloads = {name: make_workload(mode, each, inputs) for name, each in ready.items()}
        timings = time_interleaved(workloads, clock, budget or Budget(), failed.__setitem__)
        for each in checked:
            row = replace(
                each.row if isinstance(each, Ready) else each, case=replace(shape, mode=mode)
            )
            if row.provider in failed:
                error = failed[row.provider]
                row = row.failed(failure_state(error), f"while timed: {one_line(error)}")
            elif row.provider in timings:
                row = with_times(row, timings[row.provider])
            yield row


def overhead_table(rows: Sequence[Row]) -> str:
    """Return host microseconds a call, by provider and mode, and why there is no time."""
    lines = [
        [
            row.provider,
            row.case.mode,
            None if row.median_ms is None else f"{row.median_ms * 1e3:.1f}",
            None if row.p20_ms is None else f"{row.p20_ms * 1e3:.1f}",
            None if row.p80_ms is None else f"{row.p80_ms * 1e3:.1f}",
            row.state if not row.detail else f"{row.state}: {row.detail}",
        ]
        for row in rows
    ]
    headers = ["provider", "mode", "median us", "p20", "p80", "state"]
    sides = ("left", "left", "right", "right", "right", "left")
    # tabulate would read the numbers, and write 50.0 as 50
    return tabulate(lines, headers, missingval="-", disable_numparse=True, colalign=sides)

"""Runs providers on cases: check first, then time what is right."""

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby

import torch

from attn_bench.case import Case
from attn_bench.checks import LIMITS, Check, Oracle
from attn_bench.cold_start import cold_call_milliseconds
from attn_bench.failures import explained, failure_state, one_line
from attn_bench.gauge import Reading, open_gauge, weather_of
from attn_bench.graphs import SHORT_MS, replay_milliseconds
from attn_bench.memory import predicted_mib, why_too_large
from attn_bench.providers import Attention, Provider
from attn_bench.results import Row
from attn_bench.roofline import (
    Ceilings,
    attention_bytes,
    attention_flops,
    tflops,
    unmasked_flops,
)
from attn_bench.stability import with_stability, with_times
from attn_bench.timing import Budget, Clock, peak_mib, time_interleaved, wall_milliseconds
from attn_bench.truth import Tensors
from attn_bench.workload import Inputs, Workload, gradients, make_inputs, make_workload


@dataclass(frozen=True)
class Ready:
    """A provider that passed its check: how to call it, and the row to be filled with times."""

    attention: Attention
    row: Row
    provider: Provider


@dataclass(frozen=True)
class Runner:
    """Runs `providers` on a device; see `rows`."""

    suite: str
    providers: Sequence[Provider]
    device: torch.device
    budget: Budget = field(default_factory=Budget)
    ceilings: Ceilings | None = None
    is_cold_start_timed: bool = False
    checks_gradients: bool = True

    def rows(self, cases: Iterable[Case]) -> Iterator[Row]:
        """Yield one row per case and provider.

        All modes of a shape share its inputs and its check, so they should follow each other in
        `cases`.  Nothing a provider does ends the run: a wrong result, a refusal, running out of
        memory or any other error is a row.
        """
        clock, gauge = Clock(self.device), open_gauge(self.device)
        for shape, group in groupby(cases, key=lambda case: case.shape):
            # the compiled code of one shape is no use to the next, and torch stops compiling a
            # function anew after a few shapes
            torch.compiler.reset()
            yield from self._rows_of_shape(shape, list(group), clock, gauge)
            self._release()

    def _rows_of_shape(
        self, shape: Case, cases: list[Case], clock: Clock, gauge: Callable[[], Reading] | None
    ) -> Iterator[Row]:
        try:
            inputs = make_inputs(shape, self.device)
            oracle = Oracle(shape, inputs, LIMITS[self.device.type])
        except Exception as error:  # out of memory before any provider had its turn
            reason = failure_state(error), f"while making the float64 truth: {one_line(error)}"
            for case in cases:
                yield from (Row(self.suite, each.name, case, *reason) for each in self.providers)
            return
        checked = {each.name: self._check(each, shape, inputs, oracle) for each in self.providers}
        ready = {name: each for name, each in checked.items() if isinstance(each, Ready)}
        for case in cases:
            timed = time_case(case, ready, inputs, clock, self.budget, gauge)
            for name, each in checked.items():
                row = replace(each, case=case) if isinstance(each, Row) else timed[name]
                yield self._rated(row)

    def _check(
        self, provider: Provider, shape: Case, inputs: Inputs, oracle: Oracle
    ) -> Ready | Row:
        if not self.checks_gradients:
            provider = replace(provider, has_backward=False)
        checked = check_provider(provider, self.suite, shape, inputs, oracle)
        self._release()
        if isinstance(checked, Row) or not self.is_cold_start_timed:
            return checked
        cold = cold_call_milliseconds(provider, shape, self.device)
        note = cold if isinstance(cold, str) else ""
        cold_ms = None if isinstance(cold, str) else cold
        return replace(checked, row=replace(checked.row, cold_call_ms=cold_ms, note=note))

    def _rated(self, row: Row) -> Row:
        """Return the row with its rates, and its share of the ceilings if those are known."""
        if row.median_ms is None:
            return row
        ceilings = self.ceilings
        share = None if ceilings is None else ceilings.least_milliseconds(row.case) / row.median_ms
        return replace(
            row,
            tflops=tflops(attention_flops(row.case), row.median_ms),
            tflops_unmasked=tflops(unmasked_flops(row.case), row.median_ms),
            gb_s=attention_bytes(row.case) / (row.median_ms * 1e-3) / 1e9,
            roofline_share=share,
        )

    def _release(self) -> None:
        """Give cached blocks back: one provider's garbage is not another's out-of-memory."""
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


def check_provider(
    provider: Provider, suite: str, shape: Case, inputs: Inputs, oracle: Oracle
) -> Ready | Row:
    """Build and check one provider; return it ready to be timed, or the row that says why not."""
    device = inputs.q.device
    row = Row(
        suite,
        provider.name,
        shape,
        "ok",
        is_performance=device.type == "cuda",
        semantics=semantics_of(provider),
    )
    reason = provider.why_not(shape, device)
    if reason is not None:
        return row.failed("unsupported", reason)
    mode, call_first = ("fwd+bwd", first_call) if provider.has_backward else ("fwd", first_forward)
    too_large = why_too_large(replace(shape, mode=mode), provider, device)
    if too_large is not None:
        return row.failed("oom", too_large)

    def call(case: Case, other: Inputs) -> Tensors:
        return call_first(provider.build(case, device), other)[0]

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            attention = provider.build(shape, device)
            tensors, first_call_ms = call_first(attention, inputs)
            check = oracle.check(tensors, call)
        except Exception as error:  # a provider is foreign code, and its failure is a result
            detail = f"while being checked: {explained(error, caught)}"
            return row.failed(failure_state(error), detail)
    for each in caught:
        warnings.warn_explicit(each.message, each.category, each.filename, each.lineno)
    row = judged(replace(row, first_call_ms=first_call_ms), check)
    return Ready(attention, row, provider) if row.state == "ok" else row


def semantics_of(provider: Provider) -> dict[str, str | bool | None]:
    """Return what, beside the case, two rows must share so that their times can be compared."""
    return {
        "alignment": "bottom-right",
        "scale": "1/sqrt(head_dim)",
        "layout": provider.layout,
        "deterministic": provider.deterministic,
    }


def judged(row: Row, check: Check) -> Row:
    """Return the row with its check, in the state ``wrong`` if that failed."""
    row = replace(row, checked=check.scope, errors=check.errors, bounds=check.bounds)
    return row if check.is_right else row.failed("wrong", "; ".join(check.violations))


def first_call(attention: Attention, inputs: Inputs) -> tuple[Tensors, float]:
    """Return output and gradients, and the wall time of this first forward and backward in ms."""
    results: list[Tensors] = []

    def run() -> None:
        o = attention(inputs.q, inputs.k, inputs.v)
        results.append(Tensors(o.detach(), *gradients(o, inputs)))

    milliseconds = wall_milliseconds(run, inputs.q.device)
    return results[0], milliseconds


def first_forward(attention: Attention, inputs: Inputs) -> tuple[Tensors, float]:
    """Return the output alone, and the wall time of this first forward in ms."""
    results: list[Tensors] = []

    def run() -> None:
        with torch.no_grad():
            results.append(Tensors(attention(inputs.q, inputs.k, inputs.v), None, None, None))

    milliseconds = wall_milliseconds(run, inputs.q.device)
    return results[0], milliseconds


def time_case(
    case: Case,
    ready: dict[str, Ready],
    inputs: Inputs,
    clock: Clock,
    budget: Budget,
    gauge: Callable[[], Reading] | None = None,
) -> dict[str, Row]:
    """Return the row of every provider that is ready, timed or with the reason why it is not.

    `gauge` reads the GPU's clock and temperature after each round.
    """
    readings: list[Reading] = []
    rows = {name: replace(each.row, case=case) for name, each in ready.items()}

    def fail(name: str, error: Exception) -> None:
        rows[name] = rows[name].failed(failure_state(error), f"while timed: {one_line(error)}")

    workloads = {}
    for name, each in ready.items():
        if case.mode != "fwd" and not each.provider.has_backward:
            rows[name] = rows[name].failed("unsupported", "it has no backward")
        else:
            workloads[name] = make_workload(case.mode, each.attention, inputs)

    def watch() -> None:
        if gauge is not None:
            readings.append(gauge())

    timings = time_interleaved(workloads, clock, budget, fail, watch)
    weather = weather_of(readings)
    for name, timing in timings.items():
        try:
            peak = peak_mib(workloads[name], inputs.q.device)
        except Exception as error:
            fail(name, error)
            continue
        rows[name] = replace(
            with_times(with_stability(rows[name], timing.drift, weather), timing),
            peak_mib=peak,
            predicted_mib=predicted_mib(case, ready[name].provider),
            note=rows[name].note or ("the launch is part of its time" if timing.has_launch else ""),
        )
        if case.mode == "fwd" and rows[name].is_performance and timing.median_ms < SHORT_MS:
            rows[name] = with_graph(rows[name], workloads[name], inputs.q.device)
    return rows


def with_graph(row: Row, workload: Workload, device: torch.device) -> Row:
    """Return the row with the time of a replay, or with a note that it cannot be captured."""
    try:
        return replace(row, graph_ms=replay_milliseconds(workload, device))
    except Exception as error:  # foreign code that may do what a capture forbids
        return replace(row, note=f"not captured in a CUDA graph: {one_line(error)}")

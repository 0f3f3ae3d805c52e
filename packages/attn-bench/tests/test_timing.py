import time
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from attn_bench.case import MODES, Case
from attn_bench.providers import FLASH_PROVIDERS
from attn_bench.timing import (
    ROUNDS,
    Budget,
    Clock,
    peak_mib,
    repetitions,
    summarize,
    time_interleaved,
)
from attn_bench.workload import Workload, make_inputs, make_workload

CPU = torch.device("cpu")


def nothing() -> None:
    return None


def logging(name: str, log: list[str]) -> Workload:
    return Workload(nothing, lambda _: log.append(name))


def no_failure(name: str, error: Exception) -> None:
    raise AssertionError(name) from error


def test_summary_is_the_median_and_the_outer_fifths() -> None:
    timing = summarize([5.0, 1.0, 2.0, 100.0, 3.0, 4.0])
    assert (timing.median_ms, timing.p20_ms, timing.p80_ms) == (3.5, 2.0, 5.0)
    assert timing.repetitions == 6


def test_repetitions_fill_the_budget_in_whole_rounds() -> None:
    budget = Budget(seconds=0.1, least=5, most=40)
    assert repetitions(1000.0, budget) == 5
    assert repetitions(8.0, budget) == 15  # 12 fit, three a round
    assert repetitions(0.0, budget) == 40


def test_rounds_interleave_the_providers_and_rotate_their_order() -> None:
    log: list[str] = []
    workloads = {name: logging(name, log) for name in "abc"}
    timings = time_interleaved(workloads, Clock(CPU), Budget(0.0, ROUNDS, ROUNDS), no_failure)
    assert "".join(log) == "aabbcc" + "abc" + "bca" + "cab" + "abc" + "bca"
    assert {timing.repetitions for timing in timings.values()} == {ROUNDS}


def test_a_failure_while_timing_stops_that_provider_only() -> None:
    calls: list[str] = []

    def fails_late(_: Tensor | None) -> None:
        calls.append("late")
        if len(calls) > 4:
            raise torch.OutOfMemoryError("late")

    failures: dict[str, Exception] = {}
    workloads = {"good": Workload(nothing, lambda _: None), "bad": Workload(nothing, fails_late)}
    budget = Budget(0.0, ROUNDS, ROUNDS)
    timings = time_interleaved(workloads, Clock(CPU), budget, failures.__setitem__)
    assert set(timings) == {"good"}
    assert isinstance(failures["bad"], torch.OutOfMemoryError)


class ColdClock(Clock):
    """A clock that has every run take half of what is above 1 ms less than the one before."""

    runs = 0

    def milliseconds(self, workload: Workload) -> float:
        workload.run(workload.prepare())
        self.runs += 1
        return 1 + 2.0**-self.runs


def test_warming_up_goes_on_until_the_time_holds_still() -> None:
    log: list[str] = []
    budget = Budget(10.0, ROUNDS, ROUNDS)
    (timing,) = time_interleaved(
        {"a": logging("a", log)}, ColdClock(CPU), budget, no_failure
    ).values()
    # 1.0625 and 1.03125 ms, of the fourth and fifth run, are within 5 %
    assert len(log) == 5 + ROUNDS
    assert timing.median_ms == pytest.approx(1, abs=0.01)


class LateClock(Clock):
    """A GPU's clock whose device waits for the host in every run but each third."""

    runs = 0

    def milliseconds(self, workload: Workload) -> float:
        self.runs += 1
        self.was_late = self.runs % 3 > 0
        return super().milliseconds(workload)


def test_a_time_with_the_launch_in_it_says_so() -> None:
    workloads = {"sdpa": Workload(nothing, lambda _: None)}
    for clock, has_launch in ((LateClock(CPU), True), (Clock(CPU), False)):
        timings = time_interleaved(workloads, clock, Budget(0.0, 15, 15), no_failure)
        assert timings["sdpa"].has_launch is has_launch


def test_the_budget_holds_what_is_prepared_too() -> None:
    def sleeps() -> None:
        time.sleep(0.01)

    workloads = {"sdpa": Workload(sleeps, lambda _: None)}
    (timing,) = time_interleaved(workloads, Clock(CPU), Budget(0.1), no_failure).values()
    assert timing.median_ms < 1
    assert timing.repetitions <= 10


def test_preparation_is_outside_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])

    def takes(seconds: float) -> Callable[[], None]:
        return lambda: now.__setitem__(0, now[0] + seconds)

    workload = Workload(takes(100.0), lambda _: takes(0.002)())
    assert Clock(CPU).milliseconds(workload) == pytest.approx(2.0)


def test_peak_memory_counts_what_is_held_at_once() -> None:
    def holds_two_of_three(_: Tensor | None) -> Tensor:
        first = torch.zeros(2**18)  # 1 MiB
        second = first + 1
        del first
        return second + 1

    assert peak_mib(Workload(nothing, holds_two_of_three), CPU) == pytest.approx(2.0, abs=0.01)


@pytest.mark.parametrize("mode", MODES)
def test_no_mode_accumulates_gradients(mode: str) -> None:
    case = Case("fp32", 1, 1, 8, 8, 16, True, mode)
    inputs = make_inputs(case, CPU)
    attention = FLASH_PROVIDERS["dense-eager"].build(case, CPU)
    workload = make_workload(mode, attention, inputs)
    result = workload.run(workload.prepare())
    assert inputs.q.grad is None
    if mode == "fwd":
        assert isinstance(result, Tensor)
        assert not result.requires_grad
    else:
        assert isinstance(result, tuple)
        assert [each.shape for each in result] == [inputs.q.shape] * 3


def test_drift_compares_the_rounds_and_not_single_runs() -> None:
    steady = [1.0, 1.0, 9.0] * ROUNDS
    assert summarize(steady).drift == 1.0
    slowing = [1.0] * 3 * (ROUNDS - 1) + [1.5] * 3
    assert summarize(slowing).drift == pytest.approx(1.5)


def test_at_most_40_samples_are_kept_evenly() -> None:
    timing = summarize([float(n) for n in range(200)])
    assert timing.samples == tuple(float(n) for n in range(0, 200, 5))

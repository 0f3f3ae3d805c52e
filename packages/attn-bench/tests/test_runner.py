import warnings
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from attn_bench.case import Case
from attn_bench.checks import LIMITS, Oracle
from attn_bench.gauge import Reading, open_gauge, weather_of
from attn_bench.providers import FLASH_PROVIDERS, Attention, Provider
from attn_bench.results import Row
from attn_bench.runner import Ready, Runner, check_provider, time_case
from attn_bench.stability import with_stability
from attn_bench.timing import Budget, Clock
from attn_bench.workload import make_inputs
from flash_kernel import attention_reference

CPU = torch.device("cpu")
CASE = Case("fp32", 1, 2, 9, 9, 16, True, "fwd")
Plant = Callable[[str, Attention], Provider]


def run(*providers: Provider, case: Case = CASE) -> list[Row]:
    runner = Runner("suite", providers, CPU, Budget(seconds=0.0))
    return list(runner.rows([case, replace(case, mode="fwd+bwd")]))


def forgets_the_mask(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attention_reference(q, k, v, is_causal=False)[0]


def test_a_right_provider_is_timed_in_every_mode() -> None:
    rows = run(FLASH_PROVIDERS["dense-eager"])
    assert [(row.state, row.case.mode) for row in rows] == [("ok", "fwd"), ("ok", "fwd+bwd")]
    for row in rows:
        assert row.median_ms is not None
        assert row.p20_ms is not None
        assert row.p80_ms is not None
        assert 0 < row.p20_ms <= row.median_ms <= row.p80_ms
        assert row.errors["dk"] <= row.bounds["dk"]
        assert row.checked == "all heads"
        assert not row.is_performance


def test_a_wrong_provider_is_refused_and_never_timed(plant: Plant) -> None:
    calls = 0

    def wrong(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return forgets_the_mask(q, k, v)

    rows = run(plant("wrong", wrong), FLASH_PROVIDERS["sdpa"])
    assert [row.state for row in rows] == ["wrong", "ok", "wrong", "ok"]
    assert rows[0].median_ms is None
    assert rows[0].errors["o"] > rows[0].bounds["o"]
    assert "`o`: error max" in rows[0].detail
    assert calls == 1


def test_a_wrong_gradient_is_refused_although_the_output_is_right(plant: Plant) -> None:
    def wrong_dv(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention_reference(q, k, v.detach() + 0.9 * (v - v.detach()), is_causal=True)[0]

    rows = run(plant("wrong-dv", wrong_dv))
    assert {row.state for row in rows} == {"wrong"}
    assert rows[0].errors["o"] <= rows[0].bounds["o"]
    assert "`dv`" in rows[0].detail
    assert "`dq`" not in rows[0].detail


@pytest.mark.parametrize(
    ("error", "state"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried 64 GiB\nmore"), "oom"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried 1 byte"), "oom"),
        (ValueError("`head_dim` must be at most 256"), "unsupported"),
        (RuntimeError("No available kernel. Aborting execution."), "unsupported"),
        (RuntimeError("illegal memory access"), "error"),
        (KeyError("x"), "error"),
    ],
)
def test_a_failure_is_a_row_and_the_run_goes_on(plant: Plant, error: Exception, state: str) -> None:
    def fails(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        raise error

    rows = run(plant("fails", fails), FLASH_PROVIDERS["sdpa"])
    assert [row.state for row in rows] == [state, "ok", state, "ok"]
    assert rows[0].detail.startswith(f"while being checked: {type(error).__name__}: ")
    assert "\n" not in rows[0].detail


def test_out_of_memory_in_one_mode_leaves_the_other_mode_timed(plant: Plant) -> None:
    def fails_once_timed_with_gradients(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        nonlocal calls
        calls += torch.is_grad_enabled()
        if calls > 1:
            raise torch.OutOfMemoryError("no memory")
        return attention_reference(q, k, v, is_causal=True)[0]

    calls = 0
    rows = run(plant("late", fails_once_timed_with_gradients))
    assert [row.state for row in rows] == ["ok", "oom"]
    assert rows[1].detail == "while timed: OutOfMemoryError: no memory"
    assert rows[1].median_ms is None


def test_an_unavailable_provider_gives_its_reason() -> None:
    rows = run(FLASH_PROVIDERS["sdpa-cudnn"])
    assert {(row.state, row.detail) for row in rows} == {
        ("unsupported", "cuDNN needs a CUDA device")
    }


def test_a_refusal_says_what_torch_warned_of(plant: Plant) -> None:
    def refuses(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        warnings.warn("Expected fp16, got float. (Triggered internally at x.cpp:1.)", stacklevel=1)
        raise RuntimeError("No available kernel. Aborting execution.")

    (row, _) = run(plant("refuses", refuses))
    assert row.state == "unsupported"
    assert row.detail.endswith(
        "No available kernel. Aborting execution. | Expected fp16, got float."
    )


def test_a_warning_of_a_right_provider_is_passed_on(plant: Plant) -> None:
    def falls_back(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        warnings.warn("falls back", RuntimeWarning, stacklevel=1)
        return attention_reference(q, k, v, is_causal=True)[0]

    with pytest.warns(RuntimeWarning, match="falls back"):
        run(plant("falls-back", falls_back))


def test_a_provider_without_a_backward_is_timed_forward_only() -> None:
    forward_only = replace(FLASH_PROVIDERS["sdpa"], name="forward-only", has_backward=False)
    forward, both = run(forward_only)
    assert forward.state == "ok"
    assert set(forward.errors) == {"o"}
    assert (both.state, both.detail) == ("unsupported", "it has no backward")


def test_what_would_not_fit_is_not_tried(monkeypatch: pytest.MonkeyPatch, plant: Plant) -> None:
    def never(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        raise AssertionError("was called")

    monkeypatch.setattr("attn_bench.memory.available_mib", lambda _: 0.001)
    rows = run(plant("never", never))
    assert {row.state for row in rows} == {"oom"}
    assert rows[0].detail.endswith("MiB are free: not tried")


@pytest.mark.parametrize("mode", ["fwd", "fwd+bwd"])
@pytest.mark.parametrize("name", ["dense-eager", "sdpa", "sdpa-math"])
def test_predicted_memory_is_near_what_is_measured(name: str, mode: str) -> None:
    case = Case("fp32", 1, 2, 256, 256, 32, True, mode)
    rows = Runner("suite", [FLASH_PROVIDERS[name]], CPU, Budget(seconds=0.0)).rows([case])
    (row,) = rows
    assert row.predicted_mib is not None
    assert row.peak_mib is not None
    assert 0.4 < row.predicted_mib / row.peak_mib < 2  # torch has scratch space on a CPU


def test_a_run_whose_rounds_drift_is_unstable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("attn_bench.timing.drift_of", lambda _: 1.3)
    (row, _) = run(FLASH_PROVIDERS["sdpa"])
    assert row.state == "ok"  # a CPU row is no performance figure, whatever its clock did
    ready = check_provider(
        FLASH_PROVIDERS["sdpa"],
        "suite",
        CASE,
        inputs := make_inputs(CASE, CPU),
        Oracle(CASE, inputs, LIMITS["cpu"]),
    )
    assert isinstance(ready, Ready)
    ready = replace(ready, row=replace(ready.row, is_performance=True))
    monkeypatch.setattr("attn_bench.runner.SHORT_MS", 0.0)
    timed = time_case(CASE, {"sdpa": ready}, inputs, Clock(CPU), Budget(seconds=0.0))["sdpa"]
    assert timed.state == "unstable"
    assert timed.detail == "the rounds' medians differ by 30%"
    assert timed.median_ms is not None


STILL = Reading(1980, 40, is_slowed=False)


@pytest.mark.parametrize(
    ("moved", "detail"),
    [
        (STILL._replace(clock_mhz=1800), ""),
        (STILL._replace(clock_mhz=1500), "the clock moved from 1500 to 1980 MHz"),
        (STILL._replace(celsius=56), "the temperature moved from 40 to 56 °C"),
        (
            STILL._replace(is_slowed=True),
            "the driver slowed the GPU down for its temperature or power supply",
        ),
    ],
)
def test_a_row_is_unstable_if_the_clock_or_the_temperature_moved(
    moved: Reading, detail: str
) -> None:
    weather = weather_of([STILL, moved, STILL])
    row = Row("suite", "sdpa", CASE, "ok", median_ms=1.0, is_performance=True)
    rated = with_stability(row, 1.0, weather)
    assert (rated.state, rated.detail) == ("unstable" if detail else "ok", detail)
    assert rated.clock_mhz == (min(1980, moved.clock_mhz), 1980)
    assert rated.celsius == (40, moved.celsius)


def test_the_gauge_is_read_after_every_round(monkeypatch: pytest.MonkeyPatch) -> None:
    readings = iter([STILL._replace(celsius=40 + minute) for minute in range(12)])
    monkeypatch.setattr("attn_bench.runner.open_gauge", lambda _: lambda: next(readings))
    forward, both = run(FLASH_PROVIDERS["sdpa"])
    # six rounds each, with the one that warms up
    assert (forward.celsius, both.celsius) == ((40, 45), (46, 51))


def test_without_a_driver_there_is_no_gauge(monkeypatch: pytest.MonkeyPatch) -> None:
    assert open_gauge(CPU) is None
    monkeypatch.setattr("attn_bench.gauge.LIBRARY", "libno-such-driver.so")
    assert open_gauge(torch.device("cuda")) is None

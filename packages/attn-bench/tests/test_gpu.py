"""What only a CUDA device can show: its clock, its memory, and the providers that need it."""

import time

import pytest
import torch
from torch import Tensor

from attn_bench.case import Case
from attn_bench.gauge import open_gauge
from attn_bench.providers import DECODE_PROVIDERS, FLASH_PROVIDERS, Attention, Provider
from attn_bench.runner import Runner
from attn_bench.timing import Budget, Clock, peak_mib
from attn_bench.workload import Workload

pytestmark = pytest.mark.gpu

GPU = torch.device("cuda", 0)
MIB = 2**20


def nothing() -> None:
    return None


def test_events_time_the_device_and_not_the_launch() -> None:
    a = torch.randn(4096, 4096, device=GPU, dtype=torch.bfloat16)

    def products(count: int) -> Workload:
        return Workload(nothing, lambda _: [a @ a for _ in range(count)])

    clock = Clock(GPU)
    times = {}
    for count in (1, 8):
        # the shortest: others may have had to share the device
        times[count] = min(clock.milliseconds(products(count)) for _ in range(15))
    # 137 GFLOP take at least 0.1 ms on any GPU of today, and launching takes a hundredth of that
    assert times[1] > 0.05
    assert 5 < times[8] / times[1] < 11


def test_a_launch_is_hidden_and_one_that_cannot_be_is_told_of() -> None:
    x = torch.ones(16, device=GPU)

    def launched_after(seconds: float) -> Workload:
        def run(_: Tensor | None) -> None:
            time.sleep(seconds)
            x.add_(1)

        return Workload(nothing, run)

    slow, hopeless = launched_after(2e-4), launched_after(2e-2)
    clock = Clock(GPU)
    # of many, since the host may be busy with something else
    runs = [(clock.milliseconds(slow), clock.was_late) for _ in range(30)]
    assert min(ms for ms, was_late in runs if not was_late) < 0.1
    assert clock.milliseconds(hopeless) > 10
    assert clock.was_late


def test_the_l2_cache_is_cold_in_every_run() -> None:
    l2_bytes = torch.cuda.get_device_properties(GPU).L2_cache_size
    x = torch.ones(l2_bytes // 16, dtype=torch.float32, device=GPU)  # a quarter of the cache
    clock = Clock(GPU)
    workload = Workload(nothing, lambda _: x.sum())
    cold = sorted(clock.milliseconds(workload) for _ in range(21))[10]

    def warmed(_: object) -> Tensor:
        return x.sum()

    warm = sorted(clock.milliseconds(Workload(lambda: x.sum(), warmed)) for _ in range(21))[10]
    # `prepare` comes before the eviction, so that it warms nothing
    assert warm == pytest.approx(cold, rel=0.3)


def test_peak_memory_is_what_one_run_allocates() -> None:
    def allocates(_: Tensor | None) -> Tensor:
        first = torch.empty(8 * MIB, dtype=torch.int8, device=GPU)
        second = torch.empty(4 * MIB, dtype=torch.int8, device=GPU)
        del first
        return second

    assert peak_mib(Workload(nothing, allocates), GPU) == pytest.approx(12.0, abs=0.1)


def test_a_real_lack_of_memory_is_a_row_and_the_run_goes_on() -> None:
    def too_large(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return q + torch.empty(2**44, dtype=torch.int8, device=q.device).sum()

    def build(_case: Case, _device: torch.device) -> Attention:
        return too_large

    providers = [Provider("too-large", "16 TiB", build), FLASH_PROVIDERS["sdpa-math"]]
    case = Case("fp32", 1, 2, 64, 64, 32, True, "fwd")
    large, right = Runner("suite", providers, GPU, Budget(seconds=0.01)).rows([case])
    assert large.state == "oom"
    assert right.state in ("ok", "unstable")
    assert "out of memory" in large.detail.lower()
    assert right.is_performance


@pytest.mark.parametrize(
    "name",
    [
        *("sdpa-flash", "sdpa-cudnn", "flash-triton", "flash-hopper", "flash-auto"),
        *("flex", "layer-compiled"),
    ],
)
@pytest.mark.parametrize("is_causal", [True, False])
def test_a_provider_of_the_gpu_is_right_and_timed(name: str, is_causal: bool) -> None:
    case = Case("bf16", 2, 2, 256, 256, 64, is_causal, "fwd+bwd")
    provider = FLASH_PROVIDERS[name]
    reason = provider.why_not(case, GPU)
    if reason is not None:
        pytest.skip(reason)
    (row,) = Runner("suite", [provider], GPU, Budget(seconds=0.01)).rows([case])
    assert row.state in ("ok", "unstable"), row.detail
    assert row.errors["dq"] <= row.bounds["dq"]
    assert row.median_ms is not None
    assert row.median_ms > 0


def test_a_short_forward_has_the_time_of_a_graph_replay() -> None:
    case = Case("bf16", 1, 2, 128, 128, 64, True, "fwd")
    runner = Runner("suite", [FLASH_PROVIDERS["sdpa-flash"]], GPU, Budget(seconds=0.01))
    (row,) = runner.rows([case])
    assert row.median_ms is not None
    assert row.graph_ms is not None, row.note
    assert 0 < row.graph_ms < 2 * row.median_ms


def test_a_row_says_which_clock_and_temperature_it_was_measured_at() -> None:
    gauge = open_gauge(GPU)
    if gauge is None:
        pytest.skip("this machine's driver does not tell")
    reading = gauge()
    assert 100 < reading.clock_mhz < 5000
    assert 10 < reading.celsius < 120
    case = Case("bf16", 1, 2, 128, 128, 64, True, "fwd")
    (row,) = Runner("suite", [FLASH_PROVIDERS["sdpa"]], GPU, Budget(seconds=0.01)).rows([case])
    assert row.clock_mhz is not None
    assert row.celsius is not None


def test_decoding_over_a_cache_is_right_and_timed() -> None:
    case = Case("bf16", 3, 8, 1, 1000, 64, False, "fwd", num_kv_heads=2)
    provider = DECODE_PROVIDERS["flash-kvcache"]
    if reason := provider.why_unavailable(GPU):
        pytest.skip(reason)
    (row,) = Runner("suite", [provider], GPU, Budget(seconds=0.01)).rows([case])
    assert row.state in ("ok", "unstable"), row.detail
    assert row.errors["o"] <= row.bounds["o"]

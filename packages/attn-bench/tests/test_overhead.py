import time
from dataclasses import replace

import pytest
import torch

from attn_bench import overhead
from attn_bench.case import Case
from attn_bench.cli import main
from attn_bench.overhead import CALLS, HostClock, measure_overhead, overhead_table
from attn_bench.providers import Provider
from attn_bench.results import Row, read_results
from attn_bench.suites import FLASH_ATTENTION
from attn_bench.timing import Budget
from attn_bench.workload import Workload

CPU = torch.device("cpu")
TINY = Case("fp32", 1, 1, 4, 4, 8, is_causal=False, mode="fwd")
SHORT = Budget(seconds=1e-4)
SDPA = FLASH_ATTENTION.providers["sdpa"]


def test_host_clock_gives_the_time_of_one_call_of_many_and_leaves_preparation_out():
    runs = []
    workload = Workload(lambda: time.sleep(2e-2), lambda _: runs.append(time.sleep(1e-3)))
    milliseconds = HostClock(CPU).milliseconds(workload)
    assert len(runs) == CALLS
    assert 1 <= milliseconds < 20


def test_each_provider_has_a_row_for_the_forward_and_with_its_backward():
    rows = list(measure_overhead([SDPA], TINY, CPU, SHORT))
    assert [(row.provider, row.case.mode, row.state) for row in rows] == [
        ("sdpa", "fwd", "ok"), ("sdpa", "fwd+bwd", "ok")
    ]  # fmt: skip
    assert all(row.median_ms > 0 and row.errors.keys() == {"o", "dq", "dk", "dv"} for row in rows)
    assert f"{rows[0].median_ms * 1e3:.1f}" in overhead_table(rows)


def test_what_is_wrong_is_not_timed():
    def build(case, device):
        return lambda q, k, v: 2 * SDPA.build(case, device)(q, k, v)

    wrong = Provider("doubled", "twice what it should be", build)
    for row in measure_overhead([wrong], TINY, CPU, SHORT):
        assert (row.state, row.median_ms) == ("wrong", None)


def test_what_fails_while_timed_is_a_row():
    calls = []

    def build(case, device):
        attention = SDPA.build(case, device)

        def failing(q, k, v):
            calls.append(torch.is_grad_enabled())
            if calls.count(False) > 5:
                raise ZeroDivisionError("out of luck")
            return attention(q, k, v)

        return failing

    rows = list(measure_overhead([replace(SDPA, build=build)], TINY, CPU, SHORT))
    assert (rows[0].state, rows[0].median_ms) == ("error", None)
    assert "out of luck" in rows[0].detail


def test_command_saves_what_it_prints(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(overhead, "SHAPE", TINY)
    path = tmp_path / "overhead.jsonl"
    assert main(["overhead", "--provider", "sdpa", "--device", "cpu", "--save", str(path)]) == 0
    saved = read_results(path).rows
    assert [row.suite for row in saved] == ["overhead"] * 2
    printed = capsys.readouterr().out
    for row in saved:
        assert f"{row.median_ms * 1e3:.1f}" in printed


def test_table_keeps_the_digits_of_a_round_time():
    row = Row("overhead", "sdpa", TINY, "ok", median_ms=0.05, p20_ms=0.0484, p80_ms=0.0512)
    assert overhead_table([row]).splitlines()[-1].split()[2:5] == ["50.0", "48.4", "51.2"]


def test_unknown_providers_are_named(capsys):
    assert main(["overhead", "--provider", "sdpb", "--device", "cpu"]) == 2
    assert "unknown provider 'sdpb'" in capsys.readouterr().err


@pytest.mark.parametrize("name", overhead.PROVIDERS)
def test_default_providers_exist(name):
    assert name in FLASH_ATTENTION.providers

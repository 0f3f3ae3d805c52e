import csv
from dataclasses import replace

from attn_bench.case import Case
from attn_bench.metrics import METRICS
from attn_bench.results import Results, Row
from attn_bench.tables import NOT_PERFORMANCE, as_csv, markdown, terminal_table

CASE = Case("bf16", 2, 4, 8, 8, 16, True, "fwd")
ENVIRONMENT = {
    "device": "a GPU",
    "torch": "2.15.0",
    "commit": "0123456789abcdef",
    "dirty": True,
    "date": "2026-11-30T10:00:00+00:00",
}


def timed(provider: str, milliseconds: float, tflops: float) -> Row:
    return Row(
        suite="flash_attention",
        provider=provider,
        case=CASE,
        state="ok",
        errors={"o": 1e-3, "dq": 2e-3},
        bounds={"o": 4e-3, "dq": 3e-3},
        median_ms=milliseconds,
        p20_ms=milliseconds,
        p80_ms=milliseconds,
        first_call_ms=1500.0,
        tflops=tflops,
        peak_mib=2.0,
        repetitions=5,
        is_performance=True,
    )


ROWS = (
    timed("slow", 2.0, 100.0),
    timed("fast", 1.0, 200.0),
    Row("flash_attention", "big", CASE, "oom", "no memory"),
)


def test_terminal_table_gives_the_ratio_to_the_baseline_and_the_worst_error() -> None:
    lines = terminal_table(ROWS, "slow").splitlines()
    slow, fast, big, reason = lines[2:]
    assert slow.split()[-2:] == ["1.00", "1.50"]
    assert fast.split()[-2:] == ["2.00", "1.50"]
    assert "dq 2.0e-03 (3.0e-03)" in fast
    assert big.split() == ["big", "oom"]
    assert reason == "big: oom: no memory"


def test_terminal_table_marks_the_fastest_of_a_case() -> None:
    slow, fast, big, _ = terminal_table(ROWS, "slow").splitlines()[2:]
    assert "* 1.000" in fast
    assert "*" not in slow + big


def test_a_narrow_terminal_gets_fewer_columns_and_is_told_which() -> None:
    whole = terminal_table(ROWS, "slow")
    assert terminal_table(ROWS, "slow", 200) == whole
    narrow = terminal_table(ROWS, "slow", 100).splitlines()
    assert max(map(len, narrow)) <= 100
    assert narrow[5].startswith("left out in 100 columns: first call s, p20-p80")
    assert "x slow" in narrow[0]
    # what cannot be left out stays, however wide
    assert "median ms" in terminal_table(ROWS, "slow", 10).splitlines()[0]


def test_a_cpu_table_says_that_it_is_no_performance_figure() -> None:
    rows = [replace(row, is_performance=False) for row in ROWS]
    assert terminal_table(rows, "slow").startswith(NOT_PERFORMANCE)
    assert NOT_PERFORMANCE in markdown(Results(ENVIRONMENT, tuple(rows)))
    assert NOT_PERFORMANCE not in markdown(Results(ENVIRONMENT, ROWS))


def test_markdown_has_a_column_per_provider_and_the_best_in_bold() -> None:
    text = markdown(Results(ENVIRONMENT, ROWS))
    head, body = [line for line in text.splitlines() if line.startswith("|")][::2]
    cells = [cell.strip() for cell in body.strip("|").split("|")]
    assert [cell.strip() for cell in head.strip("|").split("|")][-3:] == ["slow", "fast", "big"]
    assert cells == ["bf16", "16", "causal", "8", "2 x 4", "100", "**200**", "oom"]
    assert text.startswith("a GPU, torch 2.15.0, commit 0123456789 with changes, 2026-11-30.\n")


def test_the_best_time_is_the_smallest() -> None:
    assert "| **1** |" in " ".join(markdown(Results(ENVIRONMENT, ROWS), METRICS["ms"]).split())


def test_a_step_stands_beside_its_prediction() -> None:
    rows = (replace(ROWS[0], predicted_ms=2.25), ROWS[1])
    text = " ".join(markdown(Results(ENVIRONMENT, rows), METRICS["step"]).split())
    assert "| 2.0 (2.2) | **1.0** |" in text


def test_an_unstable_time_is_marked() -> None:
    rows = (ROWS[0], replace(ROWS[1], state="unstable", detail="the rounds' medians differ"))
    assert "| ~**200** |" in " ".join(markdown(Results(ENVIRONMENT, rows)).split())
    assert "~fast" in terminal_table(rows, "slow")


def test_csv_has_a_line_per_row_with_its_case_errors_and_device() -> None:
    lines = list(csv.DictReader(as_csv(Results(ENVIRONMENT, ROWS)).splitlines()))
    assert [line["provider"] for line in lines] == ["slow", "fast", "big"]
    assert (lines[1]["seqlen_q"], lines[1]["is_causal"], lines[1]["median_ms"]) == (
        "8",
        "True",
        "1.0",
    )
    assert (lines[1]["error_dq"], lines[1]["allowed_dq"]) == ("0.002", "0.003")
    assert (lines[2]["state"], lines[2]["median_ms"], lines[2]["device"]) == ("oom", "", "a GPU")

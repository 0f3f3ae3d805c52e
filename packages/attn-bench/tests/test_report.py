import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from attn_bench.case import Case
from attn_bench.cli import main
from attn_bench.errors import InputError
from attn_bench.metrics import METRICS
from attn_bench.plots import draw
from attn_bench.report import report, script_json
from attn_bench.results import Results, Row, saving
from attn_bench.series import Ceiling, ceiling_of, panels

HERE = {
    "device": "a <GPU>",
    "torch": "2.15.0",
    "date": "2026-11-30T10:00:00",
    "ceilings": {"matmul_tflops": {"bf16": 700.0}, "copy_gb_s": 4000.0},
}
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")


def timed(provider: str, n: int, mode: str, tflops: float) -> Row:
    return Row(
        "flash_attention",
        provider,
        Case("bf16", 16384 // n, 16, n, n, 128, True, mode),
        "ok",
        checked="all heads",
        errors={"o": 1e-3},
        bounds={"o": 4e-3},
        median_ms=1000 / tflops,
        p20_ms=900 / tflops,
        p80_ms=1100 / tflops,
        tflops=tflops,
        peak_mib=64.0,
        is_performance=True,
    )


ROWS = tuple(
    timed(provider, n, mode, speed * n / 100)
    for mode in ("fwd", "bwd")
    for n in (512, 1024, 2048)
    for provider, speed in (("slow", 10.0), ("fast", 20.0))
)
OOM = Row("flash_attention", "big", ROWS[0].case, "oom", "no memory")
RESULTS = Results(HERE, (*ROWS, OOM))


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    path = tmp_path / "run.jsonl"
    with saving(path, HERE) as save:
        for row in RESULTS.rows:
            save(row)
    return path


def test_a_panel_holds_what_differs_in_length_and_provider_only() -> None:
    forward, backward = panels(RESULTS.rows)
    assert (forward.mode, backward.mode) == ("fwd", "bwd")
    assert forward.providers == ["slow", "fast", "big"]
    assert forward.title == "flash attention: bf16, h 16, d 128, causal, fwd"
    assert forward.curve("fast", METRICS["tflops"]) == [(512, 102.4), (1024, 204.8), (2048, 409.6)]
    assert forward.curve("big", METRICS["tflops"]) == []


def test_a_length_of_several_batches_has_a_panel_for_each() -> None:
    two = [replace(row, case=replace(row.case, batch=2)) for row in ROWS if row.case.mode == "fwd"]
    four = [replace(row, case=replace(row.case, batch=4)) for row in two]
    assert [panel.title.partition(": ")[2] for panel in panels([*two, *four])] == [
        *("bf16, b 2, h 16, d 128, causal, fwd", "bf16, b 4, h 16, d 128, causal, fwd")
    ]


def test_a_ceiling_far_above_the_curves_is_told_and_not_drawn() -> None:
    (panel,) = panels([row for row in ROWS if row.case.mode == "fwd"])
    near = ceiling_of(panel, METRICS["tflops"], HERE)  # the best has 410 TFLOP/s
    assert near == Ceiling(700.0, "measured matmul", is_near=True)
    environment = HERE | {"ceilings": {"matmul_tflops": {"bf16": 1700.0}, "copy_gb_s": 4000.0}}
    far = ceiling_of(panel, METRICS["tflops"], environment)
    assert far == Ceiling(1700.0, "measured matmul", is_near=False)
    (ax,) = draw([panel], METRICS["tflops"], environment).axes
    assert ax.get_ylim()[1] < 500
    assert [text.get_text() for text in ax.texts] == ["measured matmul: 1700"]
    assert ceiling_of(panel, METRICS["memory"], HERE) is None


def test_the_report_leaves_out_columns_without_a_value() -> None:
    page = report(RESULTS)
    assert "<th>peak MiB</th>" in page
    assert "<th>graph ms</th>" not in page
    with_graph = tuple(replace(row, graph_ms=0.01) for row in ROWS)
    assert "<th>graph ms</th>" in report(Results(HERE, with_graph))


def test_the_report_has_a_table_per_panel_and_no_address() -> None:
    page = report(RESULTS)
    assert page.count("<table") == 2 + 1  # and the environment's
    assert page.count('class="ok best"') == 6
    assert "big: oom: no memory" in page
    assert "a &lt;GPU&gt;" in page
    assert "<GPU>" not in page
    assert "http" not in page.replace("http://www.w3.org/2000/svg", "")
    assert "<!-- " not in page


def test_data_cannot_end_its_script_element() -> None:
    assert script_json({"x": "</script>"}) == '{"x": "\\u003c/script>"}'


def test_a_result_without_times_has_no_report() -> None:
    with pytest.raises(InputError, match="no timed rows"):
        report(Results(HERE, (OOM,)))


def test_a_cpu_report_says_that_it_is_no_performance_figure() -> None:
    rows = tuple(replace(row, is_performance=False) for row in ROWS)
    assert 'class="warning">CPU: not a performance figure' in report(Results(HERE, rows))
    assert "not a performance figure" not in report(RESULTS)


def test_report_is_written_beside_its_file(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(saved)]) == 0
    assert capsys.readouterr().out.strip() == str(saved.with_suffix(".html"))
    assert "<!doctype html>" in saved.with_suffix(".html").read_text()


def test_plots_are_written_as_png_and_svg(saved: Path) -> None:
    folder = saved.parent / "plots"
    assert main(["plots", str(saved), "--into", str(folder)]) == 0
    names = {
        f"run-{what}.{kind}" for what in ("tflops", "memory", "error") for kind in ("png", "svg")
    }
    assert {path.name for path in folder.iterdir()} == names
    assert (folder / "run-tflops.png").read_bytes()[:4] == b"\x89PNG"
    before = (folder / "run-error.svg").read_text()
    assert before.startswith("<?xml")
    assert main(["plots", str(saved), "--into", str(folder)]) == 0
    assert (folder / "run-error.svg").read_text() == before  # the same results, the same file


def test_no_curve_is_cut_off_by_its_plot() -> None:
    figure = draw(panels(RESULTS.rows), METRICS["tflops"], HERE)
    for ax in figure.axes:
        low, high = ax.get_ylim()
        assert low == 0
        assert high > 700  # the ceiling
        assert all(high > max(line.get_ydata()) for line in ax.lines)


def test_the_page_works_in_a_browser(saved: Path) -> None:
    browser = next((path for name in BROWSERS if (path := shutil.which(name))), None)
    if browser is None:
        pytest.skip(f"no browser found: none of {', '.join(BROWSERS)}")
    assert main(["report", str(saved)]) == 0
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=2000"]
    profile = f"--user-data-dir={saved.parent / 'profile'}"
    done = subprocess.run(
        [browser, *flags, profile, "--dump-dom", saved.with_suffix(".html").as_uri()],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    # what the page's own script has drawn, and what was there before it
    assert done.stdout.count("<table") == 3
    assert done.stdout.count('class="curve"') == 2
    assert done.stdout.count("<circle") == 6
    assert done.stdout.count('class="ceiling"') == 1
    assert "measured matmul: 700<" in done.stdout
    assert done.stdout.count("<option") == 2 + 4

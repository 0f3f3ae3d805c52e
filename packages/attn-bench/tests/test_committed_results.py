"""What lies in the folders of ``results/``; the command ``docs`` checks the tables of it.

Folders within those are training runs of tiny-llm, which has its own tests of them.
"""

from pathlib import Path

import pytest

from attn_bench.results import read_results
from attn_bench.run_file import read_run_file
from attn_bench.suites import SUITES

ROOT = Path(__file__).parents[3]
FILES = sorted((ROOT / "results").glob("*/*.jsonl"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_committed_results_are_right_and_of_a_clean_commit_of_a_gpu(path: Path) -> None:
    results = read_results(path)
    assert results.environment["commit"]
    assert results.environment["dirty"] is False
    assert results.rows
    assert not [row for row in results.rows if row.state in ("wrong", "error")]
    assert all(row.is_performance for row in results.rows if row.median_ms is not None)


@pytest.mark.parametrize("path", sorted((ROOT / "results").glob("*/*.toml")), ids=lambda p: p.stem)
def test_a_file_of_grids_asks_for_what_lies_beside_it(path: Path) -> None:
    asked = read_run_file(path, {name: suite.presets for name, suite in SUITES.items()})
    results = path.with_suffix(".jsonl")
    if not results.exists():
        pytest.skip("not measured yet")
    had = {(row.case, row.provider) for row in read_results(results).rows}
    assert had == {(case, name) for case in asked.cases for name in asked.providers or ()}


def test_the_readme_shows_what_quick_has_printed() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    shown = text.partition("<!-- quick-output -->")[2].partition("```text\n")[2].partition("```")[0]
    printed = iter(
        (ROOT / "results" / "cpu" / "quick.txt").read_text(encoding="utf-8").splitlines()
    )
    # the README cuts long lines, and leaves some out
    lines = [line for line in shown.splitlines() if line != "..."]
    assert lines
    assert all(any(full.startswith(line) for full in printed) for line in lines)

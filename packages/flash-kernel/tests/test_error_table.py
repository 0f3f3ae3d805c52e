"""The published table of errors: measured by the tests' own rule, and in the documents."""

import re
from pathlib import Path

import pytest
import torch

from flash_kernel import error_table


def test_largest_errors_are_those_of_the_rule():
    worst = error_table.measure(torch.bfloat16, "cpu", "mock", (16,), ((33, 40), (70, 70)))
    for name in error_table.TENSORS:
        assert 0 < worst.ours[name] < 0.1, name
        assert 0 < worst.of_bound[name] < 1, name
    assert worst.ours["lse"] < 1e-5 < worst.ours["o"]
    table = error_table.as_markdown({torch.bfloat16: worst}, "Here and now.")
    rows = [line.split(" | ") for line in table.splitlines()]
    assert rows[2][0] == "| bfloat16"
    assert float(rows[2][2]) == pytest.approx(worst.ours["o"], rel=0.05)
    assert rows[-1] == ["Here and now."]


NUMERICS = Path(__file__).parents[3] / "docs" / "numerics.md"


@pytest.mark.skipif(not NUMERICS.is_file(), reason="the documents do not lie beside these tests")
def test_published_table_is_whole_and_within_the_bound_or_says_that_it_is_missing():
    _, published, _ = re.split("<!-- /?error-table -->\n", NUMERICS.read_text("utf-8"))
    rows = [line.strip("| ").split(" | ") for line in published.splitlines() if "%" in line]
    if not rows:
        assert published.startswith("Not measured yet")
        return
    assert len(rows) == len(error_table.DTYPES)
    for row in rows:
        shares = [float(cell.rstrip("%")) for cell in row[-len(error_table.TENSORS) :]]
        assert all(0 <= share <= 100 for share in shares), row  # in whole percents: 0 may be 0.4
    measured = [line.split("|")[3:-1] for line in published.splitlines() if "e-0" in line]
    assert len(measured) == 2 * len(error_table.DTYPES)  # ours and dense attention's
    assert all(float(error) > 0 for errors in measured for error in errors)

"""The published table of errors: measured by the tests' own rule, and in the documents."""

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


def test_table_replaces_what_lies_between_the_markers():
    begin, end = error_table.MARKERS
    document = f"Before.\n{begin}\nold\n{end}\nAfter.\n"
    assert error_table.replaced(document, "new") == f"Before.\n{begin}\nnew\n{end}\nAfter.\n"
    with pytest.raises(ValueError, match="must have the markers"):
        error_table.replaced("none", "new")

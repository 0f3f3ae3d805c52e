from dataclasses import replace
from pathlib import Path

import pytest

from attn_bench.case import Case
from attn_bench.cli import main
from attn_bench.errors import InputError
from attn_bench.results import Row, saving
from attn_bench.standing import standing_table, standings


def row(provider: str, n: int, milliseconds: float | None, head_dim: int = 64) -> Row:
    case = Case("bf16", 1, 1, n, n, head_dim, True, "fwd")
    state = "oom" if milliseconds is None else "ok"
    return Row("flash_attention", provider, case, state, median_ms=milliseconds)


ROWS = (
    *(row("ours", 512, 2.0), row("ours", 1024, 4.0), row("ours", 512, 1.0, 128)),
    *(row("first", 512, 1.0), row("first", 1024, 8.0), row("first", 512, 9.0, 128)),
    *(row("second", 512, 3.0), row("second", 1024, 16.0), row("second", 512, 4.0, 128)),
    *(row("third", 512, 0.1), row("third", 1024, 0.1), row("third", 512, None, 128)),
)


def test_a_ratio_is_to_the_best_of_the_peers_at_each_case() -> None:
    d64, d128, both = standings(ROWS, ["first", "second"], ["ours"])
    # 1 / 2 and 8 / 4; 4 / 1
    assert list(d64.ratios.values()) == [0.5, 2.0]
    assert (d64.group, d64.mean) == (("bf16", 64), pytest.approx(1.0))
    assert (d128.group, d128.mean) == (("bf16", 128), pytest.approx(4.0))
    assert (both.group, both.mean) == (None, pytest.approx(4.0 ** (1 / 3)))
    assert both.worst == ROWS[0].case
    assert both.ratios[both.worst] == 0.5


def test_modes_stand_apart() -> None:
    backwards = [replace(each, case=replace(each.case, mode="bwd")) for each in ROWS]
    found = standings([*ROWS, *backwards], ["first"], ["ours"])
    assert [each.mode for each in found] == ["fwd"] * 3 + ["bwd"] * 3


def test_a_case_that_a_provider_lacks_is_counted() -> None:
    found = standings(ROWS, ["first"], ["third"])
    assert [(len(each.ratios), len(each.cases)) for each in found] == [(2, 2), (2, 3)]
    table = standing_table(found, ["first"])
    assert "2 of 3" in table
    assert "Speed as a multiple of that of `first`, case by case" in table


def test_a_case_without_a_peer_does_not_count() -> None:
    found = standings(ROWS, ["third"], ["ours"])
    assert [len(each.cases) for each in found] == [2]


def test_all_but_the_peers_stand_unless_some_are_named() -> None:
    assert {each.provider for each in standings(ROWS, ["second"])} == {"ours", "first", "third"}


def test_a_name_that_is_not_there_is_refused() -> None:
    with pytest.raises(InputError, match="unknown provider 'fourth'; choose from 'ours', 'first'"):
        standings(ROWS, ["first", "fourth"])
    only_oom = [row("ours", 8, None), row("first", 8, 1.0)]
    with pytest.raises(InputError, match="no case has a time of first and of ours"):
        standings(only_oom, ["first"])


def test_table_against_prints_the_standing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run.jsonl"
    with saving(path, {"device": "a GPU", "date": "2026-11-30"}) as save:
        for each in ROWS:
            save(each)
    against = ["--against", "first", "second", "--provider", "ours"]
    assert main(["table", str(path), *against]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines() if "ours" in line]
    assert [line[9:14:2] for line in lines] == [
        *(["2", "**1.00**", "0.50"], ["1", "**4.00**", "4.00"], ["3", "**1.59**", "0.50"])
    ]
    assert main(["table", str(path), *against, "--head-dim", "128"]) == 0
    assert "**1.00**" not in capsys.readouterr().out

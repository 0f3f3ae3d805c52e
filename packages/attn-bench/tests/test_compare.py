from dataclasses import replace
from pathlib import Path

import pytest

from attn_bench.case import Case
from attn_bench.cli import main
from attn_bench.compare import bootstrap, compare
from attn_bench.errors import InputError
from attn_bench.results import Results, Row, saving

CASE = Case("bf16", 1, 1, 8, 8, 16, True, "fwd")
HERE = {"device": "a GPU", "date": "2026-11-30T10:00:00"}


def timed(milliseconds: float, noise: float = 0.01) -> Row:
    samples = tuple(milliseconds * (1 + noise * (i % 5 - 2)) for i in range(40))
    return Row(
        "flash_attention",
        "sdpa",
        CASE,
        "ok",
        median_ms=milliseconds,
        p20_ms=milliseconds * (1 - noise),
        p80_ms=milliseconds * (1 + noise),
        samples_ms=samples,
        semantics={"alignment": "bottom-right"},
    )


FAILED = Row("flash_attention", "sdpa", CASE, "oom", "no memory")


def verdict(a: Row, b: Row) -> str:
    (found,) = compare(Results({}, (a,)), Results({}, (b,)), threshold=0.05)
    return found.verdict


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        (timed(1.0), timed(1.2), "slower"),
        (timed(1.2), timed(1.0), "faster"),
        (timed(1.0), timed(1.04), "same"),
        (timed(1.0, noise=0.2), timed(1.1, noise=0.2), "same"),  # not sure enough
        (timed(1.0), FAILED, "lost"),
        (FAILED, timed(1.0), "found"),
        (FAILED, FAILED, "same"),
        (timed(1.0), replace(timed(9.0), semantics={"alignment": "top-left"}), "not comparable"),
    ],
)
def test_the_verdict_on_a_row(a: Row, b: Row, expected: str) -> None:
    assert verdict(a, b) == expected


def test_rows_without_samples_are_compared_by_their_quantiles() -> None:
    old = replace(timed(1.0), samples_ms=())
    assert verdict(old, replace(timed(1.2), samples_ms=())) == "slower"
    assert verdict(replace(old, p80_ms=1.3), timed(1.2)) == "same"


def test_the_interval_holds_the_ratio_and_shrinks_with_the_noise() -> None:
    wide = bootstrap(timed(1.0, 0.2).samples_ms, timed(2.0, 0.2).samples_ms)
    narrow = bootstrap(timed(1.0, 0.01).samples_ms, timed(2.0, 0.01).samples_ms)
    assert wide[0] <= narrow[0] <= 2.0 <= narrow[1] <= wide[1]
    assert narrow[1] - narrow[0] < wide[1] - wide[0]


def test_files_without_a_common_row_are_refused() -> None:
    other = replace(timed(1.0), provider="other")
    with pytest.raises(InputError, match="share no row"):
        compare(Results({}, (timed(1.0),)), Results({}, (other,)), 0.05)


def test_the_command_fails_on_a_regression_only(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fast, slow = tmp_path / "fast.jsonl", tmp_path / "slow.jsonl"
    for path, row in ((fast, timed(1.0)), (slow, timed(1.5))):
        with saving(path, HERE) as save:
            save(row)
    assert main(["compare", str(fast), str(slow)]) == 1
    out = capsys.readouterr().out
    assert "1.500" in out
    assert "slower" in out
    assert "1 rows compared, 1 worse by more than 5 %" in out
    assert main(["compare", str(slow), str(fast)]) == 0
    assert main(["compare", str(fast), str(fast)]) == 0
    assert "every row is the same" in capsys.readouterr().out
    assert main(["compare", str(fast), str(slow), "--threshold", "60"]) == 0

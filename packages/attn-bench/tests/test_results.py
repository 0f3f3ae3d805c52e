import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from attn_bench.case import Case
from attn_bench.errors import InputError
from attn_bench.results import Row, read_results, saving

CASE = Case("bf16", 2, 4, 8, 12, 16, True, "bwd")
OK = Row(
    suite="flash_attention",
    provider="sdpa",
    case=CASE,
    state="ok",
    checked="all heads",
    errors={"o": 1e-3},
    bounds={"o": 3e-3},
    median_ms=0.5,
    p20_ms=0.4,
    p80_ms=0.7,
    first_call_ms=12.0,
    tflops=1.5,
    peak_mib=3.25,
    repetitions=20,
    is_performance=True,
)
WRONG = Row(
    "flash_attention",
    "other",
    CASE,
    "wrong",
    "`o`: error max inf",
    errors={"o": math.inf},
    bounds={"o": 3e-3},
)


def save(path: Path, *rows: Row) -> None:
    with saving(path, {"device": "a GPU"}) as write:
        for row in rows:
            write(row)


def test_results_survive_a_round_trip(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    save(path, OK, WRONG)
    results = read_results(path)
    assert results.rows == (OK, WRONG)
    assert results.environment == {"device": "a GPU"}
    assert json.loads(path.read_text().splitlines()[0])["schema"] == 1
    assert "Infinity" not in path.read_text()


def test_an_interrupted_run_leaves_the_folder_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    save(path, OK)
    before = path.read_text()

    def interrupted() -> None:
        with saving(path, {}) as write:
            write(WRONG)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert path.read_text() == before
    assert list(tmp_path.iterdir()) == [path]


def test_only_a_right_row_carries_a_time() -> None:
    with pytest.raises(InputError, match="state 'wrong' must not carry a time"):
        replace(OK, state="wrong")
    assert OK.failed("oom", "no memory").median_ms is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "its first line is no environment"),
        ('{"kind": "row"}\n', "its first line is no environment"),
        (
            '{"kind": "environment", "schema": 99}\n',
            "has schema 99; this attn-bench reads",
        ),
        ('{"kind": "environment", "schema": 1}\n{"kind": "ro', "line 2 is not JSON"),
        ('{"kind": "environment", "schema": 1}\n[]\n', "line 2 must be a JSON object, got list"),
        ('{"kind": "environment", "schema": 1}\n{"kind": "row"}\n', "line 2 is not a row"),
    ],
)
def test_a_damaged_file_is_refused_in_one_line(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(text)
    with pytest.raises(InputError, match=message) as caught:
        read_results(path)
    assert "\n" not in str(caught.value)


def test_an_unknown_row_field_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    save(path, OK)
    head, row = path.read_text().splitlines()
    path.write_text(f"{head}\n{json.dumps({**json.loads(row), 'speed': 1})}\n")
    with pytest.raises(InputError, match="line 2 is not a row of schema 1"):
        read_results(path)

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from attn_bench.case import Case
from attn_bench.errors import InputError
from attn_bench.journal import journaling, partial_path, rows_to_keep, split_done
from attn_bench.results import (
    NEW_CASE_FIELDS,
    NEW_ROW_FIELDS,
    Row,
    read_results,
    saving,
)

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
    semantics={"layout": "bhnd", "deterministic": None},
    samples_ms=(0.4, 0.5),
    roofline_share=0.5,
    clock_mhz=(1755, 1980),
    celsius=(41, 44),
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
    assert json.loads(path.read_text().splitlines()[0])["schema"] == 3
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
            "has schema 99; this attn-bench reads schemas 1 to 3",
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
    with pytest.raises(InputError, match="line 2 is not a row of schema 3"):
        read_results(path)


@pytest.mark.parametrize("schema", [1, 2])
def test_a_file_of_an_earlier_schema_is_read_with_defaults(tmp_path: Path, schema: int) -> None:
    path = tmp_path / "r.jsonl"
    save(path, OK)
    head, row = (json.loads(line) for line in path.read_text().splitlines())
    head["schema"] = schema
    for later in range(schema + 1, 4):
        for name in NEW_ROW_FIELDS[later]:
            del row[name]
        for name in NEW_CASE_FIELDS.get(later, ()):
            del row["case"][name]
    path.write_text(f"{json.dumps(head)}\n{json.dumps(row)}\n")
    (read,) = read_results(path).rows
    since_2 = {"semantics": {}, "samples_ms": (), "roofline_share": None}
    expected = replace(OK, clock_mhz=None, celsius=None)
    assert read == (replace(expected, **since_2) if schema == 1 else expected)


def test_an_unstable_row_carries_its_times() -> None:
    assert replace(OK, state="unstable").median_ms == OK.median_ms


CASES = [
    replace(CASE, mode=mode, seqlen_q=n, seqlen_k=n) for n in (8, 16) for mode in ("fwd", "bwd")
]


def test_a_shape_is_done_as_a_whole_or_not() -> None:
    rows = [replace(OK, case=case, provider=name) for case in CASES for name in ("a", "b")]
    kept, left = split_done(rows[:-1], CASES, ["a", "b"])
    assert kept == rows[:4]
    assert left == CASES[2:]
    assert split_done(rows, CASES, ["a"]) == (rows[::2], [])
    assert split_done([], CASES, ["a"]) == ([], CASES)


def interrupt(path: Path, environment: dict[str, object], *rows: Row) -> None:
    with journaling(path, environment, []) as journal:
        for row in rows:
            journal.append(row)
        raise KeyboardInterrupt


def test_an_interrupted_journal_keeps_its_rows_and_is_gone_on_with(tmp_path: Path) -> None:
    path, here = tmp_path / "r.jsonl", {"device": "a GPU", "torch": "2.15"}
    with pytest.raises(KeyboardInterrupt):
        interrupt(path, here, OK)
    assert [each.name for each in tmp_path.iterdir()] == ["r.jsonl.partial"]
    with pytest.raises(InputError, match="pass `--resume` to go on, or delete it"):
        rows_to_keep(path, here, resume=False, suite="flash_attention")
    with partial_path(path).open("a") as file:
        file.write('{"kind": "row", "su')  # cut off by a power failure
    kept = rows_to_keep(path, here, resume=True, suite="flash_attention")
    assert kept == [OK]
    with journaling(path, here, kept) as journal:
        journal.append(WRONG)
    assert read_results(path).rows == (OK, WRONG)
    assert list(tmp_path.iterdir()) == [path]


def test_a_run_is_not_gone_on_with_in_another_environment(tmp_path: Path) -> None:
    path, here = tmp_path / "r.jsonl", {"device": "a GPU"}
    with pytest.raises(KeyboardInterrupt):
        interrupt(path, here, OK)
    with pytest.raises(InputError, match="was measured with device 'a GPU', now it is 'other'"):
        rows_to_keep(path, {"device": "other"}, resume=True, suite="flash_attention")
    with pytest.raises(InputError, match="is a run of flash_attention, not of attention_layer"):
        rows_to_keep(path, here, resume=True, suite="attention_layer")
    with pytest.raises(InputError, match="`--resume` needs `--save`"):
        rows_to_keep(None, here, resume=True, suite="flash_attention")


def test_a_journal_without_rows_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        interrupt(tmp_path / "r.jsonl", {})
    assert list(tmp_path.iterdir()) == []

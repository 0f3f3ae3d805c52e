"""Result files: JSON Lines, an environment first, then one row per case and provider."""

import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields, replace
from math import isfinite
from pathlib import Path
from typing import IO, Any

from attn_bench.case import CASE_FIELDS, Case
from attn_bench.errors import InputError
from attn_bench.files import appearing_whole

SCHEMA_VERSION = 1
STATES = ("ok", "wrong", "unsupported", "oom", "error")


@dataclass(frozen=True)
class Row:
    """What became of one provider on one case.

    Attributes:
        state: ``ok`` is checked and timed; ``wrong`` disagreed with float64; ``unsupported`` cannot
            do this case here; ``oom`` ran out of memory; ``error`` raised.  Only ``ok`` has times.
        detail: Why, for every state but ``ok``.
        checked: What the check compared.
        errors: Largest absolute error against float64 of o, dq, dk, dv.
        bounds: The error allowed for each of them.
        median_ms, p20_ms, p80_ms: Milliseconds of a run; half of the runs are below the median.
        first_call_ms: Wall time of the first forward and backward at this shape, with compiling.
        tflops: By `attn_bench.roofline.FLOP_CONVENTION`.
        peak_mib: Memory of one run beyond its inputs, in MiB.
        repetitions: Number of timed runs.
        is_performance: False on a CPU, whose times say nothing about a GPU kernel.
    """

    suite: str
    provider: str
    case: Case
    state: str
    detail: str = ""
    checked: str = ""
    errors: dict[str, float] = field(default_factory=dict)
    bounds: dict[str, float] = field(default_factory=dict)
    median_ms: float | None = None
    p20_ms: float | None = None
    p80_ms: float | None = None
    first_call_ms: float | None = None
    tflops: float | None = None
    peak_mib: float | None = None
    repetitions: int = 0
    is_performance: bool = False

    def __post_init__(self) -> None:
        if self.state not in STATES:
            msg = f"`state` must be one of {', '.join(STATES)}, got {self.state!r}."
            raise InputError(msg)
        if self.state != "ok" and self.median_ms is not None:
            msg = f"a row of state {self.state!r} must not carry a time."
            raise InputError(msg)

    def failed(self, state: str, detail: str) -> "Row":
        """Return this row in another state, without times."""
        return replace(
            self,
            state=state,
            detail=detail,
            median_ms=None,
            p20_ms=None,
            p80_ms=None,
            tflops=None,
            peak_mib=None,
            repetitions=0,
        )


@dataclass(frozen=True)
class Results:
    """A result file in memory."""

    environment: dict[str, Any]
    rows: tuple[Row, ...]


class RowWriter:
    """Writes a result file line by line: the environment at once, then rows."""

    def __init__(self, file: IO[str], environment: dict[str, Any]) -> None:
        self._file = file
        self._write({"kind": "environment", "schema": SCHEMA_VERSION, **environment})

    def write(self, row: Row) -> None:
        """Append one row."""
        # JSON has no infinity; an error that is not finite travels as a string
        errors = {name: e if isfinite(e) else str(e) for name, e in row.errors.items()}
        self._write({"kind": "row", **asdict(row), "errors": errors})

    def _write(self, record: dict[str, Any]) -> None:
        self._file.write(json.dumps(record, allow_nan=False) + "\n")


@contextmanager
def saving(path: Path | None, environment: dict[str, Any]) -> Iterator[Callable[[Row], None]]:
    """Yield what takes each row: the writer of the result file `path`, or nobody if it is None.

    The file appears only when the ``with`` block ends well.

    Raises:
        InputError: if `path` cannot be written; raised on entry, before anything is measured.
    """
    if path is None:
        yield lambda _: None
        return
    with appearing_whole(path) as file:
        yield RowWriter(file, environment).write


def read_results(path: Path) -> Results:
    """Read a result file.

    Raises:
        InputError: if there is no such file, or it is not a result file of this schema.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        msg = f"cannot read {path}: {getattr(error, 'strerror', None) or error}."
        raise InputError(msg) from error
    records = [_record(path, number, line) for number, line in enumerate(lines, 1)]
    if not records or records[0].get("kind") != "environment":
        msg = f"{path} is not a result file of attn-bench: its first line is no environment."
        raise InputError(msg)
    environment = dict(records[0])
    del environment["kind"]
    schema = environment.pop("schema", None)
    if schema != SCHEMA_VERSION:
        msg = f"{path} has schema {schema!r}; this attn-bench reads schema {SCHEMA_VERSION}."
        raise InputError(msg)
    return Results(environment, tuple(_rows(path, records[1:])))


def _record(path: Path, number: int, line: str) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        msg = f"{path} line {number} is not JSON ({error.msg}); is the file truncated?"
        raise InputError(msg) from error
    if not isinstance(record, dict):
        msg = f"{path} line {number} must be a JSON object, got {type(record).__name__}."
        raise InputError(msg)
    return record


def _rows(path: Path, records: Iterable[dict[str, Any]]) -> Iterable[Row]:
    known = {each.name for each in fields(Row)} | {"kind"}
    for number, record in enumerate(records, 2):
        case = record.get("case")
        if record.get("kind") != "row" or set(record) != known or not isinstance(case, dict):
            msg = f"{path} line {number} is not a row of schema {SCHEMA_VERSION}."
            raise InputError(msg)
        if set(case) != set(CASE_FIELDS):
            msg = f"{path} line {number}: a case has the fields {', '.join(CASE_FIELDS)}."
            raise InputError(msg)
        values = {name: record[name] for name in known - {"kind", "case", "errors"}}
        errors = {name: float(error) for name, error in record["errors"].items()}
        yield Row(case=Case(**case), errors=errors, **values)

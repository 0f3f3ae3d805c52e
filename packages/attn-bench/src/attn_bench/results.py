"""Result files: JSON Lines, an environment first, then one row per case and provider."""

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields, replace
from math import isfinite
from pathlib import Path
from typing import IO, Any

from attn_bench.case import CASE_FIELDS, Case
from attn_bench.errors import InputError
from attn_bench.files import appearing_whole

SCHEMA_VERSION = 3
STATES = ("ok", "unstable", "wrong", "unsupported", "oom", "error")
TIMED_STATES = ("ok", "unstable")
# what each schema added; a file of an earlier one lacks these and is read with their defaults
NEW_ROW_FIELDS = {
    2: {
        *("semantics", "predicted_mib", "tflops_unmasked", "gb_s", "roofline_share"),
        *("graph_ms", "cold_call_ms", "samples_ms", "note", "predicted_ms"),
    },
    3: {"clock_mhz", "celsius"},
}
NEW_CASE_FIELDS = {2: {"num_kv_heads", "window"}}


@dataclass(frozen=True)
class Row:
    """What became of one provider on one case.

    Attributes:
        state: ``ok`` is checked and timed; ``unstable`` too, but its times drifted, or the GPU's
            clock or temperature moved; ``wrong``
            disagreed with float64; ``unsupported`` cannot do this case here; ``oom`` ran out of
            memory, or would have; ``error`` raised.  Only the first two have times.
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
        semantics: What was computed: mask, alignment, scale, layout, whether repeats are equal.
        predicted_mib: What `attn_bench.memory` expected peak_mib to be.
        tflops_unmasked: By the other convention, which counts hidden pairs as work too.
        gb_s: Bytes of inputs and results over the median, in GB/s.
        roofline_share: The time that the measured ceilings of this device allow, over the median.
        graph_ms: Milliseconds of a replay in a CUDA graph, with a warm L2, for short forwards.
        cold_call_ms: Milliseconds of the first call in a new process with empty compiler caches.
        samples_ms: Up to 40 of the timed runs, in the order they ran.
        predicted_ms: Of a training step, what the attention's own times say that it should take.
        note: Anything else worth knowing, such as why there is no graph.
        clock_mhz, celsius: The lowest and highest clock and temperature of the GPU meanwhile.
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
    semantics: dict[str, Any] = field(default_factory=dict)
    predicted_mib: float | None = None
    tflops_unmasked: float | None = None
    gb_s: float | None = None
    roofline_share: float | None = None
    graph_ms: float | None = None
    cold_call_ms: float | None = None
    samples_ms: tuple[float, ...] = ()
    note: str = ""
    predicted_ms: float | None = None
    clock_mhz: tuple[int, int] | None = None
    celsius: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        if self.state not in STATES:
            msg = f"`state` must be one of {', '.join(STATES)}, got {self.state!r}."
            raise InputError(msg)
        if self.state not in TIMED_STATES and self.median_ms is not None:
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
            tflops_unmasked=None,
            gb_s=None,
            roofline_share=None,
            graph_ms=None,
            samples_ms=(),
            clock_mhz=None,
            celsius=None,
        )


@dataclass(frozen=True)
class Results:
    """A result file in memory."""

    environment: dict[str, Any]
    rows: tuple[Row, ...]


def exit_status(rows: Sequence[Row]) -> int:
    """Return 1 if any provider was wrong or failed; a refusal or a lack of memory is no failure."""
    return int(any(row.state in ("wrong", "error") for row in rows))


class RowWriter:
    """Writes a result file line by line: the environment at once, then rows.

    Without an environment it goes on with a file that has one.
    """

    def __init__(self, file: IO[str], environment: dict[str, Any] | None) -> None:
        self._file = file
        if environment is not None:
            self._write({"kind": "environment", "schema": SCHEMA_VERSION, **environment})

    def write(self, row: Row) -> None:
        """Append one row."""
        # JSON has no infinity; an error that is not finite travels as a string
        errors = {name: e if isfinite(e) else str(e) for name, e in row.errors.items()}
        self._write({"kind": "row", **asdict(row), "errors": errors})

    def _write(self, record: dict[str, Any]) -> None:
        self._file.write(json.dumps(record, allow_nan=False) + "\n")
        self._file.flush()


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


def read_results(path: Path, *, is_partial: bool = False) -> Results:
    """Read a result file.

    Args:
        path: The file.
        is_partial: Whether its last line may be cut off, as an interruption leaves it; it is then
            left out.

    Raises:
        InputError: if there is no such file, or it is not a result file of a known schema.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    except (OSError, UnicodeDecodeError) as error:
        msg = f"cannot read {path}: {getattr(error, 'strerror', None) or error}."
        raise InputError(msg) from error
    if is_partial and lines and not lines[-1].endswith("\n"):
        del lines[-1]
    records = [_record(path, number, line) for number, line in enumerate(lines, 1)]
    if not records or records[0].get("kind") != "environment":
        msg = f"{path} is not a result file of attn-bench: its first line is no environment."
        raise InputError(msg)
    environment = dict(records[0])
    del environment["kind"]
    schema = environment.pop("schema", None)
    if schema not in range(1, SCHEMA_VERSION + 1):
        msg = f"{path} has schema {schema!r}; this attn-bench reads schemas 1 to {SCHEMA_VERSION}."
        raise InputError(msg)
    return Results(environment, tuple(_rows(path, records[1:], schema)))


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


def _rows(path: Path, records: Iterable[dict[str, Any]], schema: int) -> Iterable[Row]:
    known = {each.name for each in fields(Row)} | {"kind"}
    case_fields = set(CASE_FIELDS)
    for later in range(schema + 1, SCHEMA_VERSION + 1):
        known -= NEW_ROW_FIELDS.get(later, set())
        case_fields -= NEW_CASE_FIELDS.get(later, set())
    for number, record in enumerate(records, 2):
        case = record.get("case")
        if record.get("kind") != "row" or set(record) != known or not isinstance(case, dict):
            msg = f"{path} line {number} is not a row of schema {schema}."
            raise InputError(msg)
        if set(case) != case_fields:
            msg = f"{path} line {number}: a case has the fields {', '.join(sorted(case_fields))}."
            raise InputError(msg)
        values = {name: record[name] for name in known - {"kind", "case", "errors"}}
        for name in ("samples_ms", "clock_mhz", "celsius"):
            if isinstance(values.get(name), list):
                values[name] = tuple(values[name])
        errors = {name: float(error) for name, error in record["errors"].items()}
        yield Row(case=Case(**case), errors=errors, **values)

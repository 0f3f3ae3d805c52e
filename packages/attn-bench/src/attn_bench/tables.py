"""Rows as text: a table for the terminal, and a Markdown table for a README."""

import csv
import io
import shutil
import sys
from collections.abc import Iterable, Sequence

from tabulate import tabulate

from attn_bench.case import CASE_FIELDS, Case, heads, lengths, mask_name
from attn_bench.environment import summarize
from attn_bench.metrics import METRICS, Metric
from attn_bench.results import Results, Row

NOT_PERFORMANCE = "CPU: not a performance figure"


def terminal_table(rows: Sequence[Row], baseline: str, width: int | None = None) -> str:
    """Return every row: time, rate, memory, error and ratio to the baseline; * marks the fastest.

    The ratio is the baseline's time over the row's, so more than 1 is faster than the baseline.
    """
    references = {row.case: row.median_ms for row in rows if row.provider == baseline}
    best: dict[Case, float] = {}
    for row in rows:
        if row.median_ms is not None:
            best[row.case] = min(row.median_ms, best.get(row.case, row.median_ms))
    body = [
        _cells(row, references.get(row.case), is_first, is_best=row.median_ms == best.get(row.case))
        for row, is_first in _grouped(rows)
    ]
    headers = [
        *("case", "provider", "median ms", "p20-p80", "TFLOP/s", "GB/s"),
        *("roofline", "peak MiB", "error (allowed)", f"x {baseline}", "first call s"),
    ]
    is_decoding = all(row.case.seqlen_q == 1 for row in rows)
    expendable = ["first call s", "p20-p80", "roofline", "peak MiB", "error (allowed)"]
    expendable.append("TFLOP/s" if is_decoding else "GB/s")
    return explained(fitted(body, headers, expendable, width), rows)


def explained(table: str, rows: Sequence[Row]) -> str:
    """Return a table below a warning if it is a CPU's, and above the reasons and notes of rows."""
    is_performance = any(row.is_performance for row in rows)
    return "\n".join([*([] if is_performance else [NOT_PERFORMANCE]), table, *reasons(rows)])


def terminal_width() -> int | None:
    """Return the columns of the terminal; None if the output goes elsewhere."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def fitted(
    body: Sequence[Sequence[str]],
    headers: Sequence[str],
    expendable: Sequence[str],
    width: int | None,
    *,
    stralign: str = "right",
) -> str:
    """Return a table; where it is wider than `width`, without some columns, and a line on them.

    Columns are given up in the order of `expendable`, and no others.
    """
    left_out: list[str] = []
    while True:
        kept = [i for i, name in enumerate(headers) if name not in left_out]
        text = tabulate(
            [[line[i] for i in kept] for line in body],
            [headers[i] for i in kept],
            tablefmt="simple",
            disable_numparse=True,
            stralign=stralign,
        )
        widest = max(map(len, text.splitlines()))
        if width is None or widest <= width or len(left_out) == len(expendable):
            break
        left_out.append(expendable[len(left_out)])
    if not left_out:
        return text
    return f"{text}\nleft out in {width} columns: {', '.join(left_out)}"


def reasons(rows: Iterable[Row]) -> list[str]:
    """Return, once each, why a row is not ``ok``, and notes on it."""
    rows = list(rows)
    texts = [f"{row.provider}: {row.state}: {row.detail}" for row in rows if row.detail]
    notes = [f"{row.provider}: {row.note}" for row in rows if row.note]
    return list(dict.fromkeys([*texts, *notes]))


def _grouped(rows: Sequence[Row]) -> Iterable[tuple[Row, bool]]:
    """Yield each row and whether it is the first one of its case."""
    previous: Case | None = None
    for row in rows:
        yield row, row.case != previous
        previous = row.case


def _cells(row: Row, reference_ms: float | None, is_first: bool, *, is_best: bool) -> list[str]:
    mark = "~" if row.state == "unstable" else ""
    name = [str(row.case) if is_first else "", f"{mark}{row.provider}"]
    if row.median_ms is None:
        return [*name, row.state, "", "", "", "", "", worst_error(row), "", ""]
    peak = row.peak_mib or 0.0
    ratio = f"{reference_ms / row.median_ms:.2f}" if reference_ms is not None else ""
    return [
        *name,
        f"{'* ' if is_best else ''}{row.median_ms:.3f}",
        f"{row.p20_ms:.3f}-{row.p80_ms:.3f}",
        f"{row.tflops:.3g}",
        "" if row.gb_s is None else f"{row.gb_s:.3g}",
        "" if row.roofline_share is None else f"{row.roofline_share:.0%}",
        f"{peak:.3g}" if peak < 1000 else f"{peak:.0f}",
        worst_error(row),
        ratio,
        f"{(row.first_call_ms or 0.0) / 1e3:.2f}",
    ]


def worst_error(row: Row) -> str:
    """Return the error that is nearest to its bound, as ``dq 1.2e-06 (3.0e-06)``."""
    if not row.errors:
        return ""
    name = max(row.errors, key=lambda each: row.errors[each] / max(row.bounds[each], 1e-300))
    return f"{name} {row.errors[name]:.1e} ({row.bounds[name]:.1e})"


def markdown(results: Results, metric: Metric = METRICS["tflops"]) -> str:
    """Return a Markdown table per mode: a line per shape, a column per provider, the best bold."""
    sections = []
    for mode in dict.fromkeys(row.case.mode for row in results.rows):
        rows = [row for row in results.rows if row.case.mode == mode]
        sections.append(f"`{mode}`, {metric.label}:\n\n{_pivot(rows, metric)}")
    return headed(results, sections)


def headed(results: Results, sections: Sequence[str]) -> str:
    """Return Markdown sections below a line that says where they were measured."""
    head = [f"{summarize(results.environment)}."]
    if not any(row.is_performance for row in results.rows):
        head.append(f"**{NOT_PERFORMANCE}.**")
    return "\n\n".join([*head, *sections]) + "\n"


def as_csv(results: Results) -> str:
    """Return every row as comma-separated values: case, state, figures, errors and the device."""
    columns = [
        *("suite", "provider", *CASE_FIELDS, "state", "detail"),
        *("median_ms", "p20_ms", "p80_ms", "tflops", "tflops_unmasked", "gb_s", "roofline_share"),
        *("peak_mib", "predicted_mib", "graph_ms", "first_call_ms", "cold_call_ms"),
        *("repetitions", "is_performance"),
        *(f"{kind}_{name}" for name in ("o", "dq", "dk", "dv") for kind in ("error", "allowed")),
        *("device", "torch", "commit"),
    ]
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    for row in results.rows:
        errors = {f"error_{name}": value for name, value in row.errors.items()}
        bounds = {f"allowed_{name}": value for name, value in row.bounds.items()}
        writer.writerow({**results.environment, **vars(row), **vars(row.case), **errors, **bounds})
    return text.getvalue()


def _pivot(rows: Sequence[Row], metric: Metric) -> str:
    providers = list(dict.fromkeys(row.provider for row in rows))
    cells = {(row.case, row.provider): row for row in rows}
    body = []
    for case in dict.fromkeys(row.case for row in rows):
        line = [cells.get((case, provider)) for provider in providers]
        body.append([*_shape_cells(case), *_metric_cells(line, metric)])
    headers = ["dtype", "d", "mask", "n", "batch x heads", *providers]
    alignment = ["left", "right", "left", "right", "right", *["right"] * len(providers)]
    return tabulate(body, headers, tablefmt="github", disable_numparse=True, colalign=alignment)


def _shape_cells(case: Case) -> list[str]:
    batch = f"{case.batch} x {heads(case)}"
    return [case.dtype, str(case.head_dim), mask_name(case), lengths(case), batch]


def _metric_cells(line: Sequence[Row | None], metric: Metric) -> list[str]:
    values = [None if row is None else metric.value(row) for row in line]
    known = [value for value in values if value is not None]
    best = metric.best(known) if known else None
    cells = []
    for row, value in zip(line, values, strict=True):
        text = "" if row is None else metric.text(row)
        if row is not None and value is not None:
            text = f"**{text}**" if value == best else text
            text = f"~{text}" if row.state == "unstable" else text
        cells.append(text)
    return cells

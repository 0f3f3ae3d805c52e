"""One HTML page of a result file: tables, and plots that answer to the mouse; no network needed."""

import json
from collections.abc import Callable, Iterable
from dataclasses import asdict
from html import escape
from importlib.resources import files
from math import isfinite
from typing import Any

from attn_bench.case import Case
from attn_bench.environment import summarize
from attn_bench.errors import InputError
from attn_bench.metrics import METRICS
from attn_bench.results import Results, Row
from attn_bench.roofline import FLOP_CONVENTION
from attn_bench.series import Panel, all_providers, ceiling_of, panels
from attn_bench.tables import NOT_PERFORMANCE, reasons, worst_error

DRAWN = [METRICS[name] for name in ("tflops", "gb_s", "ms", "memory", "error", "roofline")]


def report(results: Results) -> str:
    """Return the page.

    Raises:
        InputError: if nothing was timed.
    """
    drawn = panels(results.rows)
    if not drawn:
        raise InputError("the result file holds no timed rows.")
    environment = results.environment
    warning = ""
    if not any(row.is_performance for panel in drawn for row in panel.rows):
        warning = f'<p class="warning">{escape(NOT_PERFORMANCE)}</p>'
    page = files("attn_bench").joinpath("page", "report.html").read_text(encoding="utf-8")
    parts = {
        "TITLE": escape(f"attn-bench on {environment.get('device', 'an unknown device')}"),
        "SUMMARY": escape(summarize(environment)),
        "CONVENTION": escape(f"FLOPs: {environment.get('flop_convention', FLOP_CONVENTION)}"),
        "WARNING": warning,
        "DATA": script_json(_data(drawn, environment)),
        "TABLES": "\n".join(map(_table, drawn)),
        "REASONS": _reasons(row for panel in drawn for row in panel.rows),
        "ENVIRONMENT": _environment_table(environment),
    }
    for name, text in parts.items():
        page = page.replace(f"<!-- {name} -->", text)
    return page


def script_json(data: Any) -> str:
    """Return JSON that no text in it can break out of a script element."""
    return json.dumps(data, allow_nan=False).replace("<", "\\u003c")


def _data(drawn: Iterable[Panel], environment: dict[str, Any]) -> dict[str, Any]:
    drawn = list(drawn)
    # what reads a cache is measured by its traffic
    is_decoding = all(row.case.seqlen_q == 1 for panel in drawn for row in panel.rows)
    return {
        "first": "gb_s" if is_decoding else DRAWN[0].name,
        "metrics": [{"name": each.name, "label": each.label, "log": each.is_log} for each in DRAWN],
        "providers": all_providers(drawn),
        "panels": [
            {
                "title": panel.title,
                "ceilings": _ceilings(panel, environment),
                "points": [_point(row) for row in panel.rows],
            }
            for panel in drawn
        ],
    }


def _ceilings(panel: Panel, environment: dict[str, Any]) -> dict[str, Any]:
    found = {metric.name: ceiling_of(panel, metric, environment) for metric in DRAWN}
    return {name: asdict(ceiling) for name, ceiling in found.items() if ceiling is not None}


def _point(row: Row) -> dict[str, Any]:
    values = {metric.name: metric.value(row) for metric in DRAWN}
    finite = {
        name: value for name, value in values.items() if value is not None and isfinite(value)
    }
    return {"n": row.case.seqlen_k, "provider": row.provider, "state": row.state, **finite}


def _milliseconds(row: Row) -> str:
    if row.median_ms is None:
        return row.state
    return f"{'~' if row.state == 'unstable' else ''}{_number(row.median_ms)}"


def _spread(row: Row) -> str:
    return "" if row.p20_ms is None else f"{_number(row.p20_ms)}-{_number(row.p80_ms)}"


def _seconds(milliseconds: float | None) -> str:
    return "" if milliseconds is None else f"{milliseconds / 1e3:.2f}"


COLUMNS: dict[str, Callable[[Row], str]] = {
    "n": lambda row: str(row.case.seqlen_k),
    "batch": lambda row: str(row.case.batch),
    "provider": lambda row: row.provider,
    "median ms": _milliseconds,
    "p20-p80": _spread,
    "predicted ms": lambda row: _number(row.predicted_ms),
    "TFLOP/s": lambda row: _number(row.tflops),
    "GB/s": lambda row: _number(row.gb_s),
    "roofline": lambda row: "" if row.roofline_share is None else f"{row.roofline_share:.0%}",
    "peak MiB": lambda row: _number(row.peak_mib),
    "predicted MiB": lambda row: _number(row.predicted_mib),
    "graph ms": lambda row: _number(row.graph_ms),
    "first call s": lambda row: _seconds(row.first_call_ms),
    "cold call s": lambda row: _seconds(row.cold_call_ms),
    "error (allowed)": worst_error,
    "checked": lambda row: row.checked,
}


def _table(panel: Panel) -> str:
    """Return the rows of a panel, without the columns that are empty."""
    best: dict[Case, float] = {}
    for row in panel.rows:
        if row.median_ms is not None:
            best[row.case] = min(row.median_ms, best.get(row.case, row.median_ms))
    columns = {
        name: cells
        for name, cell_of in COLUMNS.items()
        if any(cells := [cell_of(row) for row in panel.rows])
    }
    head = "".join(f"<th>{escape(name)}</th>" for name in columns)
    lines = []
    for row, texts in zip(panel.rows, zip(*columns.values(), strict=True), strict=True):
        is_best = row.median_ms is not None and row.median_ms == best[row.case]
        line = "".join(f"<td>{escape(text)}</td>" for text in texts)
        lines.append(f'<tr class="{row.state}{" best" if is_best else ""}">{line}</tr>')
    return (
        f'<details open><summary>{escape(panel.title)}</summary><div class="scroll">'
        f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(lines)}</tbody></table>"
        "</div></details>"
    )


def _number(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:.4g}" if value < 1000 else f"{value:,.0f}"


def _reasons(rows: Iterable[Row]) -> str:
    texts = reasons(rows)
    if not texts:
        return "<p>Every row was checked and timed.</p>"
    return "<ul>" + "".join(f"<li>{escape(text)}</li>" for text in texts) + "</ul>"


def _environment_table(environment: dict[str, Any]) -> str:
    lines = (
        f"<tr><th>{escape(name)}</th><td>{escape(json.dumps(value).strip(chr(34)))}</td></tr>"
        for name, value in environment.items()
    )
    return f'<table class="environment"><tbody>{"".join(lines)}</tbody></table>'

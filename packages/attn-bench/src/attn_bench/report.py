"""One HTML page of a result file: tables, and plots that answer to the mouse; no network needed."""

import json
from collections.abc import Iterable
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
from attn_bench.series import Panel, all_providers, panels
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
    ceilings = environment.get("ceilings", {}).get("matmul_tflops", {})
    return {
        "metrics": [{"name": each.name, "label": each.label, "log": each.is_log} for each in DRAWN],
        "providers": all_providers(drawn),
        "panels": [
            {
                "title": panel.title,
                "ceiling": ceilings.get(panel.rows[0].case.dtype),
                "points": [_point(row) for row in panel.rows],
            }
            for panel in drawn
        ],
    }


def _point(row: Row) -> dict[str, Any]:
    values = {metric.name: metric.value(row) for metric in DRAWN}
    finite = {
        name: value for name, value in values.items() if value is not None and isfinite(value)
    }
    return {"n": row.case.seqlen_k, "provider": row.provider, "state": row.state, **finite}


COLUMNS = (
    *("n", "batch", "provider", "median ms", "p20-p80", "TFLOP/s", "roofline"),
    *("peak MiB", "predicted", "graph ms", "first call s", "error (allowed)", "checked"),
)


def _table(panel: Panel) -> str:
    best: dict[Case, float] = {}
    for row in panel.rows:
        if row.median_ms is not None:
            best[row.case] = min(row.median_ms, best.get(row.case, row.median_ms))
    head = "".join(f"<th>{escape(name)}</th>" for name in COLUMNS)
    lines = []
    for row in panel.rows:
        is_best = row.median_ms is not None and row.median_ms == best[row.case]
        cells = "".join(f"<td>{escape(cell)}</td>" for cell in _cells(row))
        lines.append(f'<tr class="{row.state}{" best" if is_best else ""}">{cells}</tr>')
    return (
        f'<details open><summary>{escape(panel.title)}</summary><div class="scroll">'
        f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(lines)}</tbody></table>"
        "</div></details>"
    )


def _cells(row: Row) -> list[str]:
    first = [str(row.case.seqlen_k), str(row.case.batch), row.provider]
    if row.median_ms is None:
        return [*first, row.state, *[""] * 7, worst_error(row), row.checked]
    first_call = None if row.first_call_ms is None else row.first_call_ms / 1e3
    share = row.roofline_share
    return [
        *first,
        f"{'~' if row.state == 'unstable' else ''}{row.median_ms:.4g}",
        f"{row.p20_ms:.4g}-{row.p80_ms:.4g}",
        _number(row.tflops),
        "" if share is None else f"{share:.0%}",
        *map(_number, (row.peak_mib, row.predicted_mib, row.graph_ms, first_call)),
        worst_error(row),
        row.checked,
    ]


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


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

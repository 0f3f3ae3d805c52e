"""Rows as curves over the length: what plots and the report draw."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from attn_bench.case import Case, heads, mask_name
from attn_bench.metrics import Metric
from attn_bench.results import Row


@dataclass(frozen=True)
class Panel:
    """Curves that belong into one plot: everything but the length and the provider is the same."""

    title: str
    mode: str
    rows: tuple[Row, ...]

    @property
    def providers(self) -> list[str]:
        """Names, in the order of the file."""
        return list(dict.fromkeys(row.provider for row in self.rows))

    def curve(self, provider: str, metric: Metric) -> list[tuple[int, float]]:
        """Return (n, value) of one provider, by n."""
        points = [
            (row.case.seqlen_k, value)
            for row in self.rows
            if row.provider == provider and (value := metric.value(row)) is not None
        ]
        return sorted(points)


@dataclass(frozen=True)
class Ceiling:
    """What a quantity cannot exceed, and whether it is near enough to be drawn."""

    value: float
    label: str
    is_near: bool


# a ceiling that is farther above the curves than this would press them flat
NEAR = 4.0


def ceiling_of(panel: Panel, metric: Metric, environment: Mapping[str, Any]) -> Ceiling | None:
    """Return the ceiling of a metric that goes with a panel, None if there is none."""
    measured = environment.get("ceilings", {})
    dtype = panel.rows[0].case.dtype
    value, label = {
        "tflops": (measured.get("matmul_tflops", {}).get(dtype), "measured matmul"),
        "gb_s": (measured.get("copy_gb_s"), "measured copy"),
        "error": (1.0, "allowed"),
    }.get(metric.name, (None, ""))
    if value is None:
        return None
    highest = max((metric.value(row) or 0.0 for row in panel.rows), default=0.0)
    return Ceiling(value, label, metric.name == "error" or value <= NEAR * highest)


def panels(rows: Sequence[Row]) -> list[Panel]:
    """Return the rows that were timed, or tried to be, as panels in the order of the file.

    The length is what changes along a curve, and with it the batch, since a grid may keep their
    product; where a length has several batches, each has panels of its own.
    """
    timed_suites = {row.suite for row in rows if row.median_ms is not None}
    groups: dict[tuple[str, Case], list[Row]] = {}
    for row in rows:
        if row.suite in timed_suites:
            groups.setdefault((row.suite, _fixed(row.case)), []).append(row)
    return [
        Panel(panel_title(suite, case, batch), case.mode, tuple(own))
        for (suite, case), group in groups.items()
        for batch, own in _by_batch(group)
    ]


def _by_batch(rows: Sequence[Row]) -> list[tuple[str, Sequence[Row]]]:
    """Return the rows of each batch with its name, or all if the batch follows from the length."""
    batches = list(dict.fromkeys(row.case.batch for row in rows))
    shapes = {(row.case.seqlen_k, row.case.batch) for row in rows}
    if len(batches) > 1 and len(shapes) == len({length for length, _ in shapes}):
        return [("", rows)]
    return [(f", b {n}", [row for row in rows if row.case.batch == n]) for n in batches]


def _fixed(case: Case) -> Case:
    """Return a case with that set to 1 which may change along a curve."""
    is_square = case.seqlen_q == case.seqlen_k
    return replace(case, batch=1, seqlen_k=1, seqlen_q=1 if is_square else case.seqlen_q)


def panel_title(suite: str, case: Case, batch: str) -> str:
    """Return what all rows of a panel share."""
    queries = "" if case.seqlen_q == 1 else f", {case.seqlen_q} queries"
    return (
        f"{suite.replace('_', ' ')}: {case.dtype}{batch}, h {heads(case)}, d {case.head_dim}, "
        f"{mask_name(case)}, {case.mode}{queries}"
    )


def all_providers(of: Sequence[Panel]) -> list[str]:
    """Return the providers of all panels; their order gives each its colour everywhere."""
    return list(dict.fromkeys(name for panel in of for name in panel.providers))

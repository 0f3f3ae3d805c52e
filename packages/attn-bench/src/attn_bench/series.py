"""Rows as curves over the length: what plots and the report draw."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from attn_bench.case import Case, mask_name
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


def panels(rows: Sequence[Row]) -> list[Panel]:
    """Return the rows that were timed, or tried to be, as panels in the order of the file.

    Length and batch are what changes along a curve, since a grid may keep their product.
    """
    timed_suites = {row.suite for row in rows if row.median_ms is not None}
    groups: dict[tuple[str, Case], list[Row]] = {}
    for row in rows:
        if row.suite in timed_suites:
            is_square = row.case.seqlen_q == row.case.seqlen_k
            fixed = replace(row.case, batch=1, seqlen_q=1 if is_square else row.case.seqlen_q)
            groups.setdefault((row.suite, replace(fixed, seqlen_k=1)), []).append(row)
    return [
        Panel(panel_title(suite, case), case.mode, tuple(group))
        for (suite, case), group in groups.items()
    ]


def panel_title(suite: str, case: Case) -> str:
    """Return what all rows of a panel share."""
    queries = "" if case.seqlen_q == 1 else f", {case.seqlen_q} queries"
    return (
        f"{suite.replace('_', ' ')}: {case.dtype}, d {case.head_dim}, {mask_name(case)}, "
        f"{case.mode}{queries}"
    )


def all_providers(of: Sequence[Panel]) -> list[str]:
    """Return the providers of all panels; their order gives each its colour everywhere."""
    return list(dict.fromkeys(name for panel in of for name in panel.providers))

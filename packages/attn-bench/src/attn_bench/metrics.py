"""The quantities that tables, plots and the report take from a row."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from attn_bench.results import Row


@dataclass(frozen=True)
class Metric:
    """One quantity.

    Attributes:
        label: Its heading, with the unit.
        value: Takes it from a row, None where the row has none.
        form: How a number of it is written.
        best: Picks the best of several values: ``max`` or ``min``.
        is_log: Whether the axis of its plot is logarithmic.
        remark: What stands behind the number in a table.
    """

    name: str
    label: str
    value: Callable[[Row], float | None]
    form: str
    best: Callable[[Sequence[float]], float]
    is_log: bool = False
    remark: Callable[[Row], str] = lambda _: ""

    def text(self, row: Row) -> str:
        """Return the value as a table shows it, or the row's state if there is none."""
        value = self.value(row)
        return row.state if value is None else f"{value:{self.form}}{self.remark(row)}"


def error_share(row: Row) -> float | None:
    """Return the largest error in units of what is allowed: beyond 1 is wrong."""
    shares = [error / max(row.bounds[name], 1e-300) for name, error in row.errors.items()]
    return max(shares, default=None)


def _prediction(row: Row) -> str:
    return "" if row.predicted_ms is None else f" ({row.predicted_ms:.1f})"


METRICS = {
    each.name: each
    for each in (
        Metric("tflops", "TFLOP/s", lambda row: row.tflops, ".0f", max),
        Metric(
            "tflops_unmasked",
            "TFLOP/s, hidden pairs counted too",
            lambda row: row.tflops_unmasked,
            ".0f",
            max,
        ),
        Metric("gb_s", "GB/s", lambda row: row.gb_s, ".0f", max),
        Metric("ms", "median ms", lambda row: row.median_ms, ".3g", min, is_log=True),
        Metric(
            "memory",
            "peak MiB beyond the inputs",
            lambda row: row.peak_mib,
            ".0f",
            min,
            is_log=True,
        ),
        Metric("error", "largest error / allowed error", error_share, ".2f", min),
        Metric(
            "roofline", "share of the measured ceilings", lambda r: r.roofline_share, ".0%", max
        ),
        Metric(
            "step", "ms a step (predicted)", lambda r: r.median_ms, ".1f", min, remark=_prediction
        ),
        Metric(
            "cold",
            "seconds of a first call from empty caches",
            lambda row: None if row.cold_call_ms is None else row.cold_call_ms / 1e3,
            ".1f",
            min,
        ),
    )
}

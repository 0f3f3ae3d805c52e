"""A row's times, and when they are to be trusted."""

from dataclasses import replace

from attn_bench.gauge import Weather
from attn_bench.results import Row
from attn_bench.timing import Timing

# a row is unstable if its rounds' medians differ by more than this factor
STEADY = 1.15


def with_times(row: Row, timing: Timing) -> Row:
    """Return the row with its times."""
    return replace(
        row,
        median_ms=timing.median_ms,
        p20_ms=timing.p20_ms,
        p80_ms=timing.p80_ms,
        repetitions=timing.repetitions,
        samples_ms=timing.samples,
    )


def with_stability(row: Row, drift: float, weather: Weather | None) -> Row:
    """Return the row as ``ok`` or, with what moved, ``unstable``; on a CPU always the first."""
    reasons = [f"the rounds' medians differ by {drift - 1:.0%}"] if drift > STEADY else []
    if weather is not None:
        row = replace(row, clock_mhz=weather.clock_mhz, celsius=weather.celsius)
        reasons += filter(None, [weather.why_unstable])
    if not row.is_performance or not reasons:
        return replace(row, state="ok")
    return replace(row, state="unstable", detail=", ".join(reasons))

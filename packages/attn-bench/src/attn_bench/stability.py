"""When a row's times are to be trusted."""

from dataclasses import replace

from attn_bench.gauge import Weather
from attn_bench.results import Row

# a row is unstable if its rounds' medians differ by more than this factor
STEADY = 1.15


def with_stability(row: Row, drift: float, weather: Weather | None) -> Row:
    """Return the row as ``ok`` or, with what moved, ``unstable``; on a CPU always the first."""
    reasons = [f"the rounds' medians differ by {drift - 1:.0%}"] if drift > STEADY else []
    if weather is not None:
        row = replace(row, clock_mhz=weather.clock_mhz, celsius=weather.celsius)
        reasons += filter(None, [weather.why_unstable])
    if not row.is_performance or not reasons:
        return replace(row, state="ok")
    return replace(row, state="unstable", detail=", ".join(reasons))

"""Two result files against each other: the ratio of times, how sure it is, and a verdict."""

import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from tabulate import tabulate

from attn_bench.case import Case
from attn_bench.errors import InputError
from attn_bench.results import Results, Row

RESAMPLES = 1000
CONFIDENCE = 0.95

Key = tuple[str, str, Case]


@dataclass(frozen=True)
class Ratio:
    """The median time of B over that of A, and its confidence interval; above 1 B is slower."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Difference:
    """What became of one provider on one case between two runs.

    `verdict` is ``slower``, ``faster`` or ``same``; ``lost`` if A has a time and B has none,
    ``found`` for the reverse; ``not comparable`` if the two computed different things.
    """

    key: Key
    verdict: str
    ratio: Ratio | None = None
    detail: str = ""

    @property
    def is_regression(self) -> bool:
        """True if B is worse than A."""
        return self.verdict in ("slower", "lost")


def compare(a: Results, b: Results, threshold: float) -> list[Difference]:
    """Compare every row that both files have.

    A row is slower or faster if the whole confidence interval lies beyond 1 by `threshold`.

    Raises:
        InputError: if the files share no row.
    """
    rows_a, rows_b = keyed(a.rows), keyed(b.rows)
    shared = [key for key in rows_a if key in rows_b]
    if not shared:
        raise InputError("the two files share no row: same suite, provider and case.")
    return [difference(key, rows_a[key], rows_b[key], threshold) for key in shared]


def keyed(rows: Sequence[Row]) -> dict[Key, Row]:
    """Return the rows by what identifies them in a file."""
    return {(row.suite, row.provider, row.case): row for row in rows}


def difference(key: Key, a: Row, b: Row, threshold: float) -> Difference:
    """Compare two rows of the same suite, provider and case."""
    if a.semantics and b.semantics and a.semantics != b.semantics:
        names = [name for name in a.semantics if a.semantics[name] != b.semantics.get(name)]
        texts = [f"{name} {a.semantics[name]!r} and {b.semantics.get(name)!r}" for name in names]
        return Difference(key, "not comparable", detail="; ".join(texts))
    if a.median_ms is None or b.median_ms is None:
        if a.median_ms is not None:
            return Difference(key, "lost", detail=f"{b.state}: {b.detail}")
        verdict = "same" if b.median_ms is None else "found"
        return Difference(key, verdict, detail=f"{a.state} in A, {b.state} in B")
    ratio = ratio_of(a, b)
    if ratio.low > 1 + threshold:
        return Difference(key, "slower", ratio)
    if ratio.high < 1 / (1 + threshold):
        return Difference(key, "faster", ratio)
    return Difference(key, "same", ratio)


def ratio_of(a: Row, b: Row) -> Ratio:
    """Return the ratio of the medians of two timed rows.

    The interval is a percentile bootstrap over the samples.  Rows without samples, from a file of
    schema 1, get the widest ratio that their p20 and p80 allow.
    """
    if a.median_ms is None or b.median_ms is None:
        raise ValueError("both rows must be timed.")
    value = b.median_ms / a.median_ms
    if a.samples_ms and b.samples_ms:
        low, high = bootstrap(a.samples_ms, b.samples_ms)
        return Ratio(value, min(low, value), max(high, value))
    low = (b.p20_ms or b.median_ms) / (a.p80_ms or a.median_ms)
    high = (b.p80_ms or b.median_ms) / (a.p20_ms or a.median_ms)
    return Ratio(value, low, high)


def bootstrap(a: Sequence[float], b: Sequence[float], seed: int = 0) -> tuple[float, float]:
    """Return the confidence interval of median(b) / median(a), by resampling both."""
    generator = random.Random(seed)
    ratios = sorted(
        statistics.median(generator.choices(b, k=len(b)))
        / statistics.median(generator.choices(a, k=len(a)))
        for _ in range(RESAMPLES)
    )
    tail = round((1 - CONFIDENCE) / 2 * RESAMPLES)
    return ratios[tail], ratios[-1 - tail]


def comparison_table(differences: Sequence[Difference]) -> str:
    """Return a line per row, and the geometric mean of the ratios per provider."""
    body = []
    for each in differences:
        suite, provider, case = each.key
        ratio = each.ratio
        interval = "" if ratio is None else f"{ratio.low:.3f}-{ratio.high:.3f}"
        value = "" if ratio is None else f"{ratio.value:.3f}"
        body.append([suite, str(case), provider, value, interval, each.verdict, each.detail])
    headers = ["suite", "case", "provider", "time B / A", f"{CONFIDENCE:.0%}", "verdict", ""]
    table = tabulate(body, headers, disable_numparse=True)
    means = [
        f"{name}: geometric mean {statistics.geometric_mean(ratios):.3f} over {len(ratios)}"
        for name, ratios in ratios_by_provider(differences).items()
    ]
    return "\n".join([table, "", *means])


def ratios_by_provider(differences: Sequence[Difference]) -> dict[str, list[float]]:
    """Return the ratios of each provider that was timed in both files."""
    ratios: dict[str, list[float]] = {}
    for each in differences:
        if each.ratio is not None:
            ratios.setdefault(each.key[1], []).append(each.ratio.value)
    return ratios

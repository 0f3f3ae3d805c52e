"""How providers stand against named peers: the ratio to the best of them, at each case."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import geometric_mean

from tabulate import tabulate

from attn_bench.case import Case, check_name, lengths, mask_name
from attn_bench.errors import InputError
from attn_bench.results import Row


@dataclass(frozen=True)
class Standing:
    """One provider in one mode, at one dtype and head dim or (None) over all of them.

    Attributes:
        ratios: The best peer's time over the provider's, by case: above 1 the provider is faster.
        cases: The cases that have the time of a peer; the provider may lack some.
    """

    provider: str
    mode: str
    group: tuple[str, int] | None
    ratios: dict[Case, float]
    cases: list[Case]

    @property
    def mean(self) -> float:
        """The geometric mean of the ratios."""
        return geometric_mean(self.ratios.values())

    @property
    def worst(self) -> Case:
        """The case with the smallest ratio."""
        return min(self.ratios, key=lambda case: self.ratios[case])


def standings(
    rows: Sequence[Row], against: Sequence[str], providers: Sequence[str] | None = None
) -> list[Standing]:
    """Return how each provider (default: all that are no peers) stands against the best peer.

    Raises:
        InputError: if a name is not in the rows, or no case has times of a peer and a provider.
    """
    names = list(dict.fromkeys(row.provider for row in rows))
    chosen = list(providers or (name for name in names if name not in against))
    for name in [*against, *chosen]:
        check_name("provider", name, names)
    times = {(row.provider, row.case): row.median_ms for row in rows if row.median_ms is not None}
    best: dict[Case, float] = {}
    for (provider, case), milliseconds in times.items():
        if provider in against:
            best[case] = min(milliseconds, best.get(case, milliseconds))
    ratios = {name: _ratios(name, times, best) for name in chosen}
    found = [
        Standing(name, mode, group, {c: ratios[name][c] for c in cases if c in ratios[name]}, cases)
        for mode, group, cases in _groups(best)
        for name in chosen
    ]
    found = [each for each in found if each.ratios]
    if not found:
        msg = f"no case has a time of {' or '.join(against)} and of {' or '.join(chosen)}."
        raise InputError(msg)
    return found


def _ratios(
    provider: str, times: Mapping[tuple[str, Case], float], best: Mapping[Case, float]
) -> dict[Case, float]:
    """Return the best peer's time over the provider's, where both were timed."""
    return {
        case: milliseconds / times[provider, case]
        for case, milliseconds in best.items()
        if (provider, case) in times
    }


def _groups(cases: Iterable[Case]) -> Iterator[tuple[str, tuple[str, int] | None, list[Case]]]:
    """Yield (mode, group, cases) for each dtype and head dim, and for all of a mode together."""
    modes: dict[str, dict[tuple[str, int], list[Case]]] = {}
    for case in cases:
        groups = modes.setdefault(case.mode, {})
        groups.setdefault((case.dtype, case.head_dim), []).append(case)
    for mode, groups in modes.items():
        yield from ((mode, group, own) for group, own in groups.items())
        if len(groups) > 1:
            yield mode, None, [case for own in groups.values() for case in own]


def standing_table(found: Sequence[Standing], against: Sequence[str]) -> str:
    """Return a Markdown table, a line per standing."""
    body = []
    for each in found:
        dtypes = {case.dtype for case in each.cases}
        dtype = dtypes.pop() if len(dtypes) == 1 else "all"
        head_dim = "all" if each.group is None else each.group[1]
        worst, had, there = each.worst, len(each.ratios), len(each.cases)
        line = [f"`{each.mode}`", each.provider, dtype, str(head_dim)]
        line.append(str(there) if had == there else f"{had} of {there}")
        line += [f"**{each.mean:.2f}**", f"{each.ratios[worst]:.2f}"]
        body.append([*line, f"d {worst.head_dim}, {mask_name(worst)}, n {lengths(worst)}"])
    headers = ["mode", "provider", "dtype", "d", "cases", "geometric mean", "worst", "at"]
    alignment = ["left", "left", "left", "right", "right", "right", "right", "left"]
    table = tabulate(body, headers, tablefmt="github", disable_numparse=True, colalign=alignment)
    peers = " and ".join(f"`{name}`" for name in against)
    best = f"the faster of {peers}" if len(against) > 1 else peers
    return f"Speed as a multiple of that of {best}, case by case (above 1 is faster):\n\n{table}"

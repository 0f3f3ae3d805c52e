"""What a suite is."""

from collections.abc import Sequence
from dataclasses import dataclass

from attn_bench.case import check_name
from attn_bench.providers import Provider


@dataclass(frozen=True)
class Suite:
    """A table of providers that are compared on the same cases.

    Attributes:
        command: Name on the command line.
        name: Name in result files.
        baselines: Providers that ratios refer to, best first; the first one that runs is taken.
    """

    command: str
    name: str
    summary: str
    providers: dict[str, Provider]
    baselines: tuple[str, ...]

    def baseline(self, asked: str | None, running: Sequence[Provider]) -> str:
        """Return the name of the provider that ratios refer to.

        Raises:
            InputError: if `asked` is not among the running providers.
        """
        names = [each.name for each in running]
        if asked is not None:
            check_name("baseline", asked, names)
            return asked
        return next((name for name in self.baselines if name in names), names[0])

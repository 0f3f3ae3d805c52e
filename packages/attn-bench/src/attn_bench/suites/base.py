"""What a suite is."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from attn_bench.grid import PRESETS, Grid
from attn_bench.providers import Provider
from attn_bench.providers.plugins import plugin_providers
from attn_bench.results import Row


@dataclass(frozen=True)
class Suite:
    """A table of providers that are compared on the same cases.

    Attributes:
        command: Name on the command line.
        name: Name in result files.
        takes_plugins: Whether other packages may add providers.
        checks_gradients: Whether a provider must also have the right gradients to be timed.
        presets: Grids by name.
        baselines: Providers that ratios may refer to; the first one that was timed is taken.
    """

    command: str
    name: str
    summary: str
    own_providers: dict[str, Provider]
    baselines: tuple[str, ...]
    takes_plugins: bool = False
    checks_gradients: bool = True
    presets: Mapping[str, Grid] = field(default_factory=lambda: PRESETS)

    @property
    def providers(self) -> dict[str, Provider]:
        """The suite's own providers and, where it takes them, those of other packages."""
        if not self.takes_plugins:
            return self.own_providers
        return self.own_providers | plugin_providers(self.own_providers)

    def baseline(self, rows: Sequence[Row]) -> str:
        """Return the name of the provider that ratios refer to, for a run of at least one row."""
        timed = [row.provider for row in rows if row.median_ms is not None]
        others = [*timed, rows[0].provider]
        return next((name for name in self.baselines if name in timed), others[0])

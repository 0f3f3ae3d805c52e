"""Providers of other packages, found by the entry point group ``attn_bench.providers``.

An entry point names a `Provider`, or a function without arguments that returns some of them.
"""

from collections.abc import Collection, Iterable
from functools import partial
from importlib.metadata import EntryPoint, entry_points

from attn_bench.failures import one_line
from attn_bench.providers.base import Attention, Provider

GROUP = "attn_bench.providers"


def plugin_providers(taken: Collection[str]) -> dict[str, Provider]:
    """Return the installed third-party providers by name.

    One that cannot be loaded, or whose name is `taken`, is listed under the name of its entry point
    as unavailable, with the reason: a broken plugin must not end a run of the others.
    """
    found: dict[str, Provider] = {}
    for point in sorted(entry_points(group=GROUP), key=lambda each: each.name):
        for provider in _load(point):
            if provider.name in taken or provider.name in found:
                reason = f"its provider {provider.name!r} has a name that is taken"
                refused = _unavailable(point, reason)
                found[refused.name] = refused
            else:
                found[provider.name] = provider
    return found


def _load(point: EntryPoint) -> list[Provider]:
    try:
        loaded = point.load()
        made: object = loaded() if callable(loaded) else loaded
    except Exception as error:  # foreign code, and its failure is what there is to report
        return [_unavailable(point, f"its entry point cannot be loaded: {one_line(error)}")]
    providers = [made] if isinstance(made, Provider) else made
    if not isinstance(providers, Iterable):
        return [_unavailable(point, f"{point.value} is no Provider: {type(made).__name__}")]
    listed = list(providers)
    if not all(isinstance(each, Provider) for each in listed):
        return [_unavailable(point, f"{point.value} must return Providers only")]
    return listed


def _unavailable(point: EntryPoint, reason: str) -> Provider:
    def build(*_: object) -> Attention:
        raise RuntimeError(reason)

    name = f"plugin:{point.name}"
    return Provider(name, f"from {point.value}", build, why_unavailable=partial(_say, reason))


def _say(reason: str, _: object) -> str:
    return reason

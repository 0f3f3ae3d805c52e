"""Which attention backends there are, by name.

An entry is an `AttentionBackend`, a bare function, or the place of one as "module:attribute".  A
place is imported when its backend is first asked for, so that listing names, or training with
another backend, imports nothing optional.

Other packages join through the entry-point group `tiny_llm.attention`:

    [project.entry-points."tiny_llm.attention"]
    mine = "my_package.attention:BACKEND"

That makes the name known and no more: it is used where someone asks for it by name.
"""

import functools
import logging
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points

from tiny_llm.attention.backend import AttentionBackend, AttentionFn, FunctionBackend
from tiny_llm.errors import ConfigError, UnknownAttentionError

ENTRY_POINT_GROUP = "tiny_llm.attention"
Target = str | AttentionFn | AttentionBackend

logger = logging.getLogger("tiny_llm.attention")

BUILT_IN: dict[str, str] = {
    "eager": "tiny_llm.attention.eager:BACKEND",
    "sdpa": "tiny_llm.attention.sdpa:SDPA",
    "sdpa-flash": "tiny_llm.attention.sdpa:FLASH",
    "sdpa-cudnn": "tiny_llm.attention.sdpa:CUDNN",
    "sdpa-efficient": "tiny_llm.attention.sdpa:EFFICIENT",
    "sdpa-math": "tiny_llm.attention.sdpa:MATH",
    "flex": "tiny_llm.attention.flex:BACKEND",
    "flash": "tiny_llm.attention.flash_backend:FLASH",
    "flash-mock": "tiny_llm.attention.flash_backend:MOCK",
}
_BACKENDS: dict[str, Target] = dict(BUILT_IN)


def names() -> tuple[str, ...]:
    """All names that can be asked for, sorted; imports no backend."""
    return tuple(sorted({*_BACKENDS, *installed_entry_points()}))


def get(name: str) -> AttentionFn:
    """Return the function of the backend called `name`, importing it if this is the first use.

    Raises:
        UnknownAttentionError: Nothing is registered under `name` (a `KeyError`).
        MissingExtraError: The backend's optional package is missing (an `ImportError`).
    """
    return backend(name).load()


def backend(name: str) -> AttentionBackend:
    """Return the backend called `name`; one that cannot be imported says so when it is probed.

    Raises:
        UnknownAttentionError: Nothing is registered under `name` (a `KeyError`).
    """
    target = _BACKENDS.get(name) or installed_entry_points().get(name)
    if target is None:
        known = ", ".join(repr(each) for each in names())
        message = f"unknown attention {name!r}; registered: {known}"
        raise UnknownAttentionError(message)
    return _as_backend(name, target)


def _as_backend(name: str, target: Target) -> AttentionBackend:
    if isinstance(target, AttentionBackend):
        return target
    if not isinstance(target, str):
        return FunctionBackend(name, target)
    module, _, attribute = target.partition(":")
    try:
        found = getattr(import_module(module), attribute)
    # a broken package may raise anything; the backend below will raise it again when it is loaded
    except Exception:
        return FunctionBackend(name, target)
    return found if isinstance(found, AttentionBackend) else FunctionBackend(name, found)


def register(name: str, target: Target) -> None:
    """Add a backend under a new name.

    Args:
        name: What `ModelConfig.attention` and `--attention` will say.
        target: An `AttentionBackend`, a function, or the place of either as
            ``"module:attribute"``, imported on first use.

    Raises:
        ConfigError: `name` is taken or unusable, or `target` is none of these.
    """
    if name in _BACKENDS or name in installed_entry_points():
        message = f"attention {name!r} is already registered; unregister it first"
        raise ConfigError(message)
    if not name or name == "auto" or set(name) & set(":,=* "):
        message = f"`name` must be a word without ':', ',', '=', '*' and spaces, got {name!r}"
        raise ConfigError(message)
    is_place = isinstance(target, str) and all(target.partition(":"))
    if not is_place and not isinstance(target, AttentionBackend) and not callable(target):
        message = f"`target` must be a function or a string 'module:attribute', got {target!r}"
        raise ConfigError(message)
    _BACKENDS[name] = target


def unregister(name: str) -> None:
    """Remove a backend; models that already use it keep it.

    Raises:
        UnknownAttentionError: Nothing is registered under `name`.
    """
    if _BACKENDS.pop(name, None) is None:
        message = f"unknown attention {name!r}; nothing to unregister"
        raise UnknownAttentionError(message)


@functools.cache
def installed_entry_points() -> dict[str, str]:
    """Return the places that installed packages offer, by name.

    A name that tiny-llm has itself, or that two packages offer, is refused with a warning in the
    log: nobody gets a backend by surprise.
    """
    offered: dict[str, list[EntryPoint]] = {}
    for each in entry_points(group=ENTRY_POINT_GROUP):
        offered.setdefault(each.name, []).append(each)
    accepted = {}
    for name, candidates in offered.items():
        places = sorted({each.value for each in candidates})
        if name in BUILT_IN or len(places) > 1:
            owner = "tiny-llm itself" if name in BUILT_IN else "several packages"
            logger.warning(
                "attention %r of %s is refused: the name belongs to %s",
                name,
                " and ".join(places),
                owner,
            )
        else:
            accepted[name] = places[0]
    return accepted

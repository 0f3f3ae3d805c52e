"""Which attention backends there are, by name.

An entry is a function, or the place of one as "module:attribute".  A place is imported when its
backend is first asked for, so that listing names, or training with another backend, imports
nothing optional.
"""

from importlib import import_module
from typing import Protocol, cast

from torch import Tensor

from tiny_llm.errors import ConfigError, UnknownAttentionError


class AttentionFn(Protocol):
    """softmax(q k^T / sqrt(D)) v, per head.

    Causal means bottom-right aligned: of N keys, query row i of M sees the keys
    ``j <= i + N - M``.  A row that sees no key gives zeros.
    """

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool) -> Tensor:
        """Take q ``[B, H, M, D]`` and k, v ``[B, H, N, D]``; return o ``[B, H, M, D]``."""


_BACKENDS: dict[str, str | AttentionFn] = {
    "eager": "tiny_llm.attention.eager:scaled_dot_product_attention",
    "sdpa": "tiny_llm.attention.sdpa:sdpa_attention",
    "flash": "tiny_llm.attention.flash:flash_attention",
}


def names() -> tuple[str, ...]:
    """All registered names, sorted; imports no backend."""
    return tuple(sorted(_BACKENDS))


def get(name: str) -> AttentionFn:
    """Return the backend called `name`, importing it if this is the first use.

    Raises:
        UnknownAttentionError: Nothing is registered under `name` (a `KeyError`).
        MissingExtraError: The backend's optional package is missing (an `ImportError`).
    """
    try:
        target = _BACKENDS[name]
    except KeyError:
        known = ", ".join(repr(each) for each in names())
        message = f"unknown attention {name!r}; registered: {known}"
        raise UnknownAttentionError(message) from None
    if isinstance(target, str):
        module, _, attribute = target.partition(":")
        return cast("AttentionFn", getattr(import_module(module), attribute))
    return target


def register(name: str, target: str | AttentionFn) -> None:
    """Add a backend under a new name.

    Args:
        name: What `ModelConfig.attention` and `--attention` will say.
        target: The function itself, or its place as ``"module:attribute"``, imported on first use.

    Raises:
        ConfigError: `name` is taken, or `target` is neither a callable nor such a place.
    """
    if name in _BACKENDS:
        message = f"attention {name!r} is already registered; unregister it first"
        raise ConfigError(message)
    is_place = isinstance(target, str) and all(target.partition(":"))
    if not is_place and not callable(target):
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

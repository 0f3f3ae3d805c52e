"""How the configuration records describe and check their fields."""

import math
from dataclasses import field, fields
from types import NoneType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from tiny_llm.errors import ConfigError

T = TypeVar("T")


def setting(default: T, help_text: str) -> T:
    """A dataclass field with a default and a help text, typed as its value."""
    made: T = field(default=default, metadata={"help": help_text})
    return made


def check_types(config: Any) -> None:
    """Raise unless every field of a dataclass holds a value of its annotated type.

    Raises:
        ConfigError: One does not; an int serves as a float, but a bool is no int here.
    """
    hints = get_type_hints(type(config))
    for item in fields(config):
        value, kinds = getattr(config, item.name), _alternatives(hints[item.name])
        if type(value) not in kinds and not (float in kinds and type(value) is int):
            expected = " or ".join("None" if kind is NoneType else kind.__name__ for kind in kinds)
            message = f"`{item.name}` must be {expected}, got {value!r}"
            raise ConfigError(message)


def _alternatives(hint: Any) -> tuple[type, ...]:
    """Return the plain types in a hint: ``int | None`` has two, ``dict[str, str]`` is a dict."""
    if get_origin(hint) is None:
        return (hint,)
    if isinstance(get_origin(hint), type) and get_origin(hint) in (dict, tuple, list):
        return (get_origin(hint),)
    return tuple(kind for each in get_args(hint) for kind in _alternatives(each))


def check_range(config: Any, name: str, *, minimum: float, maximum: float = math.inf) -> None:
    """Raise unless a field lies in its range; None, where the type allows it, is not compared.

    Raises:
        ConfigError: It does not.
    """
    value = getattr(config, name)
    if value is None:
        return
    if not minimum <= value <= maximum or value == math.inf:
        limit = f"at least {minimum}" if maximum == math.inf else f"{minimum} to {maximum}"
        message = f"`{name}` must be {limit}, got {value}"
        raise ConfigError(message)


def check_positive_finite(config: Any, name: str) -> None:
    """Raise unless a field is above 0 and finite.

    Raises:
        ConfigError: It is not.
    """
    value = getattr(config, name)
    if not 0 < value < math.inf:
        message = f"`{name}` must be above 0 and finite, got {value}"
        raise ConfigError(message)

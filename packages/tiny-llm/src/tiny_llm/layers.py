"""Which layers a setting is for, written as text: ``"0"``, ``"1-3"``, ``"0,4-7"`` or ``"*"``."""

from tiny_llm.errors import ConfigError


def parse_layers(text: str, num_layers: int) -> frozenset[int]:
    """Return the layers that `text` names, counted from 0.

    >>> sorted(parse_layers("0,2-3", 5))
    [0, 2, 3]
    >>> sorted(parse_layers("*", 2))
    [0, 1]

    Raises:
        ConfigError: It is not of this form, or names a layer that the model does not have.
    """
    if text.strip() == "*":
        return frozenset(range(num_layers))
    named: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            message = f"layers must look like '0', '1-3', '0,4-7' or '*', got {text!r}"
            raise ConfigError(message)
        start, end = int(first), int(last or first)
        if not start <= end < num_layers:
            message = f"layers {part.strip()!r} must lie in 0-{num_layers - 1}, got {text!r}"
            raise ConfigError(message)
        named.update(range(start, end + 1))
    return frozenset(named)


def format_layers(layers: frozenset[int], num_layers: int) -> str:
    """Return the text that `parse_layers` reads as `layers`.

    >>> format_layers(frozenset({0, 1, 2, 5}), 8)
    '0-2,5'
    """
    if len(layers) == num_layers:
        return "*"
    parts: list[list[int]] = []
    for layer in sorted(layers):
        if parts and parts[-1][-1] == layer - 1:
            parts[-1] = [parts[-1][0], layer]
        else:
            parts.append([layer])
    return ",".join("-".join(map(str, part)) for part in parts)

"""What the commands share: devices by name, and options that must be given."""

from typing import Any

import torch

from tiny_llm.errors import ConfigError


def resolve_device(name: str) -> torch.device:
    """Return the device called `name`; ``auto`` is CUDA where there is one, else the CPU.

    Raises:
        ConfigError: There is no such device here.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    known = {"cpu": 1, "cuda": torch.cuda.device_count(), "mps": torch.backends.mps.is_available()}
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or (device.index or 0) >= known.get(device.type, 0):
        available = ", ".join(kind for kind, count in known.items() if count)
        message = f"--device {name} is not available here; there is: {available}"
        raise ConfigError(message)
    return device


def require(options: Any, *names: str) -> None:
    """Refuse options that lack one of these.

    Raises:
        ConfigError: One is empty.
    """
    missing = [flag_of(name) for name in names if not getattr(options, name)]
    if missing:
        message = f"the following options are required: {', '.join(missing)}"
        raise ConfigError(message)


def flag_of(field_name: str) -> str:
    """Return the flag that sets a field: ``--batch-size`` for ``batch_size``."""
    return "--" + field_name.replace("_", "-")

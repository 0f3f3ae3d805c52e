"""Devices by name, the way to them, and options that must be given."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

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


def to_device(tensor: Tensor, device: torch.device | str) -> Tensor:
    """Return a CPU tensor on a device; a GPU goes on meanwhile, and nothing waits for it."""
    if torch.device(device).type != "cuda":
        return tensor.to(device)
    pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    # by numpy: torch copies more than 32 768 numbers with all cores, and to wake the many of a
    # GPU's host takes milliseconds, in which the GPU has nothing to do
    np.copyto(pinned.numpy(), tensor.numpy())
    return pinned.to(device, non_blocking=True)


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

"""What ``torch.autocast`` asks of attention: its three factors in another dtype."""

import torch
from torch import Tensor


def is_autocast(q: Tensor) -> bool:
    """Say whether autocast is on for the device of q; whatever is no tensor is refused later."""
    # the name of another device type is made anew at each look
    return isinstance(q, Tensor) and torch.is_autocast_enabled(
        "cuda" if q.is_cuda else q.device.type
    )


def autocast(x: Tensor, device_type: str) -> Tensor:
    """Convert as autocast converts the factors of a matrix product: all but float64."""
    is_eligible = isinstance(x, Tensor) and x.is_floating_point() and x.dtype != torch.float64
    return x.to(torch.get_autocast_dtype(device_type)) if is_eligible else x

"""flash-kernel's attention: its kernels, and their readable mock.

The registry imports this module when 'flash' or 'flash-mock' is asked for, and nothing else does:
that is why flash_kernel may be imported at its top.
"""

from typing import Any

import torch
from torch import Tensor

from tiny_llm.attention.backend import takes
from tiny_llm.attention.mask import repeat_heads
from tiny_llm.errors import ConfigError, MissingExtraError

try:
    import flash_kernel
except ImportError as error:
    message = (
        "attention 'flash' needs the optional package flash-kernel: install tiny-llm[flash]"
        if isinstance(error, ModuleNotFoundError) and error.name == "flash_kernel"
        else f"attention 'flash' found flash-kernel, but it cannot be imported: {error}"
    )
    raise MissingExtraError(message) from error


def flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    is_causal: bool,
    window: int | None = None,
    scale: float | None = None,
) -> Tensor:
    """Compute `AttentionFn` with `flash_kernel.flash_attention`, on any device.

    Raises:
        ConfigError: A window, and the installed flash-kernel has none or `is_causal` is False.
    """
    return _attend(q, k, v, "auto", is_causal, window, scale)


def flash_mock_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    is_causal: bool,
    window: int | None = None,
    scale: float | None = None,
) -> Tensor:
    """Compute the same with the mock: loops over tiles in plain PyTorch, to be read, not timed."""
    return _attend(q, k, v, "mock", is_causal, window, scale)


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    impl: str,
    is_causal: bool,
    window: int | None,
    scale: float | None,
) -> Tensor:
    options: dict[str, Any] = {} if scale is None else {"scale": scale}
    if window is not None:
        if not (is_causal and HAS_WINDOW):
            message = (
                f"attention 'flash' takes a `window` with is_causal=True and a flash-kernel that "
                f"has windows, got is_causal={is_causal} and version {flash_kernel.__version__}"
            )
            raise ConfigError(message)
        options["window"] = (window - 1, 0)  # keys left and right of a row's own
    if q.shape[1] != k.shape[1] and not HAS_SHARED_HEADS:
        k, v = repeat_heads(k, v, q.shape[1])
    o: Tensor = flash_kernel.flash_attention(q, k, v, is_causal=is_causal, impl=impl, **options)
    return o


def _shared_heads_work() -> bool:
    """Ask by trying: a flash-kernel without them refuses the shapes."""
    q, k = torch.zeros(1, 2, 1, 8, device="cpu"), torch.zeros(1, 1, 1, 8, device="cpu")
    try:
        o: Tensor = flash_kernel.flash_attention(q, k, k)
    except ValueError:
        return False
    return o.shape == q.shape


HAS_WINDOW = takes(flash_kernel.flash_attention, "window")
HAS_SHARED_HEADS = _shared_heads_work()

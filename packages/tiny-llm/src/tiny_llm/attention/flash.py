"""flash-kernel's attention.

The registry imports this module when 'flash' is asked for, and nothing else does: that is why
flash_kernel may be imported at its top.
"""

from torch import Tensor

from tiny_llm.errors import MissingExtraError

try:
    import flash_kernel
except ImportError as error:
    message = (
        "attention 'flash' needs the optional package flash-kernel: install tiny-llm[flash]"
        if isinstance(error, ModuleNotFoundError) and error.name == "flash_kernel"
        else f"attention 'flash' found flash-kernel, but it cannot be imported: {error}"
    )
    raise MissingExtraError(message) from error


def flash_attention(q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool) -> Tensor:
    """Compute `AttentionFn` with `flash_kernel.flash_attention`, on any device."""
    o: Tensor = flash_kernel.flash_attention(q, k, v, is_causal=is_causal)
    return o

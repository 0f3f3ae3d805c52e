"""flash-kernel's attention: its kernels, and their readable mock.

The registry imports this module when 'flash' or 'flash-mock' is asked for, and nothing else does:
that is why flash_kernel may be imported at its top.
"""

from typing import Any

import torch
from torch import Tensor

from tiny_llm.attention.backend import takes
from tiny_llm.attention.mask import repeat_heads, visible_keys
from tiny_llm.errors import ConfigError, MissingExtraError
from tiny_llm.packing import Packing

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
    key_lengths: Tensor | None = None,
    packing: Packing | None = None,
) -> Tensor:
    """Compute `AttentionFn` with flash-kernel, on any device.

    Key lengths are those of a cache: without gradients its decoding kernels read them.  Documents
    of a packed batch are its varlen sequences.

    Raises:
        ConfigError: The installed flash-kernel is too old for what is asked.
    """
    options: dict[str, Any] = {} if scale is None else {"scale": scale}
    sides = None
    if window is not None:
        _require("window", HAS_WINDOW)
        # keys left and right of a row's own
        sides = options["window"] = (window - 1, 0)
    if packing is not None:
        _require("packing", HAS_VARLEN)
        return _attend_packed(q, k, v, packing, is_causal=is_causal, scale=scale, window=sides)
    if key_lengths is not None:
        trains = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
        if HAS_KV_CACHE and not trains:
            cached: Tensor = flash_kernel.flash_attention_with_kvcache(
                *(q, k, v),
                cache_seqlens=key_lengths,
                is_causal=is_causal,
                scale=scale,
                window=sides,
            )
            return cached
        _require("key_lengths", HAS_MASK)
        options["mask"] = visible_keys(
            q, k, is_causal=is_causal, window=window, key_lengths=key_lengths
        )
        is_causal = False
        options.pop("window", None)
    if not HAS_SHARED_HEADS:
        k, v = repeat_heads(k, v, q.shape[1])
    o: Tensor = flash_kernel.flash_attention(q, k, v, is_causal=is_causal, **options)
    return o


def _attend_packed(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    packing: Packing,
    *,
    is_causal: bool,
    scale: float | None,
    window: tuple[int, int] | None,
) -> Tensor:
    """Lay the rows of the batch end to end, ``[B * T, H, D]``, and attend within documents."""
    batch, _, seqlen, _ = q.shape
    q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (q, k, v))
    ends = packing.cu_seqlens
    o: Tensor = flash_kernel.flash_attention_varlen(
        q, k, v, ends, ends, is_causal=is_causal, scale=scale, window=window
    )
    return o.view(batch, seqlen, *o.shape[1:]).transpose(1, 2)


def flash_mock_attention(
    q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool, scale: float | None = None
) -> Tensor:
    """Compute the same with the mock: loops over tiles in plain PyTorch, to be read, not timed."""
    k, v = repeat_heads(k, v, q.shape[1])
    options: dict[str, Any] = {} if scale is None else {"scale": scale}
    o: Tensor = flash_kernel.flash_attention(q, k, v, is_causal=is_causal, impl="mock", **options)
    return o


def _require(keyword: str, is_there: bool) -> None:
    if not is_there:
        message = (
            f"attention 'flash' takes no `{keyword}` with flash-kernel "
            f"{flash_kernel.__version__}: update it, or use 'sdpa'"
        )
        raise ConfigError(message)


def _shared_heads_work() -> bool:
    """Ask by trying: a flash-kernel without them refuses the shapes."""
    q, k = torch.zeros(1, 2, 1, 8, device="cpu"), torch.zeros(1, 1, 1, 8, device="cpu")
    try:
        o: Tensor = flash_kernel.flash_attention(q, k, k)
    except ValueError:
        return False
    return o.shape == q.shape


HAS_WINDOW = takes(flash_kernel.flash_attention, "window")
HAS_MASK = takes(flash_kernel.flash_attention, "mask")
HAS_VARLEN = hasattr(flash_kernel, "flash_attention_varlen")
HAS_KV_CACHE = hasattr(flash_kernel, "flash_attention_with_kvcache")
HAS_SHARED_HEADS = _shared_heads_work()

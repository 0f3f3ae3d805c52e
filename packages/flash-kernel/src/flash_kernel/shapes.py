"""The one place where leading dimensions become batch and heads."""

from collections.abc import Sequence

from torch import Tensor

from flash_kernel.variant import Modifiers


def shaped(x: Tensor, shape: Sequence[int]) -> Tensor:
    """Return ``x`` in another shape of as many elements; costs nothing where it has it already."""
    return x if x.shape == shape else x.reshape(shape)


def as_batch_and_heads(x: Tensor) -> Tensor:
    """Return ``x [..., rows, D]`` as ``[B, H, rows, D]``.

    Nothing is copied up to four dimensions.  Beyond, all leading dimensions but the last become the
    batch, which copies only where no view can express that.
    """
    if x.dim() == 4:
        return x
    if x.dim() == 3:
        return x[:, None]
    return x[None, None] if x.dim() == 2 else x.flatten(0, -4)


def as_pairs(modifiers: Modifiers, q: Tensor, k: Tensor) -> Modifiers:
    """Return the modifiers as kernels take them.

    Bias and mask are views ``[B, H, M, N]``, slopes float32 ``[B, H]``, sinks contiguous float32.
    """
    alibi_slopes, bias, mask, sinks = modifiers
    if alibi_slopes is bias is mask is sinks is None:
        return modifiers
    scores = (*q.shape[:-1], k.shape[-2])
    if bias is not None:
        bias = as_batch_and_heads(bias.expand(scores))
    if mask is not None:
        mask = as_batch_and_heads(mask.expand(scores))
    if alibi_slopes is not None:
        alibi_slopes = alibi_slopes.float().expand(q.shape[:-2]).flatten(0, -2)
    sinks = None if sinks is None else sinks.float().contiguous()
    return Modifiers(alibi_slopes, bias, mask, sinks)

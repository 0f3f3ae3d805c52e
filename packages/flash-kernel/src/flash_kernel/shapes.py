"""The one place where leading dimensions become batch and heads."""

from torch import Tensor


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

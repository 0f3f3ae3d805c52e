"""What the Hopper kernels take, and how they are built: plain data, no Triton."""

import torch

CAPABILITY = 90  # compute capability 9.0 alone: wgmma exists nowhere else
OLDEST_TRITON = (3, 6)
DTYPES = (torch.float16, torch.bfloat16)
MAX_SEQLEN = 1 << 28  # rows are counted in 32 bits, and doubled
SMALLEST_SCALE = 1e-30  # the running maximum is that of unscaled scores: a scale must be positive
FORWARD_HEAD_DIMS: tuple[int, ...] = ()
BACKWARD_HEAD_DIMS: tuple[int, ...] = (64, 128)


class LayoutRefusal(ValueError):
    """The tensors lie in memory as the copy engine cannot read them; the portable kernels can."""


class BuildFailure(RuntimeError):
    """A kernel cannot be compiled or loaded here; says why in one line."""

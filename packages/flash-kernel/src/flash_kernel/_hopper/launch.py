"""Host side of the forward kernel."""

from torch import Tensor

from flash_kernel._hopper.config import BuildFailure
from flash_kernel.variant import Variant


def launch_forward(q: Tensor, k: Tensor, v: Tensor, variant: Variant) -> tuple[Tensor, Tensor]:
    """Return ``o`` and ``lse`` of ``q [B, H, M, D]`` and ``k, v [B, H_kv, N, D]``."""
    msg = "has no forward kernel."
    raise BuildFailure(msg)

"""Host side of the backward kernel."""

from torch import Tensor

from flash_kernel._hopper.config import BuildFailure
from flash_kernel.gradients import Gradients
from flash_kernel.variant import Variant


def launch_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    do: Tensor,
    dlse: Tensor | None,
    variant: Variant,
    *,
    is_deterministic: bool,
) -> Gradients:
    """Return ``dq``, ``dk`` and ``dv``, laid out like ``q``, ``k`` and ``v``."""
    msg = "has no backward kernel."
    raise BuildFailure(msg)

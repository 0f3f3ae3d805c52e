"""Host side of the launches that do again the tiles of a gradient that are not finite."""

from typing import NamedTuple

import torch
import triton
from torch import Tensor

from flash_kernel._triton.launch import NO_EXTRAS, Options
from flash_kernel._triton.launch_backward import MARKED_ROWS, prepare_dk_dv, prepare_dq
from flash_kernel._triton.prepared import PreparedLaunch, View, blank
from flash_kernel.gradients import Gradients
from flash_kernel.variant import PLAIN, Variant

ABSENT = NO_EXTRAS[:3] + NO_EXTRAS[-2:]  # slopes, bias, mask and cu_seqlens of a portable launch


class Redo(NamedTuple):
    """Two launches of the portable kernels, for marked tiles; see `_triton.redo_backward`."""

    dk_dv: PreparedLaunch
    dq: PreparedLaunch
    marks_k: Tensor  # what the marks are like: [B, H_kv, tiles of MARKED_ROWS],
    marks_q: Tensor  # and [B, H, tiles]

    def empty_marks(self) -> tuple[Tensor, Tensor]:
        """Return memory for the marks of a call, of keys and of rows."""
        return torch.empty_like(self.marks_k), torch.empty_like(self.marks_q)

    def launches(
        self,
        inputs: tuple[Tensor, ...],
        gradients: Gradients,
        statistics: Tensor,
        marks_k: Tensor,
        marks_q: Tensor,
    ) -> list[tuple[PreparedLaunch, tuple[Tensor | None, ...]]]:
        """Return the launches and their tensors.

        ``inputs`` are q, k, v and do, ``gradients`` dq, dk and dv, ``statistics`` the portable row
        statistics.
        """
        dq, dk, dv = gradients[:3]
        return [
            (self.dk_dv, (*inputs, dk, dv, statistics, *ABSENT, marks_k)),
            (self.dq, (*inputs, dq, statistics, *ABSENT, marks_q)),
        ]


def prepare_redo(
    inputs: tuple[Tensor, ...], gradients: Gradients, variant: Variant, view: View
) -> Redo:
    """Prepare the launches for q, k, v and do ``[B, H, rows, D]``, seen through ``view``."""
    q, k = inputs[:2]
    dq, dk, dv = gradients[:3]
    marks_k, marks_q = (
        blank((*x.shape[:2], triton.cdiv(x.shape[2], MARKED_ROWS)), torch.int32, x.device)
        for x in (k, q)
    )
    options = Options(variant, "ieee", None, None, view=view, redoes=True)
    return Redo(
        prepare_dk_dv(*inputs, dk, dv, PLAIN, options),
        prepare_dq(*inputs, dq, PLAIN, options),
        marks_k,
        marks_q,
    )

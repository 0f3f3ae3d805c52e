"""Host side of the backward for head dims above 128: a launch for dk and dv, and one for dq."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from flash_kernel._hopper.backward_launch import check_backward_layout, copied, no_gradients
from flash_kernel._hopper.launch import workspace
from flash_kernel._hopper.wide_dk_dv_launch import prepare_dk_dv
from flash_kernel._hopper.wide_dq_launch import prepare_dq
from flash_kernel._triton import launch_backward as portable
from flash_kernel._triton.launch import NO_EXTRAS, Options
from flash_kernel._triton.prepared import (
    PreparedLaunch,
    View,
    as_it_is,
    blank,
    compile_together,
    is_aligned,
)
from flash_kernel.gradients import Gradients
from flash_kernel.variant import PLAIN, Variant

ABSENT = NO_EXTRAS[:3] + NO_EXTRAS[-2:]  # slopes, bias, mask and cu_seqlens of a portable launch


@dataclass(frozen=True, slots=True)
class Backward:
    """The backward of tensors of one layout, prepared; see the portable one.

    Where a row may be kept from keys, two launches of the portable kernels follow, and do again
    what is not finite; see `_triton.redo_backward`.
    """

    row_statistics: PreparedLaunch
    dk_dv: PreparedLaunch
    dq: PreparedLaunch
    redo_dk_dv: PreparedLaunch | None
    redo_dq: PreparedLaunch | None
    copies_do: bool  # do has to be copied to where it is contiguous and aligned
    statistics: Tensor  # what the launches leave for each other is like these: row statistics,
    marks_k: Tensor  # and marks
    marks_q: Tensor

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        o: Tensor,
        lse: Tensor,
        do: Tensor,
        dlse: Tensor | None,
        extras: tuple[Tensor | None, ...] = NO_EXTRAS,
    ) -> Gradients:
        """Return ``dq``, ``dk`` and ``dv``; there are no extras."""
        dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        if self.copies_do:
            do = copied(do)
        statistics = torch.empty_like(self.statistics)
        marks_k, marks_q = torch.empty_like(self.marks_k), torch.empty_like(self.marks_q)
        zeros = workspace(q.device)
        tiled_k, tiled_q = (q, k, v, do, dk, dv), (q, k, v, do, dq)
        of_rows = (o, do, lse.contiguous(), None if dlse is None else dlse.contiguous(), None)
        launches: list[tuple[PreparedLaunch | None, tuple[Tensor | None, ...]]] = [
            (self.row_statistics, (*of_rows, statistics)),
            (self.dk_dv, (*tiled_k, *tiled_k, statistics, marks_k, zeros)),
            (self.dq, (*tiled_q, *tiled_q, statistics, marks_q, zeros)),
            (self.redo_dk_dv, (*tiled_k, statistics, *ABSENT, marks_k)),
            (self.redo_dq, (*tiled_q, statistics, *ABSENT, marks_q)),
        ]
        present = [(launch, tensors) for launch, tensors in launches if launch is not None]
        if self.dq.compiled is None:
            compile_together(*present)
        for launch, tensors in present:
            launch(*tensors)
        return Gradients(dq, dk, dv)


def prepare_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    do: Tensor,
    variant: Variant,
    *,
    has_dlse: bool,
    view: View = as_it_is,
) -> Callable[..., Gradients]:
    """Prepare a `Backward` of ``q [B, H, M, D]`` and ``k, v [B, H_kv, N, D]``.

    ``view`` shows the tensors so.  Nothing is added across programs: every result is bitwise
    repeatable.

    Raises:
        LayoutRefusal: TMA cannot read q, k or v as they lie in memory.
        BuildFailure: A kernel does not compile here; at the first launch.
    """
    if q.numel() == 0 or k.numel() == 0:
        return no_gradients
    dq, dk, dv = (view(torch.empty_like(x)) for x in (q, k, v))
    q, k, v, o, do = map(view, (q, k, v, o, do))
    check_backward_layout(q, k, v)
    # a gradient comes as autograd made it, often expanded or transposed; the caller cannot help it
    copies_do = not is_aligned(do)
    do = copied(do) if copies_do else do
    (batch, num_heads, seqlen_q, _), (_, num_heads_k, seqlen_k, _) = q.shape, k.shape
    options = Options(variant, "ieee", None, None, view=view, redoes=True)
    redoes = variant.is_windowed
    rows, tiles_q, tiles_k = (
        portable.padded_rows(seqlen_q, None),
        *(triton.cdiv(length, portable.MARKED_ROWS) for length in (seqlen_q, seqlen_k)),
    )
    return Backward(
        portable.prepare_row_statistics(o, do, has_dlse, None),
        prepare_dk_dv(q, k, variant, view),
        prepare_dq(q, k, variant, view),
        portable.prepare_dk_dv(q, k, v, do, dk, dv, PLAIN, options) if redoes else None,
        portable.prepare_dq(q, k, v, do, dq, PLAIN, options) if redoes else None,
        copies_do,
        statistics=blank((batch, num_heads, 2, rows), torch.float32, q.device),
        marks_k=blank((batch, num_heads_k, tiles_k), torch.int32, q.device),
        marks_q=blank((batch, num_heads, tiles_q), torch.int32, q.device),
    )

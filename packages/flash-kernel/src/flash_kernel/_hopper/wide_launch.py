"""Host side of the backward for head dims above 128: a launch for dk and dv, and one for dq."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from flash_kernel._hopper.backward_launch import check_backward_layout, copied, no_gradients
from flash_kernel._hopper.forward_spec import Sizes, clipped
from flash_kernel._hopper.launch import workspace
from flash_kernel._hopper.redo import Redo, prepare_redo
from flash_kernel._hopper.wide_dk_dv_launch import prepare_dk_dv
from flash_kernel._hopper.wide_dq_launch import prepare_dq
from flash_kernel._triton import launch_backward as portable
from flash_kernel._triton.launch import NO_EXTRAS
from flash_kernel._triton.prepared import (
    PreparedLaunch,
    View,
    as_it_is,
    blank,
    compile_together,
    is_aligned,
)
from flash_kernel.gradients import Gradients
from flash_kernel.variant import Variant


@dataclass(frozen=True, slots=True)
class Backward:
    """The backward of tensors of one layout, prepared; see the portable one.

    Where a row may be kept from keys, two launches more do again what is not finite.
    """

    row_statistics: PreparedLaunch
    dk_dv: PreparedLaunch
    dq: PreparedLaunch
    redo: Redo | None
    copies_do: bool  # do has to be copied to where it is contiguous and aligned
    statistics: Tensor  # what the row statistics are like, [B, H, 2, padded M]

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
        gradients = Gradients(torch.empty_like(q), torch.empty_like(k), torch.empty_like(v))
        dq, dk, dv = gradients[:3]
        if self.copies_do:
            do = copied(do)
        statistics = torch.empty_like(self.statistics)
        marks_k, marks_q, redone = None, None, []
        if self.redo is not None:
            marks_k, marks_q = self.redo.empty_marks()
            redone = self.redo.launches((q, k, v, do), gradients, statistics, marks_k, marks_q)
        zeros = workspace(q.device)
        tiled_k, tiled_q = (q, k, v, do, dk, dv), (q, k, v, do, dq)
        of_rows = (o, do, lse.contiguous(), None if dlse is None else dlse.contiguous(), None)
        launches: list[tuple[PreparedLaunch, tuple[Tensor | None, ...]]] = [
            (self.row_statistics, (*of_rows, statistics)),
            (self.dk_dv, (*tiled_k, *tiled_k, statistics, marks_k, zeros)),
            (self.dq, (*tiled_q, *tiled_q, statistics, marks_q, zeros)),
            *redone,
        ]
        if self.dq.compiled is None:
            compile_together(*launches)
        for launch, tensors in launches:
            launch(*tensors)
        return gradients


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
    gradients = Gradients(*(view(torch.empty_like(x)) for x in (q, k, v)))
    q, k, v, o, do = map(view, (q, k, v, o, do))
    check_backward_layout(q, k, v)
    # a gradient comes as autograd made it, often expanded or transposed; the caller cannot help it
    copies_do = not is_aligned(do)
    do = copied(do) if copies_do else do
    (batch, num_heads, seqlen_q, head_dim), (_, num_heads_k, seqlen_k, _) = q.shape, k.shape
    # as the kernels see it, or a mark would be read that they do not write
    variant = clipped(variant, Sizes(batch, num_heads, num_heads_k, seqlen_q, seqlen_k, head_dim))
    rows = portable.padded_rows(seqlen_q, None)
    return Backward(
        portable.prepare_row_statistics(o, do, has_dlse, None),
        prepare_dk_dv(q, k, variant, view),
        prepare_dq(q, k, variant, view),
        prepare_redo((q, k, v, do), gradients, variant, view) if variant.is_windowed else None,
        copies_do,
        statistics=blank((batch, num_heads, 2, rows), torch.float32, q.device),
    )

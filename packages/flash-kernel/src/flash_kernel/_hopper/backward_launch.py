"""Host side of the Hopper backward: outputs, workspaces, arguments, three launches or five."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from flash_kernel._hopper.backward import flash_attention_backward_kernel
from flash_kernel._hopper.backward_config import (
    BYTES_TOGETHER,
    CONFIGS,
    ROTATED_FROM,
    BackwardSpec,
)
from flash_kernel._hopper.backward_ends import (
    flash_attention_backward_end_kernel,
    flash_attention_backward_start_kernel,
)
from flash_kernel._hopper.backward_tiles import Problem
from flash_kernel._hopper.config import LayoutRefusal
from flash_kernel._hopper.forward_spec import LOG2_E
from flash_kernel._hopper.launch import (
    OPTIONS,
    Launch,
    describe_floats,
    describe_tiles,
    num_sms,
)
from flash_kernel._hopper.redo import Redo, prepare_redo
from flash_kernel._triton.launch import NO_EXTRAS
from flash_kernel._triton.launch_backward import padded_rows
from flash_kernel._triton.prepared import (
    Describe,
    PreparedLaunch,
    View,
    as_it_is,
    blank,
    compile_together,
    is_aligned,
)
from flash_kernel.gradients import Gradients
from flash_kernel.variant import Variant

SMALL = {"num_warps": 4}  # of the kernels before and after


@dataclass(frozen=True, slots=True)
class Backward:
    """The backward of tensors of one layout, prepared: three launches; see the portable one.

    Where a row may be kept from keys, two more do again what is not finite.
    """

    start: PreparedLaunch
    main: PreparedLaunch
    end: PreparedLaunch
    redo: Redo | None
    copies_do: bool  # do has to be copied to where it is contiguous and aligned
    statistics: Tensor  # what the launches leave for each other is like these: row statistics,
    portable: Tensor  # the portable kernels' [B, H, 2, padded M],
    sums: Tensor  # sums of dq,
    counters: Tensor  # and counters

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
        """Return ``dq``, ``dk`` and ``dv``; there are no extras.

        The caching allocator keeps memory to its stream, and to its graph while one is captured:
        so no two backwards that may overlap share a counter.
        """
        gradients = Gradients(torch.empty_like(q), torch.empty_like(k), torch.empty_like(v))
        dq, dk, dv = gradients[:3]
        lse = lse.contiguous()
        dlse = lse if dlse is None else dlse.contiguous()
        if self.copies_do:
            do = copied(do)
        statistics, sums = torch.empty_like(self.statistics), torch.empty_like(self.sums)
        counters = torch.empty_like(self.counters)
        portable, marks_k, marks_q, redone = None, None, None, []
        if self.redo is not None:
            portable = torch.empty_like(self.portable)
            marks_k, marks_q = self.redo.empty_marks()
            redone = self.redo.launches((q, k, v, do), gradients, portable, marks_k, marks_q)
        launches: list[tuple[PreparedLaunch, tuple[Tensor | None, ...]]] = [
            (self.start, (o, do, lse, dlse, statistics, sums, counters, portable)),
            (self.main, (q, k, v, do, dk, dv, statistics, sums, sums, counters, marks_k)),
            (self.end, (dq, statistics, sums, counters, marks_q)),
            *redone,
        ]
        if self.main.compiled is None:
            compile_together(*launches)
        for launch, tensors in launches:
            launch(*tensors)
        return gradients


def no_gradients(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> Gradients:
    """Return the gradients where there are no keys, or no rows."""
    return Gradients(torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v))


def check_backward_layout(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Raise unless the copy engine can read q, k and v, which dq, dk and dv lie like."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not is_aligned(x):
            msg = (
                f"backward='hopper' reads `{name}` by the copy engine: its rows must be contiguous,"
                " and its address and other strides multiples of 16 bytes, got strides "
                f"{x.stride()}. Pass backward='triton' or backward='auto', or a contiguous tensor."
            )
            raise LayoutRefusal(msg)


def copied(do: Tensor) -> Tensor:
    """Copy a gradient to memory of its own; a contiguous one may only start at a wrong address."""
    return do.clone(memory_format=torch.contiguous_format)


def prepare_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    do: Tensor,
    variant: Variant,
    *,
    has_dlse: bool,
    is_deterministic: bool = True,
    view: View = as_it_is,
) -> Callable[..., Gradients]:
    """Prepare a `Backward` of ``q [B, H, M, D]`` and ``k, v [B, H_kv, N, D]``.

    ``view`` shows the tensors so.

    Raises:
        LayoutRefusal: TMA cannot read q, k or v as they lie in memory.
        BuildFailure: The kernel does not compile here; at the first launch.
    """
    if q.numel() == 0 or k.numel() == 0:
        return no_gradients
    gradients = Gradients(*(view(torch.empty_like(x)) for x in (q, k, v)))
    q, k, v, o, do = map(view, (q, k, v, o, do))
    check_backward_layout(q, k, v)
    # a gradient comes as autograd made it, often expanded or transposed; the caller cannot help it
    copies_do = not is_aligned(do)
    spec = specify(q, k, variant, is_deterministic=is_deterministic)
    batch, num_heads, seqlen_q, _ = q.shape
    blocks = batch * num_heads * triton.cdiv(seqlen_q, spec.BLOCK_M)
    rows = blocks * spec.BLOCK_M
    do = copied(do) if copies_do else do
    return Backward(
        prepare_start(o, do, variant.scale, spec, has_dlse=has_dlse),
        prepare_main(q, k, variant, spec, view),
        prepare_end(gradients.dq, variant.scale, spec),
        prepare_redo((q, k, v, do), gradients, variant, view) if spec.HIDES_PAIRS else None,
        copies_do,
        statistics=blank([2 * rows], torch.float32, q.device),
        portable=blank((batch, num_heads, 2, padded_rows(seqlen_q, None)), torch.float32, q.device),
        sums=blank([spec.SUMS * rows * spec.BLOCK_D // 256, 256], torch.float32, q.device),
        counters=blank([1 + spec.SUMS * blocks], torch.int32, q.device),
    )


def specify(q: Tensor, k: Tensor, variant: Variant, *, is_deterministic: bool) -> BackwardSpec:
    """Return what the kernels are compiled for."""
    block_d = 64 if q.shape[-1] <= 64 else 128
    config = CONFIGS[block_d]
    # by the length alone: the order of a sequence's sums does not depend on its batch
    is_long = k.shape[2] > (ROTATED_FROM - 1) * BackwardSpec.BLOCK_N
    return BackwardSpec(
        BLOCK_D=block_d,
        BLOCK_M=config.block_m,
        DQ_BY_TMA=config.dq_by_tma or is_deterministic,
        IS_ORDERED=is_deterministic,
        IS_ROTATED=is_deterministic and is_long and variant.left is None,
        STATISTICS_FIRST=config.statistics_first,
        IS_GROUPED=q.shape[1] > k.shape[1],
        HAS_LEFT=variant.left is not None,
        HAS_RIGHT=variant.right is not None,
        HAS_TAIL=k.shape[2] % BackwardSpec.BLOCK_N != 0,
    )


def prepare_start(
    o: Tensor, do: Tensor, scale: float, spec: BackwardSpec, *, has_dlse: bool
) -> PreparedLaunch:
    """Prepare the row statistics: one program per head and query block."""
    batch, num_heads, seqlen_q, head_dim = o.shape
    num_blocks = triton.cdiv(seqlen_q, spec.BLOCK_M)
    sizes = (num_heads, seqlen_q, padded_rows(seqlen_q, None), num_blocks, head_dim)
    return PreparedLaunch(
        flash_attention_backward_start_kernel,
        (batch * num_heads * num_blocks, 1),
        [None] * 8,
        (o.stride(), do.stride(), *sizes, scale, has_dlse, spec),
        SMALL,
    )


def prepare_end(dq: Tensor, scale: float, spec: BackwardSpec) -> PreparedLaunch:
    """Prepare dq from its sums: one program per head and query block."""
    batch, num_heads, seqlen_q, head_dim = dq.shape
    num_blocks = triton.cdiv(seqlen_q, spec.BLOCK_M)
    return PreparedLaunch(
        flash_attention_backward_end_kernel,
        (batch * num_heads * num_blocks, 1),
        [None] * 5,
        (dq.stride(), num_heads, seqlen_q, num_blocks, head_dim, scale, spec),
        SMALL,
    )


def prepare_main(
    q: Tensor, k: Tensor, variant: Variant, spec: BackwardSpec, view: View
) -> PreparedLaunch:
    """Prepare the backward: as many CTAs as the GPU runs at a time, which take tiles in turn."""
    problem = problem_of(q, k, variant, spec)
    return Launch(
        flash_attention_backward_kernel,
        (min(problem.num_tiles, num_sms(q.device)), 1),
        (*describers(q.dtype, spec, view), None, None, None),
        (*problem, variant.scale, variant.scale * LOG2_E, spec),
        OPTIONS,
    )


def problem_of(q: Tensor, k: Tensor, variant: Variant, spec: BackwardSpec) -> Problem:
    """Return the numbers of a launch."""
    batch, num_heads, seqlen_q, _ = q.shape
    num_heads_k, seqlen_k = k.shape[1:3]
    group = num_heads // num_heads_k
    heads = batch * num_heads_k
    num_blocks, tiles_k = (
        triton.cdiv(length, size)
        for length, size in ((seqlen_q, spec.BLOCK_M), (seqlen_k, spec.BLOCK_N))
    )
    bytes_of_head = group * seqlen_q * spec.BLOCK_D * 8  # q and do in 16 bits, dq in 32
    return Problem(
        num_heads_k,
        group,
        seqlen_q,
        seqlen_k,
        num_blocks=num_blocks,
        heads_together=max(1, min(heads, BYTES_TOGETHER // bytes_of_head)),
        num_tiles=heads * tiles_k,
        # causal tiles end the earlier the later they come: twice as far, they stay apart after the
        # wrap as well
        blocks_apart=max(1, num_blocks // tiles_k) * (2 if spec.HAS_RIGHT else 1),
        left=variant.left or 0,
        right=variant.right or 0,
    )


def describers(
    dtype: torch.dtype, spec: BackwardSpec, view: View = as_it_is
) -> tuple[Describe, ...]:
    """Return what makes the descriptors of q, k, v, do, dk, dv, the statistics and the sums."""
    queries, keys = (
        describe_tiles([1, 1, rows, spec.BLOCK_D], dtype, view) for rows in (spec.BLOCK_M, 64)
    )
    statistics, sums = describe_floats([2 * spec.BLOCK_M]), describe_floats([16, 256])
    return queries, keys, keys, queries, keys, keys, statistics, sums

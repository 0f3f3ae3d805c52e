"""Host side of dk and dv of wide heads: arguments, launch."""

from typing import Any

import torch
import triton
from torch import Tensor

from flash_kernel._hopper.forward_spec import LOG2_E, Sizes, clipped
from flash_kernel._hopper.launch import (
    OPTIONS,
    Launch,
    describe_floats,
    describe_tiles,
    num_sms,
)
from flash_kernel._hopper.wide_config import (
    BYTES_TOGETHER,
    HEADS_TOGETHER,
    KEYS_WIDTHS,
    KeysSpec,
)
from flash_kernel._hopper.wide_dk_dv import flash_attention_wide_dk_dv_kernel
from flash_kernel._hopper.wide_dk_dv_tiles import Problem
from flash_kernel._triton.launch_backward import padded_rows
from flash_kernel._triton.prepared import Describe, PreparedLaunch, View, as_it_is
from flash_kernel.variant import Variant


def prepare_dk_dv(q: Tensor, k: Tensor, variant: Variant, view: View = as_it_is) -> PreparedLaunch:
    """Prepare dk and dv: as many CTAs as the GPU runs at a time, which take tiles in turn.

    The launch takes q, k, v, do, dk and dv, the same again where SPEC has two pieces and six times
    None where it has one, then the row statistics, the marks and the workspace.
    """
    sizes = Sizes(*q.shape[:2], k.shape[1], q.shape[2], k.shape[2], q.shape[3])
    variant = clipped(variant, sizes)
    spec = specify(sizes, variant)
    problem = problem_of(sizes, variant, spec)
    return Launch(
        flash_attention_wide_dk_dv_kernel,
        (min(problem.num_tiles, num_sms(q.device)), 1),
        (*describers(q.dtype, spec, view), None, None),
        (*problem, spec),
        OPTIONS,
    )


def specify(sizes: Sizes, variant: Variant) -> KeysSpec:
    """Return what the kernel is compiled for."""
    return KeysSpec(
        WIDTHS=KEYS_WIDTHS,
        HAS_LEFT=variant.left is not None,
        HAS_RIGHT=variant.right is not None,
    )


def problem_of(sizes: Sizes, variant: Variant, spec: KeysSpec) -> Problem:
    """Return the numbers of a launch."""
    heads = sizes.batch * sizes.num_heads_k
    heads_together = 1
    if spec.HAS_RIGHT:
        bytes_of_head = 2 * sizes.group * sizes.seqlen_q * spec.ROW_BYTES  # q and do
        most = max(1, min(HEADS_TOGETHER, BYTES_TOGETHER // bytes_of_head))
        heads_together = triton.cdiv(heads, triton.cdiv(heads, most))  # equal groups
    return Problem(
        sizes.num_heads_k,
        sizes.group,
        sizes.seqlen_q,
        sizes.seqlen_k,
        padded_rows(sizes.seqlen_q, None),
        heads_together,
        num_tiles=heads * triton.cdiv(sizes.seqlen_k, spec.BLOCK_N),
        left=variant.left or 0,
        right=variant.right or 0,
        scale=variant.scale,
        scale_log2=variant.scale * LOG2_E,
    )


def describers(
    dtype: torch.dtype, spec: KeysSpec, view: View = as_it_is
) -> tuple[Describe | None, ...]:
    """Return what makes the descriptors of the tensors, of their second pieces, and of statistics.

    Blocks of queries and of keys have as many rows.
    """
    widths = (*spec.WIDTHS, 64)
    *pieces, columns = (describe_tiles([1, 1, spec.BLOCK_M, w], dtype, view) for w in widths)
    first, second = pieces if len(pieces) == 2 else (*pieces, None)
    describe_rows = describe_floats([spec.BLOCK_M])

    def describe_statistics(x: Tensor) -> Any:
        return describe_rows(x.view(-1))

    return (*[first] * 5, columns, *[second] * 6, describe_statistics)

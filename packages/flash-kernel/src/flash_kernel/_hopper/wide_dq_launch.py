"""Host side of dq for head dims above 128: arguments, launch."""

import torch
import triton
from torch import Tensor

from flash_kernel._hopper.config import WARPGROUP_ROWS, ForwardSpec
from flash_kernel._hopper.forward_spec import (
    LOG2_E,
    Sizes,
    clipped,
    count_tiles,
    forward_spec,
    key_bytes,
)
from flash_kernel._hopper.launch import OPTIONS, Launch, describe_tiles, num_sms
from flash_kernel._hopper.wide_config import DQ
from flash_kernel._hopper.wide_dq import flash_attention_wide_dq_kernel
from flash_kernel._triton.launch_backward import padded_rows
from flash_kernel._triton.prepared import Describe, View, as_it_is
from flash_kernel.variant import Variant


def dq_describers(
    spec: ForwardSpec, dtype: torch.dtype, view: View = as_it_is
) -> list[Describe | None]:
    """Return what makes the descriptors of q, k, v, do and dq, and of their second pieces."""
    rows_of_tiles = (
        WARPGROUP_ROWS, spec.BLOCK_N, spec.BLOCK_N, WARPGROUP_ROWS, WARPGROUP_ROWS
    )  # fmt: skip
    made: list[Describe | None] = [
        describe_tiles([1, 1, rows, width], dtype, view)
        for width in spec.WIDTHS
        for rows in rows_of_tiles
    ]
    return made + [None] * (10 - len(made))


def prepare_dq(q: Tensor, k: Tensor, variant: Variant, view: View = as_it_is) -> Launch:
    """Prepare dq of tensors ``[B, H, rows, D]``: one CTA for each SM, which take tiles in turn."""
    variant, spec, sizes = dq_spec(q, k, variant, q.dtype)
    scalars, tiles = dq_arguments(spec, sizes, variant)
    return Launch(
        flash_attention_wide_dq_kernel,
        (min(tiles, num_sms(q.device)), 1),
        (*dq_describers(spec, q.dtype, view), None, None, None),
        (*scalars, spec),
        OPTIONS,
    )


def dq_spec(
    q: Tensor, k: Tensor, variant: Variant, dtype: torch.dtype
) -> tuple[Variant, ForwardSpec, Sizes]:
    """Return the variant as the kernel takes it, what it is compiled for, and the sizes."""
    sizes = Sizes(*q.shape[:2], k.shape[1], q.shape[2], k.shape[2], q.shape[3])
    variant = clipped(variant, sizes)
    return variant, forward_spec(DQ, dtype, sizes, variant), sizes


def dq_arguments(
    spec: ForwardSpec, sizes: Sizes, variant: Variant
) -> tuple[tuple[float, ...], int]:
    """Return the kernel's numbers, and how many tiles there are."""
    units, row_tiles = count_tiles(spec, sizes)
    swath = triton.cdiv(units, triton.cdiv(key_bytes(sizes), DQ.swath_mib << 20))
    numbers = (
        *(sizes.seqlen_q, sizes.seqlen_k, variant.left or 0, variant.right or 0),
        *(sizes.num_heads, sizes.group, units, row_tiles, swath),
        padded_rows(sizes.seqlen_q, None),
        *(variant.scale, variant.scale * LOG2_E),
    )
    return numbers, units * row_tiles

"""What the forward is compiled for and launched with, by the sizes of an attention: plain data."""

import math
from typing import NamedTuple

import torch
import triton

from flash_kernel._hopper.config import WARPGROUP_ROWS, ForwardConfig, ForwardSpec, widths_of
from flash_kernel.variant import Variant

LOG2_E = math.log2(math.e)
# of p in float16: 2^-8 for the maximum of the first block leaves room for scores to grow by 2^23
HALF_SHIFT = 8


class Sizes(NamedTuple):
    """The sizes of one attention."""

    batch: int
    num_heads: int
    num_heads_k: int
    seqlen_q: int
    seqlen_k: int
    head_dim: int
    num_sequences: int | None = None  # packed in a batch of 1; None where they are not

    @property
    def longest_keys(self) -> int:
        """Most keys of a sequence that a kernel is built for; packed, they are not looked at."""
        return self.seqlen_k if self.num_sequences is None else 0

    @property
    def group(self) -> int:
        """Query heads that share a head of k and v."""
        return self.num_heads // self.num_heads_k


def clipped(variant: Variant, sizes: Sizes) -> Variant:
    """Drop the bounds of a window that lie beyond every row's keys.

    Of packed sequences none: what one gets must not depend on how long all are together.
    """
    if sizes.num_sequences is not None:
        return variant
    left, right = variant.left, variant.right
    if left is not None and left >= sizes.seqlen_k - 1:
        left = None
    if right is not None and right >= sizes.seqlen_q - 1:
        right = None
    return variant._replace(left=left, right=right)


def forward_spec(
    config: ForwardConfig, dtype: torch.dtype, sizes: Sizes, variant: Variant
) -> ForwardSpec:
    """Return what the kernel is compiled for."""
    has_left, has_right = variant.left is not None, variant.right is not None
    # where the keys that a tile sees end at a multiple of 64, blocks of them can begin at multiples
    # of their size, and none needs a mask but the first
    is_packed = sizes.num_sequences is not None
    ends_even = (sizes.seqlen_k - sizes.seqlen_q + (variant.right or 0)) % WARPGROUP_ROWS == 0
    has_tail = is_packed or sizes.seqlen_k % config.block_n != 0
    return ForwardSpec(
        WIDTHS=widths_of(sizes.head_dim),
        BLOCK_N=config.block_n,
        CONSUMERS=config.consumers,
        STAGES=config.stages,
        Q_BUFFERS=config.q_buffers,
        CONSUMER_REGISTERS=config.consumer_registers,
        PRODUCER_REGISTERS=config.producer_registers,
        SHARES_KEYS=sizes.group % config.consumers == 0,
        HAS_RIGHT=has_right,
        HAS_LEFT=has_left,
        HAS_SOFTCAP=variant.softcap is not None,
        IS_PACKED=is_packed,
        MASKS_FIRST=has_right or has_left or has_tail,
        MASKS_LAST=has_left or (has_right and (is_packed or not ends_even)),
        MAY_BE_EMPTY=is_packed or (has_right and sizes.seqlen_q > sizes.seqlen_k),
        SHIFT=HALF_SHIFT if dtype == torch.float16 else 0,
    )


def count_tiles(spec: ForwardSpec, sizes: Sizes) -> tuple[int, int]:
    """Return the number of units, heads or groups of heads, and the tiles of rows of each."""
    heads, rows = (spec.CONSUMERS, 1) if spec.SHARES_KEYS else (1, spec.CONSUMERS)
    units, rows = sizes.batch * sizes.num_heads // heads, rows * WARPGROUP_ROWS
    if sizes.num_sequences is None:
        return units, triton.cdiv(sizes.seqlen_q, rows)
    # the slots of `sequence_and_tile`: a sequence may have one that it does not need
    return units, sizes.seqlen_q // rows + sizes.num_sequences


def key_bytes(sizes: Sizes) -> int:
    """Return the size of k and v."""
    return 2 * 2 * sizes.batch * sizes.num_heads_k * sizes.seqlen_k * sizes.head_dim


def score_factors(variant: Variant) -> tuple[float, float]:
    """Return the kernel's ``scale_log2`` and ``cap_log2``, which is not read without a softcap."""
    if variant.softcap is None:
        return variant.scale * LOG2_E, 0.0
    return variant.softcap * LOG2_E, 2 * LOG2_E * variant.scale / variant.softcap

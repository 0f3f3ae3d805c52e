"""Host side of the cache kernels: append, decode, combine."""

import dataclasses

import torch
import triton
from torch import Tensor

from flash_kernel._triton.config import (
    COMBINE_ELEMENTS,
    MAX_SPLITS,
    SMALLEST_SPLIT,
    SPLIT_PROGRAMS,
    BlockConfig,
    compute_capability,
    decode_config,
    float32_precision,
)
from flash_kernel._triton.decode import (
    flash_attention_append_kernel,
    flash_attention_combine_kernel,
    flash_attention_decode_kernel,
)
from flash_kernel._triton.launch import (
    ABSENT,
    LOG2_E,
    NO_EXTRAS,
    SMALLEST_FACTOR,
    Options,
    kernel_spec,
    window_scalars,
)
from flash_kernel._triton.prepared import PreparedLaunch, blank
from flash_kernel.variant import PLAIN, Modifiers, Variant

APPEND_BLOCK_N = 16


def prepare_append(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    seqlens: Tensor,
    block_table: Tensor | None,
) -> PreparedLaunch:
    """Prepare to write ``k, v [B, H_kv, M_new, D]`` behind the ``seqlens [B]`` cached keys.

    One program copies a tile of new rows of one head.
    """
    batch, num_heads_k, num_new, _ = k.shape
    config = BlockConfig(block_n=APPEND_BLOCK_N)
    spec = kernel_spec(k, v, config, PLAIN, Options(Variant(1.0), "ieee", None, False))
    return PreparedLaunch(
        flash_attention_append_kernel,
        (batch * num_heads_k * triton.cdiv(num_new, config.block_n), 1),
        [None] * 6,
        (
            *(x.stride() for x in (k, v, k_cache, v_cache)),
            num_heads_k,
            num_new,
            *capacity_and_pages(k_cache, block_table),
            spec,
            dataclasses.replace(spec, PAGE_SIZE=page_size(k_cache, block_table)),
        ),
        config.options,
    )


@dataclasses.dataclass(frozen=True, slots=True)
class Decode:
    """Attention over caches of one layout, prepared."""

    decode: PreparedLaunch | None  # None where there are no outputs
    combine: PreparedLaunch | None  # None where the keys are not split
    o: Tensor | None  # what o is like; None: like q
    lse: Tensor
    parts: Tensor  # what o and lse of the splits are like
    lses: Tensor

    def __call__(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        seqlens: Tensor,
        block_table: Tensor | None,
        slopes: Tensor | None = None,
        sinks: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return ``o [B, H, M, D_v]`` and ``lse [B, H, M]``; slopes are float32 ``[B, H]``."""
        o = torch.empty_like(q if self.o is None else self.o)
        lse = torch.empty_like(self.lse)
        if self.decode is None:
            return o, lse
        parts, lses = o, lse
        if self.combine is not None:
            parts, lses = torch.empty_like(self.parts), torch.empty_like(self.lses)
        self.decode(q, k_cache, v_cache, parts, lses, seqlens, block_table, slopes, sinks)
        if self.combine is not None:
            self.combine(parts, lses, o, lse, sinks)
        return o, lse


def prepare_decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor | None,
    num_new: int,
    variant: Variant,
    modifiers: Modifiers = PLAIN,
    *,
    num_splits: int | None = None,
    config: BlockConfig | None = None,
) -> Decode:
    """Prepare o and lse of queries over their sequence's cache.

    ``num_new`` keys have been appended to the ``seqlens`` of a launch.
    """
    shape = (*q.shape[:3], v_cache.shape[-1])
    o_like = None if shape == q.shape else blank(shape, q.dtype, q.device)
    o = torch.empty_like(q if o_like is None else o_like)
    lse = blank(q.shape[:3], torch.float32, q.device)
    if lse.numel() == 0:
        return Decode(None, None, o_like, lse, lse, lse)
    group = q.shape[1] // k_cache.shape[1]
    capability = compute_capability(q.device)
    width = max(q.shape[-1], v_cache.shape[-1])
    config = config or decode_config(
        width, q.dtype, capability, group * q.shape[2], is_paged=block_table is not None
    )
    if q.shape[2] == 1 and variant.right is not None:
        variant = variant._replace(right=None)  # the last position has no keys after it
    smallest = SMALLEST_SPLIT if num_splits is None else config.block_n
    if num_splits is None:
        capacity, _ = capacity_and_pages(k_cache, block_table)
        num_splits = default_splits(q, k_cache.shape[1], capacity, config.block_m)
    options = Options(variant, float32_precision(q.dtype, capability), None, use_descriptors=False)
    # a prepared call is kept: it must not hold memory
    parts = blank((num_splits, *shape), torch.float32, q.device)
    lses = blank((num_splits, *lse.shape), torch.float32, q.device)
    decode = decode_launch(
        q, k_cache, v_cache, torch.empty_like(parts) if num_splits > 1 else o, block_table, num_new,
        modifiers, options, config, num_splits, smallest,
    )  # fmt: skip
    combine = combine_launch(o, num_splits, modifiers) if num_splits > 1 else None
    return Decode(decode, combine, o_like, lse, parts, lses)


@dataclasses.dataclass(frozen=True, slots=True)
class FewQueries:
    """A forward of few queries over many keys, prepared: its k and v are a full cache."""

    decode: Decode

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, extras: tuple[Tensor | None, ...] = NO_EXTRAS
    ) -> tuple[Tensor, Tensor]:
        """Return ``o`` and ``lse``; there are no extras."""
        # not kept from one call to the next: in a graph it has to be the graph's
        seqlens = torch.full(q.shape[:1], k.shape[2], dtype=torch.int32, device=q.device)
        return self.decode(q, k, v, seqlens, None)


def prepare_few_queries(q: Tensor, k: Tensor, v: Tensor, variant: Variant) -> FewQueries:
    """Prepare ``o`` and ``lse`` of few queries ``q [B, H, M, D]``; see `has_few_queries`."""
    return FewQueries(prepare_decode(q, k, v, None, 0, variant))


def decode_launch(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    parts: Tensor,
    block_table: Tensor | None,
    num_new: int,
    modifiers: Modifiers,
    options: Options,
    config: BlockConfig,
    num_splits: int,
    smallest: int,
) -> PreparedLaunch:
    """Prepare the splits: one program per key head, tile of queries, and split."""
    batch, num_heads, seqlen_q, _ = q.shape
    num_heads_k = k_cache.shape[1]
    group = num_heads // num_heads_k
    scale, slopes = options.variant.scale, modifiers.alibi_slopes
    is_split = num_splits > 1
    # where the keys are split, a sink joins when the parts do
    of_kernel = modifiers._replace(sinks=None) if is_split else modifiers
    spec = kernel_spec(q, v_cache, config, of_kernel, options)
    prescaled = spec.PRESCALED or scale * LOG2_E < SMALLEST_FACTOR
    return PreparedLaunch(
        flash_attention_decode_kernel,
        (batch * num_heads_k * triton.cdiv(group * seqlen_q, config.block_m) * num_splits, 1),
        [None] * 9,
        (
            *(x.stride() for x in (q, k_cache, v_cache)),
            parts.stride()[-4:],
            ABSENT if slopes is None else slopes.stride(),
            parts.stride(0) if is_split else 0,
            num_heads_k,
            group,
            seqlen_q,
            num_new,
            *capacity_and_pages(k_cache, block_table),
            num_splits,
            smallest,
            scale,
            LOG2_E if prescaled else scale * LOG2_E,
            *window_scalars(options),
            dataclasses.replace(
                spec,
                PRESCALED=prescaled,
                IN_PIECES=spec.MAX_WIDTH is not None,
                PAGE_SIZE=page_size(k_cache, block_table),
            ),
        ),
        config.options,
    )


def combine_launch(o: Tensor, num_splits: int, modifiers: Modifiers) -> PreparedLaunch:
    """Prepare the joining of the splits: one program per row."""
    batch, num_heads, seqlen_q, _ = o.shape
    options = Options(Variant(1.0), "ieee", None, use_descriptors=False)
    config = BlockConfig()
    spec = kernel_spec(o, o, config, modifiers._replace(alibi_slopes=None), options)
    at_once = min(triton.next_power_of_2(num_splits), COMBINE_ELEMENTS // spec.BLOCK_DV)
    return PreparedLaunch(
        flash_attention_combine_kernel,
        (batch * num_heads * seqlen_q, 1),
        [None] * 5,
        (o.stride(), num_heads, seqlen_q, num_splits, at_once, spec),
        config.options,
    )


def default_splits(q: Tensor, num_heads_k: int, capacity: int, block_m: int) -> int:
    """Return how often to split a sequence's keys: by its own shape, whatever the batch.

    So a row's result is the same to the bit in any batch.
    """
    num_rows = q.shape[1] // num_heads_k * q.shape[2]
    of_sequence = num_heads_k * triton.cdiv(num_rows, block_m)
    most = min(MAX_SPLITS, triton.cdiv(capacity, SMALLEST_SPLIT))
    return max(1, min(most, SPLIT_PROGRAMS // of_sequence))


def capacity_and_pages(cache: Tensor, block_table: Tensor | None) -> tuple[int, int]:
    """Return how many keys a sequence can have, and in how many pages."""
    if block_table is None:
        return cache.shape[2], 0
    return block_table.shape[1] * cache.shape[2], block_table.shape[1]


def page_size(cache: Tensor, block_table: Tensor | None) -> int:
    """Return the keys of a page, 0 where there are no pages."""
    return 0 if block_table is None else cache.shape[2]

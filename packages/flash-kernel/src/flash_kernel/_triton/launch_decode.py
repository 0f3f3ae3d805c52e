"""Host side of the cache kernels: append, decode, combine."""

import dataclasses
from functools import partial

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
)
from flash_kernel._triton.decode import (
    flash_attention_append_kernel,
    flash_attention_combine_kernel,
    flash_attention_decode_kernel,
)
from flash_kernel._triton.launch import (
    ABSENT,
    LOG2_E,
    SMALLEST_FACTOR,
    Options,
    empty_like_q,
    float32_precision,
    kernel_spec,
    window_scalars,
)
from flash_kernel._triton.prepared import PreparedLaunch, layout_key, prepared
from flash_kernel.variant import PLAIN, Modifiers, Variant

APPEND_BLOCK_N = 16


def launch_append(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    seqlens: Tensor,
    block_table: Tensor | None,
) -> None:
    """Write ``k, v [B, H_kv, M_new, D]`` behind the ``seqlens [B]`` keys of each sequence."""
    if k.numel() == 0:
        return
    tensors = (k, v, k_cache, v_cache, seqlens)
    key = ("append", layout_key(*tensors, block_table))
    launch = prepared(key, partial(prepare_append, *tensors, block_table))
    launch(*tensors, seqlens if block_table is None else block_table)


def prepare_append(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    seqlens: Tensor,
    block_table: Tensor | None,
) -> PreparedLaunch:
    """Prepare the copies: one program per head and tile of new rows."""
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


def launch_decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    seqlens: Tensor,
    block_table: Tensor | None,
    num_new: int,
    variant: Variant,
    modifiers: Modifiers = PLAIN,
    *,
    num_splits: int | None = None,
    config: BlockConfig | None = None,
) -> tuple[Tensor, Tensor]:
    """Return ``o [B, H, M, D_v]`` and ``lse [B, H, M]`` of queries over their sequence's cache.

    ``num_new`` keys have been appended to ``seqlens``; slopes are float32 ``[B, H]``.
    """
    o = empty_like_q(q, v_cache.shape[-1])
    lse = torch.empty(q.shape[:3], device=q.device, dtype=torch.float32)
    if lse.numel() == 0:
        return o, lse
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
    options = Options(variant, float32_precision(q.dtype), None, use_descriptors=False)
    slopes, _, _, sinks = modifiers
    key = (
        layout_key(q, k_cache, v_cache, seqlens, block_table, slopes, sinks),
        (options, config, num_splits, smallest, num_new),
    )
    parts, lses = o, lse
    if num_splits > 1:
        parts = o.new_empty((num_splits, *lse.shape, o.shape[-1]), dtype=torch.float32)
        lses = lse.new_empty((num_splits, *lse.shape))
    prepare_it = partial(
        prepare_decode, q, k_cache, v_cache, parts, block_table, num_new, modifiers, options,
        config, num_splits, smallest,
    )  # fmt: skip
    absent = (lse if x is None else x for x in (slopes, sinks))
    prepared(("decode", key), prepare_it)(
        q, k_cache, v_cache, parts, lses, seqlens, seqlens if block_table is None else block_table,
        *absent,
    )  # fmt: skip
    if num_splits > 1:
        prepare_it = partial(prepare_combine, o, num_splits, modifiers)
        launch = prepared(("combine", key), prepare_it)
        launch(parts, lses, o, lse, lse if sinks is None else sinks)
    return o, lse


def prepare_decode(
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
                spec, PRESCALED=prescaled, PAGE_SIZE=page_size(k_cache, block_table)
            ),
        ),
        config.options,
    )


def prepare_combine(o: Tensor, num_splits: int, modifiers: Modifiers) -> PreparedLaunch:
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

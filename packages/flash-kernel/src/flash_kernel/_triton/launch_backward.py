"""Host side of the backward kernels: gradients, grids, arguments, launches."""

import dataclasses
from functools import partial

import torch
import triton
from torch import Tensor

from flash_kernel._triton.backward import flash_attention_dk_dv_kernel, flash_attention_dq_kernel
from flash_kernel._triton.config import (
    STATISTICS_BLOCK_M,
    STATISTICS_PADDING,
    BlockConfig,
    KernelConfigs,
)
from flash_kernel._triton.launch import (
    LOG2_E,
    Options,
    default_configs,
    float32_precision,
    kernel_spec,
    prepare,
    sequence_ends,
    tile_grid,
    window_scalars,
)
from flash_kernel._triton.prepared import PreparedLaunch, layout_key, prepared
from flash_kernel._triton.row_statistics import flash_attention_row_statistics_kernel
from flash_kernel.gradients import Gradients, sink_gradient
from flash_kernel.variant import PLAIN, Modifiers, Packing, Variant

STATISTICS_CONFIG = BlockConfig(block_m=STATISTICS_BLOCK_M)


def launch_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    do: Tensor,
    dlse: Tensor | None,
    variant: Variant,
    modifiers: Modifiers = PLAIN,
    packing: Packing | None = None,
    *,
    configs: KernelConfigs | None = None,
    use_descriptors: bool | None = None,
) -> Gradients:
    """Return ``dq``, ``dk`` and ``dv``, laid out like ``q``, ``k`` and ``v``, and ``dsinks``.

    ``o`` and ``lse`` are what `launch_forward` returned; ``do`` and ``dlse [B, H, M]`` (None for
    zero) are the gradients of the loss with respect to them.
    """
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    num_sequences, ends = sequence_ends(packing)
    statistics = launch_row_statistics(o, do, lse, dlse, packing)
    options = Options(variant, float32_precision(q.dtype), configs, use_descriptors, num_sequences)
    # a sink is one more key, of which the loops need to know no more than lse tells
    buffers = (*modifiers[:3], *ends)
    key = (layout_key(q, k, v, do, *buffers), options)
    extras = [statistics, *(statistics if x is None else x for x in buffers)]
    if dk.numel() > 0:
        prepare_it = partial(prepare_dk_dv, q, k, v, do, dk, dv, modifiers, options)
        prepared(("dk_dv", key), prepare_it)(q, k, v, do, dk, dv, *extras)
    if dq.numel() > 0:
        prepare_it = partial(prepare_dq, q, k, v, do, dq, modifiers, options)
        prepared(("dq", key), prepare_it)(q, k, v, do, dq, *extras)
    dsinks = None
    if modifiers.sinks is not None:
        dsinks = sink_gradient(modifiers.sinks, *statistics.unbind(2))
    return Gradients(dq, dk, dv, None, dsinks)


def launch_row_statistics(
    o: Tensor, do: Tensor, lse: Tensor, dlse: Tensor | None, packing: Packing | None = None
) -> Tensor:
    """Return ``lse`` and ``rowsum(do * o) - dlse`` as float32 ``[B, H, 2, padded M]``."""
    batch, num_heads, seqlen_q, _ = o.shape
    num_sequences, (ends, _) = sequence_ends(packing)
    padded_q = padded_rows(seqlen_q, num_sequences)
    statistics = torch.empty((batch, num_heads, 2, padded_q), device=o.device, dtype=torch.float32)
    if statistics.numel() == 0:
        return statistics
    has_dlse = dlse is not None
    lse = lse.contiguous()
    dlse = lse if dlse is None else dlse.contiguous()
    key = ("row_statistics", layout_key(o, do, lse, dlse, ends), has_dlse, num_sequences)
    prepare_it = partial(prepare_row_statistics, o, do, has_dlse, num_sequences)
    launch = prepared(key, prepare_it)
    launch(o, do, lse, dlse, lse if ends is None else ends, statistics)
    return statistics


def prepare_dk_dv(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    do: Tensor,
    dk: Tensor,
    dv: Tensor,
    modifiers: Modifiers,
    options: Options,
) -> PreparedLaunch:
    """Prepare dk and dv: one program per key head and key tile."""
    config = (options.configs or default_configs(q, v)).dk_dv
    batch, num_heads_k, seqlen_k, _ = k.shape
    seqlen_q, scale = q.shape[2], options.variant.scale
    padded_q = padded_rows(seqlen_q, options.num_sequences)
    scalars = (num_heads_k, q.shape[1] // num_heads_k, seqlen_q, padded_q, seqlen_k)
    return prepare(
        flash_attention_dk_dv_kernel,
        tile_grid(batch, num_heads_k, seqlen_k, config.block_n, options.num_sequences),
        {"q": q, "k": k, "v": v, "do": do, "dk": dk, "dv": dv},
        6,
        modifiers,
        (*scalars, options.num_sequences or 0, scale, scale * LOG2_E, *window_scalars(options)),
        config,
        dataclasses.replace(
            kernel_spec(q, v, config, modifiers, options), IS_GROUPED=q.shape[1] > num_heads_k
        ),
        options.use_descriptors,
    )


def prepare_dq(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    do: Tensor,
    dq: Tensor,
    modifiers: Modifiers,
    options: Options,
) -> PreparedLaunch:
    """Prepare dq: one program per head and query tile."""
    config = (options.configs or default_configs(q, v)).dq
    batch, num_heads, seqlen_q, _ = q.shape
    scale = options.variant.scale
    padded_q = padded_rows(seqlen_q, options.num_sequences)
    scalars = (num_heads, num_heads // k.shape[1], seqlen_q, padded_q, k.shape[2])
    return prepare(
        flash_attention_dq_kernel,
        tile_grid(batch, num_heads, seqlen_q, config.block_m, options.num_sequences),
        {"q": q, "k": k, "v": v, "do": do, "dq": dq},
        6,
        modifiers,
        (*scalars, options.num_sequences or 0, scale, scale * LOG2_E, *window_scalars(options)),
        config,
        kernel_spec(q, v, config, modifiers, options),
        options.use_descriptors,
    )


def prepare_row_statistics(
    o: Tensor, do: Tensor, has_dlse: bool, num_sequences: int | None
) -> PreparedLaunch:
    """Prepare the row statistics: one program per head and tile of padded rows."""
    batch, num_heads, seqlen_q, _ = o.shape
    padded_q = padded_rows(seqlen_q, num_sequences)
    options = Options(Variant(1.0), "ieee", None, False, num_sequences)
    heads, tiles = tile_grid(batch, num_heads, padded_q, STATISTICS_CONFIG.block_m)
    return prepare(
        flash_attention_row_statistics_kernel,
        # as many tiles as hold the padded rows, in the order of packed ones where they are packed
        (heads, tiles) if num_sequences is None else (tiles, heads),
        {"o": o, "do": do},
        4,
        None,
        (num_heads, seqlen_q, padded_q, num_sequences or 0, has_dlse),
        STATISTICS_CONFIG,
        kernel_spec(o, o, STATISTICS_CONFIG, PLAIN, options),
        options.use_descriptors,
    )


def padded_rows(seqlen_q: int, num_sequences: int | None) -> int:
    """Return the rows of the statistics: padded in all, or in the slots of packed sequences."""
    if num_sequences is None:
        return triton.cdiv(seqlen_q, STATISTICS_PADDING) * STATISTICS_PADDING
    return (seqlen_q // STATISTICS_PADDING + num_sequences) * STATISTICS_PADDING

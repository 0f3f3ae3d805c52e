"""Host side of the backward kernels: gradients, grids, arguments, launches."""

import dataclasses

import torch
import triton
from torch import Tensor

from flash_kernel._triton.backward import flash_attention_dk_dv_kernel, flash_attention_dq_kernel
from flash_kernel._triton.config import (
    STATISTICS_BLOCK_M,
    STATISTICS_PADDING,
    BlockConfig,
    KernelConfigs,
    compute_capability,
    float32_precision,
)
from flash_kernel._triton.launch import (
    LOG2_E,
    NO_EXTRAS,
    Options,
    default_configs,
    kernel_spec,
    prepare,
    tile_grid,
    window_scalars,
)
from flash_kernel._triton.prepared import PreparedLaunch, View, as_it_is, blank, compile_together
from flash_kernel._triton.row_statistics import flash_attention_row_statistics_kernel
from flash_kernel.gradients import Gradients, sink_gradient
from flash_kernel.variant import PLAIN, Modifiers, Variant

STATISTICS_CONFIG = BlockConfig(block_m=STATISTICS_BLOCK_M)


@dataclasses.dataclass(frozen=True, slots=True)
class Backward:
    """The backward of tensors of one layout, prepared; they may have any shape, as in `Forward`."""

    statistics: Tensor  # what the row statistics are like, [B, H, 2, padded M]
    row_statistics: PreparedLaunch | None
    dk_dv: PreparedLaunch | None  # None where there are no keys
    dq: PreparedLaunch | None

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
        """Return the gradients; extras are those of `Forward`."""
        dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        statistics = torch.empty_like(self.statistics)
        slopes, bias, mask, sinks, *ends = extras
        lse = lse.contiguous()
        # a sink is one more key, of which the loops need to know no more than lse tells
        buffers = (statistics, slopes, bias, mask, *ends)
        of_dk_dv, of_dq = (q, k, v, do, dk, dv, *buffers), (q, k, v, do, dq, *buffers)
        if self.dq is not None and self.dq.compiled is None and self.dk_dv is not None:
            compile_together((self.dk_dv, of_dk_dv), (self.dq, of_dq))
        if self.row_statistics is not None:
            dlse = None if dlse is None else dlse.contiguous()
            self.row_statistics(o, do, lse, dlse, ends[0], statistics)
        if self.dk_dv is not None:
            self.dk_dv(*of_dk_dv)
        if self.dq is not None:
            self.dq(*of_dq)
        dsinks = None
        if sinks is not None:
            dsinks = sink_gradient(sinks, *statistics.unbind(2))
        return Gradients(dq, dk, dv, None, dsinks)


def prepare_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    do: Tensor,
    variant: Variant,
    modifiers: Modifiers = PLAIN,
    num_sequences: int | None = None,
    *,
    has_dlse: bool,
    view: View = as_it_is,
    configs: KernelConfigs | None = None,
    use_descriptors: bool | None = None,
) -> Backward:
    """Prepare the gradients of a `Forward` that was prepared with the same arguments.

    ``dq``, ``dk`` and ``dv`` are laid out like ``q``, ``k`` and ``v``; ``do`` is the gradient of
    the loss with respect to ``o``.
    """
    dq, dk, dv = (view(torch.empty_like(x)) for x in (q, k, v))
    q, k, v, o, do = map(view, (q, k, v, o, do))
    statistics = blank(
        (*q.shape[:2], 2, padded_rows(q.shape[2], num_sequences)), torch.float32, q.device
    )
    precision = float32_precision(q.dtype, compute_capability(q.device))
    options = Options(variant, precision, configs, use_descriptors, num_sequences, view)
    has_rows, has_keys = statistics.numel() > 0, dk.numel() > 0
    return Backward(
        statistics,
        prepare_row_statistics(o, do, has_dlse, num_sequences) if has_rows else None,
        prepare_dk_dv(q, k, v, do, dk, dv, modifiers, options) if has_keys else None,
        prepare_dq(q, k, v, do, dq, modifiers, options) if dq.numel() > 0 else None,
    )


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
        options,
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
        options,
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
        options,
    )


def padded_rows(seqlen_q: int, num_sequences: int | None) -> int:
    """Return the rows of the statistics: padded in all, or in the slots of packed sequences."""
    if num_sequences is None:
        return triton.cdiv(seqlen_q, STATISTICS_PADDING) * STATISTICS_PADDING
    return (seqlen_q // STATISTICS_PADDING + num_sequences) * STATISTICS_PADDING

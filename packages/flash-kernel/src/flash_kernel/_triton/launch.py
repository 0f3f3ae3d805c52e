"""Host side of the kernels: outputs, grid, arguments, launch."""

import dataclasses
import math
from functools import partial
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from flash_kernel._triton.backward import (
    flash_attention_dk_dv_kernel,
    flash_attention_dq_kernel,
    flash_attention_row_statistics_kernel,
)
from flash_kernel._triton.config import (
    STATISTICS_BLOCK_M,
    BlockConfig,
    KernelConfigs,
    KernelSpec,
    compute_capability,
    configs_for,
    padded_head_dim,
)
from flash_kernel._triton.forward import (
    REDO_TILES,
    flash_attention_forward_kernel,
    flash_attention_redo_kernel,
)
from flash_kernel._triton.prepared import (
    Describe,
    PreparedLaunch,
    describe_blocks,
    is_aligned,
    is_interpreted,
    layout_key,
    prepared,
)
from flash_kernel.gradients import Gradients, sink_gradient
from flash_kernel.variant import PLAIN, Modifiers, Variant

LOG2_E = math.log2(math.e)
STATISTICS_CONFIG = BlockConfig(block_m=STATISTICS_BLOCK_M)
ROW_PADDING = 128  # the largest BLOCK_M: row statistics are read in whole tiles
SMALLEST_FACTOR = torch.finfo(torch.float32).tiny
KEY_TENSORS = ("k", "v", "dk", "dv")  # tensors whose rows are keys: they come in tiles of BLOCK_N
VALUE_TENSORS = ("v", "o", "do", "dv")  # tensors as wide as v
# making a descriptor at each launch takes the host longer than so few rows take the GPU; of rows
# alone, not of heads or batch, since a row's result must not depend on how many there are
SHORT_ROWS = 256
REDO_BLOCK_M = 64
REDO_PROGRAMS = 512  # enough for every SM, where there are so many tiles
ABSENT = (0, 0, 0, 0)  # strides of a modifier that is not there


class Options(NamedTuple):
    """What a launch depends on besides its tensors."""

    variant: Variant
    precision: str  # of float32 products, "ieee" or "tf32"
    configs: KernelConfigs | None  # None: the table's
    use_descriptors: bool | None  # None: if the device and the tensors' alignment allow it
    redoes: bool = False  # only the tiles that another forward has marked


def launch_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    variant: Variant,
    modifiers: Modifiers = PLAIN,
    *,
    configs: KernelConfigs | None = None,
    use_descriptors: bool | None = None,
) -> tuple[Tensor, Tensor]:
    """Return ``o`` and ``lse`` of ``q [B, H, M, D]``, ``k [B, H_kv, N, D]``, ``v [.., N, D_v]``.

    ``modifiers`` are those of `as_pairs`.  ``configs`` and ``use_descriptors`` override what the
    device and the tensors' alignment suggest; every choice gives the same values up to rounding.
    """
    o = empty_like_q(q, v.shape[-1])
    lse = torch.empty(q.shape[:3], device=q.device, dtype=torch.float32)
    if lse.numel() == 0:
        return o, lse
    options = Options(variant, float32_precision(q.dtype), configs, use_descriptors)
    key = ("forward", layout_key(q, k, v, *modifiers), options)
    launch = prepared(key, partial(prepare_forward, q, k, v, o, modifiers, options))
    launch(q, k, v, o, lse, *(lse if x is None else x for x in modifiers))
    return o, lse


def redo_forward(q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, variant: Variant) -> None:
    """Compute anew, in ``o`` and ``lse``, the tiles of rows in which some row's lse is NaN."""
    options = Options(variant, float32_precision(q.dtype), None, None, redoes=True)
    key = ("forward", layout_key(q, k, v, o), options)
    launch = prepared(key, partial(prepare_forward, q, k, v, o, PLAIN, options))
    launch(q, k, v, o, lse, *[lse] * len(PLAIN))


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
    *,
    configs: KernelConfigs | None = None,
    use_descriptors: bool | None = None,
) -> Gradients:
    """Return ``dq``, ``dk`` and ``dv``, laid out like ``q``, ``k`` and ``v``, and ``dsinks``.

    ``o`` and ``lse`` are what `launch_forward` returned; ``do`` and ``dlse [B, H, M]`` (None for
    zero) are the gradients of the loss with respect to them.
    """
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    statistics = launch_row_statistics(o, do, lse, dlse)
    options = Options(variant, float32_precision(q.dtype), configs, use_descriptors)
    key = (layout_key(q, k, v, do, *modifiers[:3]), options)
    # a sink is one more key, of which the loops need to know no more than lse tells
    extras = [statistics, *(statistics if x is None else x for x in modifiers[:3])]
    if dk.numel() > 0:
        prepare_it = partial(prepare_dk_dv, q, k, v, do, dk, dv, modifiers, options)
        prepared(("dk_dv", key), prepare_it)(q, k, v, do, dk, dv, *extras)
    if dq.numel() > 0:
        prepare_it = partial(prepare_dq, q, k, v, do, dq, modifiers, options)
        prepared(("dq", key), prepare_it)(q, k, v, do, dq, *extras)
    dsinks = None
    if modifiers.sinks is not None:
        dsinks = sink_gradient(modifiers.sinks, lse, statistics[:, :, 1, : q.shape[2]])
    return Gradients(dq, dk, dv, None, dsinks)


def empty_like_q(q: Tensor, head_dim_v: int) -> Tensor:
    """Return an output ``[B, H, M, D_v]``, laid out like ``q`` where it is as wide."""
    if head_dim_v == q.shape[-1]:
        return torch.empty_like(q)
    return torch.empty((*q.shape[:3], head_dim_v), device=q.device, dtype=q.dtype)


def launch_row_statistics(o: Tensor, do: Tensor, lse: Tensor, dlse: Tensor | None) -> Tensor:
    """Return ``lse`` and ``rowsum(do * o) - dlse`` as float32 ``[B, H, 2, padded M]``."""
    batch, num_heads, seqlen_q, _ = o.shape
    padded_q = padded_rows(seqlen_q)
    statistics = torch.empty((batch, num_heads, 2, padded_q), device=o.device, dtype=torch.float32)
    if statistics.numel() == 0:
        return statistics
    lse = lse.contiguous()
    dlse = lse if dlse is None else dlse.contiguous()
    has_dlse = dlse is not lse
    key = ("row_statistics", layout_key(o, do, lse, dlse), has_dlse)
    launch = prepared(key, partial(prepare_row_statistics, o, do, has_dlse))
    launch(o, do, lse, dlse, statistics)
    return statistics


def prepare_forward(
    q: Tensor, k: Tensor, v: Tensor, o: Tensor, modifiers: Modifiers, options: Options
) -> PreparedLaunch:
    """Prepare o and lse: one program per head and query tile."""
    config = (options.configs or default_configs(q, v)).forward
    if options.redoes:
        config = redo_config(config)
    batch, num_heads, seqlen_q, _ = q.shape
    scale = options.variant.scale
    spec = kernel_spec(q, v, config, modifiers, options)
    # folded into the exponential, a factor of 0 would make NaN of hidden scores, which are -inf
    prescaled = spec.PRESCALED or scale * LOG2_E < SMALLEST_FACTOR
    scalars = (num_heads, num_heads // k.shape[1], seqlen_q, k.shape[2])
    kernel, programs = flash_attention_forward_kernel, triton.cdiv(seqlen_q, config.block_m)
    if options.redoes:
        kernel = flash_attention_redo_kernel
        most = triton.cdiv(REDO_PROGRAMS, batch * num_heads)
        programs = max(triton.cdiv(programs, REDO_TILES.value), min(programs, most))
    return prepare(
        kernel,
        (batch * num_heads, programs),
        {"q": q, "k": k, "v": v, "o": o},
        5,
        modifiers,
        (*scalars, scale, LOG2_E if prescaled else scale * LOG2_E, *window_scalars(options)),
        config,
        dataclasses.replace(spec, PRESCALED=prescaled),
        options.use_descriptors,
    )


def redo_config(forward: BlockConfig) -> BlockConfig:
    """Return the redo kernel's configuration, given the forward's: tiles have at most 64 rows.

    So few are done again for one that failed.  Nor would 128 rows fit at head_dim 256, because q
    and o do not share room where the tile lies within a loop.
    """
    block_m = min(forward.block_m, REDO_BLOCK_M)
    num_warps = forward.num_warps * block_m // forward.block_m
    return dataclasses.replace(forward, block_m=block_m, num_warps=num_warps)


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
    scalars = (num_heads_k, q.shape[1] // num_heads_k, seqlen_q, padded_rows(seqlen_q), seqlen_k)
    return prepare(
        flash_attention_dk_dv_kernel,
        (batch * num_heads_k, triton.cdiv(seqlen_k, config.block_n)),
        {"q": q, "k": k, "v": v, "do": do, "dk": dk, "dv": dv},
        4,
        modifiers,
        (*scalars, scale, scale * LOG2_E, *window_scalars(options)),
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
    scalars = (num_heads, num_heads // k.shape[1], seqlen_q, padded_rows(seqlen_q), k.shape[2])
    return prepare(
        flash_attention_dq_kernel,
        (batch * num_heads, triton.cdiv(seqlen_q, config.block_m)),
        {"q": q, "k": k, "v": v, "do": do, "dq": dq},
        4,
        modifiers,
        (*scalars, scale, scale * LOG2_E, *window_scalars(options)),
        config,
        kernel_spec(q, v, config, modifiers, options),
        options.use_descriptors,
    )


def prepare_row_statistics(o: Tensor, do: Tensor, has_dlse: bool) -> PreparedLaunch:
    """Prepare the row statistics: one program per head and tile of padded rows."""
    batch, num_heads, seqlen_q, _ = o.shape
    padded_q = padded_rows(seqlen_q)
    options = Options(Variant(1.0), "ieee", None, use_descriptors=False)
    return prepare(
        flash_attention_row_statistics_kernel,
        (batch * num_heads, triton.cdiv(padded_q, STATISTICS_CONFIG.block_m)),
        {"o": o, "do": do},
        3,
        None,
        (num_heads, seqlen_q, padded_q, has_dlse),
        STATISTICS_CONFIG,
        kernel_spec(o, o, STATISTICS_CONFIG, PLAIN, options),
        options.use_descriptors,
    )


def prepare(
    kernel: Any,
    grid: tuple[int, int],
    tiled: dict[str, Tensor],
    num_buffers: int,
    modifiers: Modifiers | None,
    scalars: tuple[Any, ...],
    config: BlockConfig,
    spec: KernelSpec,
    use_descriptors: bool | None,
) -> PreparedLaunch:
    """Prepare a kernel whose arguments are tiled tensors, buffers, strides, scalars and SPEC.

    ``tiled`` holds the tensors that are read or written by tiles of rows; ``num_buffers`` counts
    the tensors that follow, which are always passed as pointers.
    """
    if use_descriptors is None:
        use_descriptors = can_use_descriptors(*tiled.values())
    spec = dataclasses.replace(spec, USE_DESCRIPTORS=use_descriptors)
    describers: list[Describe | None] = [None] * (len(tiled) + num_buffers)
    if use_descriptors:
        for index, name in enumerate(tiled):
            rows = spec.BLOCK_N if name in KEY_TENSORS else spec.BLOCK_M
            width = spec.BLOCK_DV if name in VALUE_TENSORS else spec.BLOCK_D
            describers[index] = describe_blocks([1, 1, rows, width])
    strides = [tensor.stride() for tensor in tiled.values()]
    if modifiers is not None:
        strides += [ABSENT if x is None else x.stride() for x in modifiers[:3]]
    options = {"num_warps": config.num_warps, "num_stages": config.num_stages}
    return PreparedLaunch(kernel, grid, describers, (*strides, *scalars, spec), options)


def window_scalars(options: Options) -> tuple[int, int, float]:
    """Return left, right and softcap as a kernel takes them; what is absent is not read."""
    _, left, right, softcap = options.variant
    return left or 0, right or 0, softcap or 0.0


def kernel_spec(
    q: Tensor, v: Tensor, config: BlockConfig, modifiers: Modifiers, options: Options
) -> KernelSpec:
    """Return what a kernel is compiled for, given q, v and the tile sizes."""
    variant = options.variant
    changes_scores = variant.softcap, modifiers.alibi_slopes, modifiers.bias
    return KernelSpec(
        HEAD_DIM=q.shape[-1],
        HEAD_DIM_V=v.shape[-1],
        BLOCK_D=padded_head_dim(q.shape[-1]),
        BLOCK_DV=padded_head_dim(v.shape[-1]),
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        PRECISION=options.precision,
        USE_DESCRIPTORS=False,
        PRESCALED=any(x is not None for x in changes_scores),
        HAS_LEFT=variant.left is not None,
        HAS_RIGHT=variant.right is not None,
        HAS_SOFTCAP=variant.softcap is not None,
        HAS_ALIBI=modifiers.alibi_slopes is not None,
        HAS_BIAS=modifiers.bias is not None,
        HAS_MASK=modifiers.mask is not None,
        HAS_SINKS=modifiers.sinks is not None,
    )


def padded_rows(seqlen_q: int) -> int:
    """Return a number of query rows rounded up to `ROW_PADDING`."""
    return triton.cdiv(seqlen_q, ROW_PADDING) * ROW_PADDING


def float32_precision(dtype: torch.dtype) -> str:
    """Return "tf32" where torch's own float32 products on CUDA would use it, else "ieee".

    ``torch.backends.cuda.matmul.fp32_precision`` reflects the older switches, ``allow_tf32`` and
    ``torch.set_float32_matmul_precision``, as well.
    """
    if dtype != torch.float32:
        return "ieee"
    return "tf32" if torch.backends.cuda.matmul.fp32_precision == "tf32" else "ieee"


def default_configs(q: Tensor, v: Tensor) -> KernelConfigs:
    """Return the table's configurations for the device, dtype and wider head dim."""
    head_dim = max(q.shape[-1], v.shape[-1])
    configs = configs_for(head_dim, q.dtype, compute_capability(q.device))
    if configs is None:
        msg = f"no kernel configuration for {q.dtype} with head_dim {head_dim} on {q.device}"
        raise ValueError(msg)
    return configs


def can_use_descriptors(*tensors: Tensor) -> bool:
    """Say whether to read every tensor ``[B, H, rows, D]`` through a TMA descriptor."""
    if not is_interpreted():
        is_short = all(tensor.shape[2] <= SHORT_ROWS for tensor in tensors)
        if is_short or compute_capability(tensors[0].device) < 90:
            return False
    return all(is_aligned(tensor) for tensor in tensors)

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
from flash_kernel._triton.forward import flash_attention_forward_kernel
from flash_kernel._triton.prepared import (
    PreparedLaunch,
    is_aligned,
    is_interpreted,
    layout_key,
    prepared,
)

LOG2_E = math.log2(math.e)
STATISTICS_CONFIG = BlockConfig(block_m=STATISTICS_BLOCK_M)
ROW_PADDING = 128  # the largest BLOCK_M: row statistics are read in whole tiles
SMALLEST_FACTOR = torch.finfo(torch.float32).tiny
KEY_TENSORS = ("k", "v", "dk", "dv")  # tensors whose rows are keys: they come in tiles of BLOCK_N


class Options(NamedTuple):
    """What a launch depends on besides its tensors."""

    is_causal: bool
    scale: float
    precision: str  # of float32 products, "ieee" or "tf32"
    configs: KernelConfigs | None  # None: the table's
    use_descriptors: bool | None  # None: if the device and the tensors' alignment allow it


ROW_STATISTICS_OPTIONS = Options(False, 1.0, "ieee", None, use_descriptors=False)


def launch_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    is_causal: bool,
    scale: float,
    configs: KernelConfigs | None = None,
    use_descriptors: bool | None = None,
) -> tuple[Tensor, Tensor]:
    """Return ``o`` and ``lse`` of ``q [B, H, M, D]`` and ``k, v [B, H, N, D]``.

    ``configs`` and ``use_descriptors`` override what the device and the tensors' alignment suggest;
    every choice gives the same values up to rounding.
    """
    o = torch.empty_like(q)
    lse = torch.empty(q.shape[:3], device=q.device, dtype=torch.float32)
    if lse.numel() == 0:
        return o, lse
    options = Options(is_causal, scale, float32_precision(q.dtype), configs, use_descriptors)
    key = ("forward", layout_key(q, k, v), options)
    launch = prepared(key, partial(prepare_forward, q, k, v, o, options))
    launch(q, k, v, o, lse)
    return o, lse


def launch_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    do: Tensor,
    dlse: Tensor | None,
    *,
    is_causal: bool,
    scale: float,
    configs: KernelConfigs | None = None,
    use_descriptors: bool | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return ``dq``, ``dk`` and ``dv``, shaped and laid out like ``q``, ``k`` and ``v``.

    ``o`` and ``lse`` are what `launch_forward` returned; ``do [B, H, M, D]`` and ``dlse [B, H, M]``
    (None for zero) are the gradients of the loss with respect to them.
    """
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    statistics = launch_row_statistics(o, do, lse, dlse)
    options = Options(is_causal, scale, float32_precision(q.dtype), configs, use_descriptors)
    key = (layout_key(q, k, v, do), options)
    if dk.numel() > 0:
        prepare = partial(prepare_dk_dv, q, k, v, do, dk, dv, options)
        prepared(("dk_dv", key), prepare)(q, k, v, do, dk, dv, statistics)
    if dq.numel() > 0:
        prepare = partial(prepare_dq, q, k, v, do, dq, options)
        prepared(("dq", key), prepare)(q, k, v, do, dq, statistics)
    return dq, dk, dv


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
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    options: Options,
) -> PreparedLaunch:
    """Prepare o and lse: one program per head and query tile."""
    config = (options.configs or default_configs(q)).forward
    scale = options.scale
    # folded into the exponential, a factor of 0 would make NaN of hidden scores, which are -inf
    prescaled = scale * LOG2_E < SMALLEST_FACTOR
    batch, num_heads, seqlen_q, _ = q.shape
    seqlen_k = k.shape[2]
    scale_log2 = LOG2_E if prescaled else scale * LOG2_E
    return prepare(
        flash_attention_forward_kernel,
        (batch * num_heads, triton.cdiv(seqlen_q, config.block_m)),
        {"q": q, "k": k, "v": v, "o": o},
        1,
        (num_heads, seqlen_q, seqlen_k, scale, scale_log2),
        config,
        kernel_spec(q, config, options, prescaled=prescaled),
        options.use_descriptors,
    )


def prepare_dk_dv(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    do: Tensor,
    dk: Tensor,
    dv: Tensor,
    options: Options,
) -> PreparedLaunch:
    """Prepare dk and dv: one program per head and key tile."""
    config = (options.configs or default_configs(q)).dk_dv
    batch, num_heads, seqlen_k, _ = k.shape
    seqlen_q = q.shape[2]
    return prepare(
        flash_attention_dk_dv_kernel,
        (batch * num_heads, triton.cdiv(seqlen_k, config.block_n)),
        {"q": q, "k": k, "v": v, "do": do, "dk": dk, "dv": dv},
        1,
        (
            num_heads,
            seqlen_q,
            padded_rows(seqlen_q),
            seqlen_k,
            options.scale,
            options.scale * LOG2_E,
        ),
        config,
        kernel_spec(q, config, options),
        options.use_descriptors,
    )


def prepare_dq(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    do: Tensor,
    dq: Tensor,
    options: Options,
) -> PreparedLaunch:
    """Prepare dq: one program per head and query tile."""
    config = (options.configs or default_configs(q)).dq
    batch, num_heads, seqlen_q, _ = q.shape
    return prepare(
        flash_attention_dq_kernel,
        (batch * num_heads, triton.cdiv(seqlen_q, config.block_m)),
        {"q": q, "k": k, "v": v, "do": do, "dq": dq},
        1,
        (
            num_heads,
            seqlen_q,
            padded_rows(seqlen_q),
            k.shape[2],
            options.scale,
            options.scale * LOG2_E,
        ),
        config,
        kernel_spec(q, config, options),
        options.use_descriptors,
    )


def prepare_row_statistics(o: Tensor, do: Tensor, has_dlse: bool) -> PreparedLaunch:
    """Prepare the row statistics: one program per head and tile of padded rows."""
    batch, num_heads, seqlen_q, _ = o.shape
    padded_q = padded_rows(seqlen_q)
    return prepare(
        flash_attention_row_statistics_kernel,
        (batch * num_heads, triton.cdiv(padded_q, STATISTICS_CONFIG.block_m)),
        {"o": o, "do": do},
        3,
        (num_heads, seqlen_q, padded_q, has_dlse),
        STATISTICS_CONFIG,
        kernel_spec(o, STATISTICS_CONFIG, ROW_STATISTICS_OPTIONS),
        ROW_STATISTICS_OPTIONS.use_descriptors,
    )


def prepare(
    kernel: Any,
    grid: tuple[int, int],
    tiled: dict[str, Tensor],
    num_buffers: int,
    scalars: tuple[Any, ...],
    config: BlockConfig,
    spec: KernelSpec,
    use_descriptors: bool | None,
) -> PreparedLaunch:
    """Prepare a kernel whose arguments are tiled tensors, buffers, strides, scalars and SPEC.

    ``tiled`` holds the tensors that are read or written by tiles of rows; ``num_buffers`` counts
    the float32 buffers that follow, which are always passed as pointers.
    """
    if use_descriptors is None:
        use_descriptors = can_use_descriptors(*tiled.values())
    spec = dataclasses.replace(spec, USE_DESCRIPTORS=use_descriptors)
    blocks: list[list[int] | None] = [
        [1, 1, spec.BLOCK_N if name in KEY_TENSORS else spec.BLOCK_M, spec.BLOCK_D]
        if use_descriptors
        else None
        for name in tiled
    ]
    strides = [tensor.stride() for tensor in tiled.values()]
    constants = (*strides, *scalars, spec)
    return PreparedLaunch(kernel, grid, blocks + [None] * num_buffers, constants, config)


def kernel_spec(
    q: Tensor, config: BlockConfig, options: Options, *, prescaled: bool = False
) -> KernelSpec:
    """Return what a kernel is compiled for, given one of its tensors and the tile sizes."""
    head_dim = q.shape[-1]
    return KernelSpec(
        HEAD_DIM=head_dim,
        BLOCK_D=padded_head_dim(head_dim),
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        IS_CAUSAL=options.is_causal,
        PRESCALED=prescaled,
        PRECISION=options.precision,
        USE_DESCRIPTORS=False,
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


def default_configs(q: Tensor) -> KernelConfigs:
    """Return the table's configurations for the device, dtype and head dim of ``q``."""
    configs = configs_for(q.shape[-1], q.dtype, q.device)
    if configs is None:
        msg = f"no kernel configuration for {q.dtype} with head_dim {q.shape[-1]} on {q.device}"
        raise ValueError(msg)
    return configs


def can_use_descriptors(*tensors: Tensor) -> bool:
    """Say whether every tensor ``[B, H, rows, D]`` can be read through a TMA descriptor."""
    if not is_interpreted() and compute_capability(tensors[0].device) < 90:
        return False
    return all(is_aligned(tensor) for tensor in tensors)

"""Host side of the kernels: shapes, strides or descriptors, grid, and the launch itself."""

import contextlib
import math

import torch
import triton
from torch import Tensor
from triton import knobs
from triton.tools.tensor_descriptor import TensorDescriptor

from flash_kernel._triton.backward import (
    flash_attention_dk_dv_kernel,
    flash_attention_dq_kernel,
    flash_attention_row_statistics_kernel,
)
from flash_kernel._triton.config import (
    BlockConfig,
    KernelConfigs,
    KernelSpec,
    compute_capability,
    configs_for,
    padded_head_dim,
)
from flash_kernel._triton.forward import flash_attention_forward_kernel

LOG2_E = math.log2(math.e)
STATISTICS_CONFIG = BlockConfig(block_m=32)
ROW_PADDING = 128  # the largest BLOCK_M: row statistics are read in whole tiles
# bytes: what the copy engine asks of an address and of every stride but the last
DESCRIPTOR_ALIGNMENT = 16


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
    batch, num_heads, seqlen_q, _ = q.shape
    o = torch.empty_like(q)
    lse = torch.empty((batch, num_heads, seqlen_q), device=q.device, dtype=torch.float32)
    if lse.numel() == 0:
        return o, lse
    config = (configs or default_configs(q)).forward
    if use_descriptors is None:
        use_descriptors = can_use_descriptors(q, k, v, o)
    prescaled = scale <= 0
    spec = kernel_spec(
        q, config, is_causal=is_causal, prescaled=prescaled, use_descriptors=use_descriptors
    )
    grid = (batch * num_heads, triton.cdiv(seqlen_q, config.block_m))
    with device_of(q):
        flash_attention_forward_kernel[grid](
            q=tiles(q, config.block_m, spec),
            k=tiles(k, config.block_n, spec),
            v=tiles(v, config.block_n, spec),
            o=tiles(o, config.block_m, spec),
            lse_ptr=lse,
            q_strides=q.stride(),
            k_strides=k.stride(),
            v_strides=v.stride(),
            o_strides=o.stride(),
            num_heads=num_heads,
            seqlen_q=seqlen_q,
            seqlen_k=k.shape[2],
            scale=scale,
            scale_log2=LOG2_E if prescaled else scale * LOG2_E,
            SPEC=spec,
            num_warps=config.num_warps,
            num_stages=config.num_stages,
        )
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
    configs = configs or default_configs(q)
    if use_descriptors is None:
        use_descriptors = can_use_descriptors(q, k, v, do, dq, dk, dv)
    shared = {"is_causal": is_causal, "scale": scale, "use_descriptors": use_descriptors}
    if dk.numel() > 0:
        launch_dk_dv(q, k, v, do, statistics, dk, dv, config=configs.dk_dv, **shared)
    if dq.numel() > 0:
        launch_dq(q, k, v, do, statistics, dq, config=configs.dq, **shared)
    return dq, dk, dv


def launch_row_statistics(o: Tensor, do: Tensor, lse: Tensor, dlse: Tensor | None) -> Tensor:
    """Return float32 ``[B, H, 2, padded M]``: ``lse * log2(e)`` and ``rowsum(do * o) - dlse``."""
    batch, num_heads, seqlen_q, _ = o.shape
    padded_q = triton.cdiv(seqlen_q, ROW_PADDING) * ROW_PADDING
    statistics = torch.empty((batch, num_heads, 2, padded_q), device=o.device, dtype=torch.float32)
    if statistics.numel() == 0:
        return statistics
    grid = (batch * num_heads, triton.cdiv(padded_q, STATISTICS_CONFIG.block_m))
    with device_of(o):
        flash_attention_row_statistics_kernel[grid](
            o=o,
            do=do,
            lse_ptr=lse,
            dlse_ptr=lse if dlse is None else dlse.contiguous(),
            statistics_ptr=statistics,
            o_strides=o.stride(),
            do_strides=do.stride(),
            num_heads=num_heads,
            seqlen_q=seqlen_q,
            padded_q=padded_q,
            HAS_DLSE=dlse is not None,
            SPEC=kernel_spec(o, STATISTICS_CONFIG, is_causal=False, use_descriptors=False),
            num_warps=STATISTICS_CONFIG.num_warps,
        )
    return statistics


def launch_dk_dv(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    do: Tensor,
    statistics: Tensor,
    dk: Tensor,
    dv: Tensor,
    *,
    is_causal: bool,
    scale: float,
    config: BlockConfig,
    use_descriptors: bool,
) -> None:
    """Fill ``dk`` and ``dv``."""
    batch, num_heads, seqlen_k, _ = k.shape
    spec = kernel_spec(q, config, is_causal=is_causal, use_descriptors=use_descriptors)
    grid = (batch * num_heads, triton.cdiv(seqlen_k, config.block_n))
    with device_of(q):
        flash_attention_dk_dv_kernel[grid](
            q=tiles(q, config.block_m, spec),
            k=tiles(k, config.block_n, spec),
            v=tiles(v, config.block_n, spec),
            do=tiles(do, config.block_m, spec),
            dk=tiles(dk, config.block_n, spec),
            dv=tiles(dv, config.block_n, spec),
            statistics_ptr=statistics,
            q_strides=q.stride(),
            k_strides=k.stride(),
            v_strides=v.stride(),
            do_strides=do.stride(),
            dk_strides=dk.stride(),
            dv_strides=dv.stride(),
            num_heads=num_heads,
            seqlen_q=q.shape[2],
            padded_q=statistics.shape[-1],
            seqlen_k=seqlen_k,
            scale=scale,
            scale_log2=scale * LOG2_E,
            SPEC=spec,
            num_warps=config.num_warps,
            num_stages=config.num_stages,
        )


def launch_dq(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    do: Tensor,
    statistics: Tensor,
    dq: Tensor,
    *,
    is_causal: bool,
    scale: float,
    config: BlockConfig,
    use_descriptors: bool,
) -> None:
    """Fill ``dq``."""
    batch, num_heads, seqlen_q, _ = q.shape
    spec = kernel_spec(q, config, is_causal=is_causal, use_descriptors=use_descriptors)
    grid = (batch * num_heads, triton.cdiv(seqlen_q, config.block_m))
    with device_of(q):
        flash_attention_dq_kernel[grid](
            q=tiles(q, config.block_m, spec),
            k=tiles(k, config.block_n, spec),
            v=tiles(v, config.block_n, spec),
            do=tiles(do, config.block_m, spec),
            dq=tiles(dq, config.block_m, spec),
            statistics_ptr=statistics,
            q_strides=q.stride(),
            k_strides=k.stride(),
            v_strides=v.stride(),
            do_strides=do.stride(),
            dq_strides=dq.stride(),
            num_heads=num_heads,
            seqlen_q=seqlen_q,
            padded_q=statistics.shape[-1],
            seqlen_k=k.shape[2],
            scale=scale,
            scale_log2=scale * LOG2_E,
            SPEC=spec,
            num_warps=config.num_warps,
            num_stages=config.num_stages,
        )


def kernel_spec(
    q: Tensor,
    config: BlockConfig,
    *,
    is_causal: bool,
    use_descriptors: bool,
    prescaled: bool = False,
) -> KernelSpec:
    """Return what a kernel is compiled for, given one of the tensors and the tile sizes."""
    head_dim = q.shape[-1]
    return KernelSpec(
        HEAD_DIM=head_dim,
        BLOCK_D=padded_head_dim(head_dim),
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        IS_CAUSAL=is_causal,
        PRESCALED=prescaled,
        PRECISION=float32_precision(),
        USE_DESCRIPTORS=use_descriptors,
    )


def float32_precision() -> str:
    """Return "tf32" where torch's own float32 products on CUDA would use it, else "ieee".

    ``torch.backends.cuda.matmul.fp32_precision`` reflects the older switches, ``allow_tf32`` and
    ``torch.set_float32_matmul_precision``, as well.
    """
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
    if not knobs.runtime.interpret and compute_capability(tensors[0].device) < 90:
        return False
    return all(is_aligned(tensor) for tensor in tensors)


def is_aligned(x: Tensor) -> bool:
    """Say whether rows are contiguous, and addresses and strides multiples of 16 bytes."""
    if x.numel() == 0 or x.stride(-1) != 1 or x.data_ptr() % DESCRIPTOR_ALIGNMENT:
        return False
    strides = [stride for size, stride in zip(x.shape, x.stride(), strict=True) if size > 1][:-1]
    if x.shape[-1] == 1:
        return False
    return all(
        stride > 0 and stride * x.element_size() % DESCRIPTOR_ALIGNMENT == 0 for stride in strides
    )


def tiles(x: Tensor, block_rows: int, spec: KernelSpec) -> Tensor | TensorDescriptor:
    """Return how a kernel is to reach ``x [B, H, rows, D]``: itself, or a descriptor over it."""
    if not spec.USE_DESCRIPTORS:
        return x
    # the stride of a dimension of size 1 is arbitrary, but a descriptor has every stride aligned
    strides = [
        stride if size > 1 or axis == 3 else DESCRIPTOR_ALIGNMENT
        for axis, (size, stride) in enumerate(zip(x.shape, x.stride(), strict=True))
    ]
    return TensorDescriptor(x, list(x.shape), strides, [1, 1, block_rows, spec.BLOCK_D])


def device_of(x: Tensor) -> contextlib.AbstractContextManager[object]:
    """Make the tensor's GPU the current one, so that the kernel is launched there."""
    return torch.cuda.device(x.device) if x.is_cuda else contextlib.nullcontext()

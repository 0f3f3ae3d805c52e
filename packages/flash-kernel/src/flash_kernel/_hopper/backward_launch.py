"""Host side of the Hopper backward: outputs, workspaces, arguments, three launches."""

from functools import partial
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from flash_kernel._hopper.backward import flash_attention_backward_kernel
from flash_kernel._hopper.backward_config import BYTES_TOGETHER, CONFIGS, BackwardSpec
from flash_kernel._hopper.backward_ends import (
    flash_attention_backward_end_kernel,
    flash_attention_backward_start_kernel,
)
from flash_kernel._hopper.backward_tiles import Problem
from flash_kernel._hopper.compat import TensorDescriptor, gl
from flash_kernel._hopper.config import LayoutRefusal
from flash_kernel._hopper.launch import LOG2_E, OPTIONS, Launch, describe_tiles, num_sms
from flash_kernel._triton.prepared import (
    Describe,
    PreparedLaunch,
    descriptor_shape,
    is_aligned,
    layout_key,
    prepared,
)
from flash_kernel.gradients import Gradients
from flash_kernel.variant import Variant

SMALL = {"num_warps": 4}  # of the kernels before and after


class Workspace(NamedTuple):
    """What the three kernels of one launch leave for each other; its own for each launch."""

    statistics: Tensor  # float32 [B * H * blocks * 2 * BLOCK_M]
    dq_sum: Tensor  # float32 [B * H * blocks * BLOCK_M * BLOCK_D / 256, 256]
    counters: Tensor  # int32 [1 + B * H * blocks]


def launch_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    do: Tensor,
    dlse: Tensor | None,
    variant: Variant,
    *,
    is_deterministic: bool,
) -> Gradients:
    """Return ``dq``, ``dk`` and ``dv``, laid out like ``q``, ``k`` and ``v``.

    Shapes are ``q [B, H, M, D]`` and ``k, v [B, H_kv, N, D]``.

    ``o`` and ``lse`` are what a forward returned; ``do`` and ``dlse [B, H, M]`` (None for zero) are
    the gradients of the loss with respect to them.

    Raises:
        LayoutRefusal: TMA cannot read q, k or v as they lie in memory.
        BuildFailure: The kernel does not compile here.
    """
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    if q.numel() == 0 or k.numel() == 0:
        return Gradients(dq.zero_(), dk.zero_(), dv.zero_())
    for name, x in (("q", q), ("k", k), ("v", v), ("dk", dk), ("dv", dv)):
        if not is_aligned(x):
            msg = f"`{name}` has strides {x.stride()}, which a TMA descriptor cannot express."
            raise LayoutRefusal(msg)
    # a gradient comes as autograd made it, often expanded or transposed; the caller cannot help it
    do = do if is_aligned(do) else do.contiguous()
    lse = lse.contiguous()
    has_dlse = dlse is not None
    dlse = lse if dlse is None else dlse.contiguous()
    spec = specify(q, k, variant, is_deterministic=is_deterministic)
    space = make_workspace(q, spec)
    key = (layout_key(q, k, v, o, do), variant, has_dlse, spec)
    start = prepared(
        ("hopper_start", key), partial(prepare_start, o, do, variant.scale, spec, has_dlse=has_dlse)
    )
    main = prepared(("hopper_backward", key), partial(prepare_main, q, k, variant, spec))
    end = prepared(("hopper_end", key), partial(prepare_end, dq, variant.scale, spec))
    start(o, do, lse, dlse, *space)
    main(q, k, v, do, dk, dv, space.statistics, space.dq_sum, space.dq_sum, space.counters)
    end(dq, space.statistics, space.dq_sum)
    return Gradients(dq, dk, dv)


def specify(q: Tensor, k: Tensor, variant: Variant, *, is_deterministic: bool) -> BackwardSpec:
    """Return what the kernels are compiled for."""
    block_d = 64 if q.shape[-1] <= 64 else 128
    config = CONFIGS[block_d]
    return BackwardSpec(
        BLOCK_D=block_d,
        BLOCK_M=config.block_m,
        DQ_BY_TMA=config.dq_by_tma or is_deterministic,
        IS_ORDERED=is_deterministic,
        STATISTICS_FIRST=config.statistics_first,
        IS_GROUPED=q.shape[1] > k.shape[1],
        HAS_LEFT=variant.left is not None,
        HAS_RIGHT=variant.right is not None,
        HAS_TAIL=k.shape[2] % BackwardSpec.BLOCK_N != 0,
    )


def make_workspace(q: Tensor, spec: BackwardSpec) -> Workspace:
    """Allocate what the kernels of one launch leave for each other.

    The caching allocator keeps memory to its stream, and to its graph while one is captured: so no
    two launches that may overlap share a counter.
    """
    batch, num_heads, seqlen_q, _ = q.shape
    blocks = batch * num_heads * triton.cdiv(seqlen_q, spec.BLOCK_M)
    rows = blocks * spec.BLOCK_M
    floats = partial(torch.empty, device=q.device, dtype=torch.float32)
    counters = torch.empty(1 + blocks, device=q.device, dtype=torch.int32)
    return Workspace(floats(2 * rows), floats((rows * spec.BLOCK_D // 256, 256)), counters)


def prepare_start(
    o: Tensor, do: Tensor, scale: float, spec: BackwardSpec, *, has_dlse: bool
) -> PreparedLaunch:
    """Prepare the row statistics: one program per head and query block."""
    batch, num_heads, seqlen_q, head_dim = o.shape
    num_blocks = triton.cdiv(seqlen_q, spec.BLOCK_M)
    constants = (o.stride(), do.stride(), num_heads, seqlen_q, num_blocks, head_dim, scale)
    return PreparedLaunch(
        flash_attention_backward_start_kernel,
        (batch * num_heads * num_blocks, 1),
        [None] * 7,
        (*constants, has_dlse, spec),
        SMALL,
    )


def prepare_end(dq: Tensor, scale: float, spec: BackwardSpec) -> PreparedLaunch:
    """Prepare dq from its sums: one program per head and query block."""
    batch, num_heads, seqlen_q, head_dim = dq.shape
    num_blocks = triton.cdiv(seqlen_q, spec.BLOCK_M)
    return PreparedLaunch(
        flash_attention_backward_end_kernel,
        (batch * num_heads * num_blocks, 1),
        [None] * 3,
        (dq.stride(), num_heads, seqlen_q, num_blocks, head_dim, scale, spec),
        SMALL,
    )


def prepare_main(q: Tensor, k: Tensor, variant: Variant, spec: BackwardSpec) -> PreparedLaunch:
    """Prepare the backward: as many CTAs as the GPU runs at a time, which take tiles in turn."""
    problem = problem_of(q, k, variant, spec)
    queries, keys = (
        describe_tiles([1, 1, rows, spec.BLOCK_D], q.dtype) for rows in (spec.BLOCK_M, 64)
    )
    statistics, dq_sum = describe_floats([2 * spec.BLOCK_M]), describe_floats([16, 256])
    return Launch(
        flash_attention_backward_kernel,
        (min(problem.num_tiles, num_sms(q.device)), 1),
        (queries, keys, keys, queries, keys, keys, statistics, dq_sum, None, None),
        (*problem, variant.scale, variant.scale * LOG2_E, spec),
        OPTIONS,
    )


def problem_of(q: Tensor, k: Tensor, variant: Variant, spec: BackwardSpec) -> Problem:
    """Return the numbers of a launch."""
    batch, num_heads, seqlen_q, _ = q.shape
    num_heads_k, seqlen_k = k.shape[1:3]
    group = num_heads // num_heads_k
    heads = batch * num_heads_k
    bytes_of_head = group * seqlen_q * spec.BLOCK_D * 8  # q and do in 16 bits, dq in 32
    return Problem(
        num_heads_k,
        group,
        seqlen_q,
        seqlen_k,
        num_blocks=triton.cdiv(seqlen_q, spec.BLOCK_M),
        heads_together=max(1, min(heads, BYTES_TOGETHER // bytes_of_head)),
        num_tiles=heads * triton.cdiv(seqlen_k, spec.BLOCK_N),
        left=variant.left or 0,
        right=variant.right or 0,
    )


def describe_floats(block: list[int]) -> Describe:
    """Return what makes a descriptor by float32 blocks of that shape, which lie plainly."""
    layout = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=len(block))

    def describe(x: Tensor) -> Any:
        return TensorDescriptor(x, *descriptor_shape(x), block, layout)

    return describe

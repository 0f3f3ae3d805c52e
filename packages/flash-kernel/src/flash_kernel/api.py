"""The public function: check, resolve, carry out."""

from typing import Literal, overload

import torch
from torch import Tensor

from flash_kernel.autograd import attend
from flash_kernel.dispatch import TRITON_DTYPES, check_options, checked_plan
from flash_kernel.reference import attention_reference
from flash_kernel.torch_attention import torch_attention
from flash_kernel.validation import check_qkv


@overload
def flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    return_lse: Literal[False] = False,
    impl: str = "auto",
    backward: str = "auto",
) -> Tensor: ...
@overload
def flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    return_lse: Literal[True],
    impl: str = "auto",
    backward: str = "auto",
) -> tuple[Tensor, Tensor]: ...
def flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    return_lse: bool = False,
    impl: str = "auto",
    backward: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """Return ``softmax(scale * q k^T) v`` without storing the score matrix.

    Args:
        q: Queries ``[..., M, D]``, any strides, float16, bfloat16, float32 or float64.
        k: Keys ``[..., N, D]``, same dtype, device and leading dimensions.
        v: Values ``[..., N, D]``.
        is_causal: Row i sees keys ``j <= i + N - M``: the mask is aligned to the bottom right.
        scale: Factor of the scores, ``D ** -0.5`` by default.
        return_lse: Also return the log-sum-exp of each row's scores.
        impl: "auto", "triton" (the kernels), "torch" (torch's own attention), "mock" (the readable
            twin) or "reference" (dense).  "auto" takes Triton on a GPU and torch elsewhere.
        backward: "auto", "triton" (memory-linear), "compiled" (dense, under torch.compile) or
            "dense" (the same formulas, not compiled).  "auto" takes the one that belongs to the
            implementation.

    Returns:
        ``o [..., M, D]`` in the dtype of ``q``; with ``return_lse`` also ``lse [..., M]``, natural
        logarithm, float32 (float64 for float64 inputs).  A row that sees no key has ``o = 0`` and
        ``lse = -inf``.  Both are differentiable once.

    Raises:
        TypeError: Not a tensor, or a dtype that is unsupported or not shared.
        ValueError: Shapes or devices that do not fit, or an option that does not exist or that the
            shapes rule out.
        RuntimeError: An implementation asked for by name cannot run on this device.

    FlashAttention-2 (Dao, 2023, arXiv 2307.08691).
    """
    if torch.compiler.is_compiling():
        o, lse = _traced(q, k, v, is_causal, scale, return_lse, impl, backward)
    else:
        plan = checked_plan(
            q,
            k,
            v,
            is_causal=is_causal,
            scale=scale,
            return_lse=return_lse,
            impl=impl,
            backward=backward,
        )
        scale = None if scale is None else float(scale)
        o, lse = attend(plan, q, k, v, is_causal=is_causal, scale=scale)
    return o if lse is None or not return_lse else (o, lse)


def _traced(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    is_causal: bool,
    scale: float | None,
    return_lse: bool,
    impl: str,
    backward: str,
) -> tuple[Tensor, Tensor | None]:
    """Return o and lse inside ``torch.compile``: our operator, or what torch can trace itself."""
    check_qkv(q, k, v, is_causal=is_causal, scale=scale)
    check_options(return_lse=return_lse, impl=impl, backward=backward)
    for_triton = q.is_cuda and q.dtype in TRITON_DTYPES and q.shape[-1] <= 256
    if impl != "torch" and (for_triton or (impl, backward) != ("auto", "auto")):
        from flash_kernel.ops import forward_op

        scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
        o, lse = forward_op(q, k, v, is_causal, scale, impl, backward)
        return o, lse
    if return_lse:
        return attention_reference(q, k, v, is_causal=is_causal, scale=scale)
    return torch_attention(q, k, v, is_causal=is_causal, scale=scale), None

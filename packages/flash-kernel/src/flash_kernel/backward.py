"""The readable backward: dense, in plain PyTorch, and the same function under ``torch.compile``.

It stores the score matrix, O(M * N) memory; the default, `_triton.backward`, does not.
"""

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from flash_kernel.reference import visible_mask

Gradients = tuple[Tensor, Tensor, Tensor]


def flash_attention_backward(
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
) -> Gradients:
    """Return ``dq, dk, dv`` from what the forward saved.

        p  = exp(s - lse)            dv = p^T do            dp = do v^T
        ds = p * (dp - delta)        dq = scale * ds k      dk = scale * ds^T q
        delta = rowsum(do * o) - dlse

    Args:
        q: ``[..., M, D]``.
        k: ``[..., N, D]``.
        v: ``[..., N, D]``.
        o: The forward's output, ``[..., M, D]``.
        lse: Its log-sum-exp, natural logarithm, ``[..., M]``.
        do: Gradient of the loss with respect to ``o``.
        dlse: Gradient of the loss with respect to ``lse``; None for zero.
        is_causal: As in the forward.
        scale: As in the forward.

    FlashAttention-2 (Dao, 2023, arXiv 2307.08691), section 3.1, without the tiles.
    """
    state_dtype = torch.promote_types(q.dtype, torch.float32)
    # lse normalizes exact scores: rounded to half precision, they would no longer sum to 1
    s = (q.to(state_dtype) @ k.to(state_dtype).mT) * scale  # [..., M, N]
    p = torch.exp(s - lse[..., None])
    if is_causal:
        # after the exponential: a row that sees nothing has lse = -inf, and its p is inf until now
        p = p.masked_fill(~visible_mask(q.shape[-2], k.shape[-2], q.device), 0.0)
    dv = p.to(do.dtype).mT @ do
    dp = do.to(state_dtype) @ v.to(state_dtype).mT
    delta = (do.to(state_dtype) * o.to(state_dtype)).sum(-1)  # [..., M]
    if dlse is not None:
        delta = delta - dlse
    ds = (p * (dp - delta[..., None]) * scale).to(q.dtype)
    return ds @ k, ds.mT @ q, dv


@functools.cache
def _flash_attn_backward_compiled() -> Callable[..., Gradients]:
    # once for all shapes: sizes are symbols, so that a new length is no new compilation
    return torch.compile(flash_attention_backward, dynamic=True)


def flash_attention_backward_compiled(
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
) -> Gradients:
    """`flash_attention_backward` under ``torch.compile``; the first call takes seconds.

    Raises:
        RuntimeError: torch could not compile, for want of a C++ compiler (CPU) or Triton (GPU).
    """
    try:
        return _flash_attn_backward_compiled()(
            q, k, v, o, lse, do, dlse, is_causal=is_causal, scale=scale
        )
    except torch._dynamo.exc.TorchDynamoException as error:
        first_line = str(error).strip().splitlines()[0]
        msg = (
            f"backward='compiled' needs a torch.compile that works here, got: {first_line} "
            "Pass backward='dense' for the same formulas uncompiled."
        )
        raise RuntimeError(msg) from error

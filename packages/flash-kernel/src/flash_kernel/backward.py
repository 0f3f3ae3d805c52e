"""The readable backward: dense, in plain PyTorch, and the same function under ``torch.compile``.

It stores the score matrix, O(M * N) memory; the default, `_triton.backward`, does not.
"""

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from flash_kernel.gradients import Gradients, sink_gradient
from flash_kernel.reference import (
    bias_scores,
    cap_scores,
    hidden_pairs,
    repeat_heads,
    sum_groups,
)
from flash_kernel.variant import PLAIN, Modifiers, Variant


def flash_attention_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    do: Tensor,
    dlse: Tensor | None,
    variant: Variant,
    modifiers: Modifiers = PLAIN,
) -> Gradients:
    """Return the gradients from what the forward saved.

        p  = exp(s - lse)            dv = p^T do            dp = do v^T
        ds = p * (dp - delta)        dq = scale * ds k      dk = scale * ds^T q
        delta = rowsum(do * o) - dlse

    Args:
        q: ``[..., H, M, D]``.
        k: ``[..., H_kv, N, D]``.
        v: ``[..., H_kv, N, D_v]``.
        o: The forward's output, ``[..., H, M, D_v]``.
        lse: Its log-sum-exp, natural logarithm, ``[..., H, M]``.
        do: Gradient of the loss with respect to ``o``.
        dlse: Gradient of the loss with respect to ``lse``; None for zero.
        variant: As in the forward.
        modifiers: As in the forward.

    FlashAttention-2 (Dao, 2023, arXiv 2307.08691), section 3.1, without the tiles.
    """
    k_each, v_each = repeat_heads(k, q), repeat_heads(v, q)
    state_dtype = torch.promote_types(q.dtype, torch.float32)
    # lse normalizes exact scores: rounded to half precision, they would no longer sum to 1
    capped = cap_scores(q.to(state_dtype) @ k_each.to(state_dtype).mT, variant)  # [..., M, N]
    s = bias_scores(capped, variant, modifiers)
    # a row that sees nothing has lse = -inf; against +inf, each of its p is 0
    p = torch.exp(s - lse.masked_fill(lse == float("-inf"), float("inf"))[..., None])
    hidden = hidden_pairs(s.shape[-2], s.shape[-1], variant, modifiers, s.device)
    if hidden is not None:
        p = p.masked_fill(hidden, 0.0)
    dv = p.to(do.dtype).mT @ do
    dp = do.to(state_dtype) @ v_each.to(state_dtype).mT
    delta = (do.to(state_dtype) * o.to(state_dtype)).sum(-1)  # [..., M]
    if dlse is not None:
        delta = delta - dlse
    ds = p * (dp - delta[..., None])
    dbias = None if modifiers.bias is None else ds.sum_to_size(modifiers.bias.shape)
    if variant.softcap is not None:
        ds = ds * (1 - (capped / variant.softcap) ** 2)
    ds = (ds * variant.scale).to(q.dtype)
    dk, dv = (sum_groups(x, k) for x in (ds.mT @ q, dv))
    dsinks = None if modifiers.sinks is None else sink_gradient(modifiers.sinks, lse, delta)
    return Gradients(ds @ k_each, dk, dv, dbias, dsinks)


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
    variant: Variant,
    modifiers: Modifiers = PLAIN,
) -> Gradients:
    """`flash_attention_backward` under ``torch.compile``; the first call takes seconds.

    Raises:
        RuntimeError: torch could not compile, for want of a C++ compiler (CPU) or Triton (GPU).
    """
    try:
        return _flash_attn_backward_compiled()(q, k, v, o, lse, do, dlse, variant, modifiers)
    except torch._dynamo.exc.TorchDynamoException as error:
        first_line = str(error).strip().splitlines()[0]
        msg = (
            f"backward='compiled' needs a torch.compile that works here, got: {first_line} "
            "Pass backward='dense' for the same formulas uncompiled."
        )
        raise RuntimeError(msg) from error

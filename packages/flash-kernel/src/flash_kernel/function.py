"""`FlashAttention`: the attention as a ``torch.autograd.Function``."""

from typing import Any

import torch
from torch import Tensor

from flash_kernel.api import flash_attention
from flash_kernel.ops import backward_op, forward_op
from flash_kernel.second_order import refuse_second_order


class FlashAttention(torch.autograd.Function):
    """Exact attention on ``[b, n, d]`` (any leading dimensions) that stores no score matrix.

    ``FlashAttention.apply(q, k, v, is_causal=False)`` is `flash_attention` with its defaults:
    projections, splitting into heads and rotary embeddings happen before.

    ``apply`` alone is called in eager mode.  Inside ``torch.compile`` torch looks past it, at
    ``forward`` and ``backward``, which are the same attention as operators.
    """

    @classmethod
    def apply(cls, q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False) -> Tensor:
        """Return ``o [..., M, D]`` for ``q [..., M, D]`` and ``k, v [..., N, D]``."""
        return flash_attention(q, k, v, is_causal=is_causal)

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False) -> Tensor:
        """Return ``o``; save q, k, v, o and lse."""
        variant = q.shape[-1] ** -0.5, None, 0 if is_causal else None, None
        ctx.options = (*variant, "auto", "auto", True)
        o: Tensor
        o, lse = forward_op(q, k, v, *NO_MODIFIERS, *ctx.options)
        ctx.save_for_backward(q, k, v, o, lse)
        return o

    @staticmethod
    def backward(ctx: Any, do: Tensor) -> tuple[Tensor | None, ...]:
        """Return dq, dk, dv; the mask has no gradient."""
        refuse_second_order()
        q, k, v, o, lse = ctx.saved_tensors
        saved = (q, k, v, *NO_MODIFIERS, o, lse)
        dq, dk, dv = backward_op(*saved, do, None, *ctx.options, trains_bias=False)
        return dq, dk, dv, None


NO_MODIFIERS = (None, None, None, None)

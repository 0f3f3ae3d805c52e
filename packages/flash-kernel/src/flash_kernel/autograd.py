"""Forward and backward tied together for autograd: bookkeeping only, no maths."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from flash_kernel.backward import flash_attention_backward, flash_attention_backward_compiled
from flash_kernel.dispatch import Plan
from flash_kernel.reference import attention_reference
from flash_kernel.second_order import refuse_second_order
from flash_kernel.shapes import as_batch_and_heads
from flash_kernel.torch_attention import torch_attention


class FlashAttention(torch.autograd.Function):
    """Exact attention on ``[b, n, d]`` (any leading dimensions) that stores no score matrix.

    ``FlashAttention.apply(q, k, v, is_causal=False)`` is `flash_attention` with its defaults:
    projections, splitting into heads and rotary embeddings happen before.
    """

    @classmethod
    def apply(cls, q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False) -> Tensor:
        """Return ``o [..., M, D]`` for ``q [..., M, D]`` and ``k, v [..., N, D]``."""
        from flash_kernel.api import flash_attention

        return flash_attention(q, k, v, is_causal=is_causal)

    @classmethod
    def apply_plan(
        cls, q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float, plan: Plan
    ) -> tuple[Tensor, Tensor]:
        """Return ``o`` and ``lse`` by the plan's forward, differentiated by its backward."""
        arguments = (q, k, v, is_causal, scale, plan)
        if torch._C._are_functorch_transforms_active():
            msg = (
                "flash_attention does not run under torch.func transforms (grad, vmap, jvp, ...). "
                "Pass impl='reference', which does."
            )
            raise RuntimeError(msg)
        records = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
        # a forward-mode level goes through `apply` too, which refuses tangents in words
        if not records and forward_ad._current_level < 0:
            return cls.forward(*arguments)
        # what `Function.apply` comes to, without its binding of arguments to the signature of
        # `forward`, which costs more than a small kernel
        o, lse = super(torch.autograd.Function, cls).apply(*arguments)  # type: ignore[misc]
        return o, lse

    @staticmethod
    def forward(
        q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float, plan: Plan
    ) -> tuple[Tensor, Tensor]:
        """Return ``o [..., M, D]`` and ``lse [..., M]``."""
        return run_forward(plan.impl, q, k, v, is_causal=is_causal, scale=scale)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        """Save q, k, v, o and lse."""
        q, k, v, ctx.is_causal, ctx.scale, ctx.plan = inputs
        ctx.save_for_backward(q, k, v, *output)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, do: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
        """Return dq, dk, dv; the other arguments have no gradient."""
        refuse_second_order()
        q, k, v, o, lse = ctx.saved_tensors
        if do is None:
            do = torch.zeros_like(o)
        gradients = run_backward(
            ctx.plan.backward, q, k, v, o, lse, do, dlse, is_causal=ctx.is_causal, scale=ctx.scale
        )
        return *gradients, None, None, None


def attend(
    plan: Plan, q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool, scale: float | None
) -> tuple[Tensor, Tensor | None]:
    """Carry out a plan: return ``o`` and, where the implementation has it, ``lse``."""
    if plan.impl == "torch":
        return torch_attention(q, k, v, is_causal=is_causal, scale=scale), None
    if plan.backward == "autograd":
        return attention_reference(q, k, v, is_causal=is_causal, scale=scale)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    return FlashAttention.apply_plan(q, k, v, is_causal, scale, plan)


def run_forward(
    impl: str, q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """Return ``o`` and ``lse`` by one implementation; nothing is recorded for autograd."""
    if impl == "triton":
        from flash_kernel._triton.launch import launch_forward

        o, lse = launch_forward(
            *(as_batch_and_heads(x) for x in (q, k, v)), is_causal=is_causal, scale=scale
        )
        return (o, lse) if q.dim() == 4 else (o.reshape(q.shape), lse.reshape(q.shape[:-1]))
    if impl == "mock":
        from flash_kernel.mock import flash_attention_mock_forward

        return flash_attention_mock_forward(q, k, v, is_causal=is_causal, scale=scale)
    return attention_reference(q, k, v, is_causal=is_causal, scale=scale)


def run_backward(
    backward: str,
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
) -> tuple[Tensor, Tensor, Tensor]:
    """Return dq, dk and dv by one of the interchangeable backwards."""
    if backward == "mock":
        from flash_kernel.mock import flash_attention_mock_backward

        return flash_attention_mock_backward(
            q, k, v, o, lse, do, dlse=dlse, is_causal=is_causal, scale=scale
        )
    tensors = [as_batch_and_heads(x) for x in (q, k, v, o)]
    tensors += [lse.reshape(tensors[0].shape[:-1]), as_batch_and_heads(do)]
    dlse = None if dlse is None else dlse.reshape(tensors[0].shape[:-1])
    run: Callable[..., tuple[Tensor, Tensor, Tensor]]
    if backward == "triton":
        from flash_kernel._triton.launch import launch_backward as run
    elif backward == "compiled":
        run = flash_attention_backward_compiled
    else:
        run = flash_attention_backward
    dq, dk, dv = run(*tensors, dlse, is_causal=is_causal, scale=scale)
    return dq.reshape(q.shape), dk.reshape(k.shape), dv.reshape(v.shape)

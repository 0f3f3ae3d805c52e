"""Forward and backward tied together for autograd: bookkeeping only, no maths."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from flash_kernel._hopper.config import BuildFailure, LayoutRefusal
from flash_kernel.backward import flash_attention_backward, flash_attention_backward_compiled
from flash_kernel.dispatch import warn_of_portable_path
from flash_kernel.gradients import Gradients
from flash_kernel.reference import dense_attention
from flash_kernel.request import Plan
from flash_kernel.second_order import refuse_second_order, refuse_transforms
from flash_kernel.shapes import as_batch_and_heads, as_pairs, shaped
from flash_kernel.torch_attention import torch_attention
from flash_kernel.variant import Modifiers, Variant


class PlannedAttention(torch.autograd.Function):
    """Attention by a plan: forward and backward may come from different implementations."""

    @classmethod
    def apply_plan(
        cls, q: Tensor, k: Tensor, v: Tensor, modifiers: Modifiers, variant: Variant, plan: Plan
    ) -> tuple[Tensor, Tensor]:
        """Return ``o`` and ``lse`` by the plan's forward, differentiated by its backward."""
        refuse_transforms("flash_attention")
        inputs = (q, k, v, *modifiers)
        records = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs)
        # a forward-mode level goes through `apply` too, which refuses tangents in words
        if not records and forward_ad._current_level < 0:
            return run_forward(plan, q, k, v, variant, modifiers)
        o, lse = cls.apply(*inputs, variant, plan)
        return o, lse

    # not split into `forward` and `setup_context`: torch then binds the arguments to a signature
    # at each call, which costs more than a small kernel, and serves the transforms refused above
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        alibi_slopes: Tensor | None,
        bias: Tensor | None,
        mask: Tensor | None,
        sinks: Tensor | None,
        variant: Variant,
        plan: Plan,
    ) -> tuple[Tensor, Tensor]:
        """Return ``o [..., M, D]`` and ``lse [..., M]``; save what the backward needs."""
        modifiers = Modifiers(alibi_slopes, bias, mask, sinks)
        o, lse = run_forward(plan, q, k, v, variant, modifiers)
        ctx.variant, ctx.plan = variant, plan
        ctx.save_for_backward(q, k, v, *modifiers, o, lse)
        ctx.set_materialize_grads(False)
        return o, lse

    @staticmethod
    def backward(ctx: Any, do: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
        """Return dq, dk, dv, and the gradients of bias and sinks."""
        refuse_second_order()
        q, k, v, *modifiers, o, lse = ctx.saved_tensors
        if do is None:
            do = torch.zeros_like(o)
        dq, dk, dv, dbias, dsinks = run_backward(
            ctx.plan, q, k, v, o, lse, do, dlse, ctx.variant, Modifiers(*modifiers)
        )
        return dq, dk, dv, None, dbias, None, dsinks, None, None


def attend(
    plan: Plan, q: Tensor, k: Tensor, v: Tensor, variant: Variant, modifiers: Modifiers
) -> tuple[Tensor, Tensor | None]:
    """Carry out a plan: return ``o`` and, where the implementation has it, ``lse``."""
    if plan.impl == "torch":
        return torch_attention(q, k, v, variant, modifiers), None
    if plan.backward == "autograd":
        return dense_attention(q, k, v, variant, modifiers)
    return PlannedAttention.apply_plan(q, k, v, modifiers, variant, plan)


def run_forward(
    plan: Plan, q: Tensor, k: Tensor, v: Tensor, variant: Variant, modifiers: Modifiers
) -> tuple[Tensor, Tensor]:
    """Return ``o`` and ``lse`` by a plan's implementation; nothing is recorded for autograd."""
    if plan.impl == "hopper":
        try:
            return _forward_on_hopper(q, k, v, variant)
        except (LayoutRefusal, BuildFailure) as refusal:
            _accept(refusal, is_named=plan.impl_is_named)
        return run_forward(plan._replace(impl="triton"), q, k, v, variant, modifiers)
    if plan.impl == "triton":
        from flash_kernel._triton.launch import launch_forward

        o, lse = launch_forward(
            as_batch_and_heads(q),
            as_batch_and_heads(k),
            as_batch_and_heads(v),
            variant,
            as_pairs(modifiers, q, k),
        )
        return shaped(o, (*q.shape[:-1], v.shape[-1])), shaped(lse, q.shape[:-1])
    if plan.impl == "mock":
        from flash_kernel.mock import flash_attention_mock_forward

        return flash_attention_mock_forward(
            q, k, v, is_causal=variant.right == 0, scale=variant.scale
        )
    # a backward that rebuilds p from lse finds 1 for their sum only in the same, exact scores
    return dense_attention(q, k, v, variant, modifiers, rounds_scores=False)


def _forward_on_hopper(q: Tensor, k: Tensor, v: Tensor, variant: Variant) -> tuple[Tensor, Tensor]:
    """Return ``o`` and ``lse`` by the Hopper kernel, or raise why it cannot take the tensors."""
    from flash_kernel._hopper.launch import launch_forward

    o, lse = launch_forward(
        as_batch_and_heads(q), as_batch_and_heads(k), as_batch_and_heads(v), variant
    )
    return shaped(o, q.shape), shaped(lse, q.shape[:-1])


def _accept(refusal: Exception, *, is_named: bool) -> None:
    """Let the portable kernels stand in for Hopper's, unless those were asked for by name.

    A layout that the copy engine cannot read is nobody's fault; a failure is told once.
    """
    if is_named:
        raise refusal
    if isinstance(refusal, BuildFailure):
        warn_of_portable_path(str(refusal))


def run_backward(
    plan: Plan,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    do: Tensor,
    dlse: Tensor | None,
    variant: Variant,
    modifiers: Modifiers,
) -> Gradients:
    """Return the gradients by a plan's backward, one of those that are interchangeable."""
    tensors = (q, k, v, o, lse, do, dlse)
    if plan.backward == "hopper":
        try:
            return _backward_by_kernels(plan, tensors, variant, modifiers)
        except (LayoutRefusal, BuildFailure) as refusal:
            _accept(refusal, is_named=plan.backward_is_named)
        plan = plan._replace(backward="triton")
    if plan.backward == "triton":
        return _backward_by_kernels(plan, tensors, variant, modifiers)
    if plan.backward == "mock":
        from flash_kernel.mock import flash_attention_mock_backward

        is_causal, scale = variant.right == 0, variant.scale
        return Gradients(
            *flash_attention_mock_backward(
                q, k, v, o, lse, do, dlse=dlse, is_causal=is_causal, scale=scale
            )
        )
    run: Callable[..., Gradients] = flash_attention_backward
    if plan.backward == "compiled":
        run = flash_attention_backward_compiled
    return run(*tensors, variant, modifiers)


def _backward_by_kernels(
    plan: Plan, tensors: tuple[Any, ...], variant: Variant, modifiers: Modifiers
) -> Gradients:
    """Return the gradients by the kernels that a plan names, in the shapes of the inputs."""
    q, k, v, o, lse, do, dlse = tensors
    q4, k4, v4, o4, do4 = (as_batch_and_heads(x) for x in (q, k, v, o, do))
    lse = shaped(lse, q4.shape[:-1])
    dlse = None if dlse is None else shaped(dlse, lse.shape)
    if plan.backward == "hopper":
        from flash_kernel._hopper.backward_launch import launch_backward as launch_on_hopper

        dq, dk, dv, _, dsinks = launch_on_hopper(
            q4, k4, v4, o4, lse, do4, dlse, variant, is_deterministic=plan.is_deterministic
        )
    else:
        from flash_kernel._triton.launch_backward import launch_backward

        dq, dk, dv, _, dsinks = launch_backward(
            q4, k4, v4, o4, lse, do4, dlse, variant, as_pairs(modifiers, q, k)
        )
    dq, dk, dv = (shaped(dx, x.shape) for dx, x in ((dq, q), (dk, k), (dv, v)))
    return Gradients(dq, dk, dv, None, dsinks)

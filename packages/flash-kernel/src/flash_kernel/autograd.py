"""Forward and backward tied together for autograd: bookkeeping only, no maths."""

from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor

from flash_kernel._hopper.config import BuildFailure, LayoutRefusal
from flash_kernel._triton.config import ALIGNMENT, allows_tf32, has_few_queries
from flash_kernel.backward import flash_attention_backward, flash_attention_backward_compiled
from flash_kernel.calls import Call
from flash_kernel.dispatch import KERNELS, warn_of_portable_path
from flash_kernel.gradients import Gradients
from flash_kernel.reference import dense_attention
from flash_kernel.second_order import refuse_second_order
from flash_kernel.shapes import as_batch_and_heads, as_pairs, shaped
from flash_kernel.torch_attention import torch_attention
from flash_kernel.variant import Modifiers


class PlannedAttention(torch.autograd.Function):
    """Attention by a plan: forward and backward may come from different implementations."""

    # not split into `forward` and `setup_context`: torch then binds the arguments to a signature
    # at each call, which costs more than a small kernel, and serves transforms, which are refused
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
        call: Call,
    ) -> tuple[Tensor, Tensor]:
        """Return ``o [..., M, D]`` and ``lse [..., M]``; save what the backward needs."""
        modifiers = Modifiers(alibi_slopes, bias, mask, sinks)
        o, lse = run_forward(call, q, k, v, modifiers)
        ctx.call = call
        ctx.save_for_backward(q, k, v, o, lse, *modifiers)
        ctx.set_materialize_grads(False)
        return o, lse

    @staticmethod
    def backward(ctx: Any, do: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
        """Return dq, dk, dv, and the gradients of bias and sinks."""
        refuse_second_order()
        q, k, v, o, lse, *modifiers = ctx.saved_tensors
        if do is None:
            do = torch.zeros_like(o)
        dq, dk, dv, dbias, dsinks = run_backward(
            ctx.call, q, k, v, o, lse, do, dlse, Modifiers(*modifiers)
        )
        return dq, dk, dv, None, dbias, None, dsinks, None


def attend(
    call: Call, q: Tensor, k: Tensor, v: Tensor, modifiers: Modifiers
) -> tuple[Tensor, Tensor | None]:
    """Carry out a call: return ``o`` and, where the implementation has it, ``lse``."""
    if call.plan.impl == "torch":
        return torch_attention(q, k, v, call.variant, modifiers), None
    if call.plan.backward == "autograd":
        return dense_attention(q, k, v, call.variant, modifiers)
    if call.records:
        o, lse = PlannedAttention.apply(q, k, v, *modifiers, call)
        return o, lse
    return run_forward(call, q, k, v, modifiers)


def run_forward(
    call: Call, q: Tensor, k: Tensor, v: Tensor, modifiers: Modifiers
) -> tuple[Tensor, Tensor]:
    """Return ``o`` and ``lse`` by the planned implementation; autograd records nothing."""
    plan, variant = call.plan, call.variant
    if plan.impl in KERNELS:
        try:
            return _forward_by_kernels(call, q, k, v, modifiers)
        except (LayoutRefusal, BuildFailure) as refusal:
            accept(refusal, is_named=plan.impl_is_named)
        call.replace_plan(impl="triton")
        return _forward_by_kernels(call, q, k, v, modifiers)
    if plan.impl == "mock":
        from flash_kernel.mock import flash_attention_mock_forward

        return flash_attention_mock_forward(
            q, k, v, is_causal=variant.right == 0, scale=variant.scale
        )
    # a backward that rebuilds p from lse finds 1 for their sum only in the same, exact scores
    return dense_attention(q, k, v, variant, modifiers, rounds_scores=False)


def _forward_by_kernels(
    call: Call, q: Tensor, k: Tensor, v: Tensor, modifiers: Modifiers
) -> tuple[Tensor, Tensor]:
    """Return ``o`` and ``lse`` by kernels, which look at addresses: no views up to four dims."""
    if q.dim() > 4:
        q4, k4, v4 = map(as_batch_and_heads, (q, k, v))
        o, lse = _forward_by_kernels(call, q4, k4, v4, as_pairs(modifiers, q, k))
        return shaped(o, (*q.shape[:-1], v.shape[-1])), shaped(lse, q.shape[:-1])
    modifiers = as_pairs(modifiers, q, k)
    forward = call.launch("forward", lambda: _prepared_forward(call, q, k, v, modifiers))
    o, lse = forward(q, k, v, (*modifiers, None, None))
    return o, lse


def _prepared_forward(
    call: Call, q: Tensor, k: Tensor, v: Tensor, modifiers: Modifiers
) -> Callable[..., tuple[Tensor, Tensor]]:
    if call.plan.impl == "hopper":
        from flash_kernel._hopper import launch as hopper

        return hopper.prepare_forward(q, k, v, call.variant, view=as_batch_and_heads)
    if q.dim() == 4 and not modifiers.tensors:
        num_rows = q.shape[1] // max(1, k.shape[1]) * q.shape[2]
        if has_few_queries(q.dtype, num_rows, k.shape[2]):
            from flash_kernel._triton.launch_decode import prepare_few_queries

            return prepare_few_queries(q, k, v, call.variant)
    from flash_kernel._triton.launch import prepare_forward

    return prepare_forward(q, k, v, call.variant, modifiers, view=as_batch_and_heads)


def accept(refusal: Exception, *, is_named: bool) -> None:
    """Let the portable kernels stand in for Hopper's, unless those were asked for by name.

    A layout that the copy engine cannot read is nobody's fault; a failure is told once.
    """
    if is_named:
        raise refusal
    if isinstance(refusal, BuildFailure):
        warn_of_portable_path(str(refusal))


def run_backward(
    call: Call,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    do: Tensor,
    dlse: Tensor | None,
    modifiers: Modifiers,
) -> Gradients:
    """Return the gradients by the planned backward, one of those that are interchangeable."""
    tensors = (q, k, v, o, lse, do, dlse)
    plan, variant = call.plan, call.variant
    if plan.backward in KERNELS:
        try:
            return _backward_by_kernels(call, *tensors, modifiers)
        except (LayoutRefusal, BuildFailure) as refusal:
            accept(refusal, is_named=plan.backward_is_named)
        call.replace_plan(backward="triton")
        return _backward_by_kernels(call, *tensors, modifiers)
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
    call: Call,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    do: Tensor,
    dlse: Tensor | None,
    modifiers: Modifiers,
) -> Gradients:
    """Return the gradients by kernels, in the shapes of the inputs."""
    modifiers = as_pairs(modifiers, q, k)
    if q.dim() > 4:
        q4, k4, v4, o4, do4 = map(as_batch_and_heads, (q, k, v, o, do))
        got = _backward_by_kernels(call, q4, k4, v4, o4, lse, do4, dlse, modifiers)
        dq, dk, dv = (shaped(dx, x.shape) for dx, x in zip(got[:3], (q, k, v), strict=True))
        return got._replace(dq=dq, dk=dk, dv=dv)
    backward = call.launch(
        backward_key((q, k, v, o, do), modifiers, dlse),
        lambda: _prepared_backward(call, q, k, v, o, do, modifiers, has_dlse=dlse is not None),
    )
    gradients: Gradients = backward(q, k, v, o, lse, do, dlse, (*modifiers, None, None))
    return gradients


def backward_key(
    tensors: tuple[Tensor, ...], modifiers: Modifiers, dlse: Tensor | None
) -> tuple[Hashable, ...]:
    """Return what a prepared backward depends on beside the call that it belongs to.

    ``tensors`` are q, k, v, o and do, ``modifiers`` as the kernels take them.  The gradient's
    layout is autograd's choice, and hooks may have laid out anew what was saved.
    """
    layouts = [
        None if x is None else (x.stride(), x.dtype, x.data_ptr() % ALIGNMENT == 0)
        for x in (*tensors, *modifiers)
    ]
    return ("backward", *layouts, dlse is None, allows_tf32(tensors[0].dtype))


def _prepared_backward(
    call: Call,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    do: Tensor,
    modifiers: Modifiers,
    *,
    has_dlse: bool,
) -> Callable[..., Gradients]:
    plan, variant, view = call.plan, call.variant, as_batch_and_heads
    if plan.backward == "hopper":
        from flash_kernel._hopper import backward_launch as hopper

        return hopper.prepare_backward(
            q, k, v, o, do, variant, has_dlse=has_dlse, view=view,
            is_deterministic=plan.is_deterministic,
        )  # fmt: skip
    from flash_kernel._triton.launch_backward import prepare_backward

    return prepare_backward(q, k, v, o, do, variant, modifiers, has_dlse=has_dlse, view=view)

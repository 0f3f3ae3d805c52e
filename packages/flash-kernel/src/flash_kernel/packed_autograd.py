"""Attention of packed sequences, carried out: by the kernels at once, or a sequence at a time."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from flash_kernel._hopper.config import BuildFailure, LayoutRefusal
from flash_kernel.autograd import accept, attend, backward_key, run_backward, run_forward
from flash_kernel.calls import Call, kind_of, known_call, wants_gradients
from flash_kernel.dispatch import KERNELS, describe, resolve
from flash_kernel.gradients import Gradients
from flash_kernel.packed import (
    as_one_batch,
    by_sequence,
    check_packed,
    join_packed,
    lengths_of,
    modifiers_of,
    split_packed,
)
from flash_kernel.request import Options, Request
from flash_kernel.second_order import refuse_second_order, refuse_transforms
from flash_kernel.validation import check_options
from flash_kernel.variant import Modifiers, Packing, Variant, make_variant


def describe_packed(
    q: Tensor, k: Tensor, v: Tensor, variant: Variant, modifiers: Modifiers, *, return_lse: bool
) -> Request:
    """Return the request that valid tensors make."""
    q, k, v = map(as_one_batch, (q, k, v))
    return describe(q, k, v, variant, modifiers, return_lse=return_lse, layout="packed")


def checked_packed_call(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    packing: Packing,
    modifiers: Modifiers,
    options: tuple[Any, ...],
) -> Call:
    """Check the inputs, and return what is decided for them; see `calls`.

    Raises:
        TypeError, ValueError, RuntimeError: See `check_packed` and `resolve`.
    """
    tensors = (q, k, v, *packing[:2], *modifiers)

    def decide() -> Call:
        variant = checked_packed_variant(q, k, v, packing, modifiers, options)
        chosen = Options(*options)
        request = describe_packed(q, k, v, variant, modifiers, return_lse=chosen.return_lse)
        plan = resolve(request, impl=chosen.impl, backward=chosen.backward)
        if plan.backward != "autograd":
            refuse_transforms("flash_attention_varlen")
        return Call(plan, variant, records=wants_gradients(tensors))

    # the bounds are looked at in each call, but their types in the first alone
    kind = kind_of("flash_attention_varlen", tensors, (*options, *map(type, packing[2:])))
    return known_call(kind, decide)


def checked_packed_variant(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    packing: Packing,
    modifiers: Modifiers,
    options: tuple[Any, ...],
) -> Variant:
    """Check the inputs, and return the numbers among the options."""
    check_packed(q, k, v, packing, modifiers)
    wishes = dict(zip(Options._fields[:4], options[:4], strict=True))
    check_options(**wishes, return_lse=Options(*options).return_lse)
    return make_variant(q.shape[-1], **wishes)


def attend_packed(
    call: Call, q: Tensor, k: Tensor, v: Tensor, packing: Packing, modifiers: Modifiers
) -> tuple[Tensor, Tensor | None]:
    """Carry out a call: return ``o [total_q, H, D_v]`` and, where there is one, ``lse``."""
    if call.plan.backward != "autograd":
        if not call.records:
            return run_packed_forward(call, q, k, v, packing, modifiers)
        slopes, _, _, sinks = modifiers
        o, lse = PackedAttention.apply(q, k, v, slopes, sinks, packing, call)
        return o, lse
    parts = [
        attend(call, *tensors, modifiers_of(modifiers, i))
        for i, tensors in enumerate(each_sequence(packing, q, k, v))
    ]
    lses = [lse[0] for _, lse in parts if lse is not None]
    return join_packed([o for o, _ in parts]), torch.cat(lses, dim=-1) if lses else None


class PackedAttention(torch.autograd.Function):
    """Packed attention by a plan: forward and backward may come from different implementations."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        alibi_slopes: Tensor | None,
        sinks: Tensor | None,
        packing: Packing,
        call: Call,
    ) -> tuple[Tensor, Tensor]:
        """Return ``o [total_q, H, D_v]`` and ``lse [H, total_q]``; save what the backward needs."""
        modifiers = Modifiers(alibi_slopes=alibi_slopes, sinks=sinks)
        o, lse = run_packed_forward(call, q, k, v, packing, modifiers)
        ctx.call = call
        ctx.save_for_backward(q, k, v, alibi_slopes, sinks, *packing[:2], o, lse)
        ctx.set_materialize_grads(False)
        return o, lse

    @staticmethod
    def backward(ctx: Any, do: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
        """Return dq, dk, dv and the gradient of sinks."""
        refuse_second_order()
        q, k, v, alibi_slopes, sinks, cu_seqlens_q, cu_seqlens_k, o, lse = ctx.saved_tensors
        modifiers = Modifiers(alibi_slopes=alibi_slopes, sinks=sinks)
        dq, dk, dv, _, dsinks = run_packed_backward(
            ctx.call, q, k, v, o, lse, torch.zeros_like(o) if do is None else do, dlse,
            Packing(cu_seqlens_q, cu_seqlens_k), modifiers,
        )  # fmt: skip
        return dq, dk, dv, None, dsinks, None, None


def run_packed_forward(
    call: Call, q: Tensor, k: Tensor, v: Tensor, packing: Packing, modifiers: Modifiers
) -> tuple[Tensor, Tensor]:
    """Return ``o`` and ``lse`` by the planned implementation; autograd records nothing."""
    if call.plan.impl in KERNELS:
        check_lengths(packing, q, k)
        by_batch = by_sequence(modifiers, packing.num_sequences, q.shape[1])
        try:
            return _forward_by_kernels(call, q, k, v, packing, by_batch)
        except (LayoutRefusal, BuildFailure) as refusal:
            accept(refusal, is_named=call.plan.impl_is_named)
        call.replace_plan(impl="triton")
        return _forward_by_kernels(call, q, k, v, packing, by_batch)
    results = [
        run_forward(call, *tensors, modifiers_of(modifiers, i))
        for i, tensors in enumerate(each_sequence(packing, q, k, v))
    ]
    return join_packed([o for o, _ in results]), torch.cat([lse[0] for _, lse in results], dim=-1)


def _forward_by_kernels(
    call: Call, q: Tensor, k: Tensor, v: Tensor, packing: Packing, modifiers: Modifiers
) -> tuple[Tensor, Tensor]:
    forward = call.launch("forward", lambda: _prepared_forward(call, q, k, v, packing, modifiers))
    o, lse = forward(q, k, v, (*modifiers, *packing[:2]))
    return o, lse


def _prepared_forward(
    call: Call, q: Tensor, k: Tensor, v: Tensor, packing: Packing, modifiers: Modifiers
) -> Callable[..., tuple[Tensor, Tensor]]:
    lse_shape = (q.shape[1], q.shape[0])
    if call.plan.impl == "hopper":
        from flash_kernel._hopper import launch as hopper

        return hopper.prepare_forward(
            q, k, v, call.variant, packing.num_sequences, view=as_one_batch, lse_shape=lse_shape
        )
    from flash_kernel._triton.launch import prepare_forward

    return prepare_forward(
        q, k, v, call.variant, modifiers, packing.num_sequences, view=as_one_batch,
        lse_shape=lse_shape,
    )  # fmt: skip


def run_packed_backward(
    call: Call,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    do: Tensor,
    dlse: Tensor | None,
    packing: Packing,
    modifiers: Modifiers,
) -> Gradients:
    """Return the gradients by the planned backward, one of those that are interchangeable."""
    if call.plan.backward == "triton":
        from flash_kernel._triton.launch_backward import prepare_backward

        by_batch = by_sequence(modifiers, packing.num_sequences, q.shape[1])
        backward = call.launch(
            backward_key((q, k, v, o, do), by_batch, dlse),
            lambda: prepare_backward(
                q, k, v, o, do, call.variant, by_batch, packing.num_sequences,
                has_dlse=dlse is not None, view=as_one_batch,
            ),
        )  # fmt: skip
        gradients: Gradients = backward(q, k, v, o, lse, do, dlse, (*by_batch, *packing[:2]))
        return gradients
    lengths = lengths_of(packing, "q", q.shape[0]) or [0]
    os, dos = split_packed(o, lengths), split_packed(do, lengths)
    lses = torch.split(lse[None], lengths, dim=-1)
    dlses = [None] * len(lengths) if dlse is None else torch.split(dlse[None], lengths, dim=-1)
    parts = [
        run_backward(
            call, *tensors, os[i], lses[i], dos[i], dlses[i], modifiers_of(modifiers, i)
        )
        for i, tensors in enumerate(each_sequence(packing, q, k, v))
    ]  # fmt: skip
    dq = join_packed([part.dq for part in parts])
    dk = join_packed([part.dk for part in parts])
    dv = join_packed([part.dv for part in parts])
    by_part = [part.dsinks for part in parts if part.dsinks is not None]
    return Gradients(dq, dk, dv, None, torch.stack(by_part).sum(0) if by_part else None)


def check_lengths(packing: Packing, q: Tensor, k: Tensor) -> None:
    """Check what ``cu_seqlens`` holds where that makes no GPU wait."""
    if not packing.cu_seqlens_q.is_cuda:
        lengths_of(packing, "q", q.shape[0])
        lengths_of(packing, "k", k.shape[0])


def each_sequence(
    packing: Packing, q: Tensor, k: Tensor, v: Tensor
) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Return q, k and v of each sequence, as views ``[1, H, rows, D]``.

    Where there is no sequence, an empty one: its results are empty, and differentiable.
    """
    lengths_q = lengths_of(packing, "q", q.shape[0]) or [0]
    lengths_k = lengths_of(packing, "k", k.shape[0]) or [0]
    by_sequence = split_packed(q, lengths_q), split_packed(k, lengths_k), split_packed(v, lengths_k)
    return list(zip(*by_sequence, strict=True))

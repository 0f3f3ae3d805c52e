"""Attention of packed sequences, carried out: by the kernels at once, or a sequence at a time."""

from typing import Any

import torch
from torch import Tensor

from flash_kernel.autograd import attend, run_backward, run_forward
from flash_kernel.dispatch import describe
from flash_kernel.gradients import Gradients
from flash_kernel.packed import (
    as_one_batch,
    by_sequence,
    join_packed,
    lengths_of,
    modifiers_of,
    split_packed,
)
from flash_kernel.request import Plan, Request
from flash_kernel.second_order import refuse_second_order, refuse_transforms
from flash_kernel.variant import Modifiers, Packing, Variant


def describe_packed(
    q: Tensor, k: Tensor, v: Tensor, variant: Variant, modifiers: Modifiers, *, return_lse: bool
) -> Request:
    """Return the request that valid tensors make."""
    views = as_one_batch(q, k, v)
    return describe(*views, variant, modifiers, return_lse=return_lse, layout="packed")


def attend_packed(
    plan: Plan,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    packing: Packing,
    variant: Variant,
    modifiers: Modifiers,
) -> tuple[Tensor, Tensor | None]:
    """Carry out a plan: return ``o [total_q, H, D_v]`` and, where there is one, ``lse``."""
    if plan.backward != "autograd":
        refuse_transforms("flash_attention_varlen")
        slopes, _, _, sinks = modifiers
        o, lse = PackedAttention.apply(q, k, v, slopes, sinks, packing, variant, plan)
        return o, lse
    parts = [
        attend(plan, *tensors, variant, modifiers_of(modifiers, i))
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
        variant: Variant,
        plan: Plan,
    ) -> tuple[Tensor, Tensor]:
        """Return ``o [total_q, H, D_v]`` and ``lse [H, total_q]``; save what the backward needs."""
        modifiers = Modifiers(alibi_slopes, None, None, sinks)
        o, lse = run_packed_forward(plan.impl, q, k, v, packing, variant, modifiers)
        ctx.variant, ctx.plan = variant, plan
        ctx.save_for_backward(q, k, v, alibi_slopes, sinks, *packing[:2], o, lse)
        ctx.set_materialize_grads(False)
        return o, lse

    @staticmethod
    def backward(ctx: Any, do: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
        """Return dq, dk, dv and the gradient of sinks."""
        refuse_second_order()
        q, k, v, alibi_slopes, sinks, cu_seqlens_q, cu_seqlens_k, o, lse = ctx.saved_tensors
        modifiers = Modifiers(alibi_slopes, None, None, sinks)
        dq, dk, dv, _, dsinks = run_packed_backward(
            ctx.plan.backward, q, k, v, o, lse, torch.zeros_like(o) if do is None else do, dlse,
            Packing(cu_seqlens_q, cu_seqlens_k), ctx.variant, modifiers,
        )  # fmt: skip
        return dq, dk, dv, None, dsinks, None, None, None


def run_packed_forward(
    impl: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    packing: Packing,
    variant: Variant,
    modifiers: Modifiers,
) -> tuple[Tensor, Tensor]:
    """Return ``o`` and ``lse`` by one implementation; nothing is recorded for autograd."""
    if impl == "triton":
        from flash_kernel._triton.launch import launch_forward

        check_lengths(packing, q, k)
        views = as_one_batch(q, k, v)
        by_batch = by_sequence(modifiers, packing.num_sequences, q.shape[1])
        o, lse = launch_forward(*views, variant, by_batch, packing)
        return o[0].transpose(0, 1), lse[0]
    results = [
        run_forward(Plan(impl, "dense"), *tensors, variant, modifiers_of(modifiers, i))
        for i, tensors in enumerate(each_sequence(packing, q, k, v))
    ]
    return join_packed([o for o, _ in results]), torch.cat([lse[0] for _, lse in results], dim=-1)


def run_packed_backward(
    backward: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    do: Tensor,
    dlse: Tensor | None,
    packing: Packing,
    variant: Variant,
    modifiers: Modifiers,
) -> Gradients:
    """Return the gradients by one of the interchangeable backwards."""
    if backward == "triton":
        from flash_kernel._triton.launch_backward import launch_backward

        views = *as_one_batch(q, k, v), o.transpose(0, 1)[None], lse[None], do.transpose(0, 1)[None]
        dlse = None if dlse is None else dlse[None]
        by_batch = by_sequence(modifiers, packing.num_sequences, q.shape[1])
        got = launch_backward(*views, dlse, variant, by_batch, packing)
        dq, dk, dv = (x[0].transpose(0, 1) for x in got[:3])
        return Gradients(dq, dk, dv, None, got.dsinks)
    lengths = lengths_of(packing, "q", q.shape[0]) or [0]
    os, dos = split_packed(o, lengths), split_packed(do, lengths)
    lses = torch.split(lse[None], lengths, dim=-1)
    dlses = [None] * len(lengths) if dlse is None else torch.split(dlse[None], lengths, dim=-1)
    parts = [
        run_backward(
            Plan("reference", backward), *tensors, os[i], lses[i], dos[i], dlses[i], variant,
            modifiers_of(modifiers, i),
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
    if packing.cu_seqlens_q.device.type == "cpu":
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

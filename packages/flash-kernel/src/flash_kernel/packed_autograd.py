"""Attention of packed sequences, carried out: by the kernels at once, or a sequence at a time."""

from typing import Any

import torch
from torch import Tensor

from flash_kernel.autograd import attend, run_backward, run_forward
from flash_kernel.dispatch import Plan
from flash_kernel.gradients import Gradients
from flash_kernel.packed import Packing, join_packed, lengths_of, modifiers_of, split_packed
from flash_kernel.second_order import refuse_second_order
from flash_kernel.variant import Modifiers, Variant


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
        o, lse = PackedAttention.apply(q, k, v, *modifiers, *packing, variant, plan)
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
        q: Tensor,
        k: Tensor,
        v: Tensor,
        alibi_slopes: Tensor | None,
        bias: Tensor | None,
        mask: Tensor | None,
        sinks: Tensor | None,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        max_seqlen_q: int | None,
        max_seqlen_k: int | None,
        variant: Variant,
        plan: Plan,
    ) -> tuple[Tensor, Tensor]:
        """Return ``o [total_q, H, D_v]`` and ``lse [H, total_q]``."""
        packing = Packing(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
        modifiers = Modifiers(alibi_slopes, bias, mask, sinks)
        return run_packed_forward(plan.impl, q, k, v, packing, variant, modifiers)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        """Save q, k, v, the modifiers, where the sequences lie, o and lse."""
        *tensors, _, _, ctx.variant, ctx.plan = inputs
        ctx.save_for_backward(*tensors, *output)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, do: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
        """Return dq, dk, dv and the gradient of sinks."""
        refuse_second_order()
        q, k, v, *modifiers, cu_seqlens_q, cu_seqlens_k, o, lse = ctx.saved_tensors
        dq, dk, dv, _, dsinks = run_packed_backward(
            ctx.plan.backward, q, k, v, o, lse, torch.zeros_like(o) if do is None else do, dlse,
            Packing(cu_seqlens_q, cu_seqlens_k), ctx.variant, Modifiers(*modifiers),
        )  # fmt: skip
        return dq, dk, dv, None, None, None, dsinks, *[None] * 6


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
    results = [
        run_forward(impl, *tensors, variant, modifiers_of(modifiers, i))
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
    lengths = lengths_of(packing, "q", q.shape[0]) or [0]
    os, dos = split_packed(o, lengths), split_packed(do, lengths)
    lses = torch.split(lse[None], lengths, dim=-1)
    dlses = [None] * len(lengths) if dlse is None else torch.split(dlse[None], lengths, dim=-1)
    parts = [
        run_backward(
            backward, *tensors, os[i], lses[i], dos[i], dlses[i], variant,
            modifiers_of(modifiers, i),
        )
        for i, tensors in enumerate(each_sequence(packing, q, k, v))
    ]  # fmt: skip
    dq, dk, dv = (join_packed(list(gradients)) for gradients in list(zip(*parts, strict=True))[:3])
    dsinks = [part.dsinks for part in parts if part.dsinks is not None]
    return Gradients(dq, dk, dv, None, torch.stack(dsinks).sum(0) if dsinks else None)


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

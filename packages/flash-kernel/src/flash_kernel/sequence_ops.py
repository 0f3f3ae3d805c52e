"""Packed sequences and caches as ``torch.library`` operators, like those of `ops`.

``flash_kernel::cached_forward_appending`` declares that it changes the cache; without new keys a
call is ``flash_kernel::cached_forward``, which changes nothing.
"""

from typing import Any

import torch
from torch import Tensor

from flash_kernel.cache import Cache
from flash_kernel.calls import Call, kind_of, known_call
from flash_kernel.decode import append_to_cache, attend_to_cache, describe_cached
from flash_kernel.dispatch import resolve
from flash_kernel.ops import empty_output, laid_out_like, without_autograd
from flash_kernel.packed_autograd import describe_packed, run_packed_backward, run_packed_forward
from flash_kernel.second_order import refuse_second_order
from flash_kernel.variant import Modifiers, Packing, Variant


def _packed_call(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    packing: Packing,
    modifiers: Modifiers,
    variant: Variant,
    impl: str,
    backward: str,
) -> Call:
    """Return what is decided for an operator's packed inputs; see `calls`."""

    def decide() -> Call:
        request = describe_packed(q, k, v, variant, modifiers, return_lse=True)
        return Call(without_autograd(resolve(request, impl=impl, backward=backward)), variant)

    tensors = (q, k, v, *packing[:2], *modifiers)
    return known_call(kind_of("packed operator", tensors, (*variant, impl, backward)), decide)


@torch.library.custom_op("flash_kernel::packed_forward", mutates_args=())
def packed_forward_op(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | None,
    max_seqlen_k: int | None,
    alibi_slopes: Tensor | None,
    sinks: Tensor | None,
    scale: float,
    left: int | None,
    right: int | None,
    softcap: float | None,
    impl: str,
    backward: str,
) -> tuple[Tensor, Tensor]:
    """Return ``o [total_q, H, D_v]`` and ``lse [H, total_q]``."""
    variant = Variant(scale, left, right, softcap)
    modifiers = Modifiers(alibi_slopes=alibi_slopes, sinks=sinks)
    packing = Packing(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    call = _packed_call(q, k, v, packing, modifiers, variant, impl, backward)
    o, lse = run_packed_forward(call, q, k, v, packing, modifiers)
    return laid_out_like(empty_output(q, v), o), lse.contiguous()


@packed_forward_op.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, *options: Any
) -> tuple[Tensor, Tensor]:
    return empty_output(q, v), _empty_lse(q, (q.shape[1], q.shape[0]))


@torch.library.custom_op("flash_kernel::packed_backward", mutates_args=())
def packed_backward_op(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    do: Tensor,
    dlse: Tensor | None,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | None,
    max_seqlen_k: int | None,
    alibi_slopes: Tensor | None,
    sinks: Tensor | None,
    scale: float,
    left: int | None,
    right: int | None,
    softcap: float | None,
    impl: str,
    backward: str,
) -> list[Tensor]:
    """Return ``dq, dk, dv``, and then the gradient of sinks, if there are any."""
    variant = Variant(scale, left, right, softcap)
    modifiers = Modifiers(alibi_slopes=alibi_slopes, sinks=sinks)
    packing = Packing(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    call = _packed_call(q, k, v, packing, modifiers, variant, impl, backward)
    gradients = run_packed_backward(call, q, k, v, o, lse, do, dlse, packing, modifiers)
    results = [
        laid_out_like(torch.empty_like(x), dx)
        for x, dx in zip((q, k, v), gradients[:3], strict=True)
    ]
    if sinks is not None and gradients.dsinks is not None:
        results.append(gradients.dsinks.to(sinks.dtype))
    return results


@packed_backward_op.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    do: Tensor,
    dlse: Tensor | None,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | None,
    max_seqlen_k: int | None,
    alibi_slopes: Tensor | None,
    sinks: Tensor | None,
    *options: Any,
) -> list[Tensor]:
    return [torch.empty_like(x) for x in (q, k, v, sinks) if x is not None]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    tensors, ctx.max_seqlens, modifiers = inputs[:5], inputs[5:7], inputs[7:9]
    ctx.options = inputs[9:]
    ctx.save_for_backward(*tensors, *modifiers, *output)
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, do: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
    refuse_second_order()
    q, k, v, cu_seqlens_q, cu_seqlens_k, slopes, sinks, o, lse = ctx.saved_tensors
    do = torch.zeros_like(o) if do is None else do
    dq, dk, dv, *rest = packed_backward_op(
        q, k, v, o, lse, do, dlse, cu_seqlens_q, cu_seqlens_k, *ctx.max_seqlens, slopes, sinks,
        *ctx.options,
    )  # fmt: skip
    dsinks = rest[0] if rest else None
    return dq, dk, dv, *[None] * 5, dsinks, *[None] * len(ctx.options)


packed_forward_op.register_autograd(_backward, setup_context=_setup_context)


@torch.library.custom_op("flash_kernel::cached_forward", mutates_args=())
def cached_forward_op(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    cache_seqlens: Tensor,
    block_table: Tensor | None,
    alibi_slopes: Tensor | None,
    sinks: Tensor | None,
    scale: float,
    left: int | None,
    right: int | None,
    softcap: float | None,
    num_splits: int | None,
    impl: str,
) -> tuple[Tensor, Tensor]:
    """Return ``o [B, H, M, D_v]`` and ``lse [B, H, M]`` of queries over a cache."""
    cache = Cache(k_cache, v_cache, cache_seqlens, block_table)
    variant = Variant(scale, left, right, softcap)
    modifiers = Modifiers(alibi_slopes=alibi_slopes, sinks=sinks)
    return _attend(q, cache, None, None, variant, modifiers, num_splits, impl)


@torch.library.custom_op(
    "flash_kernel::cached_forward_appending", mutates_args=("k_cache", "v_cache")
)
def cached_forward_appending_op(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    cache_seqlens: Tensor,
    block_table: Tensor | None,
    alibi_slopes: Tensor | None,
    sinks: Tensor | None,
    scale: float,
    left: int | None,
    right: int | None,
    softcap: float | None,
    num_splits: int | None,
    impl: str,
    k: Tensor,
    v: Tensor,
) -> tuple[Tensor, Tensor]:
    """Append ``k`` and ``v`` to a cache; return o and lse of queries over it."""
    cache = Cache(k_cache, v_cache, cache_seqlens, block_table)
    variant = Variant(scale, left, right, softcap)
    modifiers = Modifiers(alibi_slopes=alibi_slopes, sinks=sinks)
    return _attend(q, cache, k, v, variant, modifiers, num_splits, impl)


@cached_forward_op.register_fake
@cached_forward_appending_op.register_fake
def _(q: Tensor, k_cache: Tensor, v_cache: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    return empty_output(q, v_cache), _empty_lse(q, tuple(q.shape[:-1]))


def _attend(
    q: Tensor,
    cache: Cache,
    k: Tensor | None,
    v: Tensor | None,
    variant: Variant,
    modifiers: Modifiers,
    num_splits: int | None,
    impl: str,
) -> tuple[Tensor, Tensor]:

    def decide() -> Call:
        request = describe_cached(q, cache, variant, modifiers, return_lse=True)
        return Call(resolve(request, impl=impl, backward="auto"), variant)

    tensors = (q, *cache, k, v, *modifiers)
    call = known_call(kind_of("cache operator", tensors, (*variant, num_splits, impl)), decide)
    if k is not None and v is not None:
        append_to_cache(call, cache, k, v)
    num_new = 0 if k is None else k.shape[2]
    o, lse = attend_to_cache(call, q, cache, num_new, modifiers, num_splits)
    assert lse is not None  # the request asks for it
    return laid_out_like(empty_output(q, cache.v), o), lse.contiguous()


def _empty_lse(q: Tensor, shape: tuple[int, ...]) -> Tensor:
    return q.new_empty(shape, dtype=torch.promote_types(q.dtype, torch.float32))

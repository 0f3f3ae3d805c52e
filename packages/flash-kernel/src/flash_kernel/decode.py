"""Attention over a cache, carried out: by the kernels at once, or a sequence at a time."""

import torch
from torch import Tensor

from flash_kernel.autograd import attend
from flash_kernel.cache import Cache, append_rows, cached_lengths, keys_and_values
from flash_kernel.dispatch import describe
from flash_kernel.packed import by_sequence, modifiers_of
from flash_kernel.request import Plan, Request
from flash_kernel.variant import Modifiers, Variant


def describe_cached(
    q: Tensor, cache: Cache, variant: Variant, modifiers: Modifiers, *, return_lse: bool
) -> Request:
    """Return the request that valid tensors make."""
    request = describe(
        q, cache.k, cache.v, variant, modifiers, return_lse=return_lse, layout="cache"
    )
    return request._replace(seqlen_k=cache.capacity)


def append_to_cache(impl: str, cache: Cache, k: Tensor, v: Tensor) -> None:
    """Write new keys and values ``[B, H_kv, M_new, D]`` behind the cached ones, in place."""
    if impl != "triton":
        append_rows(cache, k, v, cached_lengths(cache, k.shape[2]))
        return
    from flash_kernel._triton.launch_decode import launch_append

    if cache.seqlens.device.type == "cpu":
        cached_lengths(cache, k.shape[2])
    launch_append(k, v, *cache)


def attend_to_cache(
    plan: Plan,
    q: Tensor,
    cache: Cache,
    num_new: int,
    variant: Variant,
    modifiers: Modifiers,
    num_splits: int | None,
) -> tuple[Tensor, Tensor | None]:
    """Return ``o [B, H, M, D_v]`` and, where the implementation has it, ``lse [B, H, M]``.

    ``cache.seqlens`` are those before ``num_new`` keys were appended to each sequence.
    """
    if plan.impl == "triton":
        from flash_kernel._triton.launch_decode import launch_decode

        if cache.seqlens.device.type == "cpu":
            cached_lengths(cache, num_new)
        by_batch = by_sequence(modifiers, *q.shape[:2])
        return launch_decode(q, *cache, num_new, variant, by_batch, num_splits=num_splits)
    results = []
    for i, length in enumerate(cached_lengths(cache, num_new)):
        k, v = keys_and_values(cache, i, length + num_new)
        results.append(attend(plan, q[i, None], k, v, variant, modifiers_of(modifiers, i)))
    if not results:
        o = q.new_empty((*q.shape[:-1], cache.v.shape[-1]))
        return o, q.new_empty(q.shape[:-1], dtype=torch.promote_types(q.dtype, torch.float32))
    lses = [lse for _, lse in results if lse is not None]
    return torch.cat([o for o, _ in results]), torch.cat(lses) if lses else None

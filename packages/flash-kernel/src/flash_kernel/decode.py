"""Attention over a cache, carried out: by the kernels at once, or a sequence at a time."""

from collections.abc import Callable

import torch
from torch import Tensor

from flash_kernel.autograd import attend
from flash_kernel.cache import Cache, append_rows, cached_lengths, keys_and_values
from flash_kernel.calls import Call
from flash_kernel.dispatch import describe
from flash_kernel.packed import by_sequence, modifiers_of
from flash_kernel.request import Request
from flash_kernel.variant import Modifiers, Variant


def describe_cached(
    q: Tensor, cache: Cache, variant: Variant, modifiers: Modifiers, *, return_lse: bool
) -> Request:
    """Return the request that valid tensors make."""
    request = describe(
        q, cache.k, cache.v, variant, modifiers, return_lse=return_lse, layout="cache"
    )
    return request._replace(seqlen_k=cache.capacity)


def append_to_cache(call: Call, cache: Cache, k: Tensor, v: Tensor) -> None:
    """Write new keys and values ``[B, H_kv, M_new, D]`` behind the cached ones, in place."""
    if call.plan.impl != "triton":
        append_rows(cache, k, v, cached_lengths(cache, k.shape[2]))
        return
    check_cached_lengths(cache, k.shape[2])
    if k.numel() > 0:
        from flash_kernel._triton.launch_decode import prepare_append

        append = call.launch("append", lambda: prepare_append(k, v, *cache))
        append(k, v, *cache)


def attend_to_cache(
    call: Call,
    q: Tensor,
    cache: Cache,
    num_new: int,
    modifiers: Modifiers,
    num_splits: int | None,
) -> tuple[Tensor, Tensor | None]:
    """Return ``o [B, H, M, D_v]`` and, where the implementation has it, ``lse [B, H, M]``.

    ``cache.seqlens`` are those before ``num_new`` keys were appended to each sequence.
    """
    if call.plan.impl == "triton":
        check_cached_lengths(cache, num_new)
        by_batch = by_sequence(modifiers, *q.shape[:2])
        decode = call.launch(
            "decode", lambda: _prepared_decode(call, q, cache, num_new, by_batch, num_splits)
        )
        o, lse = decode(q, *cache, by_batch.alibi_slopes, by_batch.sinks)
        return o, lse
    results = []
    for i, length in enumerate(cached_lengths(cache, num_new)):
        k, v = keys_and_values(cache, i, length + num_new)
        results.append(attend(call, q[i, None], k, v, modifiers_of(modifiers, i)))
    if not results:
        o = q.new_empty((*q.shape[:-1], cache.v.shape[-1]))
        return o, q.new_empty(q.shape[:-1], dtype=torch.promote_types(q.dtype, torch.float32))
    lses = [lse for _, lse in results if lse is not None]
    return torch.cat([o for o, _ in results]), torch.cat(lses) if lses else None


def _prepared_decode(
    call: Call,
    q: Tensor,
    cache: Cache,
    num_new: int,
    modifiers: Modifiers,
    num_splits: int | None,
) -> Callable[..., tuple[Tensor, Tensor]]:
    from flash_kernel._triton.launch_decode import prepare_decode

    return prepare_decode(
        q, cache.k, cache.v, cache.block_table, num_new, call.variant, modifiers,
        num_splits=num_splits,
    )  # fmt: skip


def check_cached_lengths(cache: Cache, num_new: int) -> None:
    """Check what lengths and table hold where that makes no GPU wait."""
    if not cache.seqlens.is_cuda:
        cached_lengths(cache, num_new)

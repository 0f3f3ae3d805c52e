"""Key-value caches: what is valid input, and what one sequence has of it.

A cache is ``[B, H_kv, capacity, D]``, or, in pages, ``[num_pages, H_kv, page_size, D]`` with a
``block_table [B, max_pages]`` that names the pages of each sequence in order.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from flash_kernel.packed import check_integers
from flash_kernel.validation import (
    check_by_head,
    check_device,
    check_kind,
    check_modifier,
    check_shape,
    check_shared,
    checked_kv_heads,
)
from flash_kernel.variant import Modifiers


class Cache(NamedTuple):
    """Keys and values kept from earlier calls."""

    k: Tensor
    v: Tensor
    seqlens: Tensor  # int32 or int64 [B]: keys of each sequence, before new ones are appended
    block_table: Tensor | None  # int32 or int64 [B, max_pages]

    @property
    def capacity(self) -> int:
        """How many keys a sequence can have."""
        if self.block_table is None:
            return self.k.shape[2]
        return self.block_table.shape[1] * self.k.shape[2]


def check_cache(
    q: Tensor, cache: Cache, k: Tensor | None, v: Tensor | None, modifiers: Modifiers
) -> None:
    """Raise unless the arguments are a valid input of `flash_attention_with_kvcache`.

    Shapes and dtypes alone: what lengths and table hold is checked by `cached_lengths`.

    Raises:
        TypeError: Not a tensor, or a dtype that is unsupported or not shared.
        ValueError: Shapes that do not fit each other, or mixed devices.
    """
    if (k is None) != (v is None):
        msg = "`k` and `v` must be given together, got one of them."
        raise ValueError(msg)
    tensors = {"q": q, "k_cache": cache.k, "v_cache": cache.v}
    if k is not None and v is not None:
        tensors |= {"k": k, "v": v}
    for name, tensor in tensors.items():
        check_kind(name, tensor)
        if tensor.dim() != 4 or tensor.shape[-1] < 1:
            msg = (
                f"`{name}` must have four dimensions, [B, heads, rows, D] with D >= 1, "
                f"got shape {list(tensor.shape)}."
            )
            raise ValueError(msg)
    check_shared(tensors)
    batch, num_heads, _, head_dim = q.shape
    num_heads_kv = checked_kv_heads(num_heads, cache.k.shape[1])
    _check_lengths(cache, q)
    leading: int | str = batch if cache.block_table is None else "num_pages"
    check_shape("k_cache", cache.k, [leading, num_heads_kv, "rows", head_dim], like="q")
    check_shape("v_cache", cache.v, [*cache.k.shape[:-1], "D_v"], like="k_cache")
    if k is not None and v is not None:
        check_shape("k", k, [batch, num_heads_kv, "rows", head_dim], like="q")
        check_shape("v", v, [*k.shape[:-1], cache.v.shape[-1]], like="k")
    for name, modifier in modifiers._asdict().items():
        if modifier is not None:
            check_modifier(name, modifier, q.device)
            check_by_head(name, modifier, [batch, num_heads])


def _check_lengths(cache: Cache, q: Tensor) -> None:
    check_integers("cache_seqlens", cache.seqlens, "[B]")
    check_device("cache_seqlens", cache.seqlens, q.device)
    if cache.seqlens.shape[0] != q.shape[0]:
        msg = (
            f"`cache_seqlens` must have one length for each of the {q.shape[0]} sequences, "
            f"got {cache.seqlens.shape[0]}."
        )
        raise ValueError(msg)
    if cache.block_table is not None:
        check_integers("block_table", cache.block_table, "[B, max_pages]", num_dims=2)
        check_device("block_table", cache.block_table, q.device)
        if cache.block_table.shape[0] != q.shape[0]:
            msg = (
                f"`block_table` must have one row for each of the {q.shape[0]} sequences, "
                f"got {cache.block_table.shape[0]}."
            )
            raise ValueError(msg)


def cached_lengths(cache: Cache, num_new: int) -> list[int]:
    """Return the keys of each sequence before new ones; reads a tensor, which waits for a GPU.

    Raises:
        ValueError: With the new keys a sequence would outgrow the cache, or has fewer than none,
            or the table names a page that does not exist.
    """
    lengths = [int(n) for n in cache.seqlens.tolist()]
    for length in lengths:
        if not 0 <= length <= cache.capacity - num_new:
            msg = (
                f"`cache_seqlens` must lie from 0 to {cache.capacity - num_new}, the capacity of "
                f"{cache.capacity} less {num_new} new keys, got {length}."
            )
            raise ValueError(msg)
    if cache.block_table is not None:
        for length, pages in zip(lengths, cache.block_table.tolist(), strict=True):
            used = pages[: -(-(length + num_new) // cache.k.shape[2])]
            if used and not 0 <= min(used) <= max(used) < cache.k.shape[0]:
                msg = (
                    f"`block_table` must name pages from 0 to {cache.k.shape[0] - 1} for the keys "
                    f"there are, got {used}."
                )
                raise ValueError(msg)
    return lengths


def append_rows(cache: Cache, k: Tensor, v: Tensor, lengths: list[int]) -> None:
    """Write new keys and values behind those of each sequence, in place."""
    for i, length in enumerate(lengths):
        rows = torch.arange(length, length + k.shape[2], device=k.device)
        for target, new in ((cache.k, k), (cache.v, v)):
            if cache.block_table is None:
                target[i, :, rows] = new[i]
            else:
                pages = cache.block_table[i, rows // target.shape[2]].long()
                target[pages, :, rows % target.shape[2]] = new[i].transpose(0, 1)


def keys_and_values(cache: Cache, sequence: int, length: int) -> tuple[Tensor, Tensor]:
    """Return the first ``length`` keys and values of a sequence, ``[1, H_kv, length, D]``."""
    if cache.block_table is None:
        return cache.k[sequence, None, :, :length], cache.v[sequence, None, :, :length]
    num_pages = -(-length // cache.k.shape[2])
    pages = cache.block_table[sequence, :num_pages].long()
    k, v = (x[pages].transpose(0, 1).flatten(1, 2)[None, :, :length] for x in (cache.k, cache.v))
    return k, v

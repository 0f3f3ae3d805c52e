"""Packed sequences: what is valid input, and what one sequence has of it.

``cu_seqlens``, cumulative lengths that start at 0, say where each sequence of a packed tensor lies:
sequence b has the rows ``cu_seqlens[b] .. cu_seqlens[b + 1]``.
"""

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from flash_kernel.validation import (
    check_by_head,
    check_device,
    check_kind,
    check_modifier,
    check_shape,
    check_shared,
    checked_kv_heads,
)
from flash_kernel.variant import Modifiers, Packing

INTEGERS = (torch.int32, torch.int64)


def check_packed(q: Tensor, k: Tensor, v: Tensor, packing: Packing, modifiers: Modifiers) -> None:
    """Raise unless the arguments are a valid input of `flash_attention_varlen`.

    Shapes and dtypes alone: what ``cu_seqlens`` holds is checked by `lengths_of`.

    Raises:
        TypeError: Not a tensor, or a dtype that is unsupported or not shared.
        ValueError: Shapes that do not fit each other, or mixed devices.
    """
    check_packed_qkv(q, k, v)
    cu_seqlens_q, cu_seqlens_k, *_ = packing
    for name, cu_seqlens in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        check_integers(name, cu_seqlens, "[B + 1]")
        check_device(name, cu_seqlens, q.device)
        if cu_seqlens.shape[0] < 1:
            msg = f"`{name}` must hold at least the 0 that it starts at, got shape [0]."
            raise ValueError(msg)
    if cu_seqlens_q.shape != cu_seqlens_k.shape:
        msg = (
            "`cu_seqlens_q` and `cu_seqlens_k` must describe as many sequences, "
            f"got shapes {list(cu_seqlens_q.shape)} and {list(cu_seqlens_k.shape)}."
        )
        raise ValueError(msg)
    for name in ("max_seqlen_q", "max_seqlen_k"):
        bound = getattr(packing, name)
        if bound is not None and (isinstance(bound, bool) or not isinstance(bound, int)):
            msg = f"`{name}` must be an integer or None, got {bound!r}."
            raise TypeError(msg)
    for name, tensor in modifiers._asdict().items():
        if tensor is not None:
            check_modifier(name, tensor, q.device)
            check_by_head(name, tensor, [packing.num_sequences, q.shape[1]])


def check_packed_qkv(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Raise unless ``q, k, v`` are packed tensors ``[total, heads, D]`` that fit each other."""
    tensors = {"q": q, "k": k, "v": v}
    for name, tensor in tensors.items():
        check_kind(name, tensor)
    for name, tensor in tensors.items():
        if tensor.dim() != 3 or tensor.shape[-1] < 1:
            msg = (
                f"`{name}` must be packed, [total, heads, D] with D >= 1, "
                f"got shape {list(tensor.shape)}."
            )
            raise ValueError(msg)
    check_shared(tensors)
    num_heads_kv = checked_kv_heads(q.shape[1], k.shape[1], dim=-2)
    check_shape("k", k, ["total_k", num_heads_kv, q.shape[-1]], like="q")
    check_shape("v", v, [*k.shape[:-1], "D_v"], like="k")


def check_integers(name: str, tensor: object, shape: str, num_dims: int = 1) -> None:
    """Raise unless an argument is a contiguous tensor of int32 or int64 of that many dimensions."""
    if not isinstance(tensor, Tensor):
        msg = f"`{name}` must be a torch.Tensor, got {type(tensor).__name__}."
        raise TypeError(msg)
    if tensor.dtype not in INTEGERS:
        dtype = str(tensor.dtype).removeprefix("torch.")
        msg = f"`{name}` must be int32 or int64, got {dtype}. Convert it with {name}.int()."
        raise TypeError(msg)
    if tensor.dim() != num_dims:
        msg = f"`{name}` must have shape {shape}, got {list(tensor.shape)}."
        raise ValueError(msg)
    if not tensor.is_contiguous():
        msg = (
            f"`{name}` must be contiguous, got strides {list(tensor.stride())}. "
            f"Pass {name}.contiguous()."
        )
        raise ValueError(msg)


def lengths_of(packing: Packing, which: str, total: int) -> list[int]:
    """Return the length of each sequence of "q" or "k"; reads a tensor, which waits for a GPU.

    Raises:
        ValueError: ``cu_seqlens`` does not start at 0, end at ``total`` and grow between, or a
            sequence is longer than ``max_seqlen``.
    """
    ends = getattr(packing, f"cu_seqlens_{which}").tolist()
    max_seqlen = getattr(packing, f"max_seqlen_{which}")
    lengths = [end - start for start, end in pairwise(ends)]
    if ends[0] != 0 or ends[-1] != total or min(lengths, default=0) < 0:
        msg = (
            f"`cu_seqlens_{which}` must start at 0, never decrease, and end at the {total} rows of "
            f"`{which}`, got {_shortened(ends)}."
        )
        raise ValueError(msg)
    if max_seqlen is not None and max(lengths, default=0) > max_seqlen:
        msg = (
            f"`max_seqlen_{which}` must be at least the longest sequence's {max(lengths)} rows, "
            f"got {max_seqlen}."
        )
        raise ValueError(msg)
    return lengths


def as_one_batch(x: Tensor) -> Tensor:
    """Return a packed tensor ``[total, H, D]`` as a view ``[1, H, total, D]``."""
    return x.transpose(0, 1)[None]


def split_packed(x: Tensor, lengths: Sequence[int]) -> list[Tensor]:
    """Return each sequence ``[1, H, rows, D]`` of ``x [total, H, D]``, as views."""
    return [part.transpose(0, 1)[None] for part in torch.split(x, list(lengths))]


def join_packed(parts: Sequence[Tensor]) -> Tensor:
    """Undo `split_packed`."""
    return torch.cat([part[0].transpose(0, 1) for part in parts])


def by_sequence(modifiers: Modifiers, batch: int, num_heads: int) -> Modifiers:
    """Return the modifiers as the kernels take them, slopes as float32 ``[B, H]``."""
    slopes, _, _, sinks = modifiers
    if slopes is sinks is None:
        return modifiers
    if slopes is not None:
        slopes = slopes.float().expand(batch, num_heads)
    sinks = None if sinks is None else sinks.float().contiguous()
    return Modifiers(alibi_slopes=slopes, sinks=sinks)


def modifiers_of(modifiers: Modifiers, sequence: int) -> Modifiers:
    """Return the modifiers of one sequence."""
    slopes = modifiers.alibi_slopes
    if slopes is not None and slopes.dim() == 2:
        slopes = slopes[sequence]
    return modifiers._replace(alibi_slopes=slopes)


def _shortened(values: list[int]) -> str:
    if len(values) <= 8:
        return str(values)
    return f"[{', '.join(map(str, values[:4]))}, ..., {', '.join(map(str, values[-3:]))}]"

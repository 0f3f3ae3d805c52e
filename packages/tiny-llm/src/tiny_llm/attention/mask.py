"""Masks and shared heads, for the backends that need them as tensors."""

import torch
from torch import Tensor

from tiny_llm.packing import Packing


def causal_mask(seqlen_q: int, seqlen_k: int, device: torch.device) -> Tensor:
    """Return the boolean mask ``[M, N]`` that is True where query i may see key j.

    Bottom-right aligned: the last query sees every key.

    >>> causal_mask(2, 3, torch.device("cpu")).int()
    tensor([[1, 1, 0],
            [1, 1, 1]], dtype=torch.int32)
    """
    everything = torch.ones(seqlen_q, seqlen_k, dtype=torch.bool, device=device)
    return everything.tril(diagonal=seqlen_k - seqlen_q)


def visible_keys(
    q: Tensor,
    k: Tensor,
    *,
    is_causal: bool,
    window: int | None = None,
    key_lengths: Tensor | None = None,
    packing: Packing | None = None,
) -> Tensor:
    """Return the mask ``[M, N]``, or ``[B, 1, M, N]`` where sequences differ: True where seen.

    Args:
        q: Queries ``[B, H, M, D]``.
        k: Keys ``[B, H_kv, N, D]``.
        is_causal: Row i sees the keys ``j <= i + n - M``, with n = N or the sequence's length.
        window: Of those the last this many.
        key_lengths: Number of keys of each sequence, int64 ``[B]``; by default all N.
        packing: Documents of the sequences, for M = N; none sees another.
    """
    if packing is not None:
        ids = packing.document_ids[:, None]  # [B, 1, T]
        own_document = ids[..., :, None] == ids[..., None, :]
        return own_document & visible_keys(q, k, is_causal=is_causal, window=window)
    seqlen_q, seqlen_k = q.shape[-2], k.shape[-2]
    keys = torch.arange(seqlen_k, device=q.device)
    rows = torch.arange(seqlen_q, device=q.device)[:, None]  # [M, 1]
    if key_lengths is None:
        ends = torch.full((1, 1), seqlen_k, device=q.device)
    else:
        ends = key_lengths.to(q.device)[:, None, None, None]  # [B, 1, 1, 1]
    if not is_causal:
        return (keys < ends).expand(*ends.shape[:-2], seqlen_q, seqlen_k)
    own = rows + ends - seqlen_q  # the key of row i's own position, [M, 1] or [B, 1, M, 1]
    visible = keys <= own
    return visible if window is None else visible & (keys > own - window)


def repeat_heads(k: Tensor, v: Tensor, num_heads: int) -> tuple[Tensor, Tensor]:
    """Return k and v ``[B, H, N, D]`` of ``[B, H_kv, N, D]``, each head once per query head."""
    group = num_heads // k.shape[1]
    if group == 1:
        return k, v
    return k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)

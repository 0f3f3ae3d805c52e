"""Which keys a query may attend to, in a case: causality and a window, aligned bottom-right."""

import torch
from torch import Tensor

from attn_bench.case import Case


def bounds(case: Case) -> tuple[int | None, int | None]:
    """Return how many keys before and after its own position a query sees; None is all.

    Query i stands at key ``i + N - M``.  Causal means none after it; a window of w means w keys on
    each side that is not cut already.
    """
    return case.window, 0 if case.is_causal else case.window


def is_masked(case: Case) -> bool:
    """Return whether the case hides any key from any query."""
    return case.is_causal or case.window is not None


def visible(
    case: Case,
    device: torch.device | None = None,
    rows: slice = slice(None),
    keys: int | None = None,
) -> Tensor:
    """Return ``[M, N]``, True where a query sees a key; on request some rows and the first keys."""
    i = torch.arange(case.seqlen_q, device=device)[rows, None]
    j = torch.arange(case.seqlen_k if keys is None else keys, device=device)[None, :]
    return visible_at(case, i, j)


def visible_at(case: Case, i: Tensor, j: Tensor) -> Tensor:
    """Return whether queries `i` see keys `j`, with broadcasting."""
    before, after = bounds(case)
    distance = j - i - (case.seqlen_k - case.seqlen_q)
    seen = torch.ones_like(distance, dtype=torch.bool)
    if after is not None:
        seen = seen & (distance <= after)
    if before is not None:
        seen = seen & (distance >= -before)
    return seen


def dense_attention(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
    """Return softmax(q k^T / sqrt(D)) v under a mask, with the whole score matrix.

    Args:
        q: ``[..., H, M, D]``.
        k: ``[..., H_kv, N, D]``; each of its heads serves H / H_kv heads of q.
        v: As k.
        seen: ``[M, N]``, True where a query sees a key; a row that sees none gives 0.
    """
    groups = q.shape[-3] // k.shape[-3]
    k, v = (x.repeat_interleave(groups, dim=-3) for x in (k, v))
    state_dtype = torch.promote_types(q.dtype, torch.float32)
    s = (q @ k.mT).to(state_dtype) * q.shape[-1] ** -0.5
    p = torch.softmax(s.masked_fill(~seen, float("-inf")), dim=-1).masked_fill(~seen, 0.0)
    return p.to(v.dtype) @ v

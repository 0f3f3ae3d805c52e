"""Attention written down as its definition: dense, differentiable, and the oracle of every test.

Called on float64 tensors it is what the other implementations are measured against; called on
half-precision ones it is what a careful eager implementation reaches, the yardstick for tolerances.
"""

import torch
from torch import Tensor

from flash_kernel.validation import check_qkv


def visible_mask(seqlen_q: int, seqlen_k: int, device: torch.device | str | None = None) -> Tensor:
    """Causal mask ``[seqlen_q, seqlen_k]``, True where a query row may attend to a key.

    Aligned to the bottom right: row i sees the keys ``j <= i + seqlen_k - seqlen_q``, so the last
    row sees every key, and with more queries than keys the first rows see none.
    """
    rows = torch.arange(seqlen_q, device=device)[:, None]
    cols = torch.arange(seqlen_k, device=device)[None, :]
    return cols <= rows + (seqlen_k - seqlen_q)


def attention_reference(
    q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool = False, scale: float | None = None
) -> tuple[Tensor, Tensor]:
    """Return ``softmax(scale * q k^T) v`` and the log-sum-exp of its scores, both differentiable.

    The two matrix products run in the dtype of the inputs, the softmax in float32 (float64 for
    float64 inputs).  The score matrix is stored: memory grows with ``M * N``.

    Args:
        q: Queries ``[..., M, D]``.
        k: Keys ``[..., N, D]``.
        v: Values ``[..., N, D]``.
        is_causal: Row i sees the keys ``j <= i + N - M`` only; see `visible_mask`.
        scale: Factor of the scores, ``D ** -0.5`` by default.

    Returns:
        ``o [..., M, D]`` in the dtype of the inputs, and ``lse [..., M]``, the natural logarithm of
        ``sum_j exp(scale * q_i k_j)`` over the visible keys, in float32 (float64 for float64).  A
        row that sees no key has ``o = 0``, ``lse = -inf`` and passes no gradient back.

    Raises:
        TypeError: See `check_qkv`.
        ValueError: See `check_qkv`.

    A NaN or inf in a key leaves o and lse of the rows that cannot see that key untouched.  One in a
    *value* does not: the dense product multiplies it by a weight of 0, which gives NaN.
    """
    check_qkv(q, k, v, is_causal=is_causal, scale=scale)
    seqlen_q, seqlen_k, head_dim = q.shape[-2], k.shape[-2], q.shape[-1]
    if scale is None:
        scale = head_dim**-0.5
    state_dtype = torch.promote_types(q.dtype, torch.float32)

    s = (q @ k.mT).to(state_dtype) * scale  # [..., M, N]
    if is_causal:
        hidden = ~visible_mask(seqlen_q, seqlen_k, q.device)
        s = s.masked_fill(hidden, float("-inf"))
    lse = torch.logsumexp(s, dim=-1)  # [..., M]
    p = torch.softmax(s, dim=-1)
    if is_causal:
        # a row of nothing but -inf has softmax NaN; here it becomes 0, and so do its gradients
        p = p.masked_fill(hidden, 0.0)
    o = p.to(v.dtype) @ v  # [..., M, D]
    return o, lse

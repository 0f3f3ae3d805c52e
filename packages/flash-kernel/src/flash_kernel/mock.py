"""The kernels' algorithm in plain PyTorch, to be read before them and run where they cannot.

Two Python loops walk the same tiles in the same order under the same names (``m_i l_i acc``,
``s_ij p_ij alpha``).  FlashAttention-2 (Dao, 2023), algorithms 1 and 2; docs/online-softmax.md and
docs/backward.md derive them.

          keys ->   n0   n1   n2   n3
    queries  m0     D    .    .    .      D  crosses the diagonal: masked inside
             m1     x    D    .    .      x  visible as a whole: no mask
             m2     x    x    D    .      .  never visited

Here alone leading dimensions are flattened with einx: the tensors in the loops are ``[G, n, d]``.
"""

import math
from typing import Any

import einx
import torch
from torch import Tensor

from flash_kernel.reference import attention_reference
from flash_kernel.second_order import refuse_second_order
from flash_kernel.validation import check_qkv

NEG_INF = float("-inf")
POS_INF = float("inf")


class FlashAttentionMock(torch.autograd.Function):
    """Tiled attention: ``FlashAttentionMock.apply(q, k, v, is_causal=True)``."""

    @classmethod
    def apply(
        cls,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        is_causal: bool = False,
        naive: bool = False,
        block_m: int = 64,
        block_n: int = 64,
    ) -> Tensor:
        """Return ``o [..., M, D]`` for ``q [..., M, D]`` and ``k, v [..., N, D]``, in their dtype.

        Args:
            q: Queries, at any float dtype.
            k: Keys with the leading dimensions of ``q``.
            v: Values, shaped like ``k``.
            is_causal: Row i sees the keys ``j <= i + N - M`` only.
            naive: Use the dense `attention_reference` and its autograd instead of the tiles.
            block_m: Query rows in a tile.
            block_n: Keys in a tile.

        Raises:
            TypeError: See `check_qkv`.
            ValueError: See `check_qkv`; or a block size below 1.
        """
        check_qkv(q, k, v)
        if naive:
            return attention_reference(q, k, v, is_causal=is_causal)[0]
        o: Tensor
        o, _ = super().apply(q, k, v, is_causal, block_m, block_n)
        return o

    @staticmethod
    def forward(
        q: Tensor, k: Tensor, v: Tensor, is_causal: bool, block_m: int, block_n: int
    ) -> tuple[Tensor, Tensor]:
        """Return o, and lse for the backward."""
        return flash_attention_mock_forward(
            q, k, v, is_causal=is_causal, block_m=block_m, block_n=block_n
        )

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        """Keep what the backward rebuilds the scores from."""
        q, k, v, ctx.is_causal, ctx.block_m, ctx.block_n = inputs
        o, lse = output
        ctx.save_for_backward(q, k, v, o, lse)

    @staticmethod
    def backward(ctx: Any, do: Tensor, _dlse: Tensor) -> tuple[Tensor | None, ...]:
        """Return dq, dk and dv; lse never leaves `apply`, so its gradient is 0."""
        refuse_second_order()
        q, k, v, o, lse = ctx.saved_tensors
        dq, dk, dv = flash_attention_mock_backward(
            q,
            k,
            v,
            o,
            lse,
            do,
            is_causal=ctx.is_causal,
            block_m=ctx.block_m,
            block_n=ctx.block_n,
        )
        return dq, dk, dv, None, None, None


@torch.no_grad()
def flash_attention_mock_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    block_m: int = 64,
    block_n: int = 64,
) -> tuple[Tensor, Tensor]:
    """Return ``o [..., M, D]`` and ``lse [..., M]``, tile by tile; nothing is differentiable.

    Same conventions as `attention_reference`: the softmax state, and lse, are float32 (float64 for
    float64 inputs); a row that sees no key has ``o = 0`` and ``lse = -inf``.
    """
    _check_blocks(block_m, block_n)
    o_shape = q.shape
    scale = _scale(q, scale)
    q, k, v = (_flatten_leading(x) for x in (q, k, v))
    seqlen_q, seqlen_k = q.shape[1], k.shape[1]
    diagonal = _diagonal(seqlen_q, seqlen_k, is_causal)
    state_dtype = torch.promote_types(q.dtype, torch.float32)
    o = torch.empty_like(q)
    lse = q.new_empty(q.shape[:2], dtype=state_dtype)

    for row in range(0, seqlen_q, block_m):
        q_i = q[:, row : row + block_m]  # [G, BLOCK_M, D]
        m_i = torch.full_like(q_i[..., 0], NEG_INF, dtype=state_dtype)  # [G, BLOCK_M]
        l_i = torch.zeros_like(m_i)
        acc = torch.zeros_like(q_i, dtype=state_dtype)
        # first cut of causal work: no tile beyond the last key that the last row sees
        end = min(seqlen_k, row + q_i.shape[1] + diagonal)
        for col in range(0, end, block_n):
            k_j, v_j = k[:, col : col + block_n], v[:, col : col + block_n]  # [G, BLOCK_N, D]
            s_ij = _scores(q_i, k_j, row, col, diagonal, scale)
            m_i, l_i, acc = online_softmax_step(m_i, l_i, acc, s_ij, v_j)

        # a row that saw nothing has l = 0 and acc = 0: its o is 0, and its lse -inf + log 0 = -inf
        o[:, row : row + block_m] = (acc / l_i.masked_fill(l_i == 0.0, 1.0)[..., None]).to(o.dtype)
        lse[:, row : row + block_m] = m_i + torch.log(l_i)
    return o.reshape(o_shape), lse.reshape(o_shape[:-1])


def online_softmax_step(
    m_i: Tensor, l_i: Tensor, acc: Tensor, s_ij: Tensor, v_j: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Fold one tile of scores into the running softmax.

        m' = max(m, rowmax(S))      alpha = exp(m - m')      P = exp(S - m')
        l' = alpha * l + rowsum(P)  acc' = alpha * acc + P V

    Invariant: after every step, acc / l is the attention output over the keys seen so far.
    Shapes: m_i, l_i [G, BLOCK_M]; acc [G, BLOCK_M, D]; s_ij [G, BLOCK_M, BLOCK_N];
    v_j [G, BLOCK_N, D].  Scores are scaled, and -inf where hidden.
    """
    m_new = torch.maximum(m_i, s_ij.amax(dim=-1))
    # a row that has seen no key keeps m = -inf; pivot on 0 so that -inf - (-inf) never occurs
    pivot = m_new.masked_fill(m_new == NEG_INF, 0.0)
    p_ij = torch.exp(s_ij - pivot[..., None])
    alpha = torch.exp(m_i - pivot)
    l_new = alpha * l_i + p_ij.sum(dim=-1)
    acc = alpha[..., None] * acc + _dot(p_ij.to(v_j.dtype), v_j)
    return m_new, l_new, acc


@torch.no_grad()
def flash_attention_mock_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    do: Tensor,
    *,
    dlse: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    block_m: int = 64,
    block_n: int = 64,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return dq, dk and dv from the results of the forward, tile by tile.

        p  = exp(s - lse)         dv += p^T do              dp = do v^T
        ds = p * (dp - delta)     dk += scale * ds^T q      dq += scale * ds k
        delta = rowsum(do * o) - dlse

    ``o, do [..., M, D]`` and ``lse, dlse [..., M]`` as `flash_attention_mock_forward` returns them;
    ``dlse`` is the gradient of lse, 0 by default.  Sums are kept in float32 (float64 for float64).
    """
    _check_blocks(block_m, block_n)
    q_shape, k_shape = q.shape, k.shape
    scale = _scale(q, scale)
    delta = (o.to(lse.dtype) * do.to(lse.dtype)).sum(dim=-1)
    delta = delta if dlse is None else delta - dlse
    q, k, v, do = (_flatten_leading(x) for x in (q, k, v, do))
    lse, delta = (x.reshape(q.shape[:2]) for x in (lse, delta))
    # p of a row that saw nothing is exp(s - inf) = 0
    lse = lse.masked_fill(lse == NEG_INF, POS_INF)
    seqlen_q, seqlen_k = q.shape[1], k.shape[1]
    diagonal = _diagonal(seqlen_q, seqlen_k, is_causal)
    dq, dk, dv = (torch.zeros_like(x, dtype=lse.dtype) for x in (q, k, v))

    for col in range(0, seqlen_k, block_n):
        keys = slice(col, col + block_n)
        k_j, v_j = k[:, keys], v[:, keys]
        # no tile of queries before the first row that sees this tile's first key
        start = max(0, col - diagonal) // block_m * block_m
        for row in range(start, seqlen_q, block_m):
            rows = slice(row, row + block_m)
            q_i, do_i = q[:, rows], do[:, rows]
            s_ij = _scores(q_i, k_j, row, col, diagonal, scale)
            p_ij = torch.exp(s_ij - lse[:, rows, None])
            dp_ij = _dot(do_i, v_j.mT)
            ds_ij = (p_ij * (dp_ij - delta[:, rows, None])).to(q.dtype)
            dv[:, keys] += _dot(p_ij.to(do.dtype).mT, do_i)
            dk[:, keys] += scale * _dot(ds_ij.mT, q_i)
            dq[:, rows] += scale * _dot(ds_ij, k_j)
    dq, dk, dv = (x.to(q.dtype) for x in (dq, dk, dv))
    return dq.reshape(q_shape), dk.reshape(k_shape), dv.reshape(k_shape)


def _flatten_leading(x: Tensor) -> Tensor:
    """``[..., n, d]`` as ``[G, n, d]``."""
    if x.numel() == 0:  # einx cannot solve for axes of length 0
        return x.reshape(math.prod(x.shape[:-2]), *x.shape[-2:])
    flat: Tensor = einx.id("... n d -> (...) n d", x)  # type: ignore[attr-defined]
    return flat


def _scores(q_i: Tensor, k_j: Tensor, row: int, col: int, diagonal: int, scale: float) -> Tensor:
    """Scaled scores of one tile ``[G, BLOCK_M, BLOCK_N]``, -inf where a row may not see a key."""
    s_ij = _dot(q_i, k_j.mT) * scale
    # second cut of causal work: a tile that its first row sees to its last key needs no mask
    if col + k_j.shape[1] - 1 > row + diagonal:
        rows = torch.arange(row, row + q_i.shape[1], device=q_i.device)
        cols = torch.arange(col, col + k_j.shape[1], device=q_i.device)
        s_ij = s_ij.masked_fill(~visible_keys(rows[:, None], cols[None, :], diagonal), NEG_INF)
    return s_ij


def visible_keys(rows: Tensor, cols: Tensor, diagonal: int) -> Tensor:
    """The one mask: True where query ``rows`` may attend to key ``cols`` (broadcast together)."""
    return cols <= rows + diagonal


def _diagonal(seqlen_q: int, seqlen_k: int, is_causal: bool) -> int:
    """The visible keys of row i are ``j <= i + diagonal``; without a mask these are all keys."""
    return seqlen_k - seqlen_q if is_causal else seqlen_k


def _dot(a: Tensor, b: Tensor) -> Tensor:
    """Multiply like a tensor core: factors in their own dtype, exact products, float32 sums."""
    state_dtype = torch.promote_types(a.dtype, torch.float32)
    return a.to(state_dtype) @ b.to(state_dtype)


def _scale(q: Tensor, scale: float | None) -> float:
    return q.shape[-1] ** -0.5 if scale is None else scale


def _check_blocks(block_m: int, block_n: int) -> None:
    for name, size in (("block_m", block_m), ("block_n", block_n)):
        if size < 1:
            msg = f"`{name}` must be at least 1, got {size}."
            raise ValueError(msg)

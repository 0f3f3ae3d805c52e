"""Attention written down as its definition: dense, differentiable, and the oracle of every test.

Called on float64 tensors it is what the other implementations are measured against; called on
half-precision ones it is what a careful eager implementation reaches, the yardstick for tolerances.
"""

import functools

import torch
from torch import Tensor

from flash_kernel.validation import check_inputs
from flash_kernel.variant import PLAIN, Modifiers, Variant, make_variant


def attention_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    window: tuple[int | None, int | None] | None = None,
    softcap: float | None = None,
    bias: Tensor | None = None,
    mask: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return ``softmax(scores) v`` and the log-sum-exp of the scores, both differentiable.

    The two matrix products run in the dtype of the inputs, the softmax in float32 (float64 for
    float64 inputs).  The score matrix is stored: memory grows with ``M * N``.  Any number of
    derivatives can be taken, with respect to every tensor.

    Args:
        q: Queries ``[..., H, M, D]``, or ``[..., M, D]`` without heads.
        k: Keys ``[..., H_kv, N, D]``; ``H_kv`` divides ``H``.
        v: Values ``[..., H_kv, N, D_v]``.
        is_causal: Row i sees the keys ``j <= i + N - M`` only.
        scale: Factor of the scores, ``D ** -0.5`` by default.
        window: ``(left, right)``: row i sees the keys from ``i + N - M - left`` to
            ``i + N - M + right``; None, for either or both, is unbounded.
        softcap: Scores become ``softcap * tanh(scores / softcap)``.
        bias: Added to the scores; broadcasts to ``[..., M, N]``.
        mask: Boolean, True where a row may attend to a key; broadcasts to ``[..., M, N]``.
        alibi_slopes: ``[H]`` or ``[B, H]``; adds ``-slope * |i + N - M - j|``.
        sinks: ``[H]``; one more score in each row's denominator, without a value.

    Returns:
        ``o [..., M, D_v]`` in the dtype of the inputs, and ``lse [..., M]``, the natural logarithm
        of each row's denominator, in float32 (float64 for float64).  A row that sees no key and has
        no sink has ``o = 0``, ``lse = -inf`` and passes no gradient back.

    Raises:
        TypeError: See `check_inputs`.
        ValueError: See `check_inputs`.

    A NaN or inf in a key leaves o and lse of the rows that cannot see that key untouched.  One in a
    *value* does not: the dense product multiplies it by a weight of 0, which gives NaN.
    """
    modifiers = Modifiers(alibi_slopes, bias, mask, sinks)
    check_inputs(
        q, k, v, modifiers, is_causal=is_causal, scale=scale, window=window, softcap=softcap
    )
    variant = make_variant(
        q.shape[-1], is_causal=is_causal, scale=scale, window=window, softcap=softcap
    )
    return dense_attention(q, k, v, variant, modifiers)


def dense_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    variant: Variant,
    modifiers: Modifiers = PLAIN,
    *,
    rounds_scores: bool = True,
) -> tuple[Tensor, Tensor]:
    """Return ``o`` and ``lse`` of inputs that have been checked.

    ``rounds_scores`` to the dtype of the inputs, as an eager model does; or as they are.
    """
    k, v = repeat_heads(k, q), repeat_heads(v, q)
    state_dtype = torch.promote_types(q.dtype, torch.float32)
    score_dtype = q.dtype if rounds_scores else state_dtype
    s = (q.to(score_dtype) @ k.mT.to(score_dtype)).to(state_dtype)  # [..., M, N]
    s = bias_scores(cap_scores(s, variant), variant, modifiers)
    hidden = hidden_pairs(s.shape[-2], s.shape[-1], variant, modifiers, s.device)
    if hidden is not None:
        s = s.masked_fill(hidden, float("-inf"))
    denominator = s
    if modifiers.sinks is not None:
        sinks = modifiers.sinks.to(state_dtype)[:, None, None].expand(*s.shape[:-1], 1)
        denominator = torch.cat([s, sinks], dim=-1)
    lse = torch.logsumexp(denominator, dim=-1)  # [..., M]
    p = torch.softmax(denominator, dim=-1)[..., : s.shape[-1]]
    if hidden is not None:
        # a row of nothing but -inf has softmax NaN; here it becomes 0, and so do its gradients
        p = p.masked_fill(hidden, 0.0)
    return p.to(v.dtype) @ v, lse  # [..., M, D_v]


def repeat_heads(x: Tensor, q: Tensor) -> Tensor:
    """Give each query head its own copy of the key or value head that it shares."""
    if x.dim() < 4 or x.shape[-3] == q.shape[-3]:
        return x
    return x.repeat_interleave(q.shape[-3] // x.shape[-3], dim=-3)


def sum_groups(x: Tensor, k: Tensor) -> Tensor:
    """Sum what each query head gives to the key head that it shares."""
    if x.shape[:-2] == k.shape[:-2]:
        return x
    # no -1 for the group: of a tensor without keys it would say nothing
    group = x.shape[-3] // max(1, k.shape[-3])
    return x.reshape(*k.shape[:-2], group, *x.shape[-2:]).sum(-3)


def cap_scores(s: Tensor, variant: Variant) -> Tensor:
    """Scale the products, and cap them softly."""
    s = s * variant.scale
    if variant.softcap is not None:
        s = variant.softcap * torch.tanh(s / variant.softcap)
    return s


def bias_scores(s: Tensor, variant: Variant, modifiers: Modifiers) -> Tensor:
    """Add ALiBi and the bias to capped scores ``[..., M, N]``."""
    if modifiers.alibi_slopes is not None:
        slopes = modifiers.alibi_slopes.to(s.dtype)[..., None, None]
        s = s - slopes * distances(s).abs()
    if modifiers.bias is not None:
        s = s + modifiers.bias.to(s.dtype)
    return s


def hidden_pairs(
    seqlen_q: int,
    seqlen_k: int,
    variant: Variant,
    modifiers: Modifiers,
    device: torch.device | str | None = None,
) -> Tensor | None:
    """Return where rows may not attend, broadcastable to ``[..., M, N]``; None for nowhere.

    A bias of -inf hides a pair as a mask does.
    """
    hidden = []
    if variant.is_windowed:
        hidden.append(~visible_mask(seqlen_q, seqlen_k, variant, device))
    if modifiers.mask is not None:
        hidden.append(~modifiers.mask)
    if modifiers.bias is not None:
        hidden.append(modifiers.bias == float("-inf"))
    return functools.reduce(torch.logical_or, hidden) if hidden else None


def visible_mask(
    seqlen_q: int, seqlen_k: int, variant: Variant, device: torch.device | str | None = None
) -> Tensor:
    """Mask ``[M, N]`` of a window, True where a query row may attend to a key.

    Aligned to the bottom right: the last row stands at the last key, so that with more queries than
    keys the first rows of a causal mask see none.
    """
    ahead = torch.arange(seqlen_k, device=device)[None, :] - (
        torch.arange(seqlen_q, device=device)[:, None] + (seqlen_k - seqlen_q)
    )
    visible = torch.ones_like(ahead, dtype=torch.bool)
    if variant.right is not None:
        visible &= ahead <= variant.right
    if variant.left is not None:
        visible &= ahead >= -variant.left
    return visible


def distances(s: Tensor) -> Tensor:
    """Return ``i + N - M - j`` for scores ``s [..., M, N]``."""
    seqlen_q, seqlen_k = s.shape[-2:]
    rows = torch.arange(seqlen_q, device=s.device)[:, None]
    return rows + (seqlen_k - seqlen_q) - torch.arange(seqlen_k, device=s.device)[None, :]

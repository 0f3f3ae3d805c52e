"""Attention by torch's own ``scaled_dot_product_attention``, with this package's conventions."""

import torch
import torch.nn.functional as F
from torch import Tensor

from flash_kernel.reference import hidden_pairs, repeat_heads, visible_mask
from flash_kernel.shapes import as_batch_and_heads
from flash_kernel.variant import Modifiers, Variant


def torch_refusal(variant: Variant, modifiers: frozenset[str]) -> str | None:
    """Return the names of what torch's attention lacks of a call, or None."""
    lacking = sorted(modifiers & {"alibi_slopes", "sinks"})
    if variant.softcap is not None:
        lacking.append("softcap")
    return ", ".join(f"`{name}`" for name in lacking) or None


def torch_attention(
    q: Tensor, k: Tensor, v: Tensor, variant: Variant, modifiers: Modifiers
) -> Tensor:
    """Return ``o [..., M, D_v]``; differentiable by torch.

    torch aligns its causal mask to the top left, and has undefined rows where a row sees nothing.
    Here the mask is aligned to the bottom right and such rows are 0.
    """
    shape = (*q.shape[:-1], v.shape[-1])
    q, k, v = (as_batch_and_heads(x) for x in (q, k, v))
    k, v = repeat_heads(k, q), repeat_heads(v, q)
    if k.shape[2] == 0:
        # the sums are 0; they keep the graph connected, so that gradients are zeros, not missing
        return torch.zeros(shape, dtype=q.dtype, device=q.device) + (
            q[:, :, :0].sum() + k.sum() + v.sum()
        )
    is_causal = (variant.left, variant.right) == (None, 0)
    if is_causal and modifiers.bias is None and modifiers.mask is None:
        return causal_attention(q, k, v, variant.scale).reshape(shape)
    scores = (*shape[:-1], k.shape[2])
    hidden = hidden_pairs(scores[-2], scores[-1], variant, modifiers, q.device)
    if hidden is not None:
        hidden = as_batch_and_heads(hidden.expand(scores))
    attn_mask = None if hidden is None else ~hidden
    if modifiers.bias is not None:
        attn_mask = as_batch_and_heads(modifiers.bias.to(q.dtype).expand(scores))
        attn_mask = attn_mask if hidden is None else attn_mask.masked_fill(hidden, float("-inf"))
    o = F.scaled_dot_product_attention(q, k, v, attn_mask=attn_mask, scale=variant.scale)
    if hidden is not None:
        o = o.masked_fill(hidden.all(-1, keepdim=True), 0.0)
    return o.reshape(shape)


def causal_attention(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Return causal attention of ``[B, H, rows, D]``, without a mask in memory where torch can."""
    seqlen_q, seqlen_k = q.shape[2], k.shape[2]
    # rows before the first key see nothing; what is left is square, where both alignments agree
    num_empty = max(0, seqlen_q - seqlen_k)
    rest = q[:, :, num_empty:]
    if seqlen_q >= seqlen_k:
        o = F.scaled_dot_product_attention(rest, k, v, is_causal=True, scale=scale)
        return F.pad(o, (0, 0, num_empty, 0))
    mask = visible_mask(seqlen_q, seqlen_k, Variant(scale, right=0), q.device)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)

"""Attention by torch's own ``scaled_dot_product_attention``, with this package's conventions."""

import torch
import torch.nn.functional as F
from torch import Tensor

from flash_kernel.reference import visible_mask
from flash_kernel.shapes import as_batch_and_heads


def torch_attention(
    q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool, scale: float | None
) -> Tensor:
    """Return ``o [..., M, D]``; differentiable by torch.

    torch aligns its causal mask to the top left, and has undefined rows where a row sees nothing.
    Here the mask is aligned to the bottom right and such rows are 0.
    """
    shape = q.shape
    q, k, v = (as_batch_and_heads(x) for x in (q, k, v))
    seqlen_q, seqlen_k = q.shape[2], k.shape[2]
    if seqlen_k == 0:
        # the sums are 0; they keep the graph connected, so that gradients are zeros, not missing
        hidden = torch.ones((), dtype=torch.bool, device=q.device)
        return (q.masked_fill(hidden, 0.0) + (k.sum() + v.sum())).reshape(shape)
    if not is_causal or seqlen_q == seqlen_k:
        o = F.scaled_dot_product_attention(q, k, v, is_causal=is_causal, scale=scale)
    elif seqlen_q > seqlen_k:
        # the first rows see no key; what is left is square, where both alignments agree
        num_empty = seqlen_q - seqlen_k
        rest = q[:, :, num_empty:]
        o = F.scaled_dot_product_attention(rest, k, v, is_causal=True, scale=scale)
        o = F.pad(o, (0, 0, num_empty, 0))
    else:
        mask = visible_mask(seqlen_q, seqlen_k, q.device)
        o = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
    return o.reshape(shape)

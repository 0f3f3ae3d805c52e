"""PyTorch's own fused attention, brought to our causal rule."""

from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from tiny_llm.attention.mask import causal_mask


def sdpa_attention(q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool) -> Tensor:
    """Compute `AttentionFn` with `torch.nn.functional.scaled_dot_product_attention`.

    PyTorch's ``is_causal=True`` is top-left aligned (query i sees the keys ``j <= i``), ours is
    bottom-right.  The two agree for M = N only.
    """
    seqlen_q, seqlen_k = q.shape[-2], k.shape[-2]
    if not is_causal or seqlen_q == seqlen_k:
        return scaled_dot_product_attention(q, k, v, is_causal=is_causal)
    if seqlen_q < seqlen_k:
        visible = causal_mask(seqlen_q, seqlen_k, q.device)
        return scaled_dot_product_attention(q, k, v, attn_mask=visible)
    # the first M - N queries see no key; the others are a square causal problem
    empty_rows = seqlen_q - seqlen_k
    o = scaled_dot_product_attention(q[..., empty_rows:, :], k, v, is_causal=True)
    return pad(o, (0, 0, empty_rows, 0))

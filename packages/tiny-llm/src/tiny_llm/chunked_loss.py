"""Cross-entropy in pieces: the logits of all tokens are never held at once.

The logits ``[tokens, vocab_size]`` are the largest tensor of a training step: of 65 536 tokens and
50 304 ids they take 13 GB in float32.  Here those of `chunk_tokens` tokens are made at a time, and
their gradient with them (of one token's logits it is ``softmax(logits) - onehot(target)``), so that
nothing is computed again in the backward pass.  What is kept for it has the inputs' sizes.  The
idea is that of Liger (Hsu et al. 2024, arXiv:2410.10989) and of Cut Cross-Entropy
(Wijmans et al. 2024, arXiv:2411.09009); the code is plain torch.
"""

from typing import Any

import torch
from torch import Tensor

IGNORED = -100  # a target that counts for nothing; also torch's default


def chunked_cross_entropy(
    hidden: Tensor, weight: Tensor, targets: Tensor, *, chunk_tokens: int
) -> Tensor:
    """Return the summed cross-entropy of ``hidden @ weight.T``, in nats, float32.

    Equal to the dense loss but for rounding.  Under autocast the products are made in its dtype,
    which must not be float16: its gradients of single probabilities would be 0.

    Args:
        hidden: What the output layer gets, ``[N, d_model]``.
        weight: The output layer's, ``[vocab_size, d_model]``.
        targets: The right ids, int64 ``[N]``; those that are `IGNORED` count for nothing.
        chunk_tokens: Tokens whose logits are held at a time.
    """
    kind = hidden.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype
    with torch.autocast(kind, enabled=False):
        loss: Tensor = _ChunkedCrossEntropy.apply(hidden, weight, targets, chunk_tokens, dtype)
    return loss


class _ChunkedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        chunk_tokens: int,
        dtype: torch.dtype,
    ) -> Tensor:
        wide = torch.promote_types(dtype, torch.float32)
        total = torch.zeros((), device=hidden.device, dtype=wide)
        w = weight.to(dtype)  # [V, d]
        wants_gradients = any(ctx.needs_input_grad)
        dweight = torch.zeros_like(weight, dtype=wide) if wants_gradients else None
        dhidden = []
        ids = torch.arange(len(weight), device=hidden.device)
        for start in range(0, len(targets), chunk_tokens):
            part = slice(start, start + chunk_tokens)
            x, labels = hidden[part].to(dtype), targets[part]  # [C, d], [C]
            logits = (x @ w.T).to(wide)  # [C, V]
            counted = labels != IGNORED
            index = labels.where(counted, 0)[:, None]
            lse = torch.logsumexp(logits, dim=-1, keepdim=True)  # [C, 1]
            losses = (lse - logits.gather(1, index)).squeeze(1)
            total = total + losses.where(counted, 0).sum()
            if dweight is not None:
                # compared, not scattered: the compiler then makes all of it in one pass
                dlogits = (logits - lse).exp().add(ids == index, alpha=-1)
                dlogits = (dlogits * counted[:, None]).to(dtype)
                dhidden.append((dlogits @ w).to(hidden.dtype))
                dweight = dweight + dlogits.T @ x
        if dweight is not None:
            ctx.save_for_backward(torch.cat(dhidden), dweight.to(weight.dtype))
        # as it is: the graph of torch 2.11 gives no gradient to an output that is another's alias
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (dloss,) = grads
        dhidden, dweight = ctx.saved_tensors
        scaled = dhidden * dloss.to(dhidden.dtype), dweight * dloss.to(dweight.dtype)
        return (*scaled, None, None, None)

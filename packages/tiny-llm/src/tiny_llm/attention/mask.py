"""The causal mask, for the backends that need one as a tensor."""

import torch
from torch import Tensor


def causal_mask(seqlen_q: int, seqlen_k: int, device: torch.device) -> Tensor:
    """Return the boolean mask ``[M, N]`` that is True where query i may see key j.

    Bottom-right aligned: the last query sees every key.

    >>> causal_mask(2, 3, torch.device("cpu")).int()
    tensor([[1, 1, 0],
            [1, 1, 1]], dtype=torch.int32)
    """
    everything = torch.ones(seqlen_q, seqlen_k, dtype=torch.bool, device=device)
    return everything.tril(diagonal=seqlen_k - seqlen_q)

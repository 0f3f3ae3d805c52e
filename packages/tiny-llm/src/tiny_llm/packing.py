"""Several documents in one sequence, and none of them sees another.

A batch of training windows is cut out of a stream of documents.  With a `Packing` each token
attends within its own document only, and its position counts from that document's beginning.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class Packing(NamedTuple):
    """Where the documents of a batch ``[B, T]`` lie.

    Attributes:
        positions: Of each token within its document, int64 ``[B, T]``.
        document_ids: Number of each token's document in its row, from 1, int32 ``[B, T]``.
        cu_seqlens: Where documents begin if the rows are laid end to end, and B * T, int32
            ``[documents + 1]``: what varlen kernels take.
    """

    positions: Tensor
    document_ids: Tensor
    cu_seqlens: Tensor

    @classmethod
    def from_positions(cls, positions: Tensor) -> "Packing":
        """Read it off positions ``[B, T]``: a document begins at every 0, and with every row.

        >>> Packing.from_positions(torch.tensor([[0, 1, 0, 1, 2]])).cu_seqlens.tolist()
        [0, 2, 5]
        """
        begins = positions == 0
        begins[:, 0] = True
        starts = begins.flatten().nonzero().flatten()
        end = torch.full_like(starts[:1], positions.numel())
        return cls(
            positions,
            begins.cumsum(dim=1, dtype=torch.int32),
            torch.cat((starts, end)).to(torch.int32),
        )

    def to(self, device: torch.device | str) -> "Packing":
        """Return it on a device."""
        return Packing(*(each.to(device) for each in self))

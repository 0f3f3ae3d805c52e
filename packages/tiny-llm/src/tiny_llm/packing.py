"""Several documents in one sequence, and none of them sees another.

A batch of training windows is cut out of a stream of documents.  With a `Packing` each token
attends within its own document only, and its position counts from that document's beginning.
"""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from tiny_llm.devices import to_device


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

        They lie on the CPU, and so does the result.

        >>> Packing.from_positions(torch.tensor([[0, 1, 0, 1, 2]])).cu_seqlens.tolist()
        [0, 2, 5]
        """
        begins = positions.numpy() == 0
        begins[:, 0] = True
        ids = begins.cumsum(axis=1, dtype=np.int32)
        starts = np.append(np.flatnonzero(begins), begins.size).astype(np.int32)
        return cls(positions, torch.from_numpy(ids), torch.from_numpy(starts))

    def to(self, device: torch.device | str) -> "Packing":
        """Return it, made on the CPU, on a device."""
        return Packing(*(to_device(each, device) for each in self))

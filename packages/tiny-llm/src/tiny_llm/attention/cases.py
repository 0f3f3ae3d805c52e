"""What the conformance kit calls a backend with, and what must come out."""

import dataclasses
from typing import Any

import torch
from torch import Tensor

from tiny_llm.packing import Packing


@dataclasses.dataclass(frozen=True)
class Case:
    """One call to test; lengths are odd on purpose.

    Attributes:
        name: What it is about.
        seqlen_q: Query rows M.
        seqlen_k: Keys N.
        is_causal: Bottom-right aligned.
        num_kv_heads: Of 4 query heads.
        window: Keys a row sees.
        scale: Factor of the scores.
        key_lengths: Of the 2 sequences.
        documents: Lengths of the documents in each of the 2 sequences.
        transposed: Hand over views of ``[B, M, H, D]`` memory.
    """

    name: str
    seqlen_q: int = 33
    seqlen_k: int = 33
    is_causal: bool = True
    num_kv_heads: int = 4
    window: int | None = None
    scale: float | None = None
    key_lengths: tuple[int, int] | None = None
    documents: tuple[tuple[int, ...], tuple[int, ...]] | None = None
    transposed: bool = False

    def options(self, device: str) -> dict[str, Any]:
        """Return the keywords of the call, without those that are not needed."""
        given: dict[str, Any] = {"is_causal": self.is_causal}
        if self.window is not None:
            given["window"] = self.window
        if self.scale is not None:
            given["scale"] = self.scale
        if self.key_lengths is not None:
            given["key_lengths"] = torch.tensor(self.key_lengths, device=device)
        if self.documents is not None:
            rows = [[i for length in each for i in range(length)] for each in self.documents]
            given["packing"] = Packing.from_positions(torch.tensor(rows)).to(device)
        return given


DOCUMENTS = ((33,), (1, 16, 16))

CASES = (
    Case("causal"),
    Case("not causal", is_causal=False),
    Case("one token", seqlen_q=1, seqlen_k=1),
    Case("decoding with a cache", seqlen_q=1),
    Case("a chunk with a cache", seqlen_q=5),
    Case("cross attention", seqlen_q=5, is_causal=False),
    Case("rows that see no key", seqlen_q=40, seqlen_k=17),
    Case("transposed memory", transposed=True),
    Case("scale", scale=0.3),
    Case("shared heads", num_kv_heads=2),
    Case("one key head", num_kv_heads=1, seqlen_q=5),
    Case("window", window=7),
    Case("window with a cache", seqlen_q=5, window=7),
    Case("window above the length", window=100),
    Case("window and shared heads", window=7, num_kv_heads=2),
    Case("key lengths", seqlen_q=3, key_lengths=(33, 9)),
    Case("key lengths, decoding", seqlen_q=1, key_lengths=(20, 33), num_kv_heads=2),
    Case("key lengths and window", seqlen_q=3, key_lengths=(33, 9), window=7),
    Case("key lengths, not causal", seqlen_q=3, key_lengths=(33, 9), is_causal=False),
    Case("key lengths and rows that see no key", seqlen_q=5, key_lengths=(33, 2)),
    Case("documents", documents=((5, 28), (20, 1, 12))),
    Case("documents, shared heads and window", documents=DOCUMENTS, num_kv_heads=2, window=7),
    Case("documents, not causal", documents=DOCUMENTS, is_causal=False),
)


def make_inputs(case: Case, *, dtype: str, device: str, head_dim: int) -> tuple[Tensor, ...]:
    """Return q, k, v of a case, the same at every call, as leaves that want gradients."""
    generator = torch.Generator().manual_seed(0)
    inputs = []
    for heads, length in ((4, case.seqlen_q), *[(case.num_kv_heads, case.seqlen_k)] * 2):
        shape = (2, length, heads, head_dim) if case.transposed else (2, heads, length, head_dim)
        x = torch.randn(shape, generator=generator, dtype=torch.float64)
        x = x.to(device=device, dtype=getattr(torch, dtype))
        inputs.append((x.transpose(1, 2) if case.transposed else x).requires_grad_())
    return tuple(inputs)


def attention_by_rows(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    is_causal: bool,
    window: int | None = None,
    scale: float | None = None,
    key_lengths: Tensor | None = None,
    packing: Packing | None = None,
) -> Tensor:
    """Return attention from its definition: for each sequence, head and row a softmax and a sum."""
    batch, num_heads, seqlen_q, head_dim = q.shape
    group = num_heads // k.shape[1]
    scale = head_dim**-0.5 if scale is None else scale
    lengths = [k.shape[2]] * batch if key_lengths is None else key_lengths.tolist()
    rows = []
    for b, length in enumerate(lengths):
        for h in range(num_heads):
            for i in range(seqlen_q):
                end = i + length - seqlen_q + 1 if is_causal else length
                start = 0 if window is None else max(0, end - window)
                if end <= 0:
                    rows.append(q[b, h, i] * 0.0)
                    continue
                if packing is not None:
                    own = (packing.document_ids[b] == packing.document_ids[b, i]).nonzero()
                    start, end = max(start, int(own[0])), min(end, int(own[-1]) + 1)
                keys, values = k[b, h // group, start:end], v[b, h // group, start:end]
                rows.append(torch.softmax(scale * (keys @ q[b, h, i]), dim=0) @ values)
    return torch.stack(rows).reshape(batch, num_heads, seqlen_q, head_dim)

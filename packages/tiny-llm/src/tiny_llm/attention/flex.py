"""PyTorch's FlexAttention: our masks compiled into its kernel."""

import functools
import warnings
import weakref
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from tiny_llm.attention.backend import AttentionBackend, Reason, Traits, only
from tiny_llm.attention.request import AttentionRequest
from tiny_llm.packing import Packing

MASKS_KEPT = 64


def flex(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    is_causal: bool,
    window: int | None = None,
    scale: float | None = None,
    packing: Packing | None = None,
) -> Tensor:
    """Compute `AttentionFn` with `flex_attention`; compiled on a GPU, dense elsewhere."""
    seqlen_q, seqlen_k = q.shape[-2], k.shape[-2]
    block_mask = None
    if packing is not None:
        block_mask = _packed_mask(packing.document_ids, is_causal, window)
    elif is_causal:
        block_mask = _block_mask(seqlen_q, seqlen_k, window, q.device)
    attend = _compiled() if q.is_cuda and not torch.compiler.is_compiling() else flex_attention
    grouped = q.shape[1] != k.shape[1]
    with warnings.catch_warnings():
        # on the CPU the dense form is what we mean to run
        warnings.filterwarnings("ignore", "flex_attention called without torch.compile")
        o: Any = attend(q, k, v, block_mask=block_mask, scale=scale, enable_gqa=grouped)
    if not isinstance(o, Tensor):
        raise TypeError("flex_attention returned no tensor")
    return o


@functools.cache
def _compiled() -> Any:
    return torch.compile(flex_attention)


@functools.lru_cache(maxsize=MASKS_KEPT)
def _block_mask(
    seqlen_q: int, seqlen_k: int, window: int | None, device: torch.device
) -> BlockMask:
    offset = seqlen_k - seqlen_q

    def visible(_batch: Tensor, _head: Tensor, row: Tensor, key: Tensor) -> Tensor:
        own = row + offset
        seen = key <= own
        return seen if window is None else seen & (key > own - window)

    return create_block_mask(visible, None, None, seqlen_q, seqlen_k, device=device)


def _packed_mask(document_ids: Tensor, is_causal: bool, window: int | None) -> BlockMask:
    """Return the mask of a packed batch; all layers of a forward pass share one."""
    if torch.compiler.is_compiling():  # there equal masks are made once anyway
        return _new_packed_mask(document_ids, is_causal, window)
    key = (id(document_ids), is_causal, window)
    if key not in _packed or _packed[key][0]() is not document_ids:
        _packed.clear()  # the last batch's
        mask = _new_packed_mask(document_ids, is_causal, window)
        _packed[key] = weakref.ref(document_ids), mask
    return _packed[key][1]


_packed: dict[tuple[int, bool, int | None], tuple[weakref.ref[Tensor], BlockMask]] = {}


def _new_packed_mask(document_ids: Tensor, is_causal: bool, window: int | None) -> BlockMask:
    batch, seqlen = document_ids.shape

    def visible(b: Tensor, _head: Tensor, row: Tensor, key: Tensor) -> Tensor:
        seen = document_ids[b, row] == document_ids[b, key]
        if is_causal:
            seen = seen & (key <= row)
        return seen if window is None else seen & (key > row - window)

    # compiled it never holds the mask of single pairs, [B, T, T]
    compiled = document_ids.is_cuda and not torch.compiler.is_compiling()
    create = _compiled_creation() if compiled else create_block_mask
    mask: BlockMask = create(visible, batch, None, seqlen, seqlen, device=document_ids.device)
    return mask


@functools.cache
def _compiled_creation() -> Any:
    return torch.compile(create_block_mask)


class FlexBackend(AttentionBackend):
    """Fused and compiled on CUDA; on the CPU dense, and forward only."""

    def limits(self, request: AttentionRequest) -> list[Reason]:
        """Refuse key lengths, which would need a new block mask for every call."""
        found = only(request, devices=("cuda", "cpu"))
        if request.device == "cuda":
            found += only(request, dtypes=("bfloat16", "float16", "float32"), max_head_dim=256)
            if request.head_dim < 16:
                text = f"`head_dim` must be at least 16, got {request.head_dim}"
                found.append(Reason("head_dim", text, "use fewer and wider heads"))
        if request.ragged:
            text = "key lengths would need a new block mask for every call"
            found.append(Reason("key_lengths", text, "use 'sdpa', or prompts of one length"))
        return found

    def traits(self, request: AttentionRequest) -> Traits:
        """Fused where it is compiled; FlexAttention has no backward on the CPU."""
        if request.device == "cpu":
            return Traits(forward="dense", backward="none", deterministic=True)
        return Traits(forward="fused", backward="fused")


BACKEND = FlexBackend("flex", flex)

"""PyTorch's own fused attention, brought to our rules; also with its kernel pinned."""

from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import pad, scaled_dot_product_attention

from tiny_llm.attention.backend import (
    USE_ANOTHER,
    AttentionBackend,
    AttentionFn,
    Reason,
    Traits,
    only,
)
from tiny_llm.attention.mask import repeat_heads, visible_keys
from tiny_llm.attention.request import AttentionRequest
from tiny_llm.packing import Packing

HALF = ("bfloat16", "float16")
SMALL_SMEM = ((8, 6), (8, 9), (12, 0), (12, 1))  # compute capabilities with little shared memory


def sdpa_attention(
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
    """Compute `AttentionFn` with `torch.nn.functional.scaled_dot_product_attention`.

    PyTorch's ``is_causal=True`` is top-left aligned (query i sees the keys ``j <= i``), ours is
    bottom-right.  The two agree for M = N; a single query sees every key.
    """
    seqlen_q, seqlen_k = q.shape[-2], k.shape[-2]
    is_plain = key_lengths is None and packing is None
    if not is_plain or (window is not None and window < seqlen_k):
        return _with_mask(q, k, v, is_causal, window, scale, key_lengths, packing)
    if is_causal and 1 < seqlen_q < seqlen_k:
        return _with_mask(q, k, v, is_causal, None, scale, None, None)
    grouped = q.shape[1] != k.shape[1]
    if is_causal and seqlen_q > seqlen_k:
        # the first M - N queries see no key; the others are a square causal problem
        empty_rows = seqlen_q - seqlen_k
        q = q[..., empty_rows:, :]
        o = scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=grouped)
        return pad(o, (0, 0, empty_rows, 0))
    is_causal = is_causal and seqlen_q == seqlen_k
    return scaled_dot_product_attention(
        q, k, v, is_causal=is_causal, scale=scale, enable_gqa=grouped
    )


def _with_mask(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    is_causal: bool,
    window: int | None,
    scale: float | None,
    key_lengths: Tensor | None,
    packing: Packing | None,
) -> Tensor:
    visible = visible_keys(
        q, k, is_causal=is_causal, window=window, key_lengths=key_lengths, packing=packing
    )
    if q.shape[-2] == 1 and q.shape[1] != k.shape[1]:
        # a single row sees the same keys in every head: those that share a key head are its rows
        batch, heads, _, head_dim = q.shape
        rows = q.reshape(batch, k.shape[1], -1, head_dim)
        return _masked(rows, k, v, visible, scale, key_lengths).reshape(batch, heads, 1, head_dim)
    # no fused kernel of torch takes both a mask and shared heads
    k, v = repeat_heads(k, v, q.shape[1])
    return _masked(q, k, v, visible, scale, key_lengths)


def _masked(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    visible: Tensor,
    scale: float | None,
    key_lengths: Tensor | None,
) -> Tensor:
    if key_lengths is None and visible.shape[-2] <= k.shape[-2]:
        return scaled_dot_product_attention(q, k, v, attn_mask=visible, scale=scale)
    # a row that sees nothing is undefined in torch: let it see everything, and clear it after
    empty = ~visible.any(dim=-1, keepdim=True)
    o = scaled_dot_product_attention(q, k, v, attn_mask=visible | empty, scale=scale)
    return o.masked_fill(empty, 0.0)


def pinned(kernel: SDPBackend) -> AttentionFn:
    """Return `sdpa_attention` held to one of torch's kernels."""

    def attend(
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
        with sdpa_kernel(kernel):
            return sdpa_attention(
                q,
                k,
                v,
                is_causal=is_causal,
                window=window,
                scale=scale,
                key_lengths=key_lengths,
                packing=packing,
            )

    return attend


class SdpaBackend(AttentionBackend):
    """Torch picks the kernel."""

    def traits(self, request: AttentionRequest) -> Traits:
        """Fused wherever one of torch's fused kernels takes the dtype."""
        if request.device == "cpu":
            return Traits(forward="fused", backward="fused", deterministic=True)
        if request.device == "cuda" and request.dtype != "float64":
            return Traits(forward="fused", backward="fused", deterministic=False)
        return Traits(forward="dense", backward="dense")


class SdpaMath(AttentionBackend):
    """The kernel that stores the scores."""

    def traits(self, request: AttentionRequest) -> Traits:
        """Dense both ways."""
        return Traits(forward="dense", backward="dense", deterministic=True)


class SdpaFlash(AttentionBackend):
    """FlashAttention-2 on CUDA, and its relative on the CPU, which also takes masks."""

    def limits(self, request: AttentionRequest) -> list[Reason]:
        """Half precision and no mask on CUDA; anything on the CPU."""
        found = only(request, devices=("cuda", "cpu"))
        if request.device == "cuda":
            found += only(request, dtypes=HALF, max_head_dim=256) + _no_mask(request)
            found += _at_least(request, (8, 0))
            if request.needs_grad and request.head_dim > 192 and request.capability in SMALL_SMEM:
                text = (
                    f"its backward takes heads of 192 at most on this GPU, got {request.head_dim}"
                )
                found.append(Reason("head_dim", text, "use 'sdpa'"))
        return found

    def traits(self, request: AttentionRequest) -> Traits:
        """Fused; on CUDA dq is summed in any order."""
        return Traits(forward="fused", backward="fused", deterministic=request.device == "cpu")


class SdpaCudnn(AttentionBackend):
    """NVIDIA's library."""

    def limits(self, request: AttentionRequest) -> list[Reason]:
        """Half precision, no mask, heads of a multiple of 8 up to 128."""
        found = only(request, devices=("cuda",), dtypes=HALF, max_head_dim=128)
        found += _multiple_of(request, 8)
        if request.seqlen_k == 1:
            found.append(Reason("seqlen_k", "it needs more than one key", "use 'sdpa'"))
        return found + _no_mask(request) + _at_least(request, (8, 0))

    def traits(self, request: AttentionRequest) -> Traits:
        """Fused both ways."""
        return Traits(forward="fused", backward="fused", deterministic=False)


class SdpaEfficient(AttentionBackend):
    """The memory-efficient kernel, which takes masks."""

    def limits(self, request: AttentionRequest) -> list[Reason]:
        """CUDA, and as many key heads as query heads."""
        found = only(request, devices=("cuda",), dtypes=(*HALF, "float32"))
        if request.is_grouped:
            text = f"it has no shared key heads, got {request.num_heads} on {request.kv_heads}"
            found.append(Reason("gqa", text, "use 'sdpa'"))
        # rows of 16 bytes
        return found + _multiple_of(request, 4 if request.dtype == "float32" else 8)

    def traits(self, request: AttentionRequest) -> Traits:
        """Fused both ways; dq is summed in any order."""
        return Traits(forward="fused", backward="fused", deterministic=False)


def _no_mask(request: AttentionRequest) -> list[Reason]:
    if not request.needs_mask:
        return []
    if request.ragged:
        what = "key lengths"
    elif request.packed:
        what = "documents in one sequence"
    elif request.window is not None:
        what = f"a window of {request.window}"
    else:
        what = f"{request.seqlen_q} causal rows on {request.seqlen_k} keys"
    return [Reason("mask", f"it takes no mask, which {what} would need", "use 'sdpa'")]


def _multiple_of(request: AttentionRequest, number: int) -> list[Reason]:
    if request.head_dim % number == 0:
        return []
    text = f"`head_dim` must be a multiple of {number}, got {request.head_dim}"
    return [Reason("head_dim", text, USE_ANOTHER)]


def _at_least(request: AttentionRequest, capability: tuple[int, int]) -> list[Reason]:
    if request.capability is None or request.capability >= capability:
        return []
    needed, got = (".".join(map(str, each)) for each in (capability, request.capability))
    text = f"it needs compute capability {needed}, got {got}"
    return [Reason("capability", text, "use 'sdpa'")]


SDPA = SdpaBackend("sdpa", sdpa_attention)
MATH = SdpaMath("sdpa-math", pinned(SDPBackend.MATH))
FLASH = SdpaFlash("sdpa-flash", pinned(SDPBackend.FLASH_ATTENTION))
CUDNN = SdpaCudnn("sdpa-cudnn", pinned(SDPBackend.CUDNN_ATTENTION))
EFFICIENT = SdpaEfficient("sdpa-efficient", pinned(SDPBackend.EFFICIENT_ATTENTION))

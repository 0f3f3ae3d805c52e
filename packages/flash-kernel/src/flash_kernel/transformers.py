"""Hugging Face transformers: ``attn_implementation="flash_kernel"``.

    import flash_kernel.transformers
    flash_kernel.transformers.register()
    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="flash_kernel")

transformers is imported by `register` alone; the extra ``flash-kernel[transformers]`` installs it.
"""

import functools
import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from flash_kernel.api import flash_attention
from flash_kernel.varlen import flash_attention_varlen

NAME = "flash_kernel"


def register() -> None:
    """Make ``attn_implementation="flash_kernel"`` known to transformers; once is enough.

    Masks are boolean, as for transformers' "sdpa": None where causality alone says all.

    Raises:
        ImportError: transformers is not installed, or older than 4.53.
    """
    try:
        transformers: Any = importlib.import_module("transformers")
        attentions, masks = transformers.AttentionInterface, transformers.AttentionMaskInterface
    except (ImportError, AttributeError) as error:
        msg = (
            "flash_kernel.transformers needs transformers with AttentionInterface and "
            f"AttentionMaskInterface, got: {error}. Install flash-kernel[transformers]."
        )
        raise ImportError(msg) from error
    attentions.register(NAME, attend)
    masks.register(NAME, masks()["sdpa"])
    # transformers takes each name with "flash" in it for a package that it has to import first
    modeling_utils: Any = importlib.import_module("transformers.modeling_utils")
    imports = getattr(modeling_utils, "lazy_import_flash_attention", None)
    if imports is not None and not hasattr(imports, "skips_flash_kernel"):
        modeling_utils.lazy_import_flash_attention = _skipping_ours(imports)


def _skipping_ours(imports: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap transformers' import of an implementation: of this one there is nothing to import."""

    @functools.wraps(imports)
    def skipping(implementation: str | None, *args: Any, **kwargs: Any) -> Any:
        return None if implementation == NAME else imports(implementation, *args, **kwargs)

    skipping.skips_flash_kernel = True  # type: ignore[attr-defined]
    return skipping


def attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    **kwargs: Any,  # transformers hands every attention whatever a model has to say
) -> tuple[Tensor, None]:
    """Return ``o [B, M, H, D_v]`` and None for the weights: what a model of transformers calls.

    Args:
        module: The layer; ``module.is_causal`` counts where ``is_causal`` is None.
        query: ``[B, H, M, D]``.
        key: ``[B, H_kv, N, D]``.
        value: ``[B, H_kv, N, D_v]``.
        attention_mask: ``[B, 1 or H, M, N]``, boolean or added to the scores; None for causality
            alone, or for no mask.
        dropout: Must be 0.
        scaling: Factor of the scores, ``D ** -0.5`` by default.
        softcap: See `flash_attention`.
        is_causal: Without a mask, whether row i sees its own past only.
        s_aux: Attention sinks ``[H]``.
        position_bias: Added to the scores, ``[1 or B, H, M, N]``; learnable.
        kwargs: ``cu_seq_lens_q`` and ``cu_seq_lens_k`` are honoured, ``output_attentions`` is
            refused.  The window of a sliding layer is found in its mask, see `_window_of`.
    """
    _refuse(dropout, kwargs)
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    cu_seqlens_q = kwargs.get("cu_seq_lens_q")
    # a mask keeps packed sequences apart by itself
    if attention_mask is None and cu_seqlens_q is not None:
        if position_bias is not None:
            msg = (
                "packed sequences (`cu_seq_lens_q`) take no `position_bias`: pad them to a batch, "
                "or use attn_implementation='eager'."
            )
            raise ValueError(msg)
        q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (query, key, value))
        o = flash_attention_varlen(
            q,
            k,
            v,
            cu_seqlens_q,
            kwargs.get("cu_seq_lens_k", cu_seqlens_q),
            is_causal=is_causal,
            scale=scaling,
            window=_window(kwargs.get("sliding_window")),
            softcap=softcap,
            sinks=s_aux,
        )
        return o.reshape(query.shape[0], -1, *o.shape[1:]), None
    is_causal = is_causal and attention_mask is None and query.shape[2] > 1
    if is_causal and key.shape[2] > query.shape[2]:
        # no mask, and yet more keys: an empty static cache, of which the rest is not yet written
        key, value = key[:, :, : query.shape[2]], value[:, :, : query.shape[2]]
    mask = window = None
    if attention_mask is not None and attention_mask.dtype == torch.bool:
        mask, attention_mask = attention_mask, None
        if mask.shape[-2:] == (query.shape[2], key.shape[2]):
            window = _window_of(mask)
    o = flash_attention(
        query,
        key,
        value,
        is_causal=is_causal,
        scale=scaling,
        window=window,
        softcap=softcap,
        mask=mask if window is None else None,
        bias=_sum(position_bias, attention_mask, key.shape[2]),
        sinks=s_aux,
    )
    return o.transpose(1, 2).contiguous(), None


def _window(sliding_window: int | None) -> tuple[int, None] | None:
    """Translate a number of keys, a row's own among them, into what is to the left of it."""
    return None if sliding_window is None else (sliding_window - 1, None)


def _window_of(mask: Tensor) -> tuple[int, int] | None:
    """Return ``(left, 0)`` where a boolean mask ``[B, H, M, N]`` is a causal window and no more.

    Keys outside a window take no time, those hidden by a mask do.  A mask is looked at once, while
    the host waits, for the layers of a model share it; not within a graph, where nobody may wait,
    nor for a single query.
    """
    is_captured = mask.is_cuda and torch.cuda.is_current_stream_capturing()
    if torch.compiler.is_compiling() or is_captured or mask.is_inference() or mask.shape[-2] < 2:
        return None
    version, window = getattr(mask, "_flash_kernel_window", (None, None))
    if version != mask._version:
        window = _fitted_window(mask)
        mask._flash_kernel_window = mask._version, window  # type: ignore[attr-defined]
    return window


def _fitted_window(mask: Tensor) -> tuple[int, int] | None:
    """Fit a causal window to the last row of a mask; return it if all rows follow it."""
    seqlen_q, seqlen_k = mask.shape[-2:]
    if mask.numel() == 0:
        return None
    keys = torch.arange(seqlen_k, device=mask.device)
    positions = torch.arange(seqlen_k - seqlen_q, seqlen_k, device=mask.device)[:, None]
    left = mask[0, 0, -1].sum() - 1
    fits = (mask == ((keys <= positions) & (keys >= positions - left))).all()
    left, fits = torch.stack([left, fits.to(left.dtype)]).tolist()
    return (left, 0) if fits and left >= 0 else None


def _sum(bias: Tensor | None, mask: Tensor | None, seqlen_k: int) -> Tensor | None:
    """Add what is to be added to the scores, for the first ``seqlen_k`` keys."""
    present = [x[..., :seqlen_k] for x in (bias, mask) if x is not None]
    return None if not present else present[0] if len(present) == 1 else present[0] + present[1]


def _refuse(dropout: float, kwargs: dict[str, Any]) -> None:
    if dropout != 0.0:
        msg = (
            f"attn_implementation='flash_kernel' has no attention dropout, got {dropout}. "
            "Set the config's attention_dropout (GPT-2: attn_pdrop) to 0.0, or call model.eval()."
        )
        raise ValueError(msg)
    if kwargs.get("output_attentions"):
        raise ValueError(
            "attn_implementation='flash_kernel' never forms the attention weights that "
            "output_attentions=True asks for. Pass attn_implementation='eager'."
        )

"""Attention that torch brings along, and tiny-llm's readable one."""

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from attn_bench.case import Case
from attn_bench.mask import dense_attention, is_masked, visible, visible_at
from attn_bench.providers.base import (
    Attention,
    Provider,
    needs_cuda,
    takes_no_window,
    takes_only_equal_heads,
    why_no_compile,
)
from flash_kernel import attention_reference
from tiny_llm.attention import ScaledDotProductAttention


def _build_dense(case: Case, device: torch.device) -> Attention:
    if case.window is None and case.kv_heads == case.num_heads:

        def dense(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return attention_reference(q, k, v, is_causal=case.is_causal)[0]

        return dense
    return partial(dense_attention, seen=visible(case, device))


def _build_compiled_dense(case: Case, device: torch.device) -> Attention:
    compiled: Attention = torch.compile(_build_dense(case, device), dynamic=False)
    return compiled


def _build_sdpa(backend: SDPBackend | None, case: Case, device: torch.device) -> Attention:
    """Build F.scaled_dot_product_attention, pinned to one backend or left to torch's choice.

    Torch aligns ``is_causal`` top-left, so where the lengths differ the mask is given as a tensor.
    """
    is_plain = case.seqlen_q == case.seqlen_k and case.window is None
    mask = visible(case, device) if is_masked(case) and not is_plain else None
    is_causal = case.is_causal and is_plain
    enable_gqa = case.kv_heads != case.num_heads

    def sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=is_causal, enable_gqa=enable_gqa
        )

    def pinned(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(backend):  # type: ignore[arg-type]
            return sdpa(q, k, v)

    return sdpa if backend is None else pinned


def _build_flex(case: Case, device: torch.device) -> Attention:
    block_mask = None
    if is_masked(case):

        def sees(_b: Tensor, _h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return visible_at(case, i, j)

        block_mask = create_block_mask(
            sees, None, None, case.seqlen_q, case.seqlen_k, device=str(device)
        )
    compiled = torch.compile(flex_attention, dynamic=False, fullgraph=True)
    enable_gqa = case.kv_heads != case.num_heads

    def flex(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        o: Tensor = compiled(q, k, v, block_mask=block_mask, enable_gqa=enable_gqa)
        return o

    return flex


def _build_layer(case: Case, _: torch.device) -> Attention:
    return partial(ScaledDotProductAttention(), is_causal=case.is_causal)


def _build_compiled_layer(case: Case, _: torch.device) -> Attention:
    compiled = torch.compile(ScaledDotProductAttention(), dynamic=False)
    return partial(compiled, is_causal=case.is_causal)


def _flash_takes_no_mask(case: Case) -> str | None:
    if case.is_causal and case.seqlen_q != case.seqlen_k:
        return "torch aligns its causal mask top-left, and this backend takes no other mask"
    return takes_no_window(case)


DENSE_PROVIDERS = (
    Provider("dense-eager", "dense attention in plain torch", _build_dense, keeps_scores=True),
    Provider(
        "dense-compiled",
        "dense attention under torch.compile",
        _build_compiled_dense,
        why_unavailable=why_no_compile,
        compiles=True,
        keeps_scores=True,
    ),
)

LAYER_PROVIDERS = (
    Provider(
        "layer-eager",
        "tiny-llm's ScaledDotProductAttention as it is written",
        _build_layer,
        why_unsupported=takes_only_equal_heads,
        keeps_scores=True,
    ),
    Provider(
        "layer-compiled",
        "tiny-llm's ScaledDotProductAttention under torch.compile",
        _build_compiled_layer,
        why_unavailable=why_no_compile,
        why_unsupported=takes_only_equal_heads,
        compiles=True,
        keeps_scores=True,
    ),
)

SDPA_PROVIDERS = (
    Provider(
        "sdpa-flash",
        "torch SDPA, flash backend",
        partial(_build_sdpa, SDPBackend.FLASH_ATTENTION),
        why_unsupported=_flash_takes_no_mask,
        deterministic=False,
    ),
    Provider(
        "sdpa-cudnn",
        "torch SDPA, cuDNN backend",
        partial(_build_sdpa, SDPBackend.CUDNN_ATTENTION),
        why_unavailable=partial(needs_cuda, "cuDNN"),
    ),
    Provider(
        "sdpa-efficient",
        "torch SDPA, memory-efficient backend",
        partial(_build_sdpa, SDPBackend.EFFICIENT_ATTENTION),
        why_unavailable=partial(needs_cuda, "this backend"),
    ),
    Provider(
        "sdpa-math",
        "torch SDPA, plain backend",
        partial(_build_sdpa, SDPBackend.MATH),
        keeps_scores=True,
    ),
    Provider("sdpa", "torch SDPA, torch's own choice", partial(_build_sdpa, None)),
    Provider(
        "flex",
        "torch FlexAttention, compiled",
        _build_flex,
        why_unavailable=partial(needs_cuda, "its backward"),
        compiles=True,
    ),
)

"""Attention of flash-kernel: each implementation and backward."""

import importlib.util
import inspect
import os
from functools import partial

import torch
from torch import Tensor

import flash_kernel
from attn_bench.case import Case
from attn_bench.mask import bounds
from attn_bench.providers.base import Attention, Provider, takes_only_equal_heads, why_no_compile
from flash_kernel import FlashAttentionMock, explain, flash_attention
from flash_kernel.dispatch import IMPLS, triton_failure

# the mock is a Python loop over blocks: beyond this many keys it is no use to wait for it
MOCK_MAX_SEQLEN = 1024
# the version that has windows also has fewer heads of k and v than of q
HAS_CACHE = hasattr(flash_kernel, "flash_attention_with_kvcache")
HAS_WINDOW = "window" in inspect.signature(flash_attention).parameters


def _build_flash(impl: str, backward: str, case: Case, _: torch.device) -> Attention:
    window = {} if case.window is None else {"window": bounds(case)}
    attention: Attention = partial(
        flash_attention, is_causal=case.is_causal, impl=impl, backward=backward, **window
    )
    return attention


def _build_mock(case: Case, _: torch.device) -> Attention:
    def mock(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        o: Tensor = FlashAttentionMock.apply(q, k, v, case.is_causal)
        return o

    return mock


def _why_no_triton(device: torch.device) -> str | None:
    if device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        return "Triton needs a GPU; `attn-bench quick` checks its kernels in Triton's interpreter"
    return triton_failure(device)


def _why_no_compiled_backward(device: torch.device) -> str | None:
    return _why_no_triton(device) or why_no_compile(device)


def _build_with_cache(case: Case, device: torch.device) -> Attention:
    """Build what reads k and v as a cache that is full."""
    window = None if case.window is None else bounds(case)
    lengths = torch.full((case.batch,), case.seqlen_k, dtype=torch.int32, device=device)

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        o: Tensor = flash_kernel.flash_attention_with_kvcache(
            q, k, v, cache_seqlens=lengths, is_causal=case.is_causal, window=window
        )
        return o

    return attention


def _why_no_cache(_: torch.device) -> str | None:
    return None if HAS_CACHE else "this version of flash-kernel has no attention over a cache"


def _why_no_hopper(device: torch.device) -> str | None:
    if "hopper" not in IMPLS:
        return "this version of flash-kernel has no kernels for Hopper"
    if device.type != "cuda" or torch.cuda.get_device_capability(device) != (9, 0):
        return "it needs a CUDA device of compute capability 9.0"
    return None


def _hopper_cannot(case: Case) -> str | None:
    """Return what flash-kernel says against its Hopper kernels for a case."""
    if "hopper" not in IMPLS:
        return None
    found = explain(
        (case.batch, case.num_heads, case.seqlen_q, case.head_dim),
        (case.batch, case.kv_heads, case.seqlen_k, case.head_dim),
        dtype=case.torch_dtype,
        capability=90,
        is_causal=case.is_causal,
        window=None if case.window is None else bounds(case),
        impl="hopper",
        backward="hopper",
    )
    if found.impl is not None:
        return None
    return "; ".join(found.refusals[name] for name in found.refusals if "hopper" in name)


def _why_no_mock(_: torch.device) -> str | None:
    if importlib.util.find_spec("einx") is None:
        return "the mock needs einx, which is not installed"
    return None


def _flash_is_older(case: Case) -> str | None:
    reason = None if HAS_WINDOW else takes_only_equal_heads(case)
    return reason and f"{reason} in this version of flash-kernel"


def _mock_cannot(case: Case) -> str | None:
    if max(case.seqlen_q, case.seqlen_k) > MOCK_MAX_SEQLEN:
        return f"the mock is a Python loop and is not run beyond n={MOCK_MAX_SEQLEN}"
    return takes_only_equal_heads(case)


FLASH_KERNEL_PROVIDERS = (
    Provider(
        "flash-triton",
        "flash_kernel, Triton forward and backward",
        partial(_build_flash, "triton", "triton"),
        why_unavailable=_why_no_triton,
        why_unsupported=_flash_is_older,
        deterministic=True,
    ),
    Provider(
        "flash-triton-compiled",
        "flash_kernel, Triton forward, compiled dense backward",
        partial(_build_flash, "triton", "compiled"),
        why_unavailable=_why_no_compiled_backward,
        why_unsupported=_flash_is_older,
        compiles=True,
        keeps_scores=True,
    ),
    Provider(
        "flash-triton-dense",
        "flash_kernel, Triton forward, dense backward",
        partial(_build_flash, "triton", "dense"),
        why_unavailable=_why_no_triton,
        why_unsupported=_flash_is_older,
        keeps_scores=True,
    ),
    Provider(
        "flash-hopper",
        "flash_kernel, its kernels for compute capability 9.0, forward and backward",
        partial(_build_flash, "hopper", "hopper"),
        why_unavailable=_why_no_hopper,
        why_unsupported=_hopper_cannot,
        deterministic=True,
    ),
    Provider(
        "flash-torch",
        "flash_kernel's path over torch's attention",
        partial(_build_flash, "torch", "auto"),
        why_unsupported=_flash_is_older,
    ),
    Provider(
        "flash-auto",
        "flash_kernel's own choice",
        partial(_build_flash, "auto", "auto"),
        why_unsupported=_flash_is_older,
    ),
    Provider(
        "flash-mock",
        "FlashAttentionMock, the readable twin in Python loops",
        _build_mock,
        why_unavailable=_why_no_mock,
        why_unsupported=_mock_cannot,
        deterministic=True,
    ),
)

CACHE_PROVIDERS = (
    Provider(
        "flash-kvcache",
        "flash_kernel.flash_attention_with_kvcache, k and v as a full cache",
        _build_with_cache,
        why_unavailable=_why_no_cache,
        has_backward=False,
        deterministic=True,
    ),
)

"""Attention of flash-kernel: each implementation and backward."""

import importlib.util
import inspect
import os
from functools import partial

import torch
from torch import Tensor

from attn_bench.case import Case
from attn_bench.mask import bounds
from attn_bench.providers.base import Attention, Provider, takes_only_equal_heads, why_no_compile
from flash_kernel import FlashAttentionMock, flash_attention
from flash_kernel.dispatch import triton_failure

# the mock is a Python loop over blocks: beyond this many keys it is no use to wait for it
MOCK_MAX_SEQLEN = 1024
# the version that has windows also has fewer heads of k and v than of q
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

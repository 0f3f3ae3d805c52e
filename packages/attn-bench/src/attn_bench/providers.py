"""The attention implementations that can be measured: one table, no baseline typed twice.

A provider is a name, a reason why it is unavailable on a device (or None), a reason why it cannot
do a case (or None), and a factory ``build(case, device) -> fn(q, k, v) -> o`` on
``[batch, num_heads, seqlen, head_dim]`` with the case's mask built in.  Whatever a provider
prepares per shape (a mask, a compiled function) is made in ``build``, outside the clock.
"""

import importlib.util
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from attn_bench.case import Case, check_name
from flash_kernel import FlashAttentionMock, attention_reference, flash_attention
from flash_kernel.dispatch import triton_failure
from flash_kernel.reference import visible_mask

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]

# the mock is a Python loop over blocks: beyond this many keys it is no use to wait for it
MOCK_MAX_SEQLEN = 1024


def _always(_: object) -> None:
    return None


@dataclass(frozen=True)
class Provider:
    """One implementation; see the module's docstring."""

    name: str
    summary: str
    build: Callable[[Case, torch.device], Attention]
    why_unavailable: Callable[[torch.device], str | None] = _always
    why_unsupported: Callable[[Case], str | None] = _always
    compiles: bool = False  # under torch.compile, for seconds at each new shape


def _build_dense(case: Case, _: torch.device) -> Attention:
    def dense(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention_reference(q, k, v, is_causal=case.is_causal)[0]

    return dense


def _build_sdpa(backend: SDPBackend | None, case: Case, device: torch.device) -> Attention:
    """Build F.scaled_dot_product_attention, pinned to one backend or left to torch's choice.

    Torch aligns ``is_causal`` top-left, so where the lengths differ the mask is given as a tensor.
    """
    is_square = case.seqlen_q == case.seqlen_k
    mask = None
    if case.is_causal and not is_square:
        mask = visible_mask(case.seqlen_q, case.seqlen_k, device)
    is_causal = case.is_causal and is_square

    def sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=is_causal)

    def pinned(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(backend):  # type: ignore[arg-type]
            return sdpa(q, k, v)

    return sdpa if backend is None else pinned


def _build_flex(case: Case, device: torch.device) -> Attention:
    block_mask = None
    if case.is_causal:
        shift = case.seqlen_k - case.seqlen_q

        def visible(_b: Tensor, _h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return j <= i + shift

        block_mask = create_block_mask(
            visible, None, None, case.seqlen_q, case.seqlen_k, device=str(device)
        )
    compiled = torch.compile(flex_attention, dynamic=False, fullgraph=True)

    def flex(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        o: Tensor = compiled(q, k, v, block_mask=block_mask)
        return o

    return flex


def _build_flash(impl: str, backward: str, case: Case, _: torch.device) -> Attention:
    def flash(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flash_attention(q, k, v, is_causal=case.is_causal, impl=impl, backward=backward)

    return flash


def _build_mock(case: Case, _: torch.device) -> Attention:
    def mock(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        o: Tensor = FlashAttentionMock.apply(q, k, v, case.is_causal)
        return o

    return mock


def _needs_cuda(what: str, device: torch.device) -> str | None:
    return None if device.type == "cuda" else f"{what} needs a CUDA device"


def _why_no_triton(device: torch.device) -> str | None:
    if device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        return "Triton needs a GPU; `attn-bench quick` checks its kernels in Triton's interpreter"
    return triton_failure(device)


def why_no_compile(device: torch.device) -> str | None:
    """Return why torch.compile cannot work for `device`, None if nothing speaks against it."""
    compilers = [os.environ.get("CXX"), "g++", "clang++", "c++"]
    if device.type == "cpu" and not any(each and shutil.which(each) for each in compilers):
        return "torch.compile needs a C++ compiler and none was found: install g++"
    return None


def _why_no_compiled_backward(device: torch.device) -> str | None:
    return _why_no_triton(device) or why_no_compile(device)


def _why_no_mock(_: torch.device) -> str | None:
    if importlib.util.find_spec("einx") is None:
        return "the mock needs einx, which is not installed"
    return None


def _flash_takes_no_mask(case: Case) -> str | None:
    if case.is_causal and case.seqlen_q != case.seqlen_k:
        return "torch aligns its causal mask top-left, and this backend takes no other mask"
    return None


def _mock_is_slow(case: Case) -> str | None:
    if max(case.seqlen_q, case.seqlen_k) > MOCK_MAX_SEQLEN:
        return f"the mock is a Python loop and is not run beyond n={MOCK_MAX_SEQLEN}"
    return None


FLASH_PROVIDERS = {
    each.name: each
    for each in (
        Provider("dense-eager", "flash_kernel.attention_reference, plain torch", _build_dense),
        Provider(
            "sdpa-flash",
            "torch SDPA, flash backend",
            partial(_build_sdpa, SDPBackend.FLASH_ATTENTION),
            why_unsupported=_flash_takes_no_mask,
        ),
        Provider(
            "sdpa-cudnn",
            "torch SDPA, cuDNN backend",
            partial(_build_sdpa, SDPBackend.CUDNN_ATTENTION),
            why_unavailable=partial(_needs_cuda, "cuDNN"),
        ),
        Provider(
            "sdpa-efficient",
            "torch SDPA, memory-efficient backend",
            partial(_build_sdpa, SDPBackend.EFFICIENT_ATTENTION),
            why_unavailable=partial(_needs_cuda, "this backend"),
        ),
        Provider("sdpa-math", "torch SDPA, plain backend", partial(_build_sdpa, SDPBackend.MATH)),
        Provider("sdpa", "torch SDPA, torch's own choice", partial(_build_sdpa, None)),
        Provider(
            "flex",
            "torch FlexAttention, compiled",
            _build_flex,
            why_unavailable=partial(_needs_cuda, "its backward"),
            compiles=True,
        ),
        Provider(
            "flash-triton",
            "flash_kernel, Triton forward and backward",
            partial(_build_flash, "triton", "triton"),
            why_unavailable=_why_no_triton,
        ),
        Provider(
            "flash-triton-compiled",
            "flash_kernel, Triton forward, compiled dense backward",
            partial(_build_flash, "triton", "compiled"),
            why_unavailable=_why_no_compiled_backward,
            compiles=True,
        ),
        Provider("flash-auto", "flash_kernel's own choice", partial(_build_flash, "auto", "auto")),
        Provider(
            "flash-mock",
            "FlashAttentionMock, the readable twin in Python loops",
            _build_mock,
            why_unavailable=_why_no_mock,
            why_unsupported=_mock_is_slow,
        ),
    )
}


def pick_providers(
    table: dict[str, Provider], names: list[str] | None, device: torch.device
) -> list[Provider]:
    """Return the providers called `names`, by default every one that is available.

    A provider asked for by name is returned even where it is unavailable: its rows say why.

    Raises:
        InputError: if a name is unknown.
    """
    if names is None:
        return [each for each in table.values() if each.why_unavailable(device) is None]
    for name in names:
        check_name("provider", name, table)
    return [table[name] for name in dict.fromkeys(names)]

"""Attention libraries that may be installed beside torch; each is imported when first asked for.

They keep q, k and v as [batch, n, heads, d].  What they get here are transposed views of
[batch, heads, n, d], which all of them take without a copy.
"""

import importlib
import importlib.util
from functools import cache, partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from attn_bench.case import Case
from attn_bench.mask import bounds
from attn_bench.providers.base import Attention, Provider, takes_only_equal_heads

LAYOUT = "bhnd, passed as a transposed view"


@cache
def _import_or_reason(module: str, distribution: str) -> ModuleType | str:
    """Return the module, or why it cannot be had."""
    try:
        if importlib.util.find_spec(module.partition(".")[0]) is None:
            return f"{distribution} is not installed"
        return importlib.import_module(module)
    # a wheel built for another torch fails with whatever its loader raises
    except (ImportError, OSError, RuntimeError, AttributeError) as error:
        lines = str(error).splitlines() or [type(error).__name__]
        return f"{distribution} is installed but cannot be imported: {lines[0]}"


def _why_no_module(module: str, distribution: str, device: torch.device) -> str | None:
    if device.type != "cuda":
        return f"{distribution} needs a CUDA device"
    found = _import_or_reason(module, distribution)
    return found if isinstance(found, str) else None


def _half_only(case: Case) -> str | None:
    return "it takes fp16 and bf16 only" if case.dtype == "fp32" else None


def _first(result: Any) -> Tensor:
    """Return o where a library may return (o, lse)."""
    o: Tensor = result[0] if isinstance(result, tuple) else result
    return o


def _build_flash_attn(
    module: str,
    unbounded: int | None,
    case: Case,
    _: torch.device,
    *,
    deterministic: bool = False,
) -> Attention:
    function = importlib.import_module(module).flash_attn_func
    options: dict[str, Any] = {"causal": case.is_causal, "deterministic": deterministic}
    if case.window is not None:
        before, after = bounds(case)
        options["window_size"] = tuple(unbounded if x is None else x for x in (before, after))

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return _first(function(q, k, v, **options)).transpose(1, 2)

    return attention


def _build_xformers(case: Case, _: torch.device) -> Attention:
    ops = importlib.import_module("xformers.ops")
    bias = ops.fmha.attn_bias.LowerTriangularFromBottomRightMask() if case.is_causal else None

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        o: Tensor = ops.memory_efficient_attention(q, k, v, attn_bias=bias)
        return o.transpose(1, 2)

    return attention


def _build_flashinfer(case: Case, _: torch.device) -> Attention:
    prefill = importlib.import_module("flashinfer").single_prefill_with_kv_cache
    window = -1 if case.window is None else case.window

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x[0].transpose(0, 1) for x in (q, k, v))
        o: Tensor = prefill(q, k, v, causal=case.is_causal, window_left=window)
        return o.transpose(0, 1)[None]

    return attention


def _flashinfer_cannot(case: Case) -> str | None:
    if case.batch != 1:
        return "its single-request prefill takes a batch of 1"
    if case.window is not None and not case.is_causal:
        return "its window has a left side only"
    return _half_only(case)


OTHER_PROVIDERS = (
    Provider(
        "flash-attn-2",
        "flash_attn.flash_attn_func (Dao-AILab, CUDA)",
        partial(_build_flash_attn, "flash_attn", -1),
        why_unavailable=partial(_why_no_module, "flash_attn.flash_attn_interface", "flash-attn"),
        why_unsupported=_half_only,
        layout=LAYOUT,
        deterministic=False,
    ),
    Provider(
        "flash-attn-4",
        "flash_attn.cute.flash_attn_func (Dao-AILab, CuTe DSL)",
        partial(_build_flash_attn, "flash_attn.cute", None),
        why_unavailable=partial(_why_no_module, "flash_attn.cute", "flash-attn-4"),
        why_unsupported=_half_only,
        layout=LAYOUT,
        deterministic=False,
    ),
    Provider(
        "flash-attn-4-deterministic",
        "flash_attn.cute.flash_attn_func, deterministic=True",
        partial(_build_flash_attn, "flash_attn.cute", None, deterministic=True),
        why_unavailable=partial(_why_no_module, "flash_attn.cute", "flash-attn-4"),
        why_unsupported=_half_only,
        layout=LAYOUT,
    ),
    Provider(
        "xformers",
        "xformers.ops.memory_efficient_attention",
        _build_xformers,
        why_unavailable=partial(_why_no_module, "xformers.ops", "xformers"),
        why_unsupported=takes_only_equal_heads,
        layout=LAYOUT,
    ),
    Provider(
        "flashinfer",
        "flashinfer.single_prefill_with_kv_cache, forward only",
        _build_flashinfer,
        why_unavailable=partial(_why_no_module, "flashinfer", "flashinfer-python"),
        why_unsupported=_flashinfer_cannot,
        has_backward=False,
        layout=LAYOUT,
    ),
)

"""Which implementation a call gets.  ``auto`` chooses; anything else is obeyed, or refused.

Nothing here imports Triton before a CUDA tensor, or an explicit wish, asks for it; the table of
configurations that says what Triton can take is plain data.
"""

import functools
import importlib.util
import warnings
from collections.abc import Hashable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from flash_kernel._triton.config import (
    PACKED_ROWS,
    compute_capability,
    configs_for,
    max_head_dim,
    max_seqlen,
)
from flash_kernel.torch_attention import torch_refusal
from flash_kernel.validation import check_inputs
from flash_kernel.variant import Modifiers, Variant, make_variant

IMPLS = ("auto", "triton", "torch", "mock", "reference")
BACKWARDS = ("auto", "triton", "compiled", "dense")
TRITON_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
GPU_ORDER = ("triton", "torch", "reference")
CPU_ORDER = ("torch", "reference")

MAX_PLANS = 4096  # descriptions of inputs; when there are more, all are forgotten
_plans: dict[Hashable, tuple["Plan", Variant]] = {}


class Plan(NamedTuple):
    """What runs: an implementation, and how it is differentiated.

    ``backward`` is a member of `BACKWARDS`, or "autograd" where torch differentiates the
    implementation itself, or "mock" for the mock's own.
    """

    impl: str
    backward: str


class Request(NamedTuple):
    """What a choice depends on: plain data, no tensors."""

    device: torch.device
    capability: int  # 90 for an NVIDIA GPU of compute capability 9.0, 0 elsewhere
    dtype: torch.dtype
    seqlen_q: int
    seqlen_k: int
    head_dim: int
    head_dim_v: int
    group: int  # query heads that share a key head
    variant: Variant
    modifiers: frozenset[str]  # names of those there are
    trained: frozenset[str]  # names of those that want a gradient
    return_lse: bool
    layout: str = "dense"  # or "packed" sequences, or a "cache" of keys and values
    is_assumed: bool = False  # the device is described, not there: whether it launches is not asked


class Options(NamedTuple):
    """The public options that are numbers or names."""

    is_causal: bool
    scale: float | None
    window: tuple[int | None, int | None] | None
    softcap: float | None
    return_lse: bool
    impl: str
    backward: str


def checked_plan(
    q: Tensor, k: Tensor, v: Tensor, modifiers: Modifiers, options: Options
) -> tuple[Plan, Variant]:
    """Check the inputs and return the plan for them; done once for inputs of one description.

    Raises:
        TypeError, ValueError, RuntimeError: See `check_inputs` and `resolve`.
    """
    key = _description(q, k, v, modifiers, options)
    known = None if key is None else _plans.get(key)
    if known is not None:
        return known
    request = checked_request(q, k, v, modifiers, options)
    plan = resolve(request, impl=options.impl, backward=options.backward)
    planned = plan, request.variant
    if key is not None:
        if len(_plans) >= MAX_PLANS:
            _plans.clear()
        _plans[key] = planned
    return planned


def checked_request(
    q: Tensor, k: Tensor, v: Tensor, modifiers: Modifiers, options: Options
) -> Request:
    """Check the inputs and return the request that they make.

    Raises:
        TypeError, ValueError: See `check_inputs`.
    """
    wishes = {name: getattr(options, name) for name in ("is_causal", "scale", "window", "softcap")}
    check_inputs(q, k, v, modifiers, **wishes)
    variant = make_variant(q.shape[-1], **wishes)
    return describe(q, k, v, variant, modifiers, return_lse=options.return_lse)


def _description(
    q: Tensor, k: Tensor, v: Tensor, modifiers: Modifiers, options: Options
) -> Hashable | None:
    """Return a key under which a plan may be kept; None if a tensor is of an unusual kind."""
    tensors = (q, k, v, *modifiers.tensors)
    if not all(map(_is_plain, tensors)):
        return None
    described = [(x.shape, x.dtype, x.device) for x in tensors]
    present = [None if x is None else x.requires_grad for x in modifiers]
    # repr: an option of the wrong kind may not be hashable, and 1 == True == 1.0
    return (*described, *present, torch.is_grad_enabled(), repr(options))


def _is_plain(x: Tensor) -> bool:
    """Say whether a tensor is described by its shape, dtype and device."""
    return type(x) in (Tensor, Parameter) and x.layout == torch.strided and not x.is_nested


def describe(
    q: Tensor, k: Tensor, v: Tensor, variant: Variant, modifiers: Modifiers, *, return_lse: bool
) -> Request:
    """Return the request that valid tensors make."""
    present = {name: x for name, x in modifiers._asdict().items() if x is not None}
    trained = [name for name, x in present.items() if x.requires_grad and torch.is_grad_enabled()]
    return Request(
        device=q.device,
        capability=compute_capability(q.device),
        dtype=q.dtype,
        seqlen_q=q.shape[-2],
        seqlen_k=k.shape[-2],
        head_dim=q.shape[-1],
        head_dim_v=v.shape[-1],
        group=q.shape[-3] // max(1, k.shape[-3]) if q.dim() >= 4 else 1,
        variant=variant,
        modifiers=frozenset(present),
        trained=frozenset(trained),
        return_lse=return_lse,
    )


def resolve(request: Request, *, impl: str, backward: str) -> Plan:
    """Return the plan for a request.

    Raises:
        ValueError, TypeError, RuntimeError: ``impl`` or ``backward`` is unknown, or was asked for
            explicitly and cannot be had; the message says why and what to do.
    """
    for name, value, known in (("impl", impl, IMPLS), ("backward", backward, BACKWARDS)):
        if value not in known:
            msg = f"`{name}` must be one of {', '.join(map(repr, known))}, got {value!r}."
            raise ValueError(msg)
    order = GPU_ORDER if request.device.type == "cuda" else CPU_ORDER
    return first_plan(request, order if impl == "auto" else (impl,), backward)


def first_plan(request: Request, candidates: tuple[str, ...], backward: str) -> Plan:
    """Return the first candidate's plan that is not refused, or raise the last refusal."""
    refusal: Exception | None = None
    for candidate in candidates:
        refusal = refuse_impl(request, candidate) or refuse_backward(request, candidate, backward)
        if refusal is None:
            return Plan(candidate, _own_backward(request, candidate, backward))
        if candidate == "triton" and len(candidates) > 1 and not request.is_assumed:
            _warn_if_triton_fails(request.device)
    raise refusal or AssertionError


def _own_backward(request: Request, impl: str, backward: str) -> str:
    """Return the backward that belongs to an implementation where none is named."""
    if backward != "auto":
        return backward
    if impl == "triton":
        return "triton" if refuse_backward(request, impl, "triton") is None else "dense"
    return "mock" if impl == "mock" else "autograd"


def refuse_impl(request: Request, impl: str) -> Exception | None:
    """Return the error that asking for an implementation would deserve here, or None."""
    if impl == "triton":
        return triton_refusal(request, "impl")
    if impl == "torch":
        lacking = torch_refusal(request.variant, request.modifiers)
        if lacking is not None:
            return ValueError(f"impl='torch' has no {lacking}. Pass impl='reference' or 'auto'.")
        if request.return_lse:
            return ValueError("impl='torch' returns no lse. Pass impl='reference' or impl='auto'.")
    if impl == "mock":
        plain = Variant(request.variant.scale, right=request.variant.right)
        if request.modifiers or request.group > 1 or request.variant != plain or plain.right:
            return ValueError(
                "impl='mock' shows the plain algorithm, causal or not: no window, softcap, bias, "
                "mask, alibi_slopes, sinks or shared heads. Pass impl='reference' or impl='auto'."
            )
        if request.head_dim != request.head_dim_v:
            return ValueError("impl='mock' needs v as wide as q. Pass impl='reference'.")
    return None


def refuse_backward(request: Request, impl: str, backward: str) -> Exception | None:
    """Return the error that differentiating an implementation so would deserve, or None."""
    if impl == "torch" and backward != "auto":
        return ValueError(
            f"impl='torch' is differentiated by torch itself, got backward={backward!r}. "
            "Pass backward='auto', or another impl."
        )
    by_autograd = impl in ("torch", "reference") and backward == "auto"
    if "alibi_slopes" in request.trained and not by_autograd:
        return ValueError(
            "the gradient of `alibi_slopes` needs impl='reference' with backward='auto', got "
            f"impl={impl!r}, backward={backward!r}."
        )
    if backward == "triton":
        if "bias" in request.trained:
            return ValueError(
                "backward='triton' has no gradient of `bias`. Pass backward='dense' or 'compiled'."
            )
        return triton_refusal(request, "backward")
    return None


def triton_refusal(request: Request, option: str) -> Exception | None:
    """Return the error that asking for Triton by an option would deserve here, or None."""
    wish = f"{option}='triton'"
    other = "impl='torch' or impl='reference'" if option == "impl" else "backward='dense'"
    dtype, capability = request.dtype, request.capability
    if dtype not in TRITON_DTYPES:
        msg = f"{wish} takes float16, bfloat16 or float32, got {dtype}. Pass {other}."
        return TypeError(msg)
    head_dim = max(request.head_dim, request.head_dim_v)
    configs = configs_for(head_dim, dtype, capability)
    if configs is None:
        return ValueError(
            f"`head_dim` must be at most {max_head_dim(dtype, capability)} for {wish} with {dtype} "
            f"on this device, got {head_dim}. Pass {other}, or split the heads."
        )
    longest, most = max(request.seqlen_q, request.seqlen_k), max_seqlen(configs)
    what = "a sequence"
    if request.layout == "packed":
        what, most = "all packed sequences together", PACKED_ROWS
    if longest > most:
        return ValueError(
            f"{what} must have at most {most} rows for {wish}, got {longest}. Pass {other}."
        )
    failure = None if request.is_assumed else triton_failure(request.device)
    return None if failure is None else RuntimeError(f"{wish} {failure}")


def triton_failure(device: torch.device) -> str | None:
    """Return why Triton's kernels cannot run on a device, or None; found out once a process."""
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        # a graph being captured cannot wait for a probe; a failure will speak for itself
        return None
    return _triton_failure(device)


@functools.cache
def _triton_failure(device: torch.device) -> str | None:
    if importlib.util.find_spec("triton") is None:
        return "needs Triton, which is not installed. Install flash-kernel[triton]."
    if device.type == "cuda":
        return _launch_failure(device)
    from triton import knobs

    if device.type == "cpu" and knobs.runtime.interpret:
        return None
    return (
        f"needs a CUDA tensor, got device '{device.type}'. Pass impl='auto' to run there, or set "
        "TRITON_INTERPRET=1 before Triton is imported to interpret the kernels on a CPU (slow)."
    )


def _launch_failure(device: torch.device) -> str | None:
    try:
        from flash_kernel._triton.probe import launch_probe

        launch_probe(device)
    # whatever Triton fails with here (no C compiler, no Python headers, an unsupported GPU, a
    # broken installation) is an answer to report, not an error to pass on
    except Exception as error:
        first_line = str(error).strip().splitlines()[:1]
        return f"cannot launch on {device}: {type(error).__name__}: {''.join(first_line)}"
    return None


@functools.cache
def _warn_if_triton_fails(device: torch.device) -> None:
    failure = triton_failure(device)
    if failure is not None:
        warnings.warn(
            f"flash_kernel falls back to torch's attention: Triton {failure}",
            RuntimeWarning,
            stacklevel=2,
        )

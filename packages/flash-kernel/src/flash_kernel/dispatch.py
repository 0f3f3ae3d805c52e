"""Which implementation a call gets.  ``auto`` chooses; anything else is obeyed, or refused.

Nothing here imports Triton before a CUDA tensor, or an explicit wish, asks for it; the table of
configurations that says what Triton can take is plain data.
"""

import functools
import importlib.util
import warnings
from typing import Any

import torch
from torch import Tensor

from flash_kernel._hopper import config as hopper
from flash_kernel._triton.config import (
    PACKED_ROWS,
    compute_capability,
    configs_for,
    has_few_queries,
    max_head_dim,
    max_seqlen,
)
from flash_kernel.calls import Call, kind_of, known_call, wants_gradients
from flash_kernel.request import Options, Plan, Request
from flash_kernel.second_order import refuse_transforms
from flash_kernel.torch_attention import torch_refusal
from flash_kernel.validation import check_inputs
from flash_kernel.variant import Modifiers, Variant, make_variant

IMPLS = ("auto", "hopper", "triton", "torch", "mock", "reference")
BACKWARDS = ("auto", "hopper", "triton", "compiled", "dense")
TRITON_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
GPU_ORDER = ("hopper", "triton", "torch", "reference")  # what `auto` tries
KERNELS = ("hopper", "triton")  # a backward of any of them takes what a forward of any saved
CPU_ORDER = ("torch", "reference")


def checked_call(
    q: Tensor, k: Tensor, v: Tensor, modifiers: Modifiers, options: tuple[Any, ...]
) -> Call:
    """Check the inputs, and return what is decided for them; see `calls`.

    ``options`` are those of `Options`: the record itself is not needed for a known call.

    Raises:
        TypeError, ValueError, RuntimeError: See `check_inputs` and `resolve`.
    """
    tensors = (q, k, v, *modifiers)

    def decide() -> Call:
        chosen = Options(*options)
        request = checked_request(q, k, v, modifiers, chosen)
        plan = resolve(request, impl=chosen.impl, backward=chosen.backward)
        if plan.backward != "autograd":
            refuse_transforms("flash_attention")
        return Call(plan, request.variant, records=wants_gradients(tensors))

    return known_call(kind_of("flash_attention", tensors, options), decide)


def checked_request(
    q: Tensor, k: Tensor, v: Tensor, modifiers: Modifiers, options: Options
) -> Request:
    """Check the inputs and return the request that they make.

    Raises:
        TypeError, ValueError: See `check_inputs`.
    """
    wishes = {name: getattr(options, name) for name in ("is_causal", "scale", "window", "softcap")}
    check_inputs(
        q,
        k,
        v,
        modifiers,
        **wishes,
        return_lse=options.return_lse,
        deterministic=options.deterministic,
    )
    variant = make_variant(q.shape[-1], **wishes)
    return describe(
        q,
        k,
        v,
        variant,
        modifiers,
        return_lse=options.return_lse,
        is_deterministic=options.deterministic,
    )


def describe(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    variant: Variant,
    modifiers: Modifiers,
    *,
    return_lse: bool,
    layout: str = "dense",
    is_deterministic: bool = True,
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
        layout=layout,
        is_deterministic=is_deterministic,
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
    return first_plan(request, candidates_for(request) if impl == "auto" else (impl,), backward)


def candidates_for(request: Request) -> tuple[str, ...]:
    """Return what ``impl="auto"`` may choose among, best first."""
    if request.device.type != "cuda":
        return CPU_ORDER
    few = has_few_queries(request.dtype, request.group * request.seqlen_q, request.seqlen_k)
    longest, softcap = max(request.seqlen_q, request.seqlen_k), request.variant.softcap
    takes_hopper = not few and hopper.is_chosen(
        request.layout, request.head_dim, longest, has_softcap=softcap is not None
    )
    return GPU_ORDER if takes_hopper else GPU_ORDER[1:]


def first_plan(request: Request, candidates: tuple[str, ...], backward: str) -> Plan:
    """Return the first candidate's plan that is not refused, or raise the last refusal."""
    refusal: Exception | None = None
    for candidate in candidates:
        # not `or`: torch.compile of torch 2.11 cannot ask whether an exception is true
        refusal = refuse_impl(request, candidate)
        if refusal is None:
            refusal = refuse_backward(request, candidate, backward)
        if refusal is None:
            return Plan(
                candidate,
                _own_backward(request, candidate, backward),
                request.is_deterministic,
                impl_is_named=len(candidates) == 1,
                backward_is_named=backward != "auto",
            )
        if len(candidates) > 1 and not request.is_assumed:
            _warn_of_failure(candidate, request)
    raise refusal or AssertionError


def _own_backward(request: Request, impl: str, backward: str) -> str:
    """Return the backward that belongs to an implementation where none is named."""
    if backward != "auto":
        return backward
    if impl in KERNELS:
        for kernels in KERNELS[KERNELS.index(impl) :]:
            is_chosen = kernels != "hopper" or request.head_dim in hopper.AUTO_HEAD_DIMS
            if is_chosen and refuse_backward(request, impl, kernels) is None:
                return kernels
        return "dense"
    return "mock" if impl == "mock" else "autograd"


def refuse_impl(request: Request, impl: str) -> Exception | None:
    """Return the error that asking for an implementation would deserve here, or None."""
    if impl == "hopper":
        return hopper_refusal(request, "impl")
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
    if backward == "hopper":
        return hopper_refusal(request, "backward")
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


def hopper_refusal(request: Request, option: str) -> Exception | None:
    """Return the error that asking for the Hopper kernels by an option would deserve, or None.

    What only the tensors' layout or the compiler can rule out shows at the launch.
    """
    wish, other = f"{option}='hopper'", f"Pass {option}='triton' or {option}='auto'."
    if request.capability != hopper.CAPABILITY:
        return RuntimeError(
            f"{wish} needs an NVIDIA GPU of compute capability 9.0, got "
            f"{_named_capability(request)}. {other}"
        )
    if request.dtype not in hopper.DTYPES:
        return TypeError(f"{wish} takes float16 or bfloat16, got {request.dtype}. {other}")
    lacking = hopper_lacks(request, option)
    if lacking is not None:
        return ValueError(f"{wish} {lacking}. {other}")
    failure = None if request.is_assumed else hopper_failure(request.device)
    return None if failure is None else RuntimeError(f"{wish} {failure}")


def hopper_lacks(request: Request, option: str) -> str | None:
    """Return what a request wants that Hopper's forward ("impl") or backward lacks, or None."""
    layouts = hopper.LAYOUTS[option]
    if request.layout not in layouts:
        return f"takes {' and '.join(layouts)} tensors only, got the layout {request.layout!r}"
    if request.head_dim != request.head_dim_v:
        return f"needs v as wide as q, got {request.head_dim_v} and {request.head_dim}"
    if request.head_dim not in hopper.HEAD_DIMS:
        step, most = hopper.HEAD_DIMS.step, hopper.HEAD_DIMS[-1]
        return f"takes multiples of {step} up to {most} as `head_dim`, got {request.head_dim}"
    if request.modifiers:
        return f"has no {', '.join(sorted(request.modifiers))}"
    if option == "backward" and request.variant.softcap is not None:
        return "has no softcap"
    softcap = request.variant.softcap
    if softcap is not None and softcap > hopper.LARGEST_SOFTCAP:
        return f"needs `softcap` to be at most {hopper.LARGEST_SOFTCAP}, got {softcap}"
    if request.variant.scale < hopper.SMALLEST_SCALE:
        return f"needs `scale` to be at least {hopper.SMALLEST_SCALE}, got {request.variant.scale}"
    longest = max(request.seqlen_q, request.seqlen_k)
    # of packed sequences as many as the portable kernels: what one gets must not depend on the sum
    most = PACKED_ROWS if request.layout == "packed" else hopper.MAX_SEQLEN
    if longest > most:
        return f"takes at most {most} rows, got {longest}"
    return None


def _named_capability(request: Request) -> str:
    """Return what a request's device is, in the words of `hopper_refusal`."""
    if not request.capability:
        return f"device '{request.device.type}'"
    return f"{request.capability // 10}.{request.capability % 10}"


def hopper_failure(device: torch.device) -> str | None:
    """Return why no Hopper kernel can run on a device of the right kind, or None."""
    return triton_failure(device) or _gluon_failure()


@functools.cache
def _gluon_failure() -> str | None:
    from triton import __version__

    if tuple(int(x) for x in __version__.split(".")[:2]) < hopper.OLDEST_TRITON:
        return f"needs Triton 3.6 or newer, got {__version__}."
    try:
        importlib.import_module("flash_kernel._hopper.compat")
    # Gluon is experimental: whatever it lacks in some release is an answer, as for Triton
    except (ImportError, AttributeError) as error:
        return f"needs Triton's Gluon, which fails: {type(error).__name__}: {error}"
    return None


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
        f"needs a CUDA tensor, got device '{device.type}'. Pass 'auto' to run there, or set "
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


def _warn_of_failure(candidate: str, request: Request) -> None:
    """Warn, once a process, if it is for a failure that a candidate for ``auto`` is passed over."""
    if candidate == "triton":
        _warn_if_triton_fails(request.device)
    elif candidate == "hopper" and request.capability == hopper.CAPABILITY:
        failure = None if triton_failure(request.device) else _gluon_failure()
        if failure is not None:
            warn_of_portable_path(failure)


@functools.cache
def warn_of_portable_path(failure: str) -> None:
    """Say, once for each reason, that the portable kernels stand in for Hopper's."""
    warnings.warn(
        f"flash_kernel falls back to its portable Triton kernels: the Hopper path {failure}",
        RuntimeWarning,
        stacklevel=2,
    )


@functools.cache
def _warn_if_triton_fails(device: torch.device) -> None:
    failure = triton_failure(device)
    if failure is not None:
        warnings.warn(
            f"flash_kernel falls back to torch's attention: Triton {failure}",
            RuntimeWarning,
            stacklevel=2,
        )

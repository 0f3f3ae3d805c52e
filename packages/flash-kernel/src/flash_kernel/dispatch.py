"""Which implementation a call gets.  ``auto`` chooses; anything else is obeyed, or refused.

Nothing here imports Triton before a CUDA tensor, or an explicit wish, asks for it; the table of
configurations that says what Triton can take is plain data.
"""

import functools
import importlib.util
import warnings
from collections.abc import Hashable
from dataclasses import dataclass
from types import NoneType

import torch
from torch import Tensor
from torch.nn import Parameter

from flash_kernel._triton.config import configs_for, max_head_dim, max_seqlen
from flash_kernel.validation import check_qkv

IMPLS = ("auto", "triton", "torch", "mock", "reference")
BACKWARDS = ("auto", "triton", "compiled", "dense")
TRITON_DTYPES = (torch.float16, torch.bfloat16, torch.float32)

MAX_PLANS = 4096  # descriptions of inputs; when there are more, all are forgotten
_plans: dict[Hashable, "Plan"] = {}

OWN_BACKWARD = {
    "triton": "triton",
    "mock": "mock",
    "torch": "autograd",
    "reference": "autograd",
}


@dataclass(frozen=True)
class Plan:
    """What runs: an implementation, and how it is differentiated.

    ``backward`` is a member of `BACKWARDS`, or "autograd" where torch differentiates the
    implementation itself, or "mock" for the mock's own.
    """

    impl: str
    backward: str


def checked_plan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    is_causal: bool,
    scale: float | None,
    return_lse: bool,
    impl: str,
    backward: str,
) -> Plan:
    """Check the inputs and return the plan for them; done once for inputs of one description.

    Raises:
        TypeError, ValueError, RuntimeError: See `check_qkv` and `resolve`.
    """
    key = None
    if all(map(_is_plain, (q, k, v))) and type(scale) in (float, NoneType):
        shapes, dtypes = (q.shape, k.shape, v.shape), (q.dtype, k.dtype, v.dtype)
        devices = (q.device, k.device, v.device)
        key = (shapes, dtypes, devices, is_causal, scale, return_lse, f"{impl}", f"{backward}")
        plan = _plans.get(key)
        if plan is not None:
            return plan
    check_qkv(q, k, v, is_causal=is_causal, scale=scale)
    plan = resolve(q, k, return_lse=return_lse, impl=impl, backward=backward)
    if key is not None:
        if len(_plans) >= MAX_PLANS:
            _plans.clear()
        _plans[key] = plan
    return plan


def _is_plain(x: Tensor) -> bool:
    """Say whether a tensor is described by its shape, dtype and device."""
    return type(x) in (Tensor, Parameter) and x.layout == torch.strided and not x.is_nested


def resolve(q: Tensor, k: Tensor, *, return_lse: bool, impl: str, backward: str) -> Plan:
    """Return the plan for a call.

    Raises:
        ValueError, TypeError, RuntimeError: ``impl`` or ``backward`` is unknown, or was asked for
            explicitly and cannot be had; the message says why and what to do.
    """
    check_options(return_lse=return_lse, impl=impl, backward=backward)
    if impl == "auto":
        impl = _choose_impl(q, k, return_lse=return_lse, backward=backward)
    for option, choice in (("impl", impl), ("backward", backward)):
        if choice == "triton":
            refusal = triton_refusal(q, k, option)
            if refusal is not None:
                raise refusal
    return Plan(impl, OWN_BACKWARD[impl] if backward == "auto" else backward)


def check_options(*, return_lse: bool, impl: str, backward: str) -> None:
    """Raise unless the options exist and go together, whatever the tensors."""
    for name, value, known in (("impl", impl, IMPLS), ("backward", backward, BACKWARDS)):
        if value not in known:
            msg = f"`{name}` must be one of {', '.join(map(repr, known))}, got {value!r}."
            raise ValueError(msg)
    if impl == "torch" and return_lse:
        msg = "impl='torch' returns no lse. Pass impl='reference', or impl='auto' to let it choose."
        raise ValueError(msg)
    if impl == "torch" and backward != "auto":
        msg = (
            f"impl='torch' is differentiated by torch itself, got backward={backward!r}. "
            "Pass backward='auto', or another impl."
        )
        raise ValueError(msg)


def _choose_impl(q: Tensor, k: Tensor, *, return_lse: bool, backward: str) -> str:
    """Return Triton on a GPU where it runs, else torch, else what can do what torch cannot."""
    if q.is_cuda:
        if triton_refusal(q, k) is None:
            return "triton"
        _warn_if_triton_fails(q.device)
    return "reference" if return_lse or backward != "auto" else "torch"


def triton_refusal(q: Tensor, k: Tensor, option: str = "impl") -> Exception | None:
    """Return the error that asking for Triton by an option would deserve here, or None."""
    wish = f"{option}='triton'"
    other = "impl='torch' or impl='reference'" if option == "impl" else "backward='dense'"
    head_dim, longest = q.shape[-1], max(q.shape[-2], k.shape[-2])
    if q.dtype not in TRITON_DTYPES:
        msg = f"{wish} takes float16, bfloat16 or float32, got {q.dtype}. Pass {other}."
        return TypeError(msg)
    configs = configs_for(head_dim, q.dtype, q.device)
    if configs is None:
        return ValueError(
            f"`head_dim` must be at most {max_head_dim(q.dtype, q.device)} for {wish} with "
            f"{q.dtype} on this device, got {head_dim}. Pass {other}, or split the heads."
        )
    if longest > max_seqlen(configs):
        return ValueError(
            f"a sequence must have at most {max_seqlen(configs)} rows for {wish}, got {longest}. "
            f"Pass {other}."
        )
    failure = triton_failure(q.device)
    return None if failure is None else RuntimeError(f"{wish} {failure}")


def triton_failure(device: torch.device) -> str | None:
    """Return why Triton's kernels cannot run on a device, or None; found out once a process."""
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return (
            None  # a graph being captured cannot wait for a probe; a failure will speak for itself
        )
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

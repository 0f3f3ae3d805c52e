"""Which implementation a call would get, and why not another: answered without tensors or a GPU."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from flash_kernel.cache import Cache, check_cache
from flash_kernel.dispatch import (
    BACKWARDS,
    IMPLS,
    refuse_backward,
    refuse_impl,
    resolve,
)
from flash_kernel.packed import check_packed_qkv
from flash_kernel.request import Request
from flash_kernel.validation import check_options, check_qkv
from flash_kernel.variant import PLAIN, Modifiers, make_variant


class _Layout(NamedTuple):
    """What the function of a layout takes."""

    num_dims: int | None  # None: any from two on
    modifiers: tuple[str, ...]


LAYOUTS = {
    "dense": _Layout(None, Modifiers._fields),
    "packed": _Layout(3, ("alibi_slopes", "sinks")),
    "cache": _Layout(4, ("alibi_slopes", "sinks")),
}


@dataclass(frozen=True)
class Explanation:
    """The answer of `explain`.

    ``impl`` and ``backward`` are what runs, None if the call would raise, and ``backward`` is None
    for a cache, which has no gradients; ``refusals`` has the reason for each implementation, and
    each ``backward=`` of the chosen one, that would be refused.
    """

    impl: str | None
    backward: str | None
    refusals: dict[str, str]

    def __str__(self) -> str:
        """Return one line for the choice and one for each refusal."""
        chosen = f"runs impl={self.impl!r}"
        if self.backward is not None:
            chosen += f", backward={self.backward!r}"
        lines = ["would raise" if self.impl is None else chosen]
        lines += [f"  not {option}: {reason}" for option, reason in self.refusals.items()]
        return "\n".join(lines)


def explain(
    q_shape: Sequence[int],
    k_shape: Sequence[int],
    v_shape: Sequence[int] | None = None,
    *,
    layout: str = "dense",
    dtype: torch.dtype = torch.bfloat16,
    capability: int | None = 90,
    is_causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    softcap: float | None = None,
    modifiers: Sequence[str] = (),
    trained: Sequence[str] = (),
    return_lse: bool = False,
    impl: str = "auto",
    backward: str = "auto",
    deterministic: bool = True,
) -> Explanation:
    """Say what a described call would run, and why each other implementation would not.

    Args:
        q_shape: ``[..., H, M, D]``; packed, ``[total_q, H, D]``.
        k_shape: ``[..., H_kv, N, D]``; packed, ``[total_k, H_kv, D]``; of a cache, ``[B, H_kv,
            capacity, D]``, in pages or not.
        v_shape: That of k but for the last number, ``D_v``; that of k by default.
        layout: "dense" for a call of `flash_attention`, "packed" for `flash_attention_varlen`,
            "cache" for `flash_attention_with_kvcache`.
        dtype: Of q, k and v.
        capability: Compute capability of the NVIDIA GPU that is assumed, 90 for 9.0; None for a
            CPU.  Nothing is launched: whether Triton works on a machine is found out there.
        is_causal: As in `flash_attention`, like the following.
        window: ``(left, right)``.
        softcap: A number, or None.
        modifiers: Names of those that are passed: "alibi_slopes", "bias", "mask", "sinks".
        trained: Names of those that require a gradient.
        return_lse: Whether lse is asked for.
        impl: A name, or "auto".
        backward: A name, or "auto".
        deterministic: As in `flash_attention`.

    Raises:
        TypeError: A dtype that is unsupported, or a capability that is no integer.
        ValueError: A name that does not exist, or that the function of this layout does not take;
            shapes that the function would refuse.
    """
    v_shape = k_shape if v_shape is None else v_shape
    _check_layout(layout, q_shape, k_shape)
    _check_shapes(layout, (q_shape, k_shape, v_shape), dtype)
    _check_modifiers(layout, (*modifiers, *trained))
    if layout == "cache" and (trained or backward != "auto"):
        msg = "flash_attention_with_kvcache has no gradients: leave out `trained` and `backward`."
        raise ValueError(msg)
    check_options(is_causal=is_causal, window=window, softcap=softcap, deterministic=deterministic)
    if capability is not None and not isinstance(capability, int):
        msg = f"`capability` must be an integer, 90 for 9.0, or None for a CPU, got {capability!r}."
        raise TypeError(msg)
    is_cpu = capability is None
    rows, heads = (0, 1) if layout == "packed" else (-2, -3)
    has_heads = layout != "dense" or len(q_shape) >= 4
    request = Request(
        device=torch.device("cpu" if is_cpu else "cuda"),
        capability=capability or 0,
        dtype=dtype,
        seqlen_q=q_shape[rows],
        seqlen_k=k_shape[rows],
        head_dim=q_shape[-1],
        head_dim_v=v_shape[-1],
        group=q_shape[heads] // max(1, k_shape[heads]) if has_heads else 1,
        variant=make_variant(
            q_shape[-1], is_causal=is_causal, scale=None, window=window, softcap=softcap
        ),
        modifiers=frozenset(modifiers) | frozenset(trained),
        trained=frozenset(trained),
        return_lse=return_lse,
        is_deterministic=deterministic,
        layout=layout,
        is_assumed=not is_cpu,
    )
    return _explain_request(request, impl, backward)


def _check_layout(layout: str, *shapes: Sequence[int]) -> None:
    if layout not in LAYOUTS:
        msg = f"`layout` must be one of {', '.join(map(repr, LAYOUTS))}, got {layout!r}."
        raise ValueError(msg)
    num_dims = LAYOUTS[layout].num_dims
    if num_dims is not None and any(len(shape) != num_dims for shape in shapes):
        got = " and ".join(str(list(shape)) for shape in shapes)
        msg = f"shapes must have {num_dims} dimensions with layout={layout!r}, got {got}."
        raise ValueError(msg)


def _check_shapes(layout: str, shapes: Sequence[Sequence[int]], dtype: torch.dtype) -> None:
    """Raise what the function of a layout would raise for tensors of these shapes."""
    q, k, v = (torch.empty(tuple(shape), dtype=dtype, device="meta") for shape in shapes)
    if layout == "dense":
        check_qkv(q, k, v)
    elif layout == "packed":
        check_packed_qkv(q, k, v)
    else:
        lengths = torch.empty(q.shape[0], dtype=torch.int32, device="meta")
        check_cache(q, Cache(k, v, lengths, None), None, None, PLAIN)


def _check_modifiers(layout: str, names: Sequence[str]) -> None:
    known = LAYOUTS[layout].modifiers
    for name in names:
        if name not in known:
            msg = (
                f"`modifiers` and `trained` must be names among {', '.join(map(repr, known))} with "
                f"layout={layout!r}, got {name!r}."
            )
            raise ValueError(msg)


def _explain_request(request: Request, impl: str, backward: str) -> Explanation:
    """Return what runs for a request, and the reason for each wish that would be refused."""
    try:
        plan = resolve(request, impl=impl, backward=backward)
    except (RuntimeError, TypeError, ValueError) as error:
        if impl not in IMPLS or backward not in BACKWARDS:
            raise
        return Explanation(None, None, {f"impl={impl!r}, backward={backward!r}": str(error)})
    refusals = {}
    for name in IMPLS[1:]:
        refusal = refuse_impl(request, name)
        if refusal is not None:
            refusals[f"impl={name!r}"] = str(refusal)
    if request.layout == "cache":
        return Explanation(plan.impl, None, refusals)
    for name in BACKWARDS[1:]:
        refusal = refuse_backward(request, plan.impl, name)
        if refusal is not None:
            refusals[f"backward={name!r}"] = str(refusal)
    return Explanation(plan.impl, plan.backward, refusals)

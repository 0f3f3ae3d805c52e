"""Which implementation a call would get, and why not another: answered without tensors or a GPU."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from flash_kernel.dispatch import (
    BACKWARDS,
    IMPLS,
    refuse_backward,
    refuse_impl,
    resolve,
)
from flash_kernel.request import Request
from flash_kernel.validation import check_options
from flash_kernel.variant import Modifiers, make_variant


@dataclass(frozen=True)
class Explanation:
    """The answer of `explain`.

    ``impl`` and ``backward`` are what runs, None if the call would raise; ``refusals`` has the
    reason for each implementation, and each ``backward=`` of the chosen one, that would be refused.
    """

    impl: str | None
    backward: str | None
    refusals: dict[str, str]

    def __str__(self) -> str:
        """Return one line for the choice and one for each refusal."""
        chosen = f"runs impl={self.impl!r}, backward={self.backward!r}"
        lines = ["would raise" if self.impl is None else chosen]
        lines += [f"  not {option}: {reason}" for option, reason in self.refusals.items()]
        return "\n".join(lines)


def explain(
    q_shape: Sequence[int],
    k_shape: Sequence[int],
    v_shape: Sequence[int] | None = None,
    *,
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
    """Say what `flash_attention` would run for a described call, and why each other would not.

    Args:
        q_shape: ``[..., H, M, D]``.
        k_shape: ``[..., H_kv, N, D]``.
        v_shape: ``[..., H_kv, N, D_v]``; that of k by default.
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
        ValueError: A name that does not exist.
    """
    for name in (*modifiers, *trained):
        if name not in Modifiers._fields:
            known = ", ".join(map(repr, Modifiers._fields))
            msg = f"`modifiers` and `trained` must be names among {known}, got {name!r}."
            raise ValueError(msg)
    check_options(is_causal=is_causal, window=window, softcap=softcap, deterministic=deterministic)
    is_cpu = capability is None
    request = Request(
        device=torch.device("cpu" if is_cpu else "cuda"),
        capability=capability or 0,
        dtype=dtype,
        seqlen_q=q_shape[-2],
        seqlen_k=k_shape[-2],
        head_dim=q_shape[-1],
        head_dim_v=(v_shape or k_shape)[-1],
        group=q_shape[-3] // k_shape[-3] if len(q_shape) >= 4 else 1,
        variant=make_variant(
            q_shape[-1], is_causal=is_causal, scale=None, window=window, softcap=softcap
        ),
        modifiers=frozenset(modifiers) | frozenset(trained),
        trained=frozenset(trained),
        return_lse=return_lse,
        is_deterministic=deterministic,
        is_assumed=not is_cpu,
    )
    try:
        plan = resolve(request, impl=impl, backward=backward)
    except (RuntimeError, TypeError) as error:
        return Explanation(None, None, {f"impl={impl!r}, backward={backward!r}": str(error)})
    except ValueError as error:
        if impl not in IMPLS or backward not in BACKWARDS:
            raise
        return Explanation(None, None, {f"impl={impl!r}, backward={backward!r}": str(error)})
    refusals = {}
    for name in IMPLS[1:]:
        refusal = refuse_impl(request, name)
        if refusal is not None:
            refusals[f"impl={name!r}"] = str(refusal)
    for name in BACKWARDS[1:]:
        refusal = refuse_backward(request, plan.impl, name)
        if refusal is not None:
            refusals[f"backward={name!r}"] = str(refusal)
    return Explanation(plan.impl, plan.backward, refusals)

"""The public function: check, resolve, carry out."""

from typing import Any, Literal, overload

import torch
from torch import Tensor

from flash_kernel.autocast import autocast, is_autocast
from flash_kernel.autograd import attend
from flash_kernel.calls import Call, wants_gradients
from flash_kernel.dispatch import TRITON_DTYPES, checked_call, checked_request, first_plan
from flash_kernel.request import Options
from flash_kernel.variant import Modifiers


@overload
def flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    window: tuple[int | None, int | None] | None = None,
    softcap: float | None = None,
    bias: Tensor | None = None,
    mask: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    return_lse: Literal[False] = False,
    impl: str = "auto",
    backward: str = "auto",
    deterministic: bool = True,
) -> Tensor: ...
@overload
def flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    window: tuple[int | None, int | None] | None = None,
    softcap: float | None = None,
    bias: Tensor | None = None,
    mask: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    return_lse: Literal[True],
    impl: str = "auto",
    backward: str = "auto",
    deterministic: bool = True,
) -> tuple[Tensor, Tensor]: ...
def flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    window: tuple[int | None, int | None] | None = None,
    softcap: float | None = None,
    bias: Tensor | None = None,
    mask: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    return_lse: bool = False,
    impl: str = "auto",
    backward: str = "auto",
    deterministic: bool = True,
) -> Tensor | tuple[Tensor, Tensor]:
    """Return ``softmax(scores) v`` without storing the scores ``scale * q k^T``.

    Scores are scaled, soft-capped, then ALiBi and ``bias`` are added, then hidden ones masked.

    Args:
        q: Queries ``[..., H, M, D]``, any strides, float16, bfloat16, float32 or float64.  With
            fewer than four dimensions there are no heads, ``[..., M, D]``.
        k: Keys ``[..., H_kv, N, D]``, same dtype and device; ``H_kv`` divides ``H``, and each key
            head serves ``H / H_kv`` query heads in a row.
        v: Values ``[..., H_kv, N, D_v]``.
        is_causal: Row i sees keys ``j <= i + N - M``: the mask is aligned to the bottom right.
        scale: Factor of the scores, ``D ** -0.5`` by default.
        window: ``(left, right)``: row i sees the keys from ``i + N - M - left`` to
            ``i + N - M + right``.  None for a side is unbounded.
        softcap: Scores become ``softcap * tanh(scores / softcap)``.
        bias: Added to the scores; broadcasts to ``[..., M, N]``.  -inf hides a pair.
        mask: Boolean, True where a row may attend; broadcasts to ``[..., M, N]``.
        alibi_slopes: ``[H]`` or ``[B, H]``; adds ``-slope * |i + N - M - j|``.
        sinks: ``[H]``; one more score in each row's denominator, without a value; learnable.
        return_lse: Also return the log-sum-exp of each row's scores.
        impl: "auto", "hopper" (kernels for compute capability 9.0), "triton" (the portable
            kernels), "torch" (torch's own attention), "mock" (the readable twin) or "reference"
            (dense).  "auto" takes the first that has what is asked for on a GPU, torch elsewhere.
        backward: "auto", "hopper" or "triton" (memory-linear), "compiled" (dense, under
            torch.compile) or "dense" (the same formulas, not compiled).  "auto" takes the one that
            belongs to the implementation.
        deterministic: Gradients are bitwise repeatable, as the output always is.  False lets a
            backward add them in whatever order is fastest (so far that of "hopper", and dq), unless
            ``torch.use_deterministic_algorithms`` is on.

    Returns:
        ``o [..., M, D_v]`` in the dtype of ``q``; with ``return_lse`` also ``lse [..., M]``, the
        natural logarithm of each row's denominator, float32 (float64 for float64 inputs).  A row
        that sees no key has ``o = 0``, and without a sink ``lse = -inf``.  Both are differentiable
        once.

    Raises:
        TypeError: Not a tensor, or a dtype that is unsupported or not shared.
        ValueError: Shapes or devices that do not fit, or an option that does not exist or that the
            shapes rule out.
        RuntimeError: An implementation asked for by name cannot run on this device.

    Under autocast, q, k and v are converted to its dtype, as for torch's own attention.

    FlashAttention-2 (Dao, 2023, arXiv 2307.08691).
    """
    modifiers = Modifiers(alibi_slopes, bias, mask, sinks)
    if deterministic is False:
        deterministic = torch.are_deterministic_algorithms_enabled()
    # as in `Options`
    options = (is_causal, scale, window, softcap, return_lse, impl, backward, deterministic)
    if is_autocast(q):
        q, k, v = (autocast(x, q.device.type) for x in (q, k, v))
        with torch.autocast(q.device.type, enabled=False):
            o, lse = _dispatched(q, k, v, modifiers, options)
    else:
        o, lse = _dispatched(q, k, v, modifiers, options)
    return o if lse is None or not return_lse else (o, lse)


def _dispatched(
    q: Tensor, k: Tensor, v: Tensor, modifiers: Modifiers, options: tuple[Any, ...]
) -> tuple[Tensor, Tensor | None]:
    """Return o and lse from whichever implementation the call gets."""
    if torch.compiler.is_compiling():
        return _traced(q, k, v, modifiers, Options(*options))
    return attend(checked_call(q, k, v, modifiers, options), q, k, v, modifiers)


def _traced(
    q: Tensor, k: Tensor, v: Tensor, modifiers: Modifiers, options: Options
) -> tuple[Tensor, Tensor | None]:
    """Return o and lse inside ``torch.compile``: our operator, or what torch can trace itself."""
    request = checked_request(q, k, v, modifiers, options)
    impl, backward = options.impl, options.backward
    width = max(request.head_dim, request.head_dim_v)
    for_triton = q.is_cuda and q.dtype in TRITON_DTYPES and width <= 256
    # the operator has no gradient of slopes: what has one, torch traces
    trains_slopes = "alibi_slopes" in request.trained
    is_default = impl == "auto" and not for_triton and backward == "auto"
    if is_default or impl == "torch" or trains_slopes:
        candidates = ("torch", "reference") if impl == "auto" else (impl,)
        plan = first_plan(request, candidates, backward)
        records = wants_gradients((q, k, v, *modifiers))
        return attend(Call(plan, request.variant, records=records), q, k, v, modifiers)
    from flash_kernel.ops import forward_op

    o, lse = forward_op(
        q, k, v, *modifiers, *request.variant, impl, backward, options.deterministic
    )
    return o, lse

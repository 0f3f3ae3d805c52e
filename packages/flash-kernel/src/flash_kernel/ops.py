"""The same forward and backward as ``torch.library`` operators: what ``torch.compile`` sees.

Eager calls go through `autograd.PlannedAttention`, which costs less; a compiled graph holds
``flash_kernel::forward`` and ``flash_kernel::backward`` as opaque nodes whose shapes and dtypes the
fakes below declare.  Which implementation runs is decided inside the operator, at run time, so that
nothing of the decision is traced.
"""

from typing import Any

import torch
from torch import Tensor

from flash_kernel.autograd import run_backward, run_forward
from flash_kernel.calls import Call, kind_of, known_call
from flash_kernel.dispatch import describe, resolve
from flash_kernel.request import Plan
from flash_kernel.second_order import refuse_second_order
from flash_kernel.variant import Modifiers, Variant


def laid_out_like(promised: Tensor, result: Tensor) -> Tensor:
    """Give a result the strides that the fakes promise; the kernels' results have them already."""
    return result if result.stride() == promised.stride() else promised.copy_(result)


def without_autograd(plan: Plan) -> Plan:
    """Let the dense formulas stand in for autograd, which sees nothing inside an operator."""
    return plan._replace(backward="dense") if plan.backward == "autograd" else plan


def empty_output(q: Tensor, v: Tensor) -> Tensor:
    """Return an ``o`` with the layout of q, or contiguous where v is of another width."""
    if v.shape[-1] == q.shape[-1]:
        return torch.empty_like(q)
    return q.new_empty((*q.shape[:-1], v.shape[-1]))


def _operator_call(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    modifiers: Modifiers,
    variant: Variant,
    options: tuple[str, str, bool],
    *,
    trains_bias: bool = False,
) -> Call:
    """Return what is decided for an operator's inputs; see `calls`."""

    def decide() -> Call:
        impl, backward, is_deterministic = options
        request = describe(
            q, k, v, variant, modifiers, return_lse=True, is_deterministic=is_deterministic
        )
        if trains_bias:
            request = request._replace(trained=frozenset({"bias"}))
        return Call(without_autograd(resolve(request, impl=impl, backward=backward)), variant)

    wishes = (*variant, *options, trains_bias)
    return known_call(kind_of("operator", (q, k, v, *modifiers), wishes), decide)


@torch.library.custom_op("flash_kernel::forward", mutates_args=())
def forward_op(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    alibi_slopes: Tensor | None,
    bias: Tensor | None,
    mask: Tensor | None,
    sinks: Tensor | None,
    scale: float,
    left: int | None,
    right: int | None,
    softcap: float | None,
    impl: str,
    backward: str,
    deterministic: bool,
) -> tuple[Tensor, Tensor]:
    """Return ``o [..., M, D_v]`` and ``lse [..., M]``."""
    modifiers = Modifiers(alibi_slopes, bias, mask, sinks)
    variant = Variant(scale, left, right, softcap)
    call = _operator_call(q, k, v, modifiers, variant, (impl, backward, deterministic))
    o, lse = run_forward(call, q, k, v, modifiers)
    return laid_out_like(empty_output(q, v), o), lse.contiguous()


@forward_op.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    alibi_slopes: Tensor | None,
    bias: Tensor | None,
    mask: Tensor | None,
    sinks: Tensor | None,
    scale: float,
    left: int | None,
    right: int | None,
    softcap: float | None,
    impl: str,
    backward: str,
    deterministic: bool,
) -> tuple[Tensor, Tensor]:
    lse_dtype = torch.promote_types(q.dtype, torch.float32)
    return empty_output(q, v), q.new_empty(q.shape[:-1], dtype=lse_dtype)


@torch.library.custom_op("flash_kernel::backward", mutates_args=())
def backward_op(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    alibi_slopes: Tensor | None,
    bias: Tensor | None,
    mask: Tensor | None,
    sinks: Tensor | None,
    o: Tensor,
    lse: Tensor,
    do: Tensor,
    dlse: Tensor | None,
    scale: float,
    left: int | None,
    right: int | None,
    softcap: float | None,
    impl: str,
    backward: str,
    deterministic: bool,
    trains_bias: bool,
) -> list[Tensor]:
    """Return ``dq, dk, dv``, and then the gradients of a bias and of sinks, if there are any."""
    modifiers = Modifiers(alibi_slopes, bias, mask, sinks)
    variant = Variant(scale, left, right, softcap)
    options = (impl, backward, deterministic)
    call = _operator_call(q, k, v, modifiers, variant, options, trains_bias=trains_bias)
    gradients = run_backward(call, q, k, v, o, lse, do, dlse, modifiers)
    promised = [torch.empty_like(x) for x in (q, k, v)]
    results = [laid_out_like(x, dx) for x, dx in zip(promised, gradients[:3], strict=True)]
    if bias is not None and trains_bias and gradients.dbias is not None:
        results.append(laid_out_like(torch.empty_like(bias), gradients.dbias.to(bias.dtype)))
    if sinks is not None and gradients.dsinks is not None:
        results.append(gradients.dsinks.to(sinks.dtype))
    return results


@backward_op.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    alibi_slopes: Tensor | None,
    bias: Tensor | None,
    mask: Tensor | None,
    sinks: Tensor | None,
    o: Tensor,
    lse: Tensor,
    do: Tensor,
    dlse: Tensor | None,
    scale: float,
    left: int | None,
    right: int | None,
    softcap: float | None,
    impl: str,
    backward: str,
    deterministic: bool,
    trains_bias: bool,
) -> list[Tensor]:
    results = [torch.empty_like(x) for x in (q, k, v)]
    if bias is not None and trains_bias:
        results.append(torch.empty_like(bias))
    if sinks is not None:
        results.append(torch.empty_like(sinks))
    return results


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    tensors, ctx.options = inputs[:7], inputs[7:]
    ctx.save_for_backward(*tensors, *output)
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, do: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
    refuse_second_order()
    *tensors, o, lse = ctx.saved_tensors
    do = torch.zeros_like(o) if do is None else do
    trains_bias = ctx.needs_input_grad[4]
    dq, dk, dv, *rest = backward_op(*tensors, o, lse, do, dlse, *ctx.options, trains_bias)
    dbias = rest.pop(0) if trains_bias else None
    dsinks = rest.pop(0) if tensors[6] is not None else None
    return dq, dk, dv, None, dbias, None, dsinks, *[None] * len(ctx.options)


forward_op.register_autograd(_backward, setup_context=_setup_context)

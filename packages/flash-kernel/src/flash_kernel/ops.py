"""The same forward and backward as ``torch.library`` operators: what ``torch.compile`` sees.

Eager calls go through `autograd.FlashAttention`, which costs less; a compiled graph holds
``flash_kernel::forward`` and ``flash_kernel::backward`` as opaque nodes whose shapes and dtypes the
fakes below declare.  Which implementation runs is decided inside the operator, at run time, so that
nothing of the decision is traced.
"""

from typing import Any

import torch
from torch import Tensor

from flash_kernel.autograd import run_backward, run_forward
from flash_kernel.dispatch import resolve


def _laid_out_like(x: Tensor, result: Tensor) -> Tensor:
    """Give a result the strides that the fakes promise; the kernels' results have them already."""
    promised = torch.empty_like(x)
    return result if result.stride() == promised.stride() else promised.copy_(result)


@torch.library.custom_op("flash_kernel::forward", mutates_args=())
def forward_op(
    q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float, impl: str, backward: str
) -> tuple[Tensor, Tensor]:
    """Return ``o [..., M, D]`` and ``lse [..., M]``."""
    plan = resolve(q, k, return_lse=True, impl=impl, backward=backward)
    o, lse = run_forward(plan.impl, q, k, v, is_causal=is_causal, scale=scale)
    return _laid_out_like(q, o), lse.contiguous()


@forward_op.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float, impl: str, backward: str
) -> tuple[Tensor, Tensor]:
    lse_dtype = torch.promote_types(q.dtype, torch.float32)
    return torch.empty_like(q), q.new_empty(q.shape[:-1], dtype=lse_dtype)


@torch.library.custom_op("flash_kernel::backward", mutates_args=())
def backward_op(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    do: Tensor,
    dlse: Tensor | None,
    is_causal: bool,
    scale: float,
    impl: str,
    backward: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return ``dq, dk, dv``, shaped like ``q, k, v``."""
    plan = resolve(q, k, return_lse=True, impl=impl, backward=backward)
    # inside an operator torch cannot differentiate for us: the dense formulas stand in
    chosen = "dense" if plan.backward == "autograd" else plan.backward
    gradients = run_backward(chosen, q, k, v, o, lse, do, dlse, is_causal=is_causal, scale=scale)
    dq, dk, dv = (_laid_out_like(x, dx) for x, dx in zip((q, k, v), gradients, strict=True))
    return dq, dk, dv


@backward_op.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    do: Tensor,
    dlse: Tensor | None,
    is_causal: bool,
    scale: float,
    impl: str,
    backward: str,
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, *ctx.options = inputs
    ctx.save_for_backward(q, k, v, *output)
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, do: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
    q, k, v, o, lse = ctx.saved_tensors
    do = torch.zeros_like(o) if do is None else do
    return *backward_op(q, k, v, o, lse, do, dlse, *ctx.options), None, None, None, None


forward_op.register_autograd(_backward, setup_context=_setup_context)

"""The truth under masks and head counts that `flash_kernel.testing.expect` does not know."""

from typing import NamedTuple

import torch
from torch import Tensor

from attn_bench.mask import dense_attention
from flash_kernel.testing import AttentionErrors, Expectation, TensorError

# roundings of the largest result that are allowed on top of twice the dense baseline's error
FLOOR_UNITS = 4.0


class Tensors(NamedTuple):
    """An output and the gradients of q, k and v, None of a provider without a backward."""

    o: Tensor
    dq: Tensor | None
    dk: Tensor | None
    dv: Tensor | None


def error_of(tensor: Tensor, truth: Tensor) -> TensorError:
    """Return the largest and mean absolute error; inf for a wrong shape or a value that is nan."""
    if tensor.shape != truth.shape:
        return TensorError(float("inf"), float("inf"))
    error = (tensor.double() - truth).abs().nan_to_num(nan=float("inf"))
    return TensorError(error.max().item(), error.mean().item())


def expect_masked(q: Tensor, k: Tensor, v: Tensor, do: Tensor, seen: Tensor) -> Expectation:
    """Return the truth and the bounds under any mask, and with heads of k and v that are shared.

    The same rule as `flash_kernel.testing.expect`, with `FLOOR_UNITS` roundings of the largest
    result in place of its closer estimate of the noise.

    Args:
        q: ``[heads, groups, M, D]``, or without groups.
        k: ``[heads, N, D]``.
        v: As k.
        do: As q.
        seen: ``[M, N]``, True where a query sees a key.
    """
    truth = _dense_results(q.double(), k.double(), v.double(), do.double(), seen)
    baseline = _dense_results(q, k, v, do, seen)
    unit = torch.finfo(q.dtype).eps / 2
    bounds = {}
    for name, result in truth.items():
        error, size = error_of(baseline[name], result), result.abs()
        floor = FLOOR_UNITS * unit
        bounds[name] = TensorError(
            2 * error.max + floor * size.max().item(), 2 * error.mean + floor * size.mean().item()
        )
    return Expectation(q, k, v, do, None, truth, AttentionErrors(lse=None, **bounds))


def _dense_results(q: Tensor, k: Tensor, v: Tensor, do: Tensor, seen: Tensor) -> dict[str, Tensor]:
    """Return o, dq, dk, dv; one head at a time, so that one score matrix is held at a time."""
    heads = []
    for leaves in zip(q, k, v, do, strict=True):
        one_q, one_k, one_v = (x.detach()[None].requires_grad_() for x in leaves[:3])
        grouped = one_q if one_q.dim() == 3 else one_q[0]
        o = dense_attention(grouped, one_k, one_v, seen).reshape(one_q.shape)
        gradients = torch.autograd.grad(o, (one_q, one_k, one_v), leaves[3][None])
        heads.append((o.detach(), *gradients))
    columns = (torch.cat(column) for column in zip(*heads, strict=True))
    return dict(zip(Tensors._fields, columns, strict=True))

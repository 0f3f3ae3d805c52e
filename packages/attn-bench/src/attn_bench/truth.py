"""The truth under masks and head counts that `flash_kernel.testing.expect` does not know."""

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from attn_bench.mask import dense_attention
from flash_kernel.testing import AttentionErrors, Expectation, TensorError

# roundings of the largest result that are allowed on top of twice the dense baseline's error
FLOOR_UNITS = 4.0
# how far the largest of many errors exceeds their usual size
LARGEST = 4.0


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


def with_sums_in_order(expectation: Expectation, seen: Tensor) -> Expectation:
    """Return the expectation with room for o and dq that are summed one key after the other.

    Of a few rows over many keys a library makes several partial sums, which hides what it costs to
    add N terms in order, as every implementation does for all rows: N roundings of the size that
    the sum has so far, a random walk of sqrt(N / 2) roundings of the root of the squared terms.

    Args:
        expectation: Of ``[heads, M, D]`` or ``[heads, groups, M, D]`` over few heads.
        seen: ``[M, N]``, True where a query sees a key.
    """
    q, k, v, do = (getattr(expectation, name).double() for name in ("q", "k", "v", "do"))
    if q.dim() > k.dim():
        k, v = k[:, None], v[:, None]
    scale = q.shape[-1] ** -0.5
    p = torch.softmax((q @ k.mT * scale).masked_fill(~seen, float("-inf")), dim=-1)
    p = p.nan_to_num()  # of a row that sees no key
    dp = do @ v.mT
    ds = scale * p * (dp - (p * dp).sum(-1, keepdim=True))
    walk = torch.finfo(torch.float32).eps / 2 * (k.shape[-2] / 2) ** 0.5
    bounds = dict(expectation.bounds.items())
    for name, terms, factors in (("o", p, v), ("dq", ds, k)):
        noise = walk * (terms**2 @ factors**2).sqrt()
        old = bounds[name]
        bounds[name] = TensorError(
            old.max + LARGEST * noise.max().item(), old.mean + noise.mean().item()
        )
    return replace(expectation, bounds=replace(expectation.bounds, **bounds))


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

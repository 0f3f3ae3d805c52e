"""How far from float64 an implementation of attention may be: the machinery of `testing`.

docs/numerics.md says why the rule is what it is.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from flash_kernel.reference import (
    attention_reference,
    bias_scores,
    cap_scores,
    hidden_pairs,
    repeat_heads,
    sum_groups,
)
from flash_kernel.variant import PLAIN, Modifiers, Variant, make_variant

AttentionImpl = Callable[[Tensor, Tensor, Tensor], Tensor | tuple[Tensor, Tensor]]

# Entries of one score matrix that the dense float64 reference may hold at a time: 512 MiB of them
_DENSE_SCORES = 2**26

# The floor of the bound: what a result may be off however well the dense baseline happens to do.
# Roundings of the result; roundings that each float32 sum, exp and log gathers; and how far the
# largest of many errors exceeds the root of a sum of squares that `_rounding_noise` estimates.
_RESULT_UNITS = 2.0
_STATE_UNITS = 4.0
_NOISE_FACTOR = 4.0

_GRADIENTS = ("dq", "dk", "dv")


@dataclass(frozen=True)
class TensorError:
    """Largest and mean absolute error of one tensor; inf if it is not finite where it should be."""

    max: float
    mean: float

    def within(self, bound: "TensorError") -> bool:
        """Whether neither the largest nor the mean error exceeds its bound."""
        return self.max <= bound.max and self.mean <= bound.mean


@dataclass(frozen=True)
class AttentionErrors:
    """Errors of an implementation, or the bounds on them; ``lse`` is None if it returns none."""

    o: TensorError
    lse: TensorError | None
    dq: TensorError
    dk: TensorError
    dv: TensorError

    def items(self) -> list[tuple[str, TensorError]]:
        """Name and error of each tensor that was measured, outputs first."""
        return [(name, error) for name, error in vars(self).items() if error is not None]


@dataclass(frozen=True)
class Expectation:
    """What float64 says of one input, and how far from it an implementation may be.

    Build it by `expect` to judge several implementations on the same input.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    do: Tensor
    dlse: Tensor | None
    results: dict[str, Tensor]  # o, lse, dq, dk, dv in float64
    bounds: AttentionErrors

    def errors_of(self, fn: AttentionImpl) -> AttentionErrors:
        """Run ``fn`` forward and backward and return its errors."""
        results = _outputs_and_gradients(fn, self.q, self.k, self.v, self.do, self.dlse)
        errors = {
            name: _measured(_absolute_error(result, self.results[name]))
            for name, result in results.items()
        }
        return AttentionErrors(errors["o"], errors.get("lse"), *(errors[x] for x in _GRADIENTS))

    def violations(self, errors: AttentionErrors) -> list[str]:
        """One line for each tensor whose error exceeds its bound."""
        bounds = dict(self.bounds.items())
        return [
            f"`{name}`: error max {error.max:.3g}, mean {error.mean:.3g}; "
            f"bound max {bounds[name].max:.3g}, mean {bounds[name].mean:.3g}"
            for name, error in errors.items()
            if not error.within(bounds[name])
        ]


def expect(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    do: Tensor | None = None,
    *,
    dlse: Tensor | None = None,
    is_causal: bool,
    scale: float | None = None,
    window: tuple[int | None, int | None] | None = None,
    softcap: float | None = None,
    modifiers: Modifiers = PLAIN,
) -> Expectation:
    """Compute the float64 results and the bounds, on the device of ``q``.

    Without modifiers and shared heads a few heads at a time, so that length is no obstacle.
    """
    if do is None:
        generator = torch.Generator().manual_seed(1)
        o_shape = (*q.shape[:-1], v.shape[-1])
        do = torch.randn(o_shape, generator=generator).to(device=q.device, dtype=q.dtype)
    state_dtype = torch.promote_types(q.dtype, torch.float32)
    no_dlse = torch.zeros(q.shape[:-1], dtype=state_dtype, device=q.device)
    inputs = [x.detach() for x in (q, k, v, do, no_dlse if dlse is None else dlse)]
    double = [x.double() for x in inputs]

    variant = make_variant(
        q.shape[-1], is_causal=is_causal, scale=scale, window=window, softcap=softcap
    )
    dense = partial(
        attention_reference,
        is_causal=is_causal,
        scale=scale,
        window=window,
        softcap=softcap,
        **modifiers._asdict(),
    )
    run = partial(_outputs_and_gradients, dense)
    rounded = partial(_rounding_noise, variant=variant, modifiers=modifiers, dtype=q.dtype)
    is_split = not modifiers.tensors and q.shape[:-2] == k.shape[:-2]
    apply = _per_head if is_split else _at_once
    results, baseline = apply(run, *double), apply(run, *inputs)
    noise = apply(rounded, *double, results["lse"])
    bounds = {name: _bound(baseline[name], results[name], noise[name]) for name in results}
    return Expectation(q, k, v, do, dlse, results, AttentionErrors(**bounds))


def _outputs_and_gradients(
    fn: AttentionImpl, q: Tensor, k: Tensor, v: Tensor, do: Tensor, dlse: Tensor | None
) -> dict[str, Tensor]:
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    returned = fn(*leaves)
    results = [returned] if isinstance(returned, Tensor) else list(returned)
    upstream = [do] if dlse is None else [do, dlse]
    if len(results) < len(upstream):
        raise ValueError("`dlse` needs an implementation that returns (o, lse), got only o.")
    _check_outputs(results, q, v)
    gradients = torch.autograd.grad(results[: len(upstream)], leaves, upstream)
    named = dict(zip(("o", "lse"), results, strict=False))
    named |= dict(zip(_GRADIENTS, gradients, strict=True))
    return {name: tensor.detach() for name, tensor in named.items()}


def _rounding_noise(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    do: Tensor,
    dlse: Tensor,
    lse: Tensor,
    *,
    variant: Variant,
    modifiers: Modifiers,
    dtype: torch.dtype,
) -> dict[str, Tensor]:
    """Expected error of each result if sums are kept in float32 and only o is stored in ``dtype``.

    Terms that are each off by ``unit`` make their sum off by ``unit`` times the root of the sum of
    their squares.  That of the scores makes ``p`` off by ``p * s``, that of o enters delta, and so
    on down to dq; to first order, and squared until the end (``s2`` is the squared error of ``s``).
    """
    state_unit = _STATE_UNITS * _unit(torch.promote_types(dtype, torch.float32))
    unit2, state_unit2 = _unit(dtype) ** 2, state_unit**2
    k_heads, (k, v) = k, (repeat_heads(k, q), repeat_heads(v, q))
    lse = lse.masked_fill(lse == -math.inf, math.inf)[..., None]  # [..., M, 1]; p of such rows is 0
    capped = cap_scores(q @ k.mT, variant)
    s = bias_scores(capped, variant, modifiers)
    p = torch.exp(s - lse)  # [..., M, N]
    hidden = hidden_pairs(s.shape[-2], s.shape[-1], variant, modifiers, s.device)
    if hidden is not None:
        p, s, capped = (x.masked_fill(hidden, 0.0) for x in (p, s, capped))
    dp = do @ v.mT
    dp_less_delta = dp - (p * dp).sum(-1, keepdim=True) + dlse[..., None]
    o_of_do = (do * (p @ v)).square().sum(-1)

    q2, k2, v2, do2 = q.square(), k.square(), v.square(), do.square()
    # of the products, and of the sums at the size they reach: scores are computed more than once,
    # in orders that differ, and lse, which is as large as they are, is rounded between
    t = torch.zeros_like(s) if variant.softcap is None else capped / variant.softcap
    slope2 = (1 - t**2) ** 2  # of tanh, which the products pass, and the gradients back
    products2 = slope2 * variant.scale**2 * (q2 @ k2.mT)
    s2 = state_unit2 * (products2 + capped.square() + (s - capped).square())
    p2 = p.square() * (state_unit2 + s2)
    o2 = p2 @ v2
    dp2 = state_unit2 * (do2 @ v2.mT)
    delta2 = (do2 * o2).sum(-1) + unit2 * o_of_do + state_unit2 * dlse.square()
    ds2 = p2 * dp_less_delta.square() + p.square() * (dp2 + delta2[..., None])
    if variant.softcap is not None:
        slope_error2 = state_unit2 + (2 * t / variant.softcap) ** 2 * s2
        ds2 = slope2 * ds2 + slope_error2 * (p * dp_less_delta).square()
    ds2 *= variant.scale**2
    lse2 = state_unit2 * lse.square().squeeze(-1) + (p.square() * s2).sum(-1)
    dk2, dv2 = (sum_groups(x, k_heads) for x in (ds2.mT @ q2, p2.mT @ do2))
    squares = {"o": o2, "lse": lse2, "dq": ds2 @ k2, "dk": dk2, "dv": dv2}
    return {name: square.sqrt() for name, square in squares.items()}


def _at_once(compute: Callable[..., dict[str, Tensor]], *inputs: Tensor) -> dict[str, Tensor]:
    return compute(*inputs)


def _per_head(compute: Callable[..., dict[str, Tensor]], *inputs: Tensor) -> dict[str, Tensor]:
    """Call ``compute`` on as many heads at a time as `_DENSE_SCORES` allows; join the results."""
    q, k, *_ = inputs
    leading = q.shape[:-2]
    num_heads = math.prod(leading)
    step = max(1, _DENSE_SCORES // max(1, q.shape[-2] * k.shape[-2]))
    flat = [x.reshape(num_heads, *x.shape[len(leading) :]) for x in inputs]
    parts = [
        compute(*(x[start : start + step] for x in flat))
        for start in range(0, max(1, num_heads), step)
    ]
    joined = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    return {name: x.reshape(*leading, *x.shape[1:]) for name, x in joined.items()}


def _check_outputs(results: list[Tensor], q: Tensor, v: Tensor) -> None:
    """A result of the wrong shape might broadcast, one of the wrong dtype look too accurate."""
    state_dtype = torch.promote_types(q.dtype, torch.float32)
    forms = {
        "o": (q.dtype, [*q.shape[:-1], v.shape[-1]]),
        "lse": (state_dtype, list(q.shape[:-1])),
    }
    for (name, (dtype, shape)), result in zip(forms.items(), results, strict=False):
        if (result.dtype, list(result.shape)) != (dtype, shape):
            msg = f"`{name}` must be {dtype} {shape}, got {result.dtype} {list(result.shape)}."
            raise AssertionError(msg)


def _absolute_error(result: Tensor, expected: Tensor) -> Tensor:
    """Error of each entry in float64; inf where only one of the two is finite."""
    result = result.double()
    same = (result == expected) | (result.isnan() & expected.isnan())
    error = (result - expected).abs().nan_to_num(nan=math.inf, posinf=math.inf)
    return error.masked_fill(same, 0.0)


def _measured(error: Tensor) -> TensorError:
    if error.numel() == 0:
        return TensorError(0.0, 0.0)
    return TensorError(error.max().item(), error.mean().item())


def _bound(baseline: Tensor, expected: Tensor, noise: Tensor) -> TensorError:
    dense, result, state = (
        _measured(x.where(x.isfinite(), 0.0))
        for x in (_absolute_error(baseline, expected), expected.abs(), noise)
    )

    def bound(of_dense: float, of_result: float, of_state: float) -> float:
        floor = _RESULT_UNITS * _unit(baseline.dtype) * of_result + _NOISE_FACTOR * of_state
        return 2 * of_dense + floor

    return TensorError(
        max=bound(dense.max, result.max, state.max),
        mean=bound(dense.mean, result.mean, state.mean),
    )


def _unit(dtype: torch.dtype) -> float:
    """Rounding unit: half the distance from 1 to the next number."""
    return torch.finfo(dtype).eps / 2

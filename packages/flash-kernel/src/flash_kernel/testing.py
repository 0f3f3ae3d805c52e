"""Inputs and the one tolerance rule shared by every test and benchmark of attention.

An implementation is ``fn(q, k, v) -> o`` or ``-> (o, lse)``; bind ``is_causal`` and the rest first:

    q, k, v = make_qkv(2, 4, 65, 65, 64, dtype=torch.float16)
    assert_matches_reference(partial(flash_attention, is_causal=True), q, k, v, is_causal=True)

Errors are absolute and measured against `attention_reference` in float64.
"""

from typing import Any

import torch
from torch import Tensor

from flash_kernel._tolerance import (
    AttentionErrors,
    AttentionImpl,
    Expectation,
    TensorError,
    expect,
)
from flash_kernel.variant import PLAIN, Modifiers

__all__ = [
    "AttentionErrors",
    "AttentionImpl",
    "Expectation",
    "TensorError",
    "assert_matches_reference",
    "expect",
    "make_qkv",
    "measure_errors",
]


def make_qkv(
    batch: int,
    num_heads: int | None,
    seqlen_q: int,
    seqlen_k: int,
    head_dim: int,
    *,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    seed: int = 0,
    requires_grad: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Draw standard normal ``q [B, H, M, D]`` and ``k, v [B, H, N, D]``; no H if None.

    Drawn on the CPU, so that a seed names the same numbers on every device.
    """
    generator = torch.Generator().manual_seed(seed)
    leading = (batch,) if num_heads is None else (batch, num_heads)

    def draw(seqlen: int) -> Tensor:
        values = torch.randn(*leading, seqlen, head_dim, generator=generator)
        return values.to(device=device, dtype=dtype).requires_grad_(requires_grad)

    return draw(seqlen_q), draw(seqlen_k), draw(seqlen_k)


def measure_errors(
    fn: AttentionImpl,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    do: Tensor | None = None,
    *,
    is_causal: bool,
    scale: float | None = None,
) -> AttentionErrors:
    """Return the errors of ``fn``, forward and backward, against float64."""
    return expect(q, k, v, do, is_causal=is_causal, scale=scale).errors_of(fn)


def assert_matches_reference(
    fn: AttentionImpl,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    is_causal: bool,
    scale: float | None = None,
    window: tuple[int | None, int | None] | None = None,
    softcap: float | None = None,
    modifiers: Modifiers = PLAIN,
    do: Tensor | None = None,
    dlse: Tensor | None = None,
) -> AttentionErrors:
    """Fail unless ``fn`` is as accurate as attention in this dtype can be expected to be.

    For each of o, lse (if returned), dq, dk and dv, the largest and the mean absolute error against
    float64 must be at most

        2 * (the same error of `attention_reference` in the dtype of q)
          + 2 * u * |result|    u: rounding unit of the tensor's dtype, 2^-8 for bfloat16
          + 4 * noise           what rounding a float32 state and the stored o must cost

    where ``|result|`` is the largest (mean) magnitude of the float64 tensor, and the noise stays
    above zero where a result cancels to nothing (with one key dq is 0, and the dense baseline may
    hit it exactly).  A value that is not finite where float64 is, or the reverse, has error
    inf.  Where the dense baseline itself overflows it earns no tolerance.

    Args:
        fn: ``fn(q, k, v) -> o`` or ``-> (o, lse)``; bind the same options as are given here.
        q: ``[..., H, M, D]``, on any device; ``k [..., H_kv, N, D]``, ``v [..., H_kv, N, D_v]``.
        k: See ``q``.
        v: See ``q``.
        is_causal: Bottom-right aligned causal mask.
        scale: ``D ** -0.5`` by default.
        window: As in `attention_reference`, like ``softcap``.
        softcap: See ``window``.
        modifiers: Bias, mask, ALiBi slopes and sinks; their gradients are not looked at.
        do: Gradient of o, standard normal by default.
        dlse: Gradient of lse, none by default.

    Returns:
        The errors of ``fn``.
    """
    options: Any = {
        "is_causal": is_causal,
        "scale": scale,
        "window": window,
        "softcap": softcap,
        "modifiers": modifiers,
    }
    expected = expect(q, k, v, do, dlse=dlse, **options)
    errors = expected.errors_of(fn)
    violations = expected.violations(errors)
    if violations:
        given = ", ".join(f"{name}={value}" for name, value in options.items())
        case = f"q {list(q.shape)}, k {list(k.shape)}, {q.dtype}, {given}"
        raise AssertionError("\n".join([f"attention is wrong for {case}:", *violations]))
    return errors

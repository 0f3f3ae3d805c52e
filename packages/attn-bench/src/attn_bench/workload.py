"""Inputs of a case, and what one timed run of it does."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from attn_bench.case import Case
from attn_bench.providers import Attention


class Inputs(NamedTuple):
    """Queries and the gradient of o ``[B, H, M, D]``, keys and values ``[B, H_kv, N, D]``."""

    q: Tensor
    k: Tensor
    v: Tensor
    do: Tensor


class Workload(NamedTuple):
    """A run in two halves: `prepare` is outside the clock, `run` takes its result inside."""

    prepare: Callable[[], Tensor | None]
    run: Callable[[Tensor | None], object]


def make_inputs(case: Case, device: torch.device, seed: int = 0) -> Inputs:
    """Return normal random inputs; q, k and v require gradients."""
    generator = torch.Generator(device).manual_seed(seed)

    def normal(heads: int, seqlen: int) -> Tensor:
        shape = (case.batch, heads, seqlen, case.head_dim)
        return torch.randn(shape, generator=generator, device=device).to(case.torch_dtype)

    q = normal(case.num_heads, case.seqlen_q).requires_grad_()
    k, v = (normal(case.kv_heads, case.seqlen_k).requires_grad_() for _ in "kv")
    return Inputs(q, k, v, normal(case.num_heads, case.seqlen_q))


def gradients(o: Tensor, inputs: Inputs) -> tuple[Tensor, Tensor, Tensor]:
    """Return (dq, dk, dv); nothing is added to ``.grad``, so no accumulation is timed."""
    dq, dk, dv = torch.autograd.grad(o, (inputs.q, inputs.k, inputs.v), inputs.do)
    return dq, dk, dv


def make_workload(mode: str, attention: Attention, inputs: Inputs) -> Workload:
    """Return what `mode` times: see `attn_bench.case.Case`."""

    def nothing() -> None:
        return None

    def forward(_: Tensor | None = None) -> Tensor:
        return attention(inputs.q, inputs.k, inputs.v)

    def inference(_: Tensor | None) -> Tensor:
        with torch.no_grad():
            return forward()

    def backward(o: Tensor | None) -> object:
        if o is None:
            raise TypeError("the backward needs the output of its forward")
        return gradients(o, inputs)

    # a fresh forward before every backward, so that no graph is retained and no buffer is reused
    return {
        "fwd": Workload(nothing, inference),
        "bwd": Workload(forward, backward),
        "fwd+bwd": Workload(nothing, lambda _: gradients(forward(), inputs)),
    }[mode]

"""What a call asks for and what it gets, as plain records."""

from typing import NamedTuple

import torch

from flash_kernel.variant import Variant


class Plan(NamedTuple):
    """What runs: an implementation, and how it is differentiated.

    ``backward`` is a member of `dispatch.BACKWARDS`, or "autograd" where torch differentiates the
    implementation itself, or "mock" for the mock's own.  What was asked for by name is never
    replaced by another, even if it turns out at the launch that it cannot be had.
    """

    impl: str
    backward: str
    is_deterministic: bool = True
    impl_is_named: bool = False
    backward_is_named: bool = False


class Request(NamedTuple):
    """What a choice depends on: plain data, no tensors."""

    device: torch.device
    capability: int  # 90 for an NVIDIA GPU of compute capability 9.0, 0 elsewhere
    dtype: torch.dtype
    seqlen_q: int
    seqlen_k: int
    head_dim: int
    head_dim_v: int
    group: int  # query heads that share a key head
    variant: Variant
    modifiers: frozenset[str]  # names of those there are
    trained: frozenset[str]  # names of those that want a gradient
    return_lse: bool
    layout: str = "dense"  # or "packed" sequences, or a "cache" of keys and values
    is_deterministic: bool = True
    is_assumed: bool = False  # the device is described, not there: whether it launches is not asked


class Options(NamedTuple):
    """The public options that are numbers or names."""

    is_causal: bool
    scale: float | None
    window: tuple[int | None, int | None] | None
    softcap: float | None
    return_lse: bool
    impl: str
    backward: str
    deterministic: bool = True

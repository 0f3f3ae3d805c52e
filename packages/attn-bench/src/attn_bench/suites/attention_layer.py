"""``attn-bench layer``: tiny-llm's readable attention with and without ``torch.compile``.

Known as ``bench_mark_atten`` in the project this one descends from, where the compiled rows held
the time of compiling.  Here the first call is a figure of its own.
"""

import torch
from torch import Tensor

from attn_bench.case import Case
from attn_bench.providers import Attention, Provider, why_no_compile
from attn_bench.suites.base import Suite
from tiny_llm.attention import ScaledDotProductAttention


def _build_eager(case: Case, _: torch.device) -> Attention:
    attention = ScaledDotProductAttention()

    def eager(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        o: Tensor = attention(q, k, v, is_causal=case.is_causal)
        return o

    return eager


def _build_compiled(case: Case, _: torch.device) -> Attention:
    attention = torch.compile(ScaledDotProductAttention(), dynamic=False)

    def compiled(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        o: Tensor = attention(q, k, v, is_causal=case.is_causal)
        return o

    return compiled


ATTENTION_LAYER = Suite(
    command="layer",
    name="attention_layer",
    summary="tiny-llm's ScaledDotProductAttention with and without torch.compile",
    providers={
        each.name: each
        for each in (
            Provider("layer-eager", "ScaledDotProductAttention as it is written", _build_eager),
            Provider(
                "layer-compiled",
                "ScaledDotProductAttention under torch.compile",
                _build_compiled,
                why_unavailable=why_no_compile,
                compiles=True,
            ),
        )
    },
    baselines=("layer-eager",),
)

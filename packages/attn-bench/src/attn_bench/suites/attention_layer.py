"""``attn-bench layer``: tiny-llm's readable attention with and without ``torch.compile``.

Known as ``bench_mark_atten`` in the project this one descends from, where the compiled rows held
the time of compiling.  Here the first call is a figure of its own.
"""

from attn_bench.providers import LAYER_PROVIDERS
from attn_bench.suites.base import Suite

ATTENTION_LAYER = Suite(
    command="layer",
    name="attention_layer",
    summary="tiny-llm's ScaledDotProductAttention with and without torch.compile",
    own_providers={each.name: each for each in LAYER_PROVIDERS},
    baselines=("layer-eager",),
)

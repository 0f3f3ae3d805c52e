"""``attn-bench flash``: the kernel against every other attention, the chapter's first benchmark.

Known as ``bench_mark_flash_attention`` in the project this one descends from, where a causal
kernel was compared with a baseline that had no mask.  Here the case holds the mask, and each
provider is checked against float64 under it before it is timed.
"""

from attn_bench.providers import FLASH_PROVIDERS
from attn_bench.suites.base import Suite

FLASH_ATTENTION = Suite(
    command="flash",
    name="flash_attention",
    summary="flash-kernel against torch's attentions, forward and backward",
    own_providers=FLASH_PROVIDERS,
    baselines=("sdpa-flash", "sdpa", "dense-eager"),
    takes_plugins=True,
)

"""``attn-bench decode``: one query per sequence over a cache; reading k and v is all there is.

The figure is GB/s, and its ceiling the copy of the same run.
"""

from attn_bench.grid import DECODE_PRESETS
from attn_bench.providers import DECODE_PROVIDERS
from attn_bench.suites.base import Suite

DECODE = Suite(
    command="decode",
    name="decode",
    summary="one query per sequence over the keys and values of a cache",
    own_providers=DECODE_PROVIDERS,
    baselines=("sdpa-flash", "sdpa", "dense-eager"),
    takes_plugins=True,
    presets=DECODE_PRESETS,
)

"""``attn-bench decode``: one query per sequence over a cache; reading k and v is all there is.

The figure is GB/s, and its ceiling the copy of the same run.  Nobody trains this way, so the output
alone is checked: a provider that cannot differentiate a single query may take part.
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
    checks_gradients=False,
    presets=DECODE_PRESETS,
)

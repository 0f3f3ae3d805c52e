"""The suites: which providers are compared, and against which baseline."""

from attn_bench.suites.attention_layer import ATTENTION_LAYER
from attn_bench.suites.base import Suite
from attn_bench.suites.decode import DECODE
from attn_bench.suites.flash_attention import FLASH_ATTENTION

SUITES = {suite.command: suite for suite in (FLASH_ATTENTION, ATTENTION_LAYER, DECODE)}

__all__ = ["ATTENTION_LAYER", "DECODE", "FLASH_ATTENTION", "SUITES", "Suite"]

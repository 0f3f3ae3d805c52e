"""FlashAttention in pure Python: torch and Triton, nothing to build.

    from flash_kernel import flash_attention
    o = flash_attention(q, k, v, is_causal=True)

Importing this package needs torch alone.  Triton is imported when a kernel is first launched, einx
when the mock is first used.
"""

from typing import TYPE_CHECKING, Any

from flash_kernel.api import flash_attention
from flash_kernel.explain import Explanation, explain
from flash_kernel.function import FlashAttention
from flash_kernel.kvcache import flash_attention_with_kvcache
from flash_kernel.merge import merge_attention
from flash_kernel.reference import attention_reference
from flash_kernel.varlen import flash_attention_varlen

if TYPE_CHECKING:
    from flash_kernel.mock import FlashAttentionMock

__version__ = "0.1.0"
__all__ = [
    "Explanation",
    "FlashAttention",
    "FlashAttentionMock",
    "attention_reference",
    "explain",
    "flash_attention",
    "flash_attention_varlen",
    "flash_attention_with_kvcache",
    "merge_attention",
]


def __getattr__(name: str) -> Any:
    if name == "FlashAttentionMock":
        from flash_kernel.mock import FlashAttentionMock

        return FlashAttentionMock
    msg = f"module {__name__!r} has no attribute {name!r}"
    raise AttributeError(msg)

"""One set of names for Gluon as Triton 3.6 to 3.9 spell it.

    what                  3.6                           3.8, 3.9 (3.7 as 3.6)
    load by TMA           async_copy_global_to_shared   async_load
    store by TMA          async_copy_shared_to_global   async_store
    expected bytes        mbarrier.expect(bytes=)       mbarrier.expect(bytes_per_cta=)

3.9 keeps the old names only to raise, so the new ones are tried first; the bytes are passed by
position.  Every name that a kernel of this folder takes from Gluon's Hopper modules is taken from
here, so that an import failure of this file is the failure of Gluon as a whole.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

__all__ = [
    "TensorDescriptor",
    "fence_async_shared",
    "gl",
    "gluon",
    "mbarrier",
    "tma_load",
    "tma_store",
    "tma_store_wait",
    "warpgroup_mma",
    "warpgroup_mma_wait",
]

tma_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
tma_store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
tma_store_wait = tma.store_wait

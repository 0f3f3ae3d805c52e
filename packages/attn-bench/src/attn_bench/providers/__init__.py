"""The attention implementations that can be measured: one table, no baseline typed twice."""

import torch

from attn_bench.case import check_name
from attn_bench.providers.base import Attention, Provider, why_no_compile
from attn_bench.providers.flash_kernel_attention import (
    CACHE_PROVIDERS,
    FLASH_KERNEL_PROVIDERS,
    MOCK_MAX_SEQLEN,
)
from attn_bench.providers.others import OTHER_PROVIDERS
from attn_bench.providers.torch_attention import DENSE_PROVIDERS, LAYER_PROVIDERS, SDPA_PROVIDERS

__all__ = [
    "DECODE_PROVIDERS",
    "FLASH_PROVIDERS",
    "LAYER_PROVIDERS",
    "MOCK_MAX_SEQLEN",
    "Attention",
    "Provider",
    "pick_providers",
    "why_no_compile",
]

# a table of no more providers than this is a comparison of just these
FEW = 2

FLASH_PROVIDERS = {
    each.name: each
    for each in (
        *DENSE_PROVIDERS,
        *LAYER_PROVIDERS,
        *SDPA_PROVIDERS,
        *FLASH_KERNEL_PROVIDERS,
        *OTHER_PROVIDERS,
    )
}

# one query over a cache: what reads a cache joins
DECODE_PROVIDERS = {**FLASH_PROVIDERS, **{each.name: each for each in CACHE_PROVIDERS}}


def pick_providers(
    table: dict[str, Provider], names: list[str] | None, device: torch.device
) -> list[Provider]:
    """Return the providers called `names`, by default every one that is available.

    On a CPU the default leaves out what compiles for seconds at each shape, unless the table holds
    little else.  A provider asked for by name is returned even where it is unavailable: its rows
    say why.

    Raises:
        InputError: if a name is unknown.
    """
    if names is None:
        there = [each for each in table.values() if each.why_unavailable(device) is None]
        quick = [each for each in there if not each.compiles]
        return quick if device.type == "cpu" and len(table) > FEW else there
    for name in names:
        check_name("provider", name, table)
    return [table[name] for name in dict.fromkeys(names)]

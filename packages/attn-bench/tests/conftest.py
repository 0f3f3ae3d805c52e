from collections.abc import Callable, Iterator

import pytest
import torch

from attn_bench.case import Case
from attn_bench.providers import FLASH_PROVIDERS, Attention, Provider

Plant = Callable[[str, Attention], Provider]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def plant(monkeypatch: pytest.MonkeyPatch) -> Plant:
    """Add a provider of one's own to the table of `attn-bench flash`."""

    def add(name: str, attention: Attention) -> Provider:
        provider = Provider(name, "planted by a test", lambda _case, _device: attention)
        monkeypatch.setitem(FLASH_PROVIDERS, name, provider)
        return provider

    return add


@pytest.fixture
def small() -> Case:
    return Case("fp32", 1, 2, 9, 9, 16, True, "fwd")

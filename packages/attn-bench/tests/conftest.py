import warnings
from collections.abc import Callable, Iterator

import pytest
import torch

from attn_bench.case import Case
from attn_bench.providers import FLASH_PROVIDERS, Attention, Provider

Plant = Callable[[str, Attention], Provider]

GPU_FOUND = torch.cuda.is_available()


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "gpu: needs a CUDA GPU")
    config.addinivalue_line("markers", "slow: takes more than ten seconds")
    # torch's own: its first product in autograd's thread, two of inductor's, and one of its meter
    for message in (
        "Attempting to run cuBLAS, but there was no current CUDA context:UserWarning",
        "`torch.jit.script_method` is deprecated:DeprecationWarning",
        "TensorFloat32 tensor cores for float32 matrix multiplication available:UserWarning",
        "Warning. Profiler clears events at the end of each cycle:UserWarning",
    ):
        config.addinivalue_line("filterwarnings", f"ignore:{message}")


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and not GPU_FOUND:
        pytest.skip("needs a CUDA GPU")


@pytest.fixture(scope="session", autouse=True)
def dynamo_is_imported() -> None:
    """Import what every run resets, so that what the import warns of fails no test."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.compiler.reset()


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

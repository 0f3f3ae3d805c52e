"""What every test of flash-kernel runs under."""

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

GPU_FOUND = torch.cuda.is_available()
if not GPU_FOUND:
    # read when a kernel is decorated, so before anything imports one
    os.environ.setdefault("TRITON_INTERPRET", "1")

# without it torch's deterministic mode refuses cuBLAS; read once, at the first product on a GPU
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

# where helpers of tests lie that are no tests
sys.path.append(str(Path(__file__).parent))

# the tensors of the tests are tiny: on a busy machine more threads only wait for each other
torch.set_num_threads(1)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "gpu: needs a CUDA GPU")
    config.addinivalue_line("markers", "slow: takes more than ten seconds")
    # torch's own: its first product in autograd's thread, two of inductor's, and one of Dynamo's
    # in torch 2.11 at each autograd Function; and one of the interpreter of Triton 3.6
    for message in (
        "Conversion of an array with ndim > 0 to a scalar is deprecated:DeprecationWarning",
        "Attempting to run cuBLAS, but there was no current CUDA context:UserWarning",
        "`torch.jit.script_method` is deprecated:DeprecationWarning",
        "<class 'torch.autograd.function.Function'> should not be instantiated:DeprecationWarning",
        "TensorFloat32 tensor cores for float32 matrix multiplication available:UserWarning",
    ):
        config.addinivalue_line("filterwarnings", f"ignore:{message}")
    if os.environ.get("FLASH_KERNEL_EXPECT_GPU") == "1" and not GPU_FOUND:
        raise pytest.UsageError("FLASH_KERNEL_EXPECT_GPU=1 is set, but torch sees no CUDA GPU.")


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and not GPU_FOUND:
        pytest.skip("needs a CUDA GPU")


@pytest.fixture(scope="session")
def device() -> str:
    return "cuda" if GPU_FOUND else "cpu"


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def nan_filled_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hand flash_kernel NaN as uninitialised memory, so that an unwritten output cannot pass."""

    def filled(allocate: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def allocate_filled(*args: object, **kwargs: object) -> Tensor:
            tensor = allocate(*args, **kwargs)
            if torch.compiler.is_compiling() or not tensor.is_floating_point():
                return tensor
            # torch's own Python code allocates too: leave it alone
            caller = sys._getframe(1).f_globals.get("__name__", "")
            return tensor.fill_(float("nan")) if caller.startswith("flash_kernel") else tensor

        return allocate_filled

    for owner, name in (
        (torch, "empty"),
        (torch, "empty_like"),
        (torch, "empty_strided"),
        (Tensor, "new_empty"),
    ):
        monkeypatch.setattr(owner, name, filled(getattr(owner, name)))

"""Fixtures: a model that trains in milliseconds, and tokens to train it on."""

import sys
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from tiny_llm.config import ModelConfig, TrainingConfig
from tiny_llm.data import TokenFile, prepare_tokens
from tiny_llm.tokenizer import ByteTokenizer

# warnings of torch 2.11 about itself, which no code of ours can avoid
TORCHS_OWN_WARNINGS = (
    # the first backward of a process that has used the GPU only through custom kernels
    "ignore:Attempting to run cuBLAS, but there was no current CUDA context",
    # raised by torch.utils.mkldnn, which torch.compile imports
    "ignore:`torch.jit.script_method` is deprecated",
    "ignore:`torch.jit.script` is deprecated",
    # what Inductor says to every GPU that has TF32 and is not told to use it
    "ignore:TensorFloat32 tensor cores for float32 matrix multiplication available",
    # what Dynamo does with every autograd.Function
    "ignore:.*should not be instantiated. Methods on autograd functions:DeprecationWarning",
)

PANGRAM = b"The quick brown fox jumps over the lazy dog. "


def pytest_configure(config: pytest.Config) -> None:
    for line in TORCHS_OWN_WARNINGS:
        config.addinivalue_line("filterwarnings", line)


@pytest.fixture(autouse=True)
def seeded_single_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def model_config() -> ModelConfig:
    return ModelConfig(d_model=32, num_layers=2, num_heads=4, d_ff=48, max_seq_len=24)


@pytest.fixture
def training_config() -> TrainingConfig:
    return TrainingConfig(batch_size=4, seq_len=24, steps=8, warmup_steps=2, learning_rate=3e-3)


@pytest.fixture
def token_file(tmp_path) -> TokenFile:
    text = tmp_path / "text.txt"
    text.write_bytes(PANGRAM * 20)
    return prepare_tokens([text], tmp_path / "tokens.bin", ByteTokenizer())


@pytest.fixture
def random_tokens() -> np.ndarray:
    return np.random.default_rng(0).integers(0, 257, size=2000)


@pytest.fixture
def forget_flash(monkeypatch) -> None:
    """Have flash-kernel looked for anew, in this test and by the next: a backend is probed once."""
    for module in ("flash_kernel", "tiny_llm.attention.flash", "tiny_llm.attention.flash_backend"):
        # set before it is removed: only then is it also gone afterwards if it is not there now
        monkeypatch.setitem(sys.modules, module, None)
        del sys.modules[module]


@pytest.fixture
def flash_missing(forget_flash, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "flash_kernel", None)

"""The registry lists without importing, and says what is wrong."""

import sys

import pytest
import torch

from tiny_llm import attention
from tiny_llm.attention.sdpa import sdpa_attention
from tiny_llm.config import ModelConfig
from tiny_llm.errors import ConfigError, TinyLLMError
from tiny_llm.transformer import Transformer


@pytest.fixture
def flash_missing(monkeypatch):
    monkeypatch.delitem(sys.modules, "tiny_llm.attention.flash", raising=False)
    monkeypatch.setitem(sys.modules, "flash_kernel", None)


def test_names_are_the_three_built_in_backends():
    assert attention.names() == ("eager", "flash", "sdpa")


def test_unknown_name_is_a_key_error_that_lists_the_registered_ones():
    with pytest.raises(KeyError) as caught:
        attention.get("falsh")
    assert str(caught.value) == "unknown attention 'falsh'; registered: 'eager', 'flash', 'sdpa'"
    assert isinstance(caught.value, TinyLLMError)


@pytest.mark.usefixtures("flash_missing")
def test_missing_flash_kernel_is_an_import_error_that_names_the_extra():
    with pytest.raises(ImportError, match=r"needs the optional package flash-kernel") as caught:
        Transformer(ModelConfig(d_model=8, num_heads=2, attention="flash"))
    assert "install tiny-llm[flash]" in str(caught.value)
    assert isinstance(caught.value, TinyLLMError)


def test_broken_flash_kernel_is_reported_with_its_own_words(monkeypatch, tmp_path):
    (tmp_path / "flash_kernel.py").write_text("import no_such_dependency")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "tiny_llm.attention.flash", raising=False)
    monkeypatch.delitem(sys.modules, "flash_kernel", raising=False)
    with pytest.raises(ImportError, match="cannot be imported: No module named 'no_such_dep"):
        attention.get("flash")


@pytest.mark.parametrize("target", [sdpa_attention, "tiny_llm.attention.sdpa:sdpa_attention"])
def test_registered_backend_is_what_a_model_uses(target):
    attention.register("mine", target)
    try:
        assert "mine" in attention.names()
        model = Transformer(ModelConfig(d_model=8, num_layers=1, num_heads=2, attention="mine"))
        assert model.blocks[0].attention.attention_fn is sdpa_attention
    finally:
        attention.unregister("mine")
    assert "mine" not in attention.names()


def test_a_place_is_not_imported_before_it_is_asked_for():
    attention.register("absent", "no_such_module_anywhere:attend")
    try:
        assert "absent" in attention.names()
        with pytest.raises(ModuleNotFoundError, match="no_such_module_anywhere"):
            attention.get("absent")
    finally:
        attention.unregister("absent")


def test_a_taken_name_is_refused():
    with pytest.raises(ConfigError, match="'eager' is already registered; unregister it first"):
        attention.register("eager", sdpa_attention)
    assert attention.get("eager") is not sdpa_attention


@pytest.mark.parametrize("target", ["no_colon", "module:", ":attribute", torch.float32])
def test_a_target_that_is_neither_function_nor_place_is_refused(target):
    with pytest.raises(ConfigError, match="must be a function or a string 'module:attribute'"):
        attention.register("mine", target)


def test_unregistering_an_unknown_name_is_refused():
    with pytest.raises(KeyError, match="unknown attention 'mine'"):
        attention.unregister("mine")

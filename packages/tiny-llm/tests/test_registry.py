"""The registry lists without importing, and says what is wrong."""

import pytest
import torch

from tiny_llm import attention
from tiny_llm.attention import registry
from tiny_llm.attention.eager import scaled_dot_product_attention
from tiny_llm.attention.sdpa import sdpa_attention
from tiny_llm.config import ModelConfig
from tiny_llm.errors import ConfigError, TinyLLMError
from tiny_llm.transformer import Transformer

BUILT_IN = (
    "eager",
    "flash",
    "flash-mock",
    "flex",
    "sdpa",
    "sdpa-cudnn",
    "sdpa-efficient",
    "sdpa-flash",
    "sdpa-math",
)


def test_names_are_the_built_in_backends():
    assert attention.names() == BUILT_IN


def test_unknown_name_is_a_key_error_that_lists_the_registered_ones():
    with pytest.raises(KeyError) as caught:
        attention.get("falsh")
    known = ", ".join(map(repr, BUILT_IN))
    assert str(caught.value) == f"unknown attention 'falsh'; registered: {known}"
    assert isinstance(caught.value, TinyLLMError)


@pytest.mark.usefixtures("flash_missing")
def test_missing_flash_kernel_is_an_import_error_that_names_the_extra():
    with pytest.raises(ImportError, match=r"needs the optional package flash-kernel") as caught:
        Transformer(ModelConfig(d_model=8, num_heads=2, attention="flash"))
    assert "install tiny-llm[flash]" in str(caught.value)
    assert isinstance(caught.value, TinyLLMError)


@pytest.mark.usefixtures("forget_flash")
def test_broken_flash_kernel_is_reported_with_its_own_words(monkeypatch, tmp_path):
    (tmp_path / "flash_kernel.py").write_text("import no_such_dependency")
    monkeypatch.syspath_prepend(tmp_path)
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


@pytest.mark.parametrize("name", ["", "auto", "prefer:x", "a,b", "a b"])
def test_a_name_that_a_choice_could_not_tell_apart_is_refused(name):
    with pytest.raises(ConfigError, match="`name` must be a word"):
        attention.register(name, sdpa_attention)


class Offer:
    """An entry point, as far as the registry looks at one."""

    def __init__(self, name, value):
        self.name, self.value = name, value


@pytest.fixture
def offers(monkeypatch):
    """Install the entry points appended to this list."""
    installed = []
    monkeypatch.setattr(registry, "entry_points", lambda group: installed)
    registry.installed_entry_points.cache_clear()
    yield installed
    registry.installed_entry_points.cache_clear()


def test_an_installed_backend_is_known_and_used_only_when_asked_for(offers):
    offers.append(Offer("theirs", "tiny_llm.attention.sdpa:sdpa_attention"))
    assert attention.names() == tuple(sorted((*BUILT_IN, "theirs")))
    assert attention.get("theirs") is sdpa_attention
    request = attention.AttentionRequest(num_heads=2, head_dim=8, device="cpu", dtype="float32")
    assert attention.resolve(request, "auto").chosen == "sdpa"
    assert attention.resolve(request, "theirs").chosen == "theirs"


def test_an_installed_backend_cannot_take_the_name_of_a_built_in_one(offers, caplog):
    offers.append(Offer("eager", "tiny_llm.attention.sdpa:sdpa_attention"))
    assert attention.get("eager") is scaled_dot_product_attention
    assert attention.names() == BUILT_IN
    assert "'eager'" in caplog.text
    assert "belongs to tiny-llm itself" in caplog.text


def test_two_packages_that_offer_one_name_are_both_refused(offers, caplog):
    offers += [Offer("mine", "first:attend"), Offer("mine", "second:attend")]
    with pytest.raises(KeyError, match="unknown attention 'mine'"):
        attention.get("mine")
    assert "first:attend and second:attend" in caplog.text


def test_a_broken_installed_backend_is_a_reason_and_harms_nobody_else(offers):
    offers.append(Offer("broken", "no_such_module_anywhere:BACKEND"))
    request = attention.AttentionRequest(num_heads=2, head_dim=8)
    (reason,) = attention.backend("broken").reasons(request)
    assert reason.code == "broken"
    assert "No module named 'no_such_module_anywhere'" in reason.text
    assert attention.explain(request, "eager").chosen == "eager"


def test_registering_the_name_of_an_installed_backend_is_refused(offers):
    offers.append(Offer("theirs", "tiny_llm.attention.sdpa:sdpa_attention"))
    with pytest.raises(ConfigError, match="'theirs' is already registered"):
        attention.register("theirs", sdpa_attention)

"""A request and a choice give a backend, or every reason why not: all as data, without a GPU."""

import json
import logging
from dataclasses import FrozenInstanceError, replace
from pathlib import Path

import pytest
import torch

from tiny_llm import attention
from tiny_llm.attention import (
    AttentionBackend,
    AttentionRequest,
    Reason,
    Traits,
    explain,
    explain_model,
    resolve,
)
from tiny_llm.attention.backend import only
from tiny_llm.attention.eager import scaled_dot_product_attention
from tiny_llm.attention.explain import support_table
from tiny_llm.config import ModelConfig
from tiny_llm.errors import AttentionUnavailable, ConfigError, MissingExtraError, TinyLLMError
from tiny_llm.transformer import Transformer

H200 = AttentionRequest(
    num_heads=8,
    head_dim=64,
    seqlen_q=128,
    seqlen_k=128,
    device="cuda",
    capability=(9, 0),
    dtype="bfloat16",
    needs_grad=True,
)
CPU = replace(H200, device="cpu", capability=None, dtype="float32")


def codes(name, request):
    return [reason.code for reason in attention.backend(name).limits(request)]


@pytest.fixture
def registered():
    """Register backends for one test."""
    added = []

    def add(name, target):
        attention.register(name, target)
        added.append(name)

    yield add
    for name in added:
        attention.unregister(name)


@pytest.mark.parametrize(
    ("name", "change", "expected"),
    [
        ("eager", {"dtype": "float64", "num_kv_heads": 2, "window": 5, "ragged": True}, []),
        ("sdpa", {"dtype": "float64", "num_kv_heads": 2, "window": 5, "ragged": True}, []),
        ("sdpa-flash", {}, []),
        ("sdpa-flash", {"num_kv_heads": 2}, []),
        ("sdpa-flash", {"dtype": "float32"}, ["dtype"]),
        ("sdpa-flash", {"window": 5}, ["mask"]),
        ("sdpa-flash", {"seqlen_q": 16}, ["mask"]),
        ("sdpa-flash", {"seqlen_q": 1}, []),
        ("sdpa-flash", {"head_dim": 320, "capability": (7, 5)}, ["head_dim", "capability"]),
        ("sdpa-flash", {"device": "cpu", "dtype": "float64", "window": 5}, []),
        ("sdpa-flash", {"device": "mps"}, ["device"]),
        ("sdpa-cudnn", {}, []),
        ("sdpa-cudnn", {"head_dim": 256}, ["head_dim"]),
        ("sdpa-cudnn", {"head_dim": 60, "ragged": True}, ["head_dim", "mask"]),
        ("sdpa-cudnn", {"device": "cpu"}, ["device"]),
        ("sdpa-efficient", {"dtype": "float32", "window": 5}, []),
        ("sdpa-efficient", {"num_kv_heads": 2}, ["gqa"]),
        ("sdpa-cudnn", {"seqlen_q": 1, "seqlen_k": 1}, ["seqlen_k"]),
        ("sdpa-efficient", {"head_dim": 20}, ["head_dim"]),
        ("sdpa-efficient", {"head_dim": 20, "dtype": "float32"}, []),
        ("sdpa-flash", {"head_dim": 256, "capability": (8, 9)}, ["head_dim"]),
        ("sdpa-flash", {"head_dim": 256, "capability": (8, 9), "needs_grad": False}, []),
        ("flex", {"window": 5, "num_kv_heads": 2}, []),
        ("flex", {"ragged": True, "head_dim": 8}, ["head_dim", "key_lengths"]),
        ("flash", {"window": 5, "ragged": True}, []),
        ("flash", {"dtype": "float64", "head_dim": 320}, ["dtype", "head_dim"]),
        ("flash", {"device": "cpu", "dtype": "float64", "head_dim": 320}, []),
        ("flash-mock", {"dtype": "float64", "num_kv_heads": 2}, []),
        ("flash-mock", {"window": 5, "ragged": True}, ["window", "key_lengths"]),
    ],
)
def test_backend_gives_the_reasons_of_its_limits(name, change, expected):
    assert codes(name, replace(H200, **change)) == expected


@pytest.mark.parametrize(
    ("change", "flag", "code"),
    [({"window": 5}, "HAS_WINDOW", "window"), ({"ragged": True}, "HAS_MASK", "key_lengths")],
)
@pytest.mark.parametrize("has_it", [True, False])
def test_what_flash_can_do_depends_on_the_installed_version(
    change, flag, code, has_it, monkeypatch
):
    if not attention.backend("flash").probe().ok:
        pytest.skip("flash-kernel is not installed")
    monkeypatch.setattr(f"tiny_llm.attention.flash.{flag}", has_it)
    reasons = attention.backend("flash").reasons(replace(CPU, **change))
    assert [reason.code for reason in reasons] == ([] if has_it else [code])


def test_flash_has_gradients_of_keys_of_given_lengths_also_where_queries_are_frozen():
    if not attention.backend("flash").probe().ok:
        pytest.skip("flash-kernel is not installed")
    q, k, v = (torch.randn(2, 1, 3, 8) for _ in range(3))
    lengths = torch.tensor([3, 2])
    results = []
    for name in ("flash", "eager"):
        leaves = k.clone().requires_grad_(), v.clone().requires_grad_()
        attend = attention.backend(name).load()
        o = attend(q, *leaves, is_causal=False, key_lengths=lengths)
        results.append(torch.autograd.grad(o.sum(), leaves))
    torch.testing.assert_close(*results)


def test_what_is_not_known_yet_is_not_refused():
    unknown = AttentionRequest(num_heads=8, head_dim=64)
    assert all(codes(name, unknown) == [] for name in attention.names())


def test_reasons_and_traits_tell_forward_from_backward():
    reasons = attention.backend("flex").reasons(CPU)
    assert [reason.code for reason in reasons] == ["backward"]
    assert attention.backend("flex").traits(CPU).backward == "none"
    assert attention.backend("flex").reasons(replace(CPU, needs_grad=False)) == []


def test_determinism_must_be_promised():
    reasons = attention.backend("sdpa").reasons(replace(H200, deterministic=True))
    assert [reason.code for reason in reasons] == ["deterministic"]
    assert attention.backend("sdpa-math").reasons(replace(H200, deterministic=True)) == []


def test_explicit_choice_that_cannot_serve_raises_every_reason_and_fix_in_one_line():
    with pytest.raises(AttentionUnavailable) as caught:
        resolve(replace(H200, dtype="float32", window=5), "sdpa-flash")
    text = str(caught.value)
    assert text.startswith("attention 'sdpa-flash' cannot serve this request [cuda, float32, 8 he")
    assert "takes bfloat16, float16, got float32 (convert to bfloat16)" in text
    assert "takes no mask, which a window of 5 would need (use 'sdpa')" in text
    assert "\n" not in text
    assert [reason.code for reason in caught.value.trace[0].reasons] == ["dtype", "mask"]
    assert isinstance(caught.value, TinyLLMError)
    assert not isinstance(caught.value, MissingExtraError)


@pytest.mark.usefixtures("flash_missing")
def test_missing_package_is_one_reason_among_others():
    with pytest.raises(AttentionUnavailable) as caught:
        resolve(replace(H200, dtype="float64"), "flash")
    assert isinstance(caught.value, MissingExtraError)
    assert [reason.code for reason in caught.value.trace[0].reasons] == ["missing", "dtype"]
    assert "install tiny-llm[flash]" in str(caught.value)


@pytest.mark.usefixtures("flash_missing")
def test_auto_takes_the_first_valid_backend_and_logs_what_it_passed_over(caplog):
    with caplog.at_level(logging.INFO, logger="tiny_llm.attention"):
        resolution = resolve(H200, "auto")
    assert resolution.chosen == "sdpa"
    assert [each.name for each in resolution.trace] == ["flash", "sdpa"]
    (line,) = caplog.messages
    assert line.startswith("attention 'auto' takes 'sdpa' for cuda, bfloat16, 8 heads of 64")
    assert "passed over flash: attention 'flash' needs the optional package" in line
    assert "\n" not in line


def test_auto_on_the_cpu_takes_torchs_attention():
    assert resolve(CPU, "auto").chosen == "sdpa"


def test_explicit_choice_logs_nothing(caplog):
    with caplog.at_level(logging.INFO, logger="tiny_llm.attention"):
        assert resolve(CPU, "eager").chosen == "eager"
    assert caplog.messages == []


def test_prefer_takes_the_first_valid_one_of_its_list():
    assert resolve(CPU, "prefer:sdpa-cudnn, eager").chosen == "eager"
    with pytest.raises(AttentionUnavailable, match=r"'sdpa-cudnn': .* 'sdpa-efficient': "):
        resolve(CPU, "prefer:sdpa-cudnn,sdpa-efficient")
    with pytest.raises(ConfigError, match=r"like 'prefer:flash,sdpa', got 'prefer:'"):
        resolve(CPU, "prefer:")
    with pytest.raises(KeyError, match="unknown attention 'falsh'"):
        resolve(CPU, "prefer:falsh,sdpa")


def test_resolution_and_explanation_are_json():
    resolution = json.loads(json.dumps(resolve(CPU, "prefer:sdpa-cudnn,eager").to_dict()))
    assert resolution["chosen"] == "eager"
    assert resolution["request"]["head_dim"] == 64
    assert resolution["trace"][0]["reasons"][0]["code"] == "device"
    explanation = json.loads(json.dumps(explain(H200, "sdpa-flash").to_dict()))
    assert explanation["chosen"] == "sdpa-flash"
    assert {each["name"] for each in explanation["decisions"]} == set(attention.names())


def test_explanation_says_why_every_backend_would_or_would_not_serve():
    explanation = explain(replace(H200, window=5), "prefer:sdpa-flash,sdpa")
    assert explanation.chosen == "sdpa"
    table = explanation.table().splitlines()
    assert table[1] == "choice: prefer:sdpa-flash,sdpa -> sdpa"
    assert table[2].startswith("  sdpa-flash      it takes no mask")
    assert table[3] == "* sdpa            yes: forward fused, backward fused"
    assert explain(replace(CPU), "sdpa-cudnn").chosen is None
    assert "-> refused" in explain(CPU, "sdpa-cudnn").table()


def test_a_models_layers_are_explained_without_building_it():
    config = ModelConfig(
        num_layers=6,
        num_kv_heads=2,
        sliding_window=64,
        window_layers="0-1,5",
        attention={"4": "eager", "*": "prefer:sdpa-flash,sdpa"},
    )
    answers = explain_model(config, device="cuda", capability=(9, 0), dtype="bfloat16")
    assert {layers: each.chosen for layers, each in answers.items()} == {
        "0-1,5": "sdpa",
        "2-3": "sdpa-flash",
        "4": "eager",
    }
    assert answers["2-3"].request.num_kv_heads == 2


def test_a_backend_of_ones_own_declares_and_is_obeyed(registered):
    class Mine(AttentionBackend):
        def limits(self, request):
            return only(request, devices=("cuda",), max_head_dim=64)

        def traits(self, request):
            return Traits(forward="fused", backward="none", deterministic=True)

    registered("mine", Mine("mine", scaled_dot_product_attention))
    assert resolve(replace(H200, needs_grad=False), "mine").chosen == "mine"
    with pytest.raises(AttentionUnavailable, match=r"runs on cuda, got cpu .* no gradients"):
        resolve(CPU, "mine")


def test_bare_function_is_refused_what_its_signature_lacks(registered):
    def bare(q, k, v, *, is_causal):
        return scaled_dot_product_attention(q, k, v, is_causal=is_causal)

    registered("bare", bare)
    assert resolve(CPU, "bare").chosen == "bare"
    request = replace(CPU, window=5, scale=0.5, ragged=True, num_kv_heads=2)
    found = [reason.code for reason in attention.backend("bare").reasons(request)]
    assert found == ["window", "scale", "key_lengths", "gqa"]
    with pytest.raises(AttentionUnavailable, match="its function takes no `window`"):
        Transformer(ModelConfig(d_model=8, num_heads=2, attention="bare", sliding_window=4))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"window": 0}, "`window` must be at least 1, got 0"),
        ({"window": 4, "is_causal": False}, "`window` needs is_causal=True"),
        ({"num_kv_heads": 3}, "multiple of `num_kv_heads`, got 8 and 3"),
        ({"dtype": "bf16"}, "name of a torch dtype such as 'bfloat16', got 'bf16'"),
    ],
)
def test_impossible_request_is_refused(change, message):
    with pytest.raises(ConfigError, match=message):
        replace(CPU, **change)


def test_requests_are_frozen_and_describe_tensors():
    q = torch.zeros(2, 4, 3, 8, dtype=torch.bfloat16, requires_grad=True)
    k = torch.zeros(2, 2, 5, 8, dtype=torch.bfloat16)
    request = AttentionRequest.from_tensors(q, k, is_causal=True, window=3)
    assert request == AttentionRequest(
        num_heads=4,
        head_dim=8,
        num_kv_heads=2,
        seqlen_q=3,
        seqlen_k=5,
        window=3,
        device="cpu",
        dtype="bfloat16",
        needs_grad=True,
    )
    with pytest.raises(FrozenInstanceError):
        request.window = 4


def test_each_layer_has_the_attention_chosen_for_it(model_config):
    choice = {"0": "sdpa", "*": "prefer:sdpa-cudnn,sdpa-math"}
    model = Transformer(replace(model_config, num_layers=3, attention=choice))
    assert model.blocks[0].attention.attention_fn is attention.get("sdpa")
    resolutions = model.resolve_attention(device="cpu", dtype=torch.float32, needs_grad=True)
    assert [each.chosen for each in resolutions] == ["sdpa", "sdpa-math", "sdpa-math"]
    assert model.blocks[2].attention.attention_fn is attention.get("sdpa-math")
    assert resolutions[1].request.needs_grad


def test_model_refuses_an_explicit_choice_that_its_device_cannot_serve(model_config):
    model = Transformer(replace(model_config, attention="sdpa-cudnn"))
    with pytest.raises(AttentionUnavailable, match="runs on cuda, got cpu"):
        model.resolve_attention(device="cpu", dtype=torch.float32)


def test_auto_resolves_at_the_first_call_and_logs_once(model_config, caplog):
    tokens = torch.randint(257, (1, 9))
    results = []
    for choice in ("eager", "auto"):
        torch.manual_seed(1)
        model = Transformer(replace(model_config, num_layers=1, attention=choice))
        with caplog.at_level(logging.INFO, logger="tiny_llm.attention"):
            results.append(model(tokens))
            model(tokens[:, :5])
    torch.testing.assert_close(results[1], results[0])
    assert len(caplog.messages) == 1
    assert "takes 'sdpa' for cpu, float32" in caplog.messages[0]


def test_support_table_in_the_docs_is_the_one_the_predicates_give():
    docs = Path(__file__).parents[3] / "docs" / "attention-registry.md"
    if not docs.exists():
        pytest.skip("the docs are not beside the package")
    assert support_table() in docs.read_text()


def test_reason_reads_as_text_and_fix():
    assert str(Reason("dtype", "it takes a, got b", "convert to a")) == (
        "it takes a, got b (convert to a)"
    )

"""A measured policy is an order of preference, on the device it was measured on."""

import json
from dataclasses import replace

import pytest
import torch

from tiny_llm.attention import AttentionRequest, explain, resolve
from tiny_llm.attention.policy import read_policy
from tiny_llm.config import ModelConfig
from tiny_llm.errors import ConfigError, FileError, FormatError
from tiny_llm.transformer import Transformer

CPU = AttentionRequest(
    num_heads=4, head_dim=8, seqlen_q=64, seqlen_k=64, device="cpu", dtype="float32"
)


def shapes(dtype, max_seqlen, *prefer, head_dim=8, is_causal=True):
    return {
        "dtype": dtype,
        "head_dim": head_dim,
        "is_causal": is_causal,
        "max_seqlen": max_seqlen,
        "prefer": list(prefer),
        "milliseconds": {},
    }


CLASSES = [
    shapes("fp32", 512, "sdpa-math", "eager"),
    shapes("fp32", 64, "sdpa-cudnn", "eager", "sdpa"),
    shapes("bf16", 512, "eager"),
    shapes("fp32", 512, "eager", is_causal=False),
]


@pytest.fixture
def write(tmp_path):
    def written(**changes):
        content = {
            "kind": "attention-policy",
            "schema": 1,
            "device": "a CPU",
            "device_type": "cpu",
            "classes": CLASSES,
            **changes,
        }
        path = tmp_path / "policy.json"
        path.write_text(json.dumps(content))
        return str(path)

    return written


def test_order_is_that_of_the_first_class_that_covers_the_request(write):
    policy = read_policy(write())
    assert policy.order(CPU) == ("sdpa-cudnn", "eager", "sdpa")
    assert policy.order(replace(CPU, seqlen_k=65)) == ("sdpa-math", "eager")
    # beyond all that was measured the longest is the best guess
    assert policy.order(replace(CPU, seqlen_k=9999)) == ("sdpa-math", "eager")
    assert policy.order(replace(CPU, is_causal=False)) == ("eager",)
    assert policy.order(replace(CPU, dtype="bfloat16")) == ("eager",)
    assert policy.order(replace(CPU, head_dim=128)) == ()


def test_the_fastest_valid_backend_is_taken_and_what_was_passed_over_is_said(write):
    choice = f"policy:{write()}"
    resolution = resolve(CPU, choice)
    assert resolution.chosen == "eager"
    assert "passed over sdpa-cudnn: it runs on cuda, got cpu" in resolution.summary()
    # nothing like it was measured: as auto
    assert resolve(replace(CPU, head_dim=128), choice).chosen == "sdpa"
    explanation = explain(CPU, choice)
    assert [each.name for each in explanation.decisions[:3]] == ["sdpa-cudnn", "eager", "sdpa"]


def test_a_model_computes_by_the_policy(write):
    config = ModelConfig(d_model=32, num_heads=4, num_layers=1, attention=f"policy:{write()}")
    model = Transformer(config)
    tokens = torch.randint(257, (1, 20))
    expected = Transformer(replace(config, attention="eager"))
    expected.load_state_dict(model.state_dict())
    torch.testing.assert_close(model(tokens), expected(tokens))
    (resolution,) = model.resolve_attention(device="cpu", dtype=torch.float32, seq_len=400)
    assert resolution.chosen == "sdpa-math"


def test_policy_of_another_device_is_refused(write, monkeypatch):
    policy = read_policy(write(device="NVIDIA H200", device_type="cuda"))
    with pytest.raises(ConfigError, match="was measured on NVIDIA H200, not on cpu: measure here"):
        policy.order(CPU)
    gpu = replace(CPU, device="cuda")
    assert policy.order(gpu), "without a GPU to compare with"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA A100")
    with pytest.raises(ConfigError, match="measured on NVIDIA H200, not on NVIDIA A100"):
        policy.order(gpu)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    assert policy.order(gpu)


@pytest.mark.parametrize(
    ("changes", "finding"),
    [
        ({"kind": "other"}, "its kind and schema are others"),
        ({"schema": 2}, "its kind and schema are others"),
        ({"classes": [{"dtype": "fp32"}]}, "'prefer'"),
        ({"classes": [shapes("fp32", 8) | {"prefer": "eager"}]}, "`prefer` must be a list"),
        ({"classes": 3}, "not iterable"),
    ],
)
def test_what_is_no_policy_is_refused_in_one_line(write, changes, finding):
    path = write(**changes)
    with pytest.raises(FormatError, match="is no attention policy of schema 1") as caught:
        read_policy(path)
    assert finding in str(caught.value)


def test_policy_that_is_not_there_is_refused_when_the_model_runs(tmp_path):
    with pytest.raises(FileError, match=r"cannot read attention policy .*No such file"):
        resolve(CPU, f"policy:{tmp_path / 'none.json'}")

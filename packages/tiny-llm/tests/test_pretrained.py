"""Checkpoints of Hugging Face come in and go out, and give transformers' own logits."""

import json
from dataclasses import replace

import pytest
import torch

from tiny_llm.config import ModelConfig
from tiny_llm.errors import ConfigError, FileError, FormatError, TinyLLMError
from tiny_llm.pretrained import load_pretrained, save_pretrained
from tiny_llm.transformer import Transformer

transformers = pytest.importorskip("transformers")
safetensors = pytest.importorskip("safetensors.torch")

SHAPE = {
    "vocab_size": 61,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "attn_implementation": "eager",
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
PEERS = {
    "llama": ("LlamaConfig", {}),
    "llama-wide-heads": ("LlamaConfig", {"head_dim": 10, "tie_word_embeddings": True}),
    "llama-3": ("LlamaConfig", {"head_dim": 16, "rope_parameters": LLAMA3_ROPE}),
    "mistral": ("MistralConfig", {"sliding_window": None, "head_dim": 8}),
    "mistral-windowed": ("MistralConfig", {"sliding_window": 5, "head_dim": 8}),
    "qwen2": ("Qwen2Config", {"tie_word_embeddings": True}),
    "qwen2-windowed": (
        "Qwen2Config",
        {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    ),
    "qwen3": ("Qwen3Config", {"head_dim": 8}),
    "qwen3-windowed": (
        "Qwen3Config",
        {
            "head_dim": 8,
            "use_sliding_window": True,
            "sliding_window": 5,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
}


def make_peer(name):
    """Return a small random model of transformers whose weights all matter."""
    kind, settings = PEERS[name]
    config = getattr(transformers, kind)(**{**SHAPE, **settings})
    peer = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for key, parameter in peer.named_parameters():
            parameter.normal_(mean=1.0 if "norm" in key else 0.0, std=0.3)
    return peer.eval()


@pytest.fixture
def llama(tmp_path):
    """The folder of a small checkpoint."""
    make_peer("llama").save_pretrained(tmp_path / "llama")
    return tmp_path / "llama"


@torch.no_grad()
def assert_same_logits(model, peer, length=23):
    tokens = torch.randint(61, (2, length))
    expected = peer(tokens).logits
    assert expected.std() > 0.1
    torch.testing.assert_close(model(tokens), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("shard_size", ["1GB", "8KB"])
@pytest.mark.parametrize("name", PEERS)
def test_loaded_checkpoint_gives_the_logits_of_transformers(name, shard_size, tmp_path):
    peer = make_peer(name)
    peer.save_pretrained(tmp_path / "peer", max_shard_size=shard_size)
    files = list((tmp_path / "peer").glob("*.safetensors"))
    assert len(files) > 1 if shard_size == "8KB" else len(files) == 1
    assert_same_logits(load_pretrained(tmp_path / "peer", attention="sdpa"), peer)


@pytest.mark.parametrize("max_shard_bytes", [1_000_000, 8_000])
@pytest.mark.parametrize("name", PEERS)
def test_saved_checkpoint_gives_the_same_logits_in_transformers(name, max_shard_bytes, tmp_path):
    make_peer(name).save_pretrained(tmp_path / "peer")
    model = load_pretrained(tmp_path / "peer")
    save_pretrained(model, tmp_path / "ours", max_shard_bytes=max_shard_bytes)
    shards = list((tmp_path / "ours").glob("model-*-of-*.safetensors"))
    assert bool(shards) == (max_shard_bytes == 8_000)
    peer = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "ours", attn_implementation="eager"
    )
    # a Mistral without a window is a Llama
    expected = "llama" if name == "mistral" else name.partition("-")[0]
    assert peer.config.model_type == expected
    assert_same_logits(model, peer)
    again = load_pretrained(tmp_path / "ours")
    assert again.config == model.config
    for key, weight in model.state_dict().items():
        assert torch.equal(again.state_dict()[key], weight), key


@torch.no_grad()
@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3-windowed"])
def test_every_layer_gives_what_transformers_layer_gives(name, tmp_path):
    peer = make_peer(name)
    peer.save_pretrained(tmp_path / "peer")
    model = load_pretrained(tmp_path / "peer")
    outputs = []
    for block in model.blocks:
        block.register_forward_hook(lambda _block, _inputs, output: outputs.append(output))
    tokens = torch.randint(61, (2, 23))
    model(tokens)
    expected = peer(tokens, output_hidden_states=True).hidden_states
    torch.testing.assert_close(model.embedding(tokens), expected[0])
    # the last of theirs has passed the final norm
    outputs[-1] = model.norm(outputs[-1])
    for output, theirs in zip(outputs, expected[1:], strict=True):
        torch.testing.assert_close(output, theirs, rtol=1e-4, atol=1e-4)


def test_dtype_is_the_checkpoints_own_or_the_one_asked_for(tmp_path):
    make_peer("llama").to(torch.bfloat16).save_pretrained(tmp_path / "peer")
    assert load_pretrained(tmp_path / "peer").head.weight.dtype == torch.bfloat16
    wide = load_pretrained(tmp_path / "peer", dtype=torch.float64)
    assert wide.head.weight.dtype == torch.float64


def test_loading_draws_nothing_from_the_global_generator(llama):
    before = torch.get_rng_state()
    load_pretrained(llama)
    assert torch.equal(torch.get_rng_state(), before)


def rewrite(folder, change):
    """Change the weights of a folder with one file."""
    path = folder / "model.safetensors"
    weights = safetensors.load_file(path)
    change(weights)
    safetensors.save_file(weights, path, metadata={"format": "pt"})


def test_every_missing_and_unexpected_weight_is_named(llama):
    def change(weights):
        del weights["model.layers.1.mlp.up_proj.weight"], weights["model.norm.weight"]
        weights["model.layers.9.extra"] = torch.zeros(1)
        weights["model.layers.0.self_attn.q_proj.bias"] = torch.zeros(24)

    rewrite(llama, change)
    with pytest.raises(FormatError) as caught:
        load_pretrained(llama)
    assert (
        "it misses model.layers.1.mlp.up_proj.weight, model.norm.weight and has unexpected "
        "model.layers.0.self_attn.q_proj.bias, model.layers.9.extra"
    ) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_every_weight_of_another_shape_is_named(llama):
    def change(weights):
        weights["model.norm.weight"] = torch.zeros(7)
        weights["lm_head.weight"] = torch.zeros(24, 61)

    rewrite(llama, change)
    with pytest.raises(FormatError) as caught:
        load_pretrained(llama)
    assert "model.norm.weight [7] instead of [24]" in str(caught.value)
    assert "lm_head.weight [24, 61] instead of [61, 24]" in str(caught.value)


def test_rotary_tables_of_old_checkpoints_are_not_needed(llama):
    key = "model.layers.0.self_attn.rotary_emb.inv_freq"
    rewrite(llama, lambda weights: weights.update({key: torch.zeros(3)}))
    load_pretrained(llama)


@torch.no_grad()
def test_a_tied_head_may_be_stored_if_it_is_the_embedding(tmp_path):
    peer = make_peer("qwen2")
    peer.save_pretrained(tmp_path / "peer")
    embedding = peer.model.embed_tokens.weight.detach()
    rewrite(tmp_path / "peer", lambda weights: weights.update({"lm_head.weight": embedding}))
    assert_same_logits(load_pretrained(tmp_path / "peer"), peer)
    rewrite(tmp_path / "peer", lambda weights: weights.update({"lm_head.weight": embedding + 1}))
    with pytest.raises(FormatError, match=r"lm_head.weight differs .* set it to false"):
        load_pretrained(tmp_path / "peer")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "gpt2"}, "`model_type` must be one of llama, mistral, qwen2, qwen3, got"),
        ({"hidden_act": "gelu"}, "`hidden_act` must be 'silu', got 'gelu'"),
        ({"attention_bias": True}, "`attention_bias` must be False, got True"),
        ({"mlp_bias": True}, "`mlp_bias` must be False, got True"),
        ({"quantization_config": {"bits": 4}}, "`quantization_config` must be None"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}, "got 'yarn'"),
        (
            {"rope_parameters": {**LLAMA3_ROPE, "high_freq_factor": 8.0}},
            "got 'llama3' with 1.0 and 8.0",
        ),
        ({"hidden_size": 25, "head_dim": None}, "got d_model=25 and num_heads=4"),
        ({"rope_parameters": "fast"}, "'str' object has no attribute 'get'"),
        ({"vocab_size": "many"}, "`vocab_size` must be int, got 'many'"),
        ({"dtype": "float33"}, "name of a torch dtype, got 'float33'"),
    ],
)
def test_a_config_that_says_what_we_do_not_compute_is_refused(llama, change, message):
    path = llama / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(FormatError) as caught:
        load_pretrained(llama)
    assert message in str(caught.value)
    assert str(path) in str(caught.value)


def test_a_config_that_lacks_a_setting_is_refused(llama):
    path = llama / "config.json"
    content = json.loads(path.read_text())
    del content["vocab_size"]
    path.write_text(json.dumps(content))
    with pytest.raises(FormatError, match="the setting 'vocab_size' is missing"):
        load_pretrained(llama)


def test_settings_of_older_transformers_are_read(llama):
    path = llama / "config.json"
    content = json.loads(path.read_text())
    del content["rope_parameters"], content["head_dim"]
    scaling = {key: value for key, value in LLAMA3_ROPE.items() if key != "rope_theta"}
    content |= {"rope_theta": 500.0, "rope_scaling": scaling, "torch_dtype": "float32"}
    path.write_text(json.dumps(content))
    config = load_pretrained(llama).config
    assert (config.rope_theta, config.rope_factor, config.rope_original_len) == (500.0, 8.0, 32)
    assert config.head_dim == 6


def damage_weights(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def damage_header(folder):
    (folder / "model.safetensors").write_bytes(b"not safetensors at all")


def damage_config(folder):
    (folder / "config.json").write_text("{")


def turn_config_into_a_list(folder):
    (folder / "config.json").write_text("[]")


def remove_weights(folder):
    (folder / "model.safetensors").unlink()


def remove_config(folder):
    (folder / "config.json").unlink()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (damage_weights, "model.safetensors is damaged or no safetensors file"),
        (damage_header, "model.safetensors is damaged or no safetensors file"),
        (damage_config, "config.json is not JSON"),
        (turn_config_into_a_list, "config.json must hold a JSON object, got list"),
        (remove_weights, "has neither model.safetensors nor model.safetensors.index.json"),
        (remove_config, "config.json: No such file or directory"),
    ],
)
def test_a_damaged_folder_is_refused_in_one_line(llama, damage, message):
    damage(llama)
    with pytest.raises(TinyLLMError) as caught:
        load_pretrained(llama)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.fixture
def shards(tmp_path):
    folder = tmp_path / "shards"
    save_pretrained(Transformer(ModelConfig(num_layers=1)), folder, max_shard_bytes=300_000)
    return folder


def test_a_missing_shard_is_named(shards):
    first = min(shards.glob("*.safetensors"))
    first.unlink()
    with pytest.raises(FileError, match=f"lacks {first.name}, named in model.safetensors.index"):
        load_pretrained(shards)


@pytest.mark.parametrize("place", ["../outside.safetensors", "/etc/passwd", 3, ""])
def test_an_index_that_points_outside_its_folder_is_refused(shards, place):
    path = shards / "model.safetensors.index.json"
    content = json.loads(path.read_text())
    content["weight_map"]["model.norm.weight"] = place
    path.write_text(json.dumps(content))
    with pytest.raises(FormatError, match="must have a `weight_map` of names to file names"):
        load_pretrained(shards)


def test_an_index_that_disagrees_with_its_files_is_refused(shards):
    path = shards / "model.safetensors.index.json"
    content = json.loads(path.read_text())
    del content["weight_map"]["model.norm.weight"]
    path.write_text(json.dumps(content))
    with pytest.raises(FormatError, match=r"disagree about model.norm.weight"):
        load_pretrained(shards)


def test_saving_never_touches_an_existing_folder(shards):
    with pytest.raises(FileError, match="exists already; name a new folder"):
        save_pretrained(Transformer(ModelConfig(num_layers=1)), shards)


def test_a_save_that_fails_leaves_nothing_behind(tmp_path, monkeypatch):
    def full(*_arguments, **_options):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("tiny_llm.pretrained.saving.save_file", full)
    with pytest.raises(FileError, match="No space left on device"):
        save_pretrained(Transformer(ModelConfig(num_layers=1)), tmp_path / "model")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"qk_norm": True, "qkv_bias": True}, "both `qk_norm` and `qkv_bias`"),
        ({"sliding_window": 4, "window_layers": "0"}, "got window_layers='0'"),
    ],
)
def test_a_mix_that_no_architecture_has_is_refused(settings, message, tmp_path):
    model = Transformer(replace(ModelConfig(num_layers=2), **settings))
    with pytest.raises(ConfigError, match=message):
        save_pretrained(model, tmp_path / "model")
    assert not (tmp_path / "model").exists()


def test_our_own_model_round_trips(tmp_path):
    config = ModelConfig(num_layers=2, num_kv_heads=2, sliding_window=9, rope_factor=2.0)
    model = Transformer(config)
    save_pretrained(model, tmp_path / "model")
    loaded = load_pretrained(tmp_path / "model")
    tokens = torch.randint(257, (1, 20))
    assert torch.equal(loaded(tokens), model(tokens))

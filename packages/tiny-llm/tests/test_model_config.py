"""The shape of a model: heads, windows, layers by name, presets."""

from dataclasses import asdict, replace

import pytest
import torch

from tiny_llm.config import PRESETS, ModelConfig, preset
from tiny_llm.errors import ConfigError
from tiny_llm.layers import format_layers, parse_layers
from tiny_llm.transformer import Transformer


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_kv_heads": 0}, "`num_kv_heads` must be at least 1, got 0"),
        ({"num_kv_heads": 3}, "multiple of `num_kv_heads`, got num_heads=4 and num_kv_heads=3"),
        ({"head_size": 7}, "`head_size` must be even, because RoPE rotates pairs, got 7"),
        ({"sliding_window": 0}, "`sliding_window` must be at least 1, got 0"),
        ({"sliding_window": 2.5}, "`sliding_window` must be int or None, got 2.5"),
        ({"rope_factor": 0.5}, "`rope_factor` must be at least 1, got 0.5"),
        ({"window_layers": "first"}, "must look like '0', '1-3', '0,4-7' or '*', got 'first'"),
        ({"window_layers": "2-4"}, "layers '2-4' must lie in 0-3, got '2-4'"),
        ({"attention": {"0": "sdpa"}}, "names no attention for layer 1; name one, or use '*'"),
        (
            {"attention": {"0-1": "sdpa", "1": "eager", "*": "eager"}},
            "names several attentions (sdpa, eager) for layer 1",
        ),
        ({"attention": {"5": "sdpa", "*": "eager"}}, "layers '5' must lie in 0-3"),
    ],
)
def test_impossible_model_is_refused_in_one_line(settings, message):
    with pytest.raises(ConfigError) as caught:
        ModelConfig(**settings)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_attention_is_one_choice_or_one_for_each_layer():
    assert ModelConfig(attention="sdpa").attention_at(3) == "sdpa"
    config = ModelConfig(attention={"0,3": "eager", "*": "auto"})
    assert [config.attention_at(layer) for layer in range(4)] == ["eager", "auto", "auto", "eager"]


def test_window_belongs_to_the_layers_named():
    config = ModelConfig(sliding_window=16, window_layers="1-2")
    assert [config.window_at(layer) for layer in range(4)] == [None, 16, 16, None]
    assert [replace(config, window_layers="*").window_at(layer) for layer in (0, 3)] == [16, 16]
    assert ModelConfig().window_at(0) is None


def test_heads_default_to_what_the_width_gives():
    config = ModelConfig(d_model=96, num_heads=6)
    assert (config.head_dim, config.kv_heads) == (16, 6)
    config = ModelConfig(d_model=100, num_heads=6, num_kv_heads=2, head_size=32)
    assert (config.head_dim, config.kv_heads) == (32, 2)


@pytest.mark.parametrize("text", ["0", "1-3", "0,2-4", "*"])
def test_layers_survive_being_written_and_read(text):
    layers = parse_layers(text, 6)
    assert format_layers(layers, 6) == text
    assert parse_layers(format_layers(layers, 6), 6) == layers


def test_configuration_comes_back_from_its_plain_form():
    config = ModelConfig(attention={"*": "sdpa"}, num_kv_heads=2, sliding_window=8)
    assert ModelConfig(**asdict(config)) == config


@pytest.mark.parametrize(
    ("name", "millions"),
    [("toy", 0.9), ("10m", 8.7), ("124m", 123.6), ("350m", 353.6), ("1b", 1009.1)],
)
def test_preset_has_the_size_of_its_name(name, millions):
    with torch.device("meta"):
        model = Transformer(preset(name))
    assert model.num_parameters() / 1e6 == pytest.approx(millions, abs=0.05)


def test_unknown_preset_lists_those_there_are():
    assert set(PRESETS) == {"toy", "10m", "124m", "350m", "1b"}
    with pytest.raises(
        ConfigError, match="unknown preset '7b'; there are toy, 10m, 124m, 350m, 1b"
    ):
        preset("7b")

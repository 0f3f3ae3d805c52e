"""A configuration that exists is one that works."""

import math
from dataclasses import FrozenInstanceError

import pytest

from tiny_llm.config import ModelConfig, TrainingConfig
from tiny_llm.errors import ConfigError


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"d_model": 0}, "`d_model` must be at least 1, got 0"),
        ({"num_layers": -1}, "`num_layers` must be at least 1, got -1"),
        ({"d_model": 128.0}, "`d_model` must be int, got 128.0"),
        ({"num_heads": True}, "`num_heads` must be int, got True"),
        ({"d_model": 100, "num_heads": 8}, "got d_model=100 and num_heads=8"),
        ({"d_model": 12, "num_heads": 4}, "must be even, because RoPE rotates pairs, got 12 / 4"),
        ({"rope_theta": 0.0}, "`rope_theta` must be above 0 and finite, got 0.0"),
        ({"rope_theta": math.nan}, "`rope_theta` must be above 0 and finite, got nan"),
        ({"attention": None}, "`attention` must be str or dict, got None"),
    ],
)
def test_impossible_model_is_refused_in_one_line(settings, message):
    with pytest.raises(ConfigError) as caught:
        ModelConfig(**settings)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"batch_size": 0}, "`batch_size` must be at least 1, got 0"),
        ({"steps": 0}, "`steps` must be at least 1, got 0"),
        ({"seed": -1}, "`seed` must be 0 to 9223372036854775807, got -1"),
        ({"seed": 2**63}, "`seed` must be 0 to 9223372036854775807, got 9223372036854775808"),
        ({"learning_rate": 0.0}, "`learning_rate` must be above 0 and finite, got 0.0"),
        ({"learning_rate": "fast"}, "`learning_rate` must be float, got 'fast'"),
        ({"final_lr_fraction": 1.5}, "`final_lr_fraction` must be 0 to 1, got 1.5"),
        ({"weight_decay": math.inf}, "`weight_decay` must be at least 0, got inf"),
        ({"grad_clip": 0.0}, "`grad_clip` must be above 0, got 0.0"),
        ({"grad_clip": math.nan}, "`grad_clip` must be above 0, got nan"),
    ],
)
def test_impossible_training_is_refused_in_one_line(settings, message):
    with pytest.raises(ConfigError) as caught:
        TrainingConfig(**settings)
    assert message in str(caught.value)


def test_configurations_are_frozen_and_take_integers_for_floats():
    assert TrainingConfig(grad_clip=math.inf, learning_rate=1).learning_rate == 1
    with pytest.raises(FrozenInstanceError):
        ModelConfig().d_model = 64


def test_head_dim_is_the_width_per_head():
    assert ModelConfig(d_model=96, num_heads=6).head_dim == 16

"""Who decays, and how fast a step is."""

import pytest

from tiny_llm.config import TrainingConfig
from tiny_llm.optimizer import build_optimizer, learning_rate_at
from tiny_llm.transformer import Transformer


def test_matrices_decay_and_norm_weights_do_not(model_config):
    model = Transformer(model_config)
    decayed, exempt = build_optimizer(model, TrainingConfig(weight_decay=0.3)).param_groups
    assert decayed["weight_decay"] == 0.3
    assert exempt["weight_decay"] == 0.0
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    assert all("norm" in names[id(parameter)] for parameter in exempt["params"])
    assert len(exempt["params"]) == 2 * model_config.num_layers + 1
    assert len(decayed["params"]) + len(exempt["params"]) == len(names)


def test_learning_rate_rises_linearly_then_falls_along_a_cosine():
    config = TrainingConfig(learning_rate=1.0, steps=15, warmup_steps=4, final_lr_fraction=0.2)
    rates = [learning_rate_at(step, config) for step in range(15)]
    assert rates[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert rates[9] == pytest.approx(0.6)  # half of the way from 1 to 0.2
    assert rates[14] == pytest.approx(0.2)
    assert rates[4:] == sorted(rates[4:], reverse=True)


@pytest.mark.parametrize(("warmup", "expected"), [(10, [0.1, 0.2]), (0, [1.0, 0.1]), (1, [1, 1])])
def test_runs_shorter_than_the_schedule_have_a_learning_rate(warmup, expected):
    config = TrainingConfig(learning_rate=1.0, steps=2, warmup_steps=warmup)
    rates = [learning_rate_at(step, config) for step in range(2)]
    assert rates == pytest.approx(expected)


def test_wsd_rises_stays_and_falls_linearly():
    config = TrainingConfig(
        learning_rate=1.0,
        steps=20,
        warmup_steps=4,
        schedule="wsd",
        decay_fraction=0.25,
        final_lr_fraction=0.0,
    )
    rates = [learning_rate_at(step, config) for step in range(20)]
    assert rates[:4] == [0.25, 0.5, 0.75, 1.0]
    assert rates[4:15] == [1.0] * 11
    assert rates[15:] == pytest.approx([0.8, 0.6, 0.4, 0.2, 0.0])


@pytest.mark.parametrize("fraction", [0.0, 0.01, 1.0])
def test_wsd_of_any_fraction_stays_between_its_ends(fraction):
    config = TrainingConfig(
        learning_rate=1.0, steps=3, warmup_steps=0, schedule="wsd", decay_fraction=fraction
    )
    rates = [learning_rate_at(step, config) for step in range(3)]
    assert all(0.1 <= rate <= 1.0 for rate in rates)
    assert rates == sorted(rates, reverse=True)

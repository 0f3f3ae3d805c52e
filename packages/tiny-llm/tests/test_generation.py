"""Sampling follows the model's distribution, reproducibly."""

import pytest
import torch

from tiny_llm.errors import ConfigError
from tiny_llm.generation import generate, sample_token
from tiny_llm.transformer import Transformer

LOGITS = torch.tensor([1.0, 3.0, 2.0, -1.0])


def draw(count, **settings):
    generator = torch.Generator().manual_seed(0)
    return [sample_token(LOGITS, generator=generator, **settings) for _ in range(count)]


def test_temperature_zero_takes_the_likeliest():
    assert draw(5, temperature=0) == [1] * 5
    # so does one so small that the scaled logits overflow
    assert draw(5, temperature=1e-300) == [1] * 5


def test_draws_have_the_frequencies_of_the_softmax():
    draws = torch.tensor(draw(4000, temperature=2.0))
    frequencies = torch.bincount(draws, minlength=4) / 4000
    torch.testing.assert_close(frequencies, torch.softmax(LOGITS / 2, 0), atol=0.03, rtol=0)


def test_top_k_draws_from_the_k_likeliest_only():
    assert set(draw(200, temperature=5.0, top_k=2)) == {1, 2}
    assert set(draw(400, temperature=5.0, top_k=100)) == {0, 1, 2, 3}


@pytest.fixture
def model(model_config):
    return Transformer(model_config)


def test_greedy_tokens_are_the_argmax_of_a_model_that_sees_its_last_max_seq_len_tokens(model):
    prompt = torch.randint(257, (30,)).tolist()  # longer than max_seq_len = 24
    context = list(prompt)
    for _ in range(3):
        context.append(int(model(torch.tensor([context[-24:]]))[0, -1].argmax()))
    assert list(generate(model, prompt, max_new_tokens=3, temperature=0)) == context[30:]


def test_same_generator_state_gives_the_same_text(model):
    def sample(seed):
        generator = torch.Generator().manual_seed(seed)
        return list(generate(model, [1], max_new_tokens=8, generator=generator))

    assert sample(0) == sample(0)
    assert sample(0) != sample(1)


def test_stop_token_ends_the_text_and_is_not_part_of_it(model):
    tokens = list(generate(model, [1, 2], max_new_tokens=6, temperature=0))
    stop = tokens[-1]
    expected = tokens[: tokens.index(stop)]
    stopped = generate(model, [1, 2], max_new_tokens=6, temperature=0, stop_token=stop)
    assert list(stopped) == expected


@pytest.mark.parametrize(
    ("prompt", "settings", "message"),
    [
        ([], {}, "`prompt` must have at least one token"),
        ([1], {"max_new_tokens": -1}, "`max_new_tokens` must be at least 0, got -1"),
        ([1], {"temperature": -0.5}, "`temperature` must be at least 0 and finite, got -0.5"),
        ([1], {"temperature": float("nan")}, "`temperature` must be .* got nan"),
        ([1], {"top_k": 0}, "`top_k` must be at least 1, got 0"),
    ],
)
def test_impossible_sampling_is_refused_at_the_call(model, prompt, settings, message):
    with pytest.raises(ConfigError, match=message):
        generate(model, prompt, **{"max_new_tokens": 1, **settings})

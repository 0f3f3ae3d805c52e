"""Sampling follows the model's distribution, reproducibly."""

import pytest
import torch

from tiny_llm.bpe import BPETokenizer
from tiny_llm.errors import ConfigError
from tiny_llm.generation import generate, generate_batch, stream_text
from tiny_llm.sampling import Sampling, sample_token
from tiny_llm.tokenizer import ByteTokenizer
from tiny_llm.transformer import Transformer

LOGITS = torch.tensor([1.0, 3.0, 2.0, -1.0])


def draw(count, *, context=(), **settings):
    generator = torch.Generator().manual_seed(0)
    sampling = Sampling(**settings)
    return [
        sample_token(LOGITS, sampling, context=context, generator=generator) for _ in range(count)
    ]


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


def test_top_p_draws_from_the_fewest_that_make_up_its_share():
    # the softmax is 0.65, 0.24, 0.09, 0.01 for the tokens 1, 2, 0, 3
    assert set(draw(300, top_p=0.6)) == {1}
    assert set(draw(300, top_p=0.7)) == {1, 2}
    assert set(draw(500, top_p=0.9)) == {0, 1, 2}
    assert set(draw(2000, top_p=1.0)) == {0, 1, 2, 3}


def test_repetition_penalty_lowers_both_positive_and_negative_logits_of_the_context():
    assert draw(1, temperature=0, repetition_penalty=2.0, context=[1]) == [2]
    assert draw(1, temperature=0, repetition_penalty=1.4, context=[1, 1, 1]) == [1]
    # -1 becomes -100: token 3 is out of reach
    assert 3 in draw(2000)
    assert 3 not in draw(2000, repetition_penalty=100.0, context=[3])


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
        ([1], {"top_p": 0.0}, "`top_p` must be above 0 and at most 1, got 0.0"),
        ([1], {"repetition_penalty": 0.0}, "`repetition_penalty` must be above 0 and finite"),
    ],
)
def test_impossible_sampling_is_refused_at_the_call(model, prompt, settings, message):
    with pytest.raises(ConfigError, match=message):
        generate(model, prompt, **{"max_new_tokens": 1, **settings})


def greedy(model, prompts, count, **settings):
    sampling = Sampling(temperature=0)
    steps = list(
        generate_batch(model, prompts, max_new_tokens=count, sampling=sampling, **settings)
    )
    return [list(column) for column in zip(*steps, strict=True)]


def test_prompts_of_different_lengths_continue_as_each_does_alone(model):
    prompts = [torch.randint(257, (length,)).tolist() for length in (1, 9, 4, 9)]
    # 9 and 20 tokens do not fit into max_seq_len = 24: the window moves at the end
    alone = [list(generate(model, p, max_new_tokens=20, temperature=0)) for p in prompts]
    assert greedy(model, prompts, 20) == alone
    uncached = list(prompts[1])
    for _ in range(20):
        uncached.append(int(model(torch.tensor([uncached[-24:]]))[0, -1].argmax()))
    assert alone[1] == uncached[9:]


def test_draws_of_one_prompt_do_not_depend_on_the_others(model):
    def sample(prompts, seeds):
        generators = [torch.Generator().manual_seed(seed) for seed in seeds]
        steps = generate_batch(model, prompts, max_new_tokens=8, generators=generators)
        return list(zip(*steps, strict=True))

    both = sample([[1, 2, 3], [4]], [5, 6])
    assert both[0] == sample([[1, 2, 3]], [5])[0]
    assert both[1] == sample([[4]], [6])[0]
    assert both[0] != both[1]


def test_each_text_of_a_batch_ends_at_its_own_stop_token(model):
    prompts = [[1, 2], [7, 8, 9]]
    first, second = greedy(model, prompts, 6)
    stop = next(token for token in first if token not in second)
    ended = greedy(model, prompts, 6, stop_tokens=[stop])
    kept = first[: first.index(stop)]
    assert ended[0] == [*kept, *[None] * (6 - len(kept))]
    assert ended[1] == second


def test_a_token_is_read_once_while_the_text_fits_into_the_window(model):
    seen = []
    model.embedding.register_forward_pre_hook(lambda _, args: seen.append(args[0].shape[1]))
    list(generate(model, [1, 2, 3], max_new_tokens=5))
    assert seen == [3, 1, 1, 1, 1]


def test_stream_never_breaks_a_character():
    text = "né 漢字 \N{GRINNING FACE}!"
    tokenizers = (ByteTokenizer(), BPETokenizer.train([text.encode()], 262))
    for tokenizer in tokenizers:
        pieces = list(stream_text(tokenizer.encode(text), tokenizer))
        assert "".join(pieces) == text
        assert all("\ufffd" not in piece for piece in pieces)
    assert list(stream_text(tokenizers[0].encode("né"), tokenizers[0])) == ["n", "é"]


def test_stream_shows_bytes_that_are_no_character_as_replacement():
    tokenizer = ByteTokenizer()
    assert "".join(stream_text([0x61, 0xE6, 0x62], tokenizer)) == "a\ufffdb"
    assert "".join(stream_text([0x61, 0xE6], tokenizer)) == "a\ufffd"


def test_generators_must_be_one_for_each_prompt(model):
    with pytest.raises(ConfigError, match="`generators` must be one for each prompt, got 1"):
        generate_batch(model, [[1], [2]], max_new_tokens=1, generators=[torch.Generator()])


def test_generation_works_under_autocast(model):
    seen = []
    for block in model.blocks:
        attend = block.attention.attention_fn

        def watching(q, k, v, attend=attend, **settings):
            seen.append({q.dtype, k.dtype, v.dtype})
            return attend(q, k, v, **settings)

        block.attention.attention_fn = watching
    tokens = generate(model, [1, 2, 3], max_new_tokens=5, temperature=0)
    with torch.autocast("cpu", torch.bfloat16):
        assert len(list(tokens)) == 5
    assert seen == [{torch.bfloat16}] * 5 * len(model.blocks)

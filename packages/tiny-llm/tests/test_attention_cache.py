"""Reading with a cache gives the logits of reading without one."""

from dataclasses import replace

import pytest
import torch

from tiny_llm.attention.eager import scaled_dot_product_attention
from tiny_llm.cache import KVCache
from tiny_llm.config import ModelConfig
from tiny_llm.errors import AttentionUnavailable, ConfigError
from tiny_llm.transformer import Transformer

PLAIN = ModelConfig(d_model=32, num_layers=3, num_heads=4, d_ff=48, max_seq_len=24)
VARIANTS = {
    "plain": PLAIN,
    "grouped": replace(PLAIN, num_kv_heads=2, qk_norm=True, qkv_bias=True, head_size=6),
    "windowed": replace(PLAIN, sliding_window=5, window_layers="0,2"),
    "windowed-sdpa": replace(PLAIN, sliding_window=5, num_kv_heads=1, attention="sdpa"),
    "auto": replace(PLAIN, sliding_window=5, window_layers="1", attention="auto"),
}
LENGTH = 17


@pytest.fixture(params=VARIANTS)
def model(request):
    model = Transformer(VARIANTS[request.param]).double()
    with torch.no_grad():
        for parameter in model.parameters():  # large enough for attention to matter
            parameter.normal_(std=0.3)
    return model


def make_cache(model, batch_size=2, **options):
    return KVCache(model.config, batch_size, dtype=torch.float64, **options)


@torch.no_grad()
def read(model, tokens, cache, chunks):
    """Return the logits of tokens read in chunks of these lengths."""
    logits = []
    for chunk in tokens.split(chunks, dim=1):
        logits.append(model(chunk, cache=cache))
        cache.advance(chunk.shape[1])
    return torch.cat(logits, dim=1)


def assert_same(logits, expected):
    torch.testing.assert_close(logits, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("static", [False, True], ids=["growing", "static"])
@pytest.mark.parametrize(
    "chunks", [[LENGTH], [7, 1, 9], [1] * LENGTH, [12, 1, 1, 1, 1, 1]], ids=str
)
def test_cached_logits_are_the_uncached_ones(model, chunks, static):
    tokens = torch.randint(257, (2, LENGTH))
    cache = make_cache(model, static=static)
    with torch.no_grad():
        expected = model(tokens)
    assert_same(read(model, tokens, cache, chunks), expected)
    assert cache.lengths.tolist() == [LENGTH, LENGTH]


@torch.no_grad()
def test_prompts_of_different_lengths_give_the_logits_of_each_alone(model):
    lengths, more = [9, 4, 1], 5
    rows = [torch.randint(257, (1, length + more)) for length in lengths]
    expected = [model(row) for row in rows]

    padded = torch.zeros(3, max(lengths), dtype=torch.int64)
    for row, length, prompt in zip(rows, lengths, padded, strict=True):
        prompt[:length] = row[0, :length]
    cache = make_cache(model, 3)
    logits = model(padded, cache=cache)
    cache.advance(lengths)
    for index, length in enumerate(lengths):
        assert_same(logits[index, :length], expected[index][0, :length])

    for step in range(more):
        next_tokens = torch.stack(
            [row[0, n + step : n + step + 1] for row, n in zip(rows, lengths, strict=True)]
        )
        logits = model(next_tokens, cache=cache)
        cache.advance(1)
        for index, length in enumerate(lengths):
            assert_same(logits[index, 0], expected[index][0, length + step])


@torch.no_grad()
def test_a_chunk_on_sequences_of_different_lengths(model):
    tokens = torch.randint(257, (2, 12))
    cache = make_cache(model)
    model(tokens[:, :6], cache=cache)
    cache.advance([6, 2])
    chunk = torch.stack((tokens[0, 6:11], tokens[1, 2:7]))
    logits = model(chunk, cache=cache)
    assert_same(logits[0], model(tokens[:1, :11])[0, 6:])
    assert_same(logits[1], model(tokens[1:, :7])[0, 2:])


@torch.no_grad()
def test_tokens_can_be_taken_back(model):
    tokens = torch.randint(257, (1, 12))
    cache = make_cache(model, 1)
    read(model, tokens, cache, [12])
    cache.set_lengths([5])
    other = torch.randint(257, (1, 4))
    logits = model(other, cache=cache)
    assert_same(logits, model(torch.cat((tokens[:, :5], other), dim=1))[:, 5:])


@torch.no_grad()
def test_explicit_positions_equal_the_default_ones(model):
    tokens = torch.randint(257, (2, 8))
    expected = model(tokens)
    assert_same(model(tokens, positions=torch.arange(8)), expected)
    assert_same(model(tokens, positions=torch.arange(8).expand(2, 8)), expected)
    # rotary scores depend on distances only; the tables are float32
    moved = model(tokens, positions=torch.arange(3, 11))
    torch.testing.assert_close(moved, expected, rtol=1e-4, atol=1e-6)


def test_window_bounds_what_a_layer_hands_to_its_attention():
    model = Transformer(replace(PLAIN, num_layers=1, sliding_window=5))
    seen = []
    layer = model.blocks[0].attention
    inner = layer.attention_fn

    def watching(q, k, v, **options):
        seen.append((q.shape[2], k.shape[2]))
        return inner(q, k, v, **options)

    layer.attention_fn = watching
    cache = KVCache(model.config, 1)
    read(model, torch.randint(257, (1, 12)), cache, [8, 3, 1])
    assert seen == [(8, 8), (3, 7), (1, 5)]


@torch.no_grad()
def test_decoding_with_a_static_cache_compiles_once():
    graphs = []

    def counting(graph, _inputs):
        graphs.append(graph)
        return graph.forward

    model = Transformer(replace(PLAIN, sliding_window=5, window_layers="0", num_kv_heads=2))
    tokens = torch.randint(257, (2, 12))
    expected = model(tokens)
    cache = KVCache(model.config, 2, static=True)
    model(tokens[:, :6], cache=cache)
    cache.advance(6)
    step = torch.compile(model, backend=counting, fullgraph=True)
    for index in range(6, 12):
        logits = step(tokens[:, index : index + 1], cache=cache)
        cache.advance(1)
        torch.testing.assert_close(logits[:, 0], expected[:, index])
    assert len(graphs) == 1


def test_cache_says_what_it_cannot_hold():
    model = Transformer(PLAIN)
    cache = KVCache(PLAIN, 1, capacity=8)
    tokens = torch.zeros(1, 9, dtype=torch.int64)
    with torch.no_grad():
        with pytest.raises(ConfigError, match="room for 8 tokens, got 0 and 9 more"):
            model(tokens, cache=cache)
        with pytest.raises(ConfigError, match=r"= \[1, 4, 8\] in torch.float32, got \[2, 4, 8\]"):
            model(torch.zeros(2, 3, dtype=torch.int64), cache=cache)
        with pytest.raises(ConfigError, match=r"in torch.float32, got .* in torch.bfloat16"):
            model.bfloat16()(tokens[:, :3], cache=cache)
    with pytest.raises(ConfigError, match=r"under torch.no_grad"):
        model.float()(tokens[:, :3], cache=cache)


@torch.no_grad()
def test_attention_that_takes_no_key_lengths_says_so_when_they_are_needed():
    model = Transformer(PLAIN)

    def bare(q, k, v, *, is_causal):
        return scaled_dot_product_attention(q, k, v, is_causal=is_causal)

    for block in model.blocks:
        block.attention.attention_fn = bare
    tokens = torch.zeros(2, 3, dtype=torch.int64)
    cache = KVCache(PLAIN, 2)
    model(tokens, cache=cache)
    cache.advance([3, 1])
    with pytest.raises(AttentionUnavailable, match="layer 0 takes no `key_lengths`, which this"):
        model(tokens, cache=cache)


def test_cache_refuses_impossible_sizes_and_lengths():
    with pytest.raises(ConfigError, match="`capacity` from 1 to 24, got 1 and 25"):
        KVCache(PLAIN, 1, capacity=25)
    with pytest.raises(ConfigError, match="`batch_size` from 1"):
        KVCache(PLAIN, 0)
    cache = KVCache(PLAIN, 2, capacity=8)
    with pytest.raises(ConfigError, match="`counts` must be 2 numbers from 0, got"):
        cache.advance([1])
    with pytest.raises(ConfigError, match=r"2 numbers from 0 to 8, got \[9, 9\]"):
        cache.advance(9)
    with pytest.raises(ConfigError, match=r"2 numbers from 0 to 8, got \[3, -1\]"):
        cache.set_lengths([3, -1])
    assert cache.lengths.tolist() == [0, 0]


def test_cache_knows_its_memory():
    cache = KVCache(replace(PLAIN, num_kv_heads=2), 3, capacity=10, dtype=torch.bfloat16)
    assert cache.nbytes == 2 * 3 * 3 * 2 * 10 * 8 * 2  # k and v, layers, batch, heads, ...


def test_position_above_the_models_length_is_refused():
    with pytest.raises(ConfigError, match="at most 24 tokens, got 31"):
        Transformer(PLAIN)(torch.zeros(1, 1, dtype=torch.int64), positions=torch.tensor([30]))

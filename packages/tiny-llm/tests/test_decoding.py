"""A compiled or captured step decodes what the plain one does."""

from dataclasses import replace

import pytest
import torch

from tiny_llm import attention, decoding
from tiny_llm.cache import KVCache
from tiny_llm.decoding import DecodingStep, capacity_for, resolve_mode
from tiny_llm.errors import AttentionUnavailable, ConfigError
from tiny_llm.generation import generate_batch
from tiny_llm.sampling import Sampling
from tiny_llm.transformer import Transformer

on_a_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


@pytest.fixture
def graphs(monkeypatch):
    """Let `torch.compile` trace and not compile; the graphs it found."""
    found = []

    def counting(graph, _inputs):
        found.append(graph)
        return graph.forward

    def traced(model, **settings):
        assert settings["dynamic"] is False
        return compile_(model, backend=counting, fullgraph=True, dynamic=False)

    compile_ = torch.compile
    monkeypatch.setattr(decoding.torch, "compile", traced)
    torch.compiler.reset()
    return found


def greedy(model, prompts, decode, count=12):
    settings = {"max_new_tokens": count, "sampling": Sampling(temperature=0), "decode": decode}
    return list(generate_batch(model, prompts, **settings))


@pytest.mark.parametrize("name", ["eager", "sdpa", "auto"])
def test_compiled_decoding_gives_the_tokens_of_eager_decoding_and_compiles_once(
    name, model_config, graphs
):
    config = replace(
        model_config, attention=name, num_kv_heads=2, sliding_window=6, window_layers="0"
    )
    model = Transformer(config)
    for prompts in ([[1, 2, 3]], [[4, 5]]):
        assert greedy(model, prompts, "compile") == greedy(model, prompts, "eager")
    # the block with a window, the one without, and the output layer
    assert len(graphs) == 3
    # a text that outgrows max_seq_len = 24 goes on without the cache
    assert greedy(model, [[1], [2] * 9], "compile", 20) == greedy(
        model, [[1], [2] * 9], "eager", 20
    )


def test_blocks_that_are_alike_share_one_compiled_block(model_config, graphs):
    model = Transformer(replace(model_config, num_layers=5))
    assert greedy(model, [[1, 2, 3]], "compile") == greedy(model, [[1, 2, 3]], "eager")
    assert len(graphs) == 2, "a block and the output layer"


def test_step_refuses_to_write_behind_the_cache(model_config):
    model = Transformer(model_config)
    cache = KVCache(model_config, 1, capacity=3)
    step = DecodingStep(model, cache, "eager")
    expected = model(torch.tensor([[7, 8, 9]]))[0, -1]
    logits = [step([token])[0] for token in (7, 8, 9)][-1]
    torch.testing.assert_close(logits, expected)
    with pytest.raises(ConfigError, match="room for 3 tokens, and is full"):
        step([1])


def test_what_cannot_be_is_refused_and_auto_goes_without(model_config):
    model = Transformer(model_config)
    assert resolve_mode(model, "auto") == ("graph" if model.embedding.weight.is_cuda else "eager")
    with pytest.raises(ConfigError, match="decode 'graph' needs a CUDA device"):
        resolve_mode(model, "graph")
    with pytest.raises(ConfigError, match="`decode` must be one of auto, eager, graph, compile"):
        resolve_mode(model, "fast")
    flex = Transformer(replace(model_config, attention="flex", d_model=64))
    with pytest.raises(AttentionUnavailable, match="key lengths would need a new block mask"):
        resolve_mode(flex, "compile")


def test_capacity_is_rounded_up_so_that_steps_are_shared(model_config):
    large = Transformer(replace(model_config, max_seq_len=1000))
    assert [capacity_for(large, tokens) for tokens in (1, 256, 257, 990)] == [256, 256, 512, 1000]


@pytest.mark.gpu
@on_a_gpu
@pytest.mark.parametrize("name", ["sdpa", "flash"])
@pytest.mark.parametrize("decode", ["graph", "compile"])
def test_captured_decoding_gives_the_tokens_of_eager_decoding(name, decode, model_config):
    if not attention.backend(name).probe().ok:
        pytest.skip(f"{name} is not available here")
    config = replace(model_config, attention=name, d_model=128, num_kv_heads=2, max_seq_len=64)
    model = Transformer(config).cuda()
    assert resolve_mode(model, "auto") == "graph"
    prompts = [[1, 2, 3], [4] * 9]
    assert greedy(model, prompts, decode) == greedy(model, prompts, "eager")


@pytest.mark.gpu
@on_a_gpu
def test_where_the_attention_takes_no_static_cache_auto_is_eager(model_config):
    model = Transformer(replace(model_config, attention="flex", d_model=64)).cuda()
    assert resolve_mode(model, "auto") == "eager"

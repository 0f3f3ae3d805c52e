"""Every backend computes the same attention, and the layers hand it the right tensors."""

import importlib.util
import os

import pytest
import torch

from tiny_llm import attention
from tiny_llm.attention import (
    MultiHeadAttention,
    MultiHeadAttentionWithRoPE,
    ScaledDotProductAttention,
)
from tiny_llm.attention.eager import scaled_dot_product_attention
from tiny_llm.config import ModelConfig
from tiny_llm.errors import ConfigError
from tiny_llm.rope import RotaryEmbedding
from tiny_llm.transformer import Transformer

HAS_FLASH = importlib.util.find_spec("flash_kernel") is not None
needs_flash = pytest.mark.skipif(not HAS_FLASH, reason="flash-kernel is not installed")
OTHERS = ["sdpa", pytest.param("flash", marks=needs_flash)]
# the lengths of q and k: one, equal, and unequal both ways (M > N has rows that see nothing)
LENGTHS = [(1, 1), (5, 5), (1, 7), (3, 7), (7, 3)]


def make_qkv(seqlen_q, seqlen_k, dtype=torch.float64):
    shapes = [(2, 3, seqlen_q, 8), (2, 3, seqlen_k, 8), (2, 3, seqlen_k, 8)]
    return [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes]


def attention_by_loops(q, k, v, *, is_causal):
    """The definition, row by row: softmax over the keys that a query sees."""
    seqlen_q, seqlen_k = q.shape[-2], k.shape[-2]
    o = torch.zeros_like(q)
    for i in range(seqlen_q):
        seen = max(0, i + seqlen_k - seqlen_q + 1) if is_causal else seqlen_k
        if seen:
            scores = (q[..., i : i + 1, :] * k[..., :seen, :]).sum(-1) / q.shape[-1] ** 0.5
            weights = scores.exp() / scores.exp().sum(-1, keepdim=True)
            o[..., i, :] = (weights[..., None] * v[..., :seen, :]).sum(-2)
    return o


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), LENGTHS)
@pytest.mark.parametrize("name", ["eager", *OTHERS])
def test_backend_matches_the_definition_in_values_and_gradients(
    name, seqlen_q, seqlen_k, is_causal
):
    q, k, v = make_qkv(seqlen_q, seqlen_k)
    expected = attention_by_loops(q, k, v, is_causal=is_causal)
    do = torch.randn_like(expected)
    expected_grads = torch.autograd.grad(expected, (q, k, v), do)

    o = attention.get(name)(q, k, v, is_causal=is_causal)
    grads = torch.autograd.grad(o, (q, k, v), do)

    torch.testing.assert_close(o, expected, rtol=1e-9, atol=1e-12)
    for grad, expected_grad in zip(grads, expected_grads, strict=True):
        torch.testing.assert_close(grad, expected_grad, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", ["eager", *OTHERS])
def test_rows_that_see_no_key_give_zero_output_and_zero_gradient(name):
    q, k, v = make_qkv(5, 2)
    o = attention.get(name)(q, k, v, is_causal=True)
    o.sum().backward()
    assert torch.equal(o[..., :3, :], torch.zeros_like(o[..., :3, :]))
    assert torch.equal(q.grad[..., :3, :], torch.zeros_like(q[..., :3, :]))
    assert torch.isfinite(k.grad).all()
    assert torch.isfinite(v.grad).all()


def test_module_computes_what_the_eager_backend_computes():
    q, k, v = make_qkv(5, 5)
    for is_causal in (False, True):
        expected = scaled_dot_product_attention(q, k, v, is_causal=is_causal)
        assert torch.equal(ScaledDotProductAttention()(q, k, v, is_causal=is_causal), expected)
    assert torch.equal(
        ScaledDotProductAttention()(q, k, v), scaled_dot_product_attention(q, k, v, is_causal=False)
    )


@pytest.mark.parametrize("name", OTHERS)
def test_model_with_any_attention_gives_the_logits_and_gradients_of_eager(name, model_config):
    tokens = torch.randint(257, (2, 17))
    results = {}
    for backend in ("eager", name):
        torch.manual_seed(1)
        model = Transformer(ModelConfig(**{**vars(model_config), "attention": backend})).double()
        logits = model(tokens)
        logits.square().mean().backward()
        results[backend] = logits, {key: p.grad for key, p in model.named_parameters()}
    (logits, grads), (other_logits, other_grads) = results["eager"], results[name]
    torch.testing.assert_close(other_logits, logits, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(other_grads, grads, rtol=1e-8, atol=1e-12)


def test_layer_attends_per_head_between_its_projections():
    layer = MultiHeadAttention(8, 2).double()
    x = torch.randn(2, 5, 8, dtype=torch.float64)
    expected = torch.zeros_like(x)
    for head in range(2):
        rows = slice(4 * head, 4 * head + 4)
        q, k, v = (x @ p.weight[rows].T for p in (layer.q_proj, layer.k_proj, layer.v_proj))
        o = attention_by_loops(q, k, v, is_causal=True)
        expected += o @ layer.o_proj.weight[:, rows].T
    torch.testing.assert_close(layer(x), expected)


def test_layer_calls_the_assigned_function_with_rotated_queries_and_keys():
    rope = RotaryEmbedding(4, 16)
    layer = MultiHeadAttentionWithRoPE(8, 2, rope=rope)
    x = torch.randn(3, 5, 8)
    before = layer(x)
    seen = []

    def watching(q, k, v, *, is_causal):
        seen.append((q, k, v, is_causal))
        return scaled_dot_product_attention(q, k, v, is_causal=is_causal)

    layer.attention_fn = watching
    assert torch.equal(layer(x), before)
    ((q, k, v, is_causal),) = seen
    assert q.shape == k.shape == v.shape == (3, 2, 5, 4)
    assert is_causal
    assert torch.equal(q, rope(layer.q_proj(x).view(3, 5, 2, 4).transpose(1, 2)))
    assert torch.equal(v, layer.v_proj(x).view(3, 5, 2, 4).transpose(1, 2))


def test_layer_refuses_a_width_that_does_not_split_into_heads():
    with pytest.raises(ConfigError, match="multiple of `num_heads`, got 10 and 4"):
        MultiHeadAttention(10, 4)


@pytest.mark.skipif("TINY_LLM_EXTRA" not in os.environ, reason="says which extra is installed")
def test_flash_is_installed_exactly_when_the_extra_is():
    assert (os.environ["TINY_LLM_EXTRA"] == "flash") == HAS_FLASH

"""RoPE, RMSNorm, SwiGLU and the transformer made of them."""

import math
from dataclasses import replace

import pytest
import torch

from tiny_llm.config import ModelConfig
from tiny_llm.errors import ConfigError
from tiny_llm.feed_forward import SwiGLU
from tiny_llm.norm import RMSNorm
from tiny_llm.rope import RotaryEmbedding, stretched
from tiny_llm.transformer import Transformer


def test_rope_turns_each_pair_of_halves_by_its_angle():
    theta, position = 100.0, 3
    x = torch.randn(position + 1, 4, dtype=torch.float64)
    first_angle, second_angle = position * 1.0, position * theta**-0.5
    a, b, c, d = x[position].tolist()
    expected = [
        a * math.cos(first_angle) - c * math.sin(first_angle),
        b * math.cos(second_angle) - d * math.sin(second_angle),
        c * math.cos(first_angle) + a * math.sin(first_angle),
        d * math.cos(second_angle) + b * math.sin(second_angle),
    ]
    turned = RotaryEmbedding(4, 8, theta=theta)(x)[position]
    torch.testing.assert_close(turned.tolist(), expected, rtol=1e-6, atol=1e-6)


def test_rope_scores_depend_on_the_distance_only():
    rope = RotaryEmbedding(8, 64)
    q, k = torch.randn(8), torch.randn(8)
    q_everywhere, k_everywhere = rope(q.expand(64, 8)), rope(k.expand(64, 8))
    at_5_and_2 = q_everywhere[5] @ k_everywhere[2]
    at_60_and_57 = q_everywhere[60] @ k_everywhere[57]
    torch.testing.assert_close(at_5_and_2, at_60_and_57, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(at_5_and_2, q_everywhere[6] @ k_everywhere[2], rtol=1e-3)


def test_rope_tables_stay_exact_when_the_model_becomes_bfloat16():
    x = torch.randn(64, 8)
    expected = RotaryEmbedding(8, 64)(x.bfloat16())
    rope = RotaryEmbedding(8, 64).to(torch.bfloat16)
    assert torch.equal(rope(x.bfloat16()), expected)
    assert rope(x.bfloat16()).dtype == torch.bfloat16


def test_rope_refuses_an_odd_head_dim_and_too_many_positions():
    with pytest.raises(ConfigError, match="`head_dim` must be even, got 5"):
        RotaryEmbedding(5, 8)
    with pytest.raises(ConfigError, match="at most 8 tokens, got 9"):
        RotaryEmbedding(4, 8)(torch.randn(9, 4))


def test_rope_stretches_long_wavelengths_by_the_factor_and_keeps_short_ones():
    frequencies = torch.tensor([1.0, 0.1, 0.01, 0.001], dtype=torch.float64)
    # turns within 100 positions: 15.9, 1.59, 0.159, 0.0159
    new = stretched(frequencies, 8.0, 100)
    kept = (100 * 0.1 / (2 * math.pi) - 1) / 3
    expected = [1.0, 0.1 * (kept + (1 - kept) / 8), 0.01 / 8, 0.001 / 8]
    torch.testing.assert_close(new.tolist(), expected)
    assert torch.equal(stretched(frequencies, 1.0, 100), frequencies)


def test_rope_takes_positions_of_each_sequence():
    rope = RotaryEmbedding(8, 16)
    x = torch.randn(2, 3, 2, 8)
    turned = rope(x, torch.tensor([[4, 5], [0, 9]]))
    whole = rope(x.new_zeros(1, 16, 8) + x[1, 2, 1])
    torch.testing.assert_close(turned[1, 2, 1], whole[0, 9])
    torch.testing.assert_close(turned[1, :, 0], x[1, :, 0])


def test_rope_tables_exist_for_a_model_built_on_the_meta_device(model_config):
    with torch.device("meta"):
        model = Transformer(model_config)
    model.to_empty(device="cpu")
    x = torch.randn(1, 4, 5, 8)
    expected = RotaryEmbedding(8, 24)(x)
    assert torch.equal(model.blocks[0].attention.rope(x), expected)


def test_rms_norm_divides_by_the_root_mean_square_and_scales():
    norm = RMSNorm(3, eps=0.0)
    with torch.no_grad():
        norm.weight.copy_(torch.tensor([1.0, 2.0, -1.0]))
    x = torch.tensor([[1.0, 2.0, 2.0]])  # mean square 3
    expected = torch.tensor([[1.0, 4.0, -2.0]]) / math.sqrt(3)
    torch.testing.assert_close(norm(x), expected)


def test_rms_norm_of_large_half_precision_numbers_does_not_overflow():
    x = torch.full((1, 4), 60_000.0, dtype=torch.float16)
    normed = RMSNorm(4).half()(x)
    assert torch.equal(normed, torch.ones(1, 4, dtype=torch.float16))


def test_swiglu_is_the_gated_product():
    layer = SwiGLU(4, 6)
    x = torch.randn(2, 4)
    gate, up = x @ layer.gate_proj.weight.T, x @ layer.up_proj.weight.T
    expected = (gate * torch.sigmoid(gate) * up) @ layer.down_proj.weight.T
    torch.testing.assert_close(layer(x), expected)


def test_logits_do_not_depend_on_later_tokens(model_config):
    model = Transformer(model_config)
    tokens = torch.randint(257, (1, 12))
    changed = tokens.clone()
    changed[0, 7:] = (changed[0, 7:] + 1) % 257
    before, after = model(tokens), model(changed)
    torch.testing.assert_close(before[:, :7], after[:, :7])
    assert not torch.allclose(before[:, 7], after[:, 7])


def test_logits_depend_on_the_order_of_earlier_tokens(model_config):
    model = Transformer(model_config)
    logits = model(torch.tensor([[1, 2, 3, 4], [2, 1, 3, 4]]))
    assert not torch.allclose(logits[0, -1], logits[1, -1])


def test_fresh_model_guesses_uniformly(model_config):
    tokens = torch.randint(257, (4, 24))
    logits = Transformer(replace(model_config, tie_embeddings=False))(tokens)
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())
    assert loss.item() == pytest.approx(math.log(257), abs=0.05)


def test_tied_head_is_the_embedding_and_counts_once(model_config):
    tied = Transformer(model_config)
    untied = Transformer(replace(model_config, tie_embeddings=False))
    assert tied.head.weight is tied.embedding.weight
    assert untied.num_parameters() - tied.num_parameters() == 257 * 32
    block = 4 * 32 * 32 + 3 * 32 * 48 + 2 * 32
    assert tied.num_parameters() == 257 * 32 + 2 * block + 32


def test_residual_projections_start_smaller_the_deeper_the_model():
    deep = Transformer(ModelConfig(d_model=64, num_layers=8, num_heads=4, d_ff=256))
    attention, feed_forward = deep.blocks[0].attention, deep.blocks[0].feed_forward
    assert attention.q_proj.weight.std().item() == pytest.approx(0.02, rel=0.1)
    assert attention.o_proj.weight.std().item() == pytest.approx(0.02 / 4, rel=0.1)
    assert feed_forward.down_proj.weight.std().item() == pytest.approx(0.02 / 4, rel=0.1)


@pytest.mark.parametrize(
    ("tokens", "got"),
    [
        (torch.zeros(3, dtype=torch.int64), r"got \[3\] and torch.int64"),
        (torch.zeros(1, 3), r"got \[1, 3\] and torch.float32"),
    ],
)
def test_tokens_of_wrong_shape_or_dtype_are_refused(model_config, tokens, got):
    with pytest.raises(ConfigError, match=got):
        Transformer(model_config)(tokens)


def test_sequence_longer_than_the_model_is_refused(model_config):
    with pytest.raises(ConfigError, match="at most 24 tokens, got 25"):
        Transformer(model_config)(torch.zeros(1, 25, dtype=torch.int64))


def test_shared_key_heads_equal_a_model_whose_key_heads_are_repeated(model_config):
    grouped = Transformer(replace(model_config, num_kv_heads=2))
    full = Transformer(model_config)
    state = grouped.state_dict()
    for name, weight in state.items():
        if "k_proj" in name or "v_proj" in name:
            assert weight.shape == (16, 32)
            heads = weight.view(2, 8, 32)
            state[name] = heads.repeat_interleave(2, dim=0).reshape(32, 32)
    full.load_state_dict(state)
    tokens = torch.randint(257, (2, 9))
    torch.testing.assert_close(grouped(tokens), full(tokens))


def test_window_hides_older_tokens_in_the_layers_that_have_it(model_config):
    tokens = torch.randint(257, (1, 12))
    changed = tokens.clone()
    changed[0, 0] = (changed[0, 0] + 1) % 257
    for layers, reach in (("*", 1 + 2 * 3), ("0", 12)):
        config = replace(model_config, sliding_window=4, window_layers=layers)
        model = Transformer(config)
        difference = (model(tokens) - model(changed)).abs().amax(dim=-1)[0]
        # each windowed layer carries a token at most 3 further
        assert (difference[:reach] > 0).all()
        assert (difference[reach:] == 0).all()


def test_qk_norm_makes_scores_independent_of_the_size_of_queries_and_keys(model_config):
    model = Transformer(replace(model_config, qk_norm=True, norm_eps=1e-12))
    tokens = torch.randint(257, (1, 9))
    before = model(tokens)
    with torch.no_grad():
        model.blocks[0].attention.q_proj.weight.mul_(3)
        model.blocks[1].attention.k_proj.weight.mul_(5)
    torch.testing.assert_close(model(tokens), before)


def test_head_size_is_free_of_the_width(model_config):
    model = Transformer(replace(model_config, num_heads=3, head_size=10))
    assert model.blocks[0].attention.q_proj.weight.shape == (30, 32)
    assert model.blocks[0].attention.o_proj.weight.shape == (32, 30)
    assert model(torch.randint(257, (1, 5))).shape == (1, 5, 257)


def test_new_settings_leave_the_weights_of_older_checkpoints_as_they_were(model_config):
    names = set(Transformer(model_config).state_dict())
    block = {
        *(f"attention.{each}_proj.weight" for each in "qkvo"),
        *(f"feed_forward.{each}_proj.weight" for each in ("gate", "up", "down")),
        "attention_norm.weight",
        "feed_forward_norm.weight",
    }
    outside = {"embedding.weight", "norm.weight", "head.weight"}
    assert names == outside | {f"blocks.{i}.{each}" for i in range(2) for each in block}

"""transformers' models by ``attn_implementation="flash_kernel"``: equal to their eager selves."""

import pytest
import torch

transformers = pytest.importorskip(
    "transformers", reason="needs the extra `transformers`, which is not installed"
)

import flash_kernel.transformers  # noqa: E402

# transformers' own, and torch's that it calls
pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"
)

SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,  # so that rows do attend to some keys more than to others
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
MODELS = {
    "llama": ("Llama", SMALL),
    "qwen3": ("Qwen3", SMALL),
    # its second layer slides; queries are scaled by a number of their own
    "gemma2": ("Gemma2", SMALL | {"sliding_window": 6, "attn_logit_softcapping": 2.0,
                                  "query_pre_attn_scalar": 5}),
    "mistral": ("Mistral", SMALL | {"sliding_window": 6}),
    "gpt2": ("GPT2", {"vocab_size": 64, "n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 4,
                      "attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0,
                      "initializer_range": 0.3, "bos_token_id": 1, "eos_token_id": 2,
                      "pad_token_id": 0}),
}  # fmt: skip
CLOSE = {"rtol": 1e-4, "atol": 1e-4}


def build(name, attention, device, **changes):
    flash_kernel.transformers.register()
    family, options = MODELS[name]
    config = getattr(transformers, f"{family}Config")(
        **options | changes, attn_implementation=attention
    )
    head = "LMHeadModel" if name == "gpt2" else "ForCausalLM"
    model_class = getattr(transformers, f"{family}{head}")
    torch.manual_seed(0)
    model = model_class(config).to(device)
    assert model.config._attn_implementation == attention
    return model


def batch(device):
    """Two sequences of 12 and of 9 tokens, the second padded on the left."""
    tokens = torch.randint(3, 64, (2, 12), device=device)
    is_token = torch.ones_like(tokens)
    is_token[1, :3] = 0
    return tokens, is_token


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("padded", [False, True], ids=["full", "padded"])
def test_logits_and_gradients_are_those_of_eager_attention(name, padded, device):
    tokens, is_token = batch(device)
    is_token = is_token if padded else torch.ones_like(tokens)
    labels = tokens.masked_fill(is_token.roll(1, dims=1) * is_token == 0, -100)
    labels[:, 0] = -100  # a token after padding is predicted from padding: any number will do
    results = []
    for attention in ("eager", "flash_kernel"):
        model = build(name, attention, device).train()
        out = model(input_ids=tokens, attention_mask=is_token, labels=labels)
        out.loss.backward()
        gradients = {x: p.grad for x, p in model.named_parameters() if p.grad is not None}
        results.append((out.logits[is_token == 1].detach(), out.loss.detach(), gradients))
    eager, ours = results
    torch.testing.assert_close(ours, eager, **CLOSE)
    assert len(ours[2]) > 10


@pytest.mark.parametrize("name", MODELS)
def test_generation_is_that_of_eager_attention(name, device):
    tokens, is_token = batch(device)
    settings = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False}
    eager, ours = (
        build(name, attention, device)
        .eval()
        .generate(
            tokens,
            attention_mask=is_token,
            return_dict_in_generate=True,
            output_logits=True,
            **settings,
        )
        for attention in ("eager", "flash_kernel")
    )
    torch.testing.assert_close(torch.stack(ours.logits), torch.stack(eager.logits), **CLOSE)
    assert torch.equal(ours.sequences, eager.sequences)


@pytest.mark.parametrize("padded", [False, True], ids=["full", "padded"])
def test_mask_of_a_sliding_layer_is_passed_as_its_window(padded, device, monkeypatch):
    """So that what lies outside takes no time."""
    asked = []

    def recorded(*tensors, **options):
        asked.append((options["window"], options["mask"] is None))
        return flash_kernel.flash_attention(*tensors, **options)

    monkeypatch.setattr(flash_kernel.transformers, "flash_attention", recorded)
    tokens, is_token = batch(device)
    build("gemma2", "flash_kernel", device)(tokens, attention_mask=is_token if padded else None)
    # the second layer's window of 6 has 5 keys before a row's own
    assert set(asked) == ({(None, False)} if padded else {(None, True), ((5, 0), True)})


def test_window_is_found_in_a_mask_that_is_one_and_in_no_other(device):
    keys, positions = torch.arange(9, device=device), torch.arange(3, 9, device=device)[:, None]
    mask = ((keys <= positions) & (keys >= positions - 2)).expand(2, 1, 6, 9).contiguous()
    find = flash_kernel.transformers._window_of
    assert find(mask) == find(mask) == (2, 0)
    mask[1, 0, 3, 5] = False  # changed in place, after it was looked at
    assert find(mask) is None
    assert find(torch.ones(1, 1, 6, 9, dtype=torch.bool, device=device)) is None
    assert find(torch.zeros(1, 1, 6, 9, dtype=torch.bool, device=device)) is None
    assert find(torch.ones(1, 1, 6, 9, dtype=torch.bool, device=device).tril(3)) == (8, 0)


def test_mask_of_more_keys_than_there_are_is_refused_and_not_read_as_a_window(device):
    q, k = torch.randn(1, 2, 4, 16, device=device), torch.randn(1, 2, 6, 16, device=device)
    mask = torch.ones(1, 1, 4, 8, dtype=torch.bool, device=device).tril(4)
    with pytest.raises(ValueError, match="`mask`"):
        flash_kernel.transformers.attend(torch.nn.Module(), q, k, k, mask)


def test_static_cache_does_not_attend_to_what_is_not_yet_written(device):
    tokens = torch.randint(3, 64, (1, 12), device=device)
    eager, ours = (
        build("llama", attention, device)
        .eval()
        .generate(
            tokens,
            max_new_tokens=4,
            min_new_tokens=4,
            do_sample=False,
            cache_implementation="static",
            disable_compile=True,
        )
        for attention in ("eager", "flash_kernel")
    )
    assert torch.equal(ours, eager)


def test_dropout_of_attention_weights_raises_and_says_what_to_set(device):
    tokens, _ = batch(device)
    model = build("gpt2", "flash_kernel", device, attn_pdrop=0.1).train()
    with pytest.raises(
        ValueError, match=r"no attention dropout, got 0.1. Set .* \(GPT-2: attn_pdrop\)"
    ):
        model(tokens)
    assert model.eval()(tokens).logits.isfinite().all()


def test_packed_lengths_and_sinks_are_honoured(device):
    """As vision models and GPT-OSS call their attention."""
    q, k, v = (torch.randn(1, 2, 11, 8, device=device) for _ in range(3))
    module = torch.nn.Module()
    ends = torch.tensor([0, 4, 11], dtype=torch.int32, device=device)
    sinks = torch.randn(2, device=device)
    o, weights = flash_kernel.transformers.attend(
        module, q, k, v, None, is_causal=False, cu_seq_lens_q=ends, cu_seq_lens_k=ends, s_aux=sinks
    )
    parts = [
        flash_kernel.attention_reference(*(x[:, :, rows] for x in (q, k, v)), sinks=sinks)[0]
        for rows in (slice(0, 4), slice(4, 11))
    ]
    torch.testing.assert_close(o.transpose(1, 2), torch.cat(parts, dim=2), rtol=1e-5, atol=1e-5)
    assert weights is None
    with pytest.raises(ValueError, match=r"output_attentions=True .* attn_implementation='eager'"):
        flash_kernel.transformers.attend(module, q, k, v, None, output_attentions=True)


def test_position_bias_between_packed_sequences_is_refused(device):
    q = torch.randn(1, 2, 11, 8, device=device)
    ends = torch.tensor([0, 4, 11], dtype=torch.int32, device=device)
    bias = torch.zeros(1, 2, 11, 11, device=device)
    with pytest.raises(ValueError, match=r"take no `position_bias`: pad them to a batch"):
        flash_kernel.transformers.attend(
            torch.nn.Module(), q, q, q, None, cu_seq_lens_q=ends, position_bias=bias
        )

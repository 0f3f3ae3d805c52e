"""flash-attn 2's functions: its layouts and arguments, mapped onto ours."""

import inspect

import pytest
import torch

from flash_kernel import attention_reference, flash_attn
from flash_kernel.flash_attn import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
    flash_attn_with_kvcache,
)

CLOSE = {"rtol": 1e-5, "atol": 1e-5}
# the options of one call, flash-attn's names and ours
OPTIONS = {
    "causal": ({"causal": True}, {"is_causal": True}),
    "window": ({"window_size": (5, -1), "causal": True}, {"window": (5, None), "is_causal": True}),
    "softcap": ({"softcap": 2.0, "softmax_scale": 0.3}, {"softcap": 2.0, "scale": 0.3}),
    "both sides": ({"window_size": (3, 4)}, {"window": (3, 4)}),
}


def draw(*shapes, device):
    return [torch.randn(shape, device=device, requires_grad=True) for shape in shapes]


def expected_output(q, k, v, **options):
    o, lse = attention_reference(*(x.transpose(1, 2) for x in (q, k, v)), **options)
    return o.transpose(1, 2), lse


def assert_same_gradients(o, expected, leaves):
    do = torch.randn_like(expected)
    gradients = (torch.autograd.grad(x, leaves, do) for x in (o, expected))
    torch.testing.assert_close(*gradients, **CLOSE)


@pytest.mark.parametrize("option", OPTIONS)
def test_dense_function_takes_flash_attn_arguments(option, device):
    q, k, v = draw((2, 9, 4, 8), (2, 13, 2, 8), (2, 13, 2, 8), device=device)
    theirs, ours = OPTIONS[option]
    expected, expected_lse = expected_output(q, k, v, **ours)
    o, lse, mask = flash_attn_func(q, k, v, return_attn_probs=True, deterministic=True, **theirs)
    torch.testing.assert_close((o, lse), (expected, expected_lse), **CLOSE)
    assert mask is None
    assert o.is_contiguous()
    alone = flash_attn_func(q, k, v, **theirs)
    torch.testing.assert_close(alone, expected, **CLOSE)
    assert_same_gradients(alone, expected, [q, k, v])


def test_slopes_are_those_of_flash_attn(device):
    q, k, v = draw((2, 9, 4, 8), (2, 13, 4, 8), (2, 13, 4, 8), device=device)
    slopes = torch.rand(2, 4, device=device)
    # as flash-attn documents it
    distance = (torch.arange(9)[:, None] + 13 - 9 - torch.arange(13)[None]).abs().to(device)
    expected, _ = expected_output(q, k, v, bias=-slopes[..., None, None] * distance)
    torch.testing.assert_close(flash_attn_func(q, k, v, alibi_slopes=slopes), expected, **CLOSE)


def test_packed_tensors_are_split_where_they_lie(device):
    (qkv,) = draw((2, 9, 3, 4, 8), device=device)
    expected, _ = expected_output(*qkv.unbind(2), is_causal=True)
    o = flash_attn_qkvpacked_func(qkv, causal=True)
    torch.testing.assert_close(o, expected, **CLOSE)
    assert_same_gradients(o, expected, [qkv])
    q, kv = draw((2, 9, 4, 8), (2, 13, 2, 2, 8), device=device)
    expected, _ = expected_output(q, *kv.unbind(2))
    torch.testing.assert_close(flash_attn_kvpacked_func(q, kv), expected, **CLOSE)


def test_varlen_functions_attend_within_each_sequence(device):
    lengths_q, lengths_k = [4, 0, 7], [6, 2, 7]
    cu_q, cu_k = (
        torch.tensor([0, *lengths], dtype=torch.int32, device=device).cumsum(0, dtype=torch.int32)
        for lengths in (lengths_q, lengths_k)
    )
    q, kv = draw((11, 4, 8), (15, 2, 2, 8), device=device)
    parts_q, parts_kv = q.split(lengths_q), kv.split(lengths_k)
    parts = [
        expected_output(x[None], *y[None].unbind(2), is_causal=True)
        for x, y in zip(parts_q, parts_kv, strict=True)
    ]
    expected = torch.cat([o[0] for o, _ in parts])
    lse_expected = torch.cat([lse[0] for _, lse in parts], dim=-1)
    o, lse, _ = flash_attn_varlen_func(
        q, *kv.unbind(1), cu_q, cu_k, 7, 7, causal=True, return_attn_probs=True
    )
    torch.testing.assert_close((o, lse), (expected, lse_expected), **CLOSE)
    assert_same_gradients(o, expected, [q, kv])
    packed = flash_attn_varlen_kvpacked_func(q, kv, cu_q, cu_k, 7, 7, causal=True)
    torch.testing.assert_close(packed, expected, **CLOSE)
    (qkv,) = draw((11, 3, 2, 8), device=device)
    expected = [expected_output(*x[None].unbind(2))[0][0] for x in qkv.split(lengths_q)]
    packed = flash_attn_varlen_qkvpacked_func(qkv, cu_q, 7)
    torch.testing.assert_close(packed, torch.cat(expected), **CLOSE)


@torch.no_grad()
def test_cache_is_appended_to_and_attended_to(device):
    q, k, v = draw((2, 3, 4, 8), (2, 3, 2, 8), (2, 3, 2, 8), device=device)
    k_cache, v_cache = draw((2, 16, 2, 8), (2, 16, 2, 8), device=device)
    lengths = torch.tensor([5, 9], dtype=torch.int32, device=device)
    before = k_cache.clone()
    o, lse = flash_attn_with_kvcache(
        q, k_cache, v_cache, k, v, cache_seqlens=lengths, causal=True, return_softmax_lse=True
    )
    for i, length in enumerate((5, 9)):
        assert torch.equal(k_cache[i, length : length + 3], k[i])
        assert torch.equal(k_cache[i, :length], before[i, :length])
        held = (x[i : i + 1, : length + 3] for x in (k_cache, v_cache))
        expected, expected_lse = expected_output(q[i : i + 1], *held, is_causal=True)
        torch.testing.assert_close((o[i], lse[i]), (expected[0], expected_lse[0]), **CLOSE)


@torch.no_grad()
def test_cache_is_full_by_default_and_its_length_may_be_one_number(device):
    q, k_cache, v_cache = draw((2, 1, 4, 8), (2, 16, 2, 8), (2, 16, 2, 8), device=device)
    expected, _ = expected_output(q, k_cache, v_cache)
    torch.testing.assert_close(flash_attn_with_kvcache(q, k_cache, v_cache), expected, **CLOSE)
    expected, _ = expected_output(q, k_cache[:, :6], v_cache[:, :6])
    o = flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=6)
    torch.testing.assert_close(o, expected, **CLOSE)
    pages = torch.arange(8, dtype=torch.int32, device=device).view(2, 4)
    paged = (x.reshape(8, 4, 2, 8) for x in (k_cache, v_cache))
    o = flash_attn_with_kvcache(q, *paged, cache_seqlens=6, block_table=pages)
    torch.testing.assert_close(o, expected, **CLOSE)


X = torch.zeros(1, 4, 2, 8)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: flash_attn_func(X, X, X, 0.1), r"`dropout_p` must be 0.0, got 0.1.* use torch's"),
        (lambda: flash_attn_func(X, X, X, dropout_p=0.1), "no dropout of attention weights"),
        (lambda: flash_attn_qkvpacked_func(X), r"`qkv` must have shape \[..., 3, heads, head_dim"),
        (lambda: flash_attn_with_kvcache(X, X, X, X, X), "`cache_seqlens` must be given"),
        (lambda: flash_attn_with_kvcache(X, X, X, rotary_cos=X), "Rotate q and k before the call"),
        (lambda: flash_attn_with_kvcache(X, X, X, cache_batch_idx=X), "or pass a `block_table`"),
        (lambda: flash_attn_with_kvcache(X, X, X, cache_leftpad=X), "from the start of its cache"),
        (
            lambda: flash_attn_varlen_func(X[0], X[0], X[0], X, X, 4, 4, block_table=X),
            "pass pages to flash_attn_with_kvcache",
        ),
        (lambda: flash_attn_func(X[0], X[0], X[0]), r"`q` must have four dimensions, .* \[4, 2, 8"),
        (lambda: flash_attn_with_kvcache(X, X[0], X), "`k_cache` must have four dimensions"),
        (lambda: flash_attn_func(X, X, X, window_size=(3, None)), r"-1 for unbounded, got \(3, No"),
    ],
)
def test_what_is_lacking_raises_and_says_what_to_use(call, message):
    with pytest.raises(ValueError, match=message) as caught:
        call()
    assert "\n" not in str(caught.value)


def test_what_is_no_tensor_is_refused_in_words():
    with pytest.raises(TypeError, match=r"`v` must be a torch.Tensor, got list"):
        flash_attn_func(X, X, [1])
    with pytest.raises(TypeError, match=r"`kv` must be a torch.Tensor, got list"):
        flash_attn_kvpacked_func(X, [1])


def test_every_function_takes_what_flash_attn_documents():
    """Positions count: code calls these functions without names."""
    shared = ["dropout_p", "softmax_scale", "causal", "window_size", "softcap", "alibi_slopes",
              "deterministic", "return_attn_probs"]  # fmt: skip
    lengths = ["cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"]
    signatures = {
        "flash_attn_func": ["q", "k", "v", *shared],
        "flash_attn_kvpacked_func": ["q", "kv", *shared],
        "flash_attn_qkvpacked_func": ["qkv", *shared],
        "flash_attn_varlen_func": ["q", "k", "v", *lengths, *shared, "block_table"],
        "flash_attn_varlen_kvpacked_func": ["q", "kv", *lengths, *shared],
        "flash_attn_varlen_qkvpacked_func": ["qkv", "cu_seqlens", "max_seqlen", *shared],
        "flash_attn_with_kvcache": [
            "q", "k_cache", "v_cache", "k", "v", "rotary_cos", "rotary_sin", "cache_seqlens",
            "cache_batch_idx", "cache_leftpad", "block_table", "softmax_scale", "causal",
            "window_size", "softcap", "rotary_interleaved", "alibi_slopes", "num_splits",
            "return_softmax_lse",
        ],
    }  # fmt: skip
    assert sorted(signatures) == flash_attn.__all__
    for name, parameters in signatures.items():
        assert list(inspect.signature(getattr(flash_attn, name)).parameters) == parameters, name

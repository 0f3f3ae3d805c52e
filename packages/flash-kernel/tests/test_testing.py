"""The tolerance rule must pass what is right and fail what is wrong: all other tests rest on it."""

import math
from functools import partial

import pytest
import torch
import torch.nn.functional as F

from flash_kernel import _tolerance
from flash_kernel.reference import attention_reference
from flash_kernel.testing import assert_matches_reference, expect, make_qkv, measure_errors

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


def test_make_qkv_draws_the_same_numbers_for_a_seed_and_others_for_another():
    first, again, other = (
        make_qkv(2, 3, 4, 5, 8, dtype=torch.float32, seed=seed) for seed in (0, 0, 1)
    )
    assert [list(x.shape) for x in first] == [[2, 3, 4, 8], [2, 3, 5, 8], [2, 3, 5, 8]]
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(first, other, strict=True))
    assert not torch.equal(first[1], first[2])


def test_make_qkv_without_heads_gives_three_dimensions_and_leaves_that_require_grad():
    q, k, _ = make_qkv(2, None, 4, 5, 8, dtype=torch.float16, requires_grad=True)
    assert (q.shape, k.shape) == ((2, 4, 8), (2, 5, 8))
    assert q.is_leaf
    assert q.requires_grad
    assert q.dtype == torch.float16


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(1, 1), (2, 2), (33, 33)])
def test_torch_attention_passes(seqlen_q, seqlen_k, dtype, is_causal, device):
    q, k, v = make_qkv(1, 2, seqlen_q, seqlen_k, 32, dtype=dtype, device=device)
    fn = partial(F.scaled_dot_product_attention, is_causal=is_causal)
    assert_matches_reference(fn, q, k, v, is_causal=is_causal)


def spoil(x, which, how):
    """An attention whose named result is changed by ``how``, everything else right."""

    class Spoilt(torch.autograd.Function):
        @staticmethod
        def forward(ctx, q, k, v):
            with torch.enable_grad():
                ctx.leaves = [t.detach().requires_grad_() for t in (q, k, v)]
                ctx.outputs = attention_reference(*ctx.leaves)
            o, lse = (t.detach().clone() for t in ctx.outputs)
            return (how(o) if which == "o" else o), (how(lse) if which == "lse" else lse)

        @staticmethod
        def backward(ctx, do, dlse):
            gradients = torch.autograd.grad(ctx.outputs, ctx.leaves, (do, dlse))
            named = zip(("dq", "dk", "dv"), gradients, strict=True)
            return tuple(how(g) if which == name else g for name, g in named)

    return Spoilt.apply(*x)


def one_entry(value):
    def change(tensor):
        tensor = tensor.clone()
        tensor[(0,) * tensor.dim()] = value
        return tensor

    return change


@pytest.mark.parametrize("which", ["o", "lse", "dq", "dk", "dv"])
@pytest.mark.parametrize(
    "how",
    [
        pytest.param(one_entry(math.nan), id="one-nan"),
        pytest.param(one_entry(math.inf), id="one-inf"),
        pytest.param(lambda x: x * 1.02, id="two-percent"),
        pytest.param(lambda x: x.flip(-1), id="flipped"),
    ],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_wrong_result_fails_and_is_the_only_one_named(dtype, how, which):
    q, k, v = make_qkv(1, 2, 17, 17, 32, dtype=dtype)
    with pytest.raises(AssertionError) as raised:
        assert_matches_reference(lambda *x: spoil(x, which, how), q, k, v, is_causal=False)
    _, *lines = str(raised.value).splitlines()
    assert len(lines) == 1
    assert lines[0].startswith(f"`{which}`: error max ")
    assert "bound max " in lines[0]


def test_a_bias_too_small_for_the_largest_error_fails_by_the_mean():
    q, k, v = make_qkv(1, 2, 33, 33, 32, dtype=torch.bfloat16)
    expected = expect(q, k, v, is_causal=False)
    errors = expected.errors_of(lambda *x: spoil(x, "o", lambda o: o + 2**-7))
    assert errors.o.max <= expected.bounds.o.max
    assert errors.o.mean > expected.bounds.o.mean
    assert len(expected.violations(errors)) == 1


def test_inputs_rounded_to_tf32_fail_in_float32():
    def rounded(x):
        """Keep the 10 bits of mantissa that TF32 has; the gradient passes unchanged."""
        as_tf32 = (x.detach().view(torch.int32) + 0x1000 & ~0x1FFF).view(torch.float32)
        return x + (as_tf32 - x.detach())

    q, k, v = make_qkv(1, 2, 65, 65, 64, dtype=torch.float32)
    expected = expect(q, k, v, is_causal=False)
    errors = expected.errors_of(lambda *x: attention_reference(*map(rounded, x)))
    assert len(expected.violations(errors)) == 5


@pytest.mark.parametrize(
    ("which", "how", "message"),
    [
        ("o", lambda o: o.float(), r"`o` must be torch.float16 \[1, 2, 5, 8\], got torch.float32"),
        (
            "o",
            lambda o: o[..., :1],
            r"`o` must be torch.float16 \[1, 2, 5, 8\], got .* \[1, 2, 5, 1\]",
        ),
        (
            "lse",
            lambda lse: lse.half(),
            r"`lse` must be torch.float32 \[1, 2, 5\], got torch.float16",
        ),
    ],
)
def test_a_result_of_another_dtype_or_shape_fails(which, how, message):
    q, k, v = make_qkv(1, 2, 5, 5, 8, dtype=torch.float16)
    with pytest.raises(AssertionError, match=message):
        assert_matches_reference(lambda *x: spoil(x, which, how), q, k, v, is_causal=False)


def test_where_the_dense_baseline_overflows_it_earns_no_tolerance():
    q, k, v = make_qkv(1, 2, 17, 17, 64, dtype=torch.float16)
    q, k = q * 100, k * 100  # scores of 1e5 before scaling: inf in float16
    bounds = expect(q, k, v, is_causal=False, scale=1e-5).bounds
    assert all(math.isfinite(bound.max) for _, bound in bounds.items())


def test_heads_in_slices_give_the_bounds_of_all_at_once(monkeypatch):
    q, k, v = make_qkv(2, 3, 9, 7, 8, dtype=torch.float16)
    at_once = expect(q, k, v, is_causal=True)
    monkeypatch.setattr(_tolerance, "_DENSE_SCORES", 2 * 9 * 7)
    sliced = expect(q, k, v, is_causal=True)
    for name, result in at_once.results.items():
        torch.testing.assert_close(sliced.results[name], result, rtol=1e-13, atol=1e-14)
    assert sliced.bounds.dk.max == pytest.approx(at_once.bounds.dk.max, rel=1e-6)


def test_measured_error_is_the_distance_from_float64():
    q, k, v = make_qkv(1, None, 5, 7, 8, dtype=torch.float64)
    errors = measure_errors(
        lambda q, k, v: attention_reference(q, k, v)[0] + 0.25, q, k, v, is_causal=False
    )
    assert errors.o.max == pytest.approx(0.25)
    assert errors.o.mean == pytest.approx(0.25)
    assert errors.lse is None
    assert [name for name, _ in errors.items()] == ["o", "dq", "dk", "dv"]


def test_a_gradient_of_lse_needs_an_implementation_that_returns_lse():
    q, k, v = make_qkv(1, None, 5, 7, 8, dtype=torch.float32)
    with pytest.raises(ValueError, match="`dlse` needs an implementation that returns"):
        assert_matches_reference(
            F.scaled_dot_product_attention, q, k, v, is_causal=False, dlse=torch.ones(1, 5)
        )


@pytest.mark.parametrize(
    ("module", "is_filled"), [("flash_kernel.somewhere", True), ("elsewhere", False)]
)
def test_uninitialised_memory_is_nan_inside_flash_kernel_only(module, is_filled):
    scope = {"__name__": module, "torch": torch, "x": torch.zeros(2)}
    exec("found = torch.empty(2), torch.empty_like(x), x.new_empty(2)", scope)
    assert all(bool(tensor.isnan().all()) for tensor in scope["found"]) == is_filled

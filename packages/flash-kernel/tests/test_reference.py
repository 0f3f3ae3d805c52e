import math
from functools import partial

import pytest
import torch
import torch.nn.functional as F

from flash_kernel.reference import attention_reference, visible_mask
from flash_kernel.testing import make_qkv
from flash_kernel.variant import Variant

CAUSAL = Variant(1.0, right=0)

# (seqlen_q, seqlen_k): equal, more keys, more queries, one of either
LENGTHS = [(1, 1), (13, 13), (5, 13), (13, 5), (1, 13), (13, 1)]


def test_causal_mask_is_aligned_to_the_bottom_right():
    assert visible_mask(2, 4, CAUSAL).tolist() == [
        [True, True, True, False],
        [True, True, True, True],
    ]
    assert visible_mask(3, 2, CAUSAL).tolist() == [[False, False], [True, False], [True, True]]


@pytest.mark.parametrize(
    ("seqlen_q", "seqlen_k", "is_causal"),
    # rows that see nothing have no definition in torch; they are tested below
    [(m, n, False) for m, n in LENGTHS] + [(m, n, True) for m, n in LENGTHS if m <= n],
)
def test_output_and_gradients_equal_those_of_torch_in_float64(
    seqlen_q, seqlen_k, is_causal, device
):
    leaves = make_qkv(2, 2, seqlen_q, seqlen_k, 8, dtype=torch.float64, device=device)
    leaves = [x.requires_grad_() for x in leaves]
    do = torch.randn(leaves[0].shape, dtype=torch.float64, device=device)
    # spelled independently of visible_mask
    mask = torch.ones(seqlen_q, seqlen_k, dtype=torch.bool, device=device)
    mask = mask.tril(seqlen_k - seqlen_q) if is_causal else mask

    expected = F.scaled_dot_product_attention(*leaves, attn_mask=mask)
    expected_gradients = torch.autograd.grad(expected, leaves, do)
    o, _ = attention_reference(*leaves, is_causal=is_causal)
    gradients = torch.autograd.grad(o, leaves, do)

    torch.testing.assert_close(o, expected, rtol=1e-12, atol=1e-13)
    for gradient, expected_gradient in zip(gradients, expected_gradients, strict=True):
        torch.testing.assert_close(gradient, expected_gradient, rtol=1e-12, atol=1e-13)


def test_lse_is_the_natural_logarithm_of_the_sum_of_exponentials():
    q = torch.tensor([[2.0, 0.0]], dtype=torch.float64)
    k = torch.tensor([[1.0, 7.0], [3.0, -1.0]], dtype=torch.float64)
    _, lse = attention_reference(q, k, k, scale=0.5)
    assert lse.item() == pytest.approx(math.log(math.exp(1.0) + math.exp(3.0)), rel=1e-15)


def test_scale_defaults_to_one_over_the_root_of_head_dim(device):
    q, k, v = make_qkv(1, 2, 5, 7, 16, dtype=torch.float64, device=device)
    o, lse = attention_reference(q, k, v)
    o_scaled, lse_scaled = attention_reference(q, k, v, scale=0.25)
    assert torch.equal(o, o_scaled)
    assert torch.equal(lse, lse_scaled)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_output_has_the_dtype_of_the_input_and_lse_that_of_the_softmax(dtype, device):
    q, k, v = make_qkv(1, None, 5, 7, 16, dtype=dtype, device=device)
    o, lse = attention_reference(q, k, v, is_causal=True)
    assert o.dtype == dtype
    assert lse.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)


def test_softmax_is_kept_in_float32_for_half_precision(device):
    # the probabilities, 1/4099, are added up: float16 would stop counting at 2048
    q, k, v = torch.zeros(1, 8), torch.zeros(4099, 8), torch.ones(4099, 8)
    q, k, v = (x.to(device, torch.float16) for x in (q, k, v))
    o, lse = attention_reference(q, k, v)
    assert lse.item() == pytest.approx(math.log(4099), rel=1e-6)
    torch.testing.assert_close(o, torch.ones_like(o), rtol=1e-3, atol=0.0)


def test_rows_that_see_nothing_are_zero_and_pass_no_gradient(device):
    leaves = make_qkv(2, None, 5, 3, 8, dtype=torch.float64, device=device)
    leaves = [x.requires_grad_() for x in leaves]
    o, lse = attention_reference(*leaves, is_causal=True)
    assert torch.equal(o[:, :2], torch.zeros_like(o[:, :2]))
    assert torch.equal(lse[:, :2], torch.full_like(lse[:, :2], -math.inf))

    gradients = torch.autograd.grad([o, lse], leaves, [torch.ones_like(o), torch.ones_like(lse)])
    # the same problem without these rows
    q, k, v = leaves
    o_seen, lse_seen = attention_reference(q[:, 2:], k, v, is_causal=True)
    torch.testing.assert_close(o[:, 2:], o_seen, rtol=1e-13, atol=1e-14)
    expected = torch.autograd.grad(
        [o_seen, lse_seen], leaves, [torch.ones_like(o_seen), torch.ones_like(lse_seen)]
    )
    for gradient, expected_gradient in zip(gradients, expected, strict=True):
        torch.testing.assert_close(gradient, expected_gradient, rtol=1e-13, atol=1e-14)
    assert torch.equal(gradients[0][:, :2], torch.zeros_like(q[:, :2]))


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(3, 0), (0, 3), (0, 0)])
def test_empty_sequences_have_defined_results_and_gradients(seqlen_q, seqlen_k, is_causal, device):
    leaves = make_qkv(2, None, seqlen_q, seqlen_k, 8, dtype=torch.float32, device=device)
    leaves = [x.requires_grad_() for x in leaves]
    o, lse = attention_reference(*leaves, is_causal=is_causal)
    assert torch.equal(o, torch.zeros(2, seqlen_q, 8, device=device))
    assert torch.equal(lse, torch.full((2, seqlen_q), -math.inf, device=device))
    for gradient in torch.autograd.grad([o.sum() + lse.sum()], leaves):
        assert torch.equal(gradient, torch.zeros_like(gradient))


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(3, 5), (5, 3)])
def test_gradients_through_output_and_lse_pass_gradcheck(seqlen_q, seqlen_k, is_causal, device):
    leaves = make_qkv(1, None, seqlen_q, seqlen_k, 4, dtype=torch.float64, device=device)
    leaves = [x.requires_grad_() for x in leaves]
    seen_from = max(0, seqlen_q - seqlen_k) if is_causal else 0

    def outputs(q, k, v):
        o, lse = attention_reference(q, k, v, is_causal=is_causal)
        # finite differences of -inf are NaN
        return o, lse[..., seen_from:]

    assert torch.autograd.gradcheck(outputs, leaves)


def test_a_constant_added_to_every_score_moves_only_lse(device):
    q, k, v = make_qkv(1, 2, 5, 7, 8, dtype=torch.float64, device=device)
    shift = torch.randn(8, dtype=torch.float64, device=device)
    o, lse = attention_reference(q, k, v, scale=1.0)
    o_shifted, lse_shifted = attention_reference(q, k + shift, v, scale=1.0)
    torch.testing.assert_close(o_shifted, o, rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(lse_shifted, lse + q @ shift, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_a_key_that_is_not_finite_stays_out_of_rows_that_cannot_see_it(poison, device):
    q, k, v = make_qkv(1, None, 4, 4, 8, dtype=torch.float32, device=device)
    clean = attention_reference(q, k, v, is_causal=True)
    k[:, 2] = poison
    poisoned = attention_reference(q, k, v, is_causal=True)
    for tensor, expected in zip(poisoned, clean, strict=True):
        assert torch.equal(tensor[:, :2], expected[:, :2])
        assert not tensor[:, 2:].isfinite().any()


def test_bad_input_is_refused_instead_of_broadcast():
    q, k = torch.zeros(2, 4, 8), torch.zeros(1, 4, 8)
    with pytest.raises(ValueError, match=r"`k` must have shape \[2, N, 8\] to match `q`, got"):
        attention_reference(q, k, k)


def test_any_leading_dimensions_are_attended_independently(device):
    q, k, v = make_qkv(6, None, 5, 7, 8, dtype=torch.float64, device=device)
    run = partial(attention_reference, is_causal=True)
    o, lse = run(*(x.unflatten(0, (1, 2, 3)) for x in (q, k, v)))
    for i in range(6):
        o_i, lse_i = run(q[i], k[i], v[i])
        torch.testing.assert_close(o.flatten(0, 2)[i], o_i, rtol=1e-13, atol=1e-14)
        torch.testing.assert_close(lse.flatten(0, 2)[i], lse_i, rtol=1e-13, atol=1e-14)

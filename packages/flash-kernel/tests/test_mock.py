import math
import re
from collections import Counter
from functools import partial

import pytest
import torch
import torch.nn.functional as F

from flash_kernel import mock
from flash_kernel.mock import (
    FlashAttentionMock,
    flash_attention_mock_backward,
    flash_attention_mock_forward,
    online_softmax_step,
)
from flash_kernel.reference import attention_reference
from flash_kernel.testing import assert_matches_reference, make_qkv

# with tiles of 16: one row, a tile and its neighbours, a prime, either side the longer
TILE = 16
LENGTHS = [(1, 1), (15, 15), (16, 16), (17, 17), (37, 37), (5, 37), (37, 5), (1, 33), (33, 1)]
HALF_AND_FULL = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


class _WithLse(torch.autograd.Function):
    """The mock's two plain functions joined, as the dispatcher joins them."""

    @staticmethod
    def forward(q, k, v, options):
        return flash_attention_mock_forward(q, k, v, **options)

    @staticmethod
    def setup_context(ctx, inputs, output):
        *qkv, ctx.options = inputs
        ctx.save_for_backward(*qkv, *output)

    @staticmethod
    def backward(ctx, do, dlse):
        saved = ctx.saved_tensors
        return *flash_attention_mock_backward(*saved, do, dlse=dlse, **ctx.options), None


def attention_with_lse(q, k, v, **options):
    return _WithLse.apply(q, k, v, {"block_m": TILE, "block_n": TILE, **options})


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), LENGTHS)
def test_tiles_match_reference_at_every_length(seqlen_q, seqlen_k, is_causal, device):
    q, k, v = make_qkv(1, 2, seqlen_q, seqlen_k, 16, dtype=torch.float32, device=device)
    fn = partial(attention_with_lse, is_causal=is_causal)
    assert_matches_reference(fn, q, k, v, is_causal=is_causal)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("head_dim", [16, 40, 64, 80])
@pytest.mark.parametrize("dtype", HALF_AND_FULL)
def test_tiles_match_reference_in_every_dtype_and_head_dim(dtype, head_dim, is_causal, device):
    q, k, v = make_qkv(1, 2, 33, 37, head_dim, dtype=dtype, device=device)
    fn = partial(FlashAttentionMock.apply, is_causal=is_causal, block_m=TILE, block_n=TILE)
    assert_matches_reference(fn, q, k, v, is_causal=is_causal)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("dtype", HALF_AND_FULL)
def test_gradient_of_lse_and_scale_are_honoured(dtype, is_causal, device):
    q, k, v = make_qkv(1, 2, 19, 17, 16, dtype=dtype, device=device)
    dlse = torch.randn(1, 2, 19, device=device, dtype=torch.promote_types(dtype, torch.float32))
    fn = partial(attention_with_lse, is_causal=is_causal, scale=-0.3)
    assert_matches_reference(fn, q, k, v, is_causal=is_causal, scale=-0.3, dlse=dlse)


@pytest.mark.parametrize("is_causal", [False, True])
def test_tiles_equal_torch_attention_in_float64(is_causal, device):
    q, k, v = make_qkv(2, 2, 37, 37, 24, dtype=torch.float64, device=device)
    o = FlashAttentionMock.apply(q, k, v, is_causal, False, 16, 8)
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=is_causal)
    torch.testing.assert_close(o, expected, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(("block_m", "block_n"), [(1, 1), (5, 3), (3, 5), (64, 64)])
def test_results_do_not_depend_on_block_size(block_m, block_n, is_causal, device):
    q, k, v = make_qkv(1, None, 11, 13, 8, dtype=torch.float64, device=device)
    blocks = {"block_m": block_m, "block_n": block_n, "is_causal": is_causal}
    fn = partial(attention_with_lse, **blocks)
    assert_matches_reference(fn, q, k, v, is_causal=is_causal)


@pytest.mark.parametrize(
    ("seqlen_q", "seqlen_k", "is_causal", "naive"),
    [
        (5, 5, False, False),
        (5, 5, True, False),
        (3, 7, True, False),
        (7, 3, True, False),
        (3, 3, True, True),
    ],
)
def test_gradients_pass_gradcheck_tiled_and_naive(seqlen_q, seqlen_k, is_causal, naive, device):
    leaves = make_qkv(1, None, seqlen_q, seqlen_k, 4, dtype=torch.float64, device=device)
    leaves = [x.requires_grad_() for x in leaves]
    fn = partial(FlashAttentionMock.apply, is_causal=is_causal, naive=naive, block_m=2, block_n=3)
    assert torch.autograd.gradcheck(fn, leaves)


def test_naive_is_the_dense_reference(device):
    q, k, v = make_qkv(1, 2, 5, 7, 8, dtype=torch.float32, device=device)
    o = FlashAttentionMock.apply(q, k, v, is_causal=True, naive=True)
    assert torch.equal(o, attention_reference(q, k, v, is_causal=True)[0])


def test_is_causal_binds_by_position_and_by_keyword(device):
    q, k, v = make_qkv(1, None, 9, 9, 8, dtype=torch.float32, device=device)
    by_position = FlashAttentionMock.apply(q, k, v, True)
    assert torch.equal(by_position, FlashAttentionMock.apply(q, k, v, is_causal=True))
    assert not torch.equal(by_position, FlashAttentionMock.apply(q, k, v))


@pytest.mark.parametrize("naive", [False, True])
@pytest.mark.parametrize("dtype", HALF_AND_FULL)
def test_output_and_gradients_have_the_dtype_of_the_input(dtype, naive, device):
    leaves = make_qkv(1, None, 5, 7, 8, dtype=dtype, device=device, requires_grad=True)
    o = FlashAttentionMock.apply(*leaves, is_causal=True, naive=naive)
    assert o.dtype == dtype
    assert [g.dtype for g in torch.autograd.grad(o.sum(), leaves)] == [dtype] * 3


@pytest.mark.parametrize("leading", [(), (6,), (2, 3), (1, 2, 1, 3)])
def test_leading_dimensions_are_flattened_and_restored(leading, device):
    q, k, v = make_qkv(6, None, 9, 11, 8, dtype=torch.float64, device=device)
    q, k, v = (x.reshape(*leading, *x.shape[1:]) if leading else x[0] for x in (q, k, v))
    fn = partial(attention_with_lse, is_causal=True)
    assert_matches_reference(fn, q, k, v, is_causal=True)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(
    ("batch", "seqlen_q", "seqlen_k"), [(2, 3, 0), (2, 0, 3), (2, 0, 0), (0, 3, 3)]
)
def test_empty_sequences_and_batches_have_defined_results(
    batch, seqlen_q, seqlen_k, is_causal, device
):
    q, k, v = make_qkv(batch, 2, seqlen_q, seqlen_k, 8, dtype=torch.float32, device=device)
    fn = partial(attention_with_lse, is_causal=is_causal)
    assert_matches_reference(fn, q, k, v, is_causal=is_causal)
    o, lse = fn(q, k, v)
    if seqlen_k == 0:
        assert torch.equal(o, torch.zeros_like(q))
        assert torch.equal(lse, torch.full_like(lse, -math.inf))


def test_rows_that_see_nothing_are_zero_and_pass_no_gradient(device):
    # tiles of 4: one tile of rows sees nothing at all, another only in part
    leaves = make_qkv(1, None, 13, 7, 8, dtype=torch.float64, device=device, requires_grad=True)
    o, lse = attention_with_lse(*leaves, is_causal=True, block_m=4, block_n=4)
    assert torch.equal(o[:, :6], torch.zeros_like(o[:, :6]))
    assert torch.equal(lse[:, :6], torch.full_like(lse[:, :6], -math.inf))
    assert lse[:, 6:].isfinite().all()
    dq, dk, dv = torch.autograd.grad([o.sum() + lse[:, 6:].sum()], leaves)
    assert torch.equal(dq[:, :6], torch.zeros_like(dq[:, :6]))
    assert all(gradient.isfinite().all() for gradient in (dq, dk, dv))


def test_causal_row_ignores_future_keys(device):
    q, k, v = make_qkv(1, None, 20, 24, 8, dtype=torch.float32, device=device)
    before, _ = flash_attention_mock_forward(q, k, v, is_causal=True, block_m=8, block_n=8)
    k[:, 15:], v[:, 15:] = 100.0, -100.0
    after, _ = flash_attention_mock_forward(q, k, v, is_causal=True, block_m=8, block_n=8)
    # row i sees keys up to i + 4
    assert torch.equal(before[:, :11], after[:, :11])
    assert (before[:, 11:] != after[:, 11:]).any(-1).all()


def test_scores_beyond_the_range_of_exp_do_not_overflow(device):
    q, k, v = make_qkv(1, None, 9, 33, 16, dtype=torch.float32, device=device)
    fn = partial(attention_with_lse, scale=1000.0)
    assert_matches_reference(fn, q, k, v, is_causal=False, scale=1000.0)


def test_strided_inputs_and_an_expanded_gradient_give_the_contiguous_result(device):
    q, k, v = make_qkv(2, 19, 3, 3, 8, dtype=torch.float64, device=device)
    strided = [x.transpose(1, 2).requires_grad_() for x in (q, k, v)]  # [B, H, 19, D] views
    contiguous = [x.detach().contiguous().requires_grad_() for x in strided]
    gradients = []
    for leaves in (strided, contiguous):
        o = FlashAttentionMock.apply(*leaves, is_causal=True, block_m=8, block_n=8)
        gradients.append([o, *torch.autograd.grad(o.sum(), leaves)])  # sum: do has stride 0
    for result, expected in zip(*gradients, strict=True):
        torch.testing.assert_close(result, expected, rtol=1e-13, atol=1e-14)


def test_online_softmax_keeps_the_attention_over_the_keys_seen_so_far(device):
    q, k, v = make_qkv(2, None, 3, 12, 8, dtype=torch.float64, device=device)
    m_i = torch.full((2, 3), -math.inf, dtype=torch.float64, device=device)
    l_i, acc = torch.zeros_like(m_i), torch.zeros_like(q)
    for end in (5, 6, 12):
        start = {5: 0, 6: 5, 12: 6}[end]
        s_ij = q @ k[:, start:end].mT * 8**-0.5
        m_i, l_i, acc = online_softmax_step(m_i, l_i, acc, s_ij, v[:, start:end])
        o, lse = attention_reference(q, k[:, :end], v[:, :end])
        torch.testing.assert_close(acc / l_i[..., None], o, rtol=1e-12, atol=1e-13)
        torch.testing.assert_close(m_i + torch.log(l_i), lse, rtol=1e-12, atol=1e-13)


def test_online_softmax_state_is_untouched_by_a_hidden_tile(device):
    m_i = torch.tensor([[-math.inf, 1.5]], device=device)
    l_i, acc = torch.tensor([[0.0, 2.0]], device=device), torch.randn(1, 2, 4, device=device)
    acc[:, 0] = 0.0
    s_ij, v_j = torch.full((1, 2, 3), -math.inf, device=device), torch.randn(1, 3, 4, device=device)
    for new, old in zip(
        online_softmax_step(m_i, l_i, acc, s_ij, v_j), (m_i, l_i, acc), strict=True
    ):
        assert torch.equal(new, old)


@pytest.mark.parametrize(
    ("seqlen_q", "seqlen_k", "is_causal", "tiles", "masked"),
    [
        (16, 16, False, 16, 0),
        (16, 16, True, 10, 4),  # the lower triangle, masked on the diagonal only
        (4, 16, True, 4, 1),  # the last four rows of it
        (16, 4, True, 1, 1),  # the last tile of rows; the other rows see nothing
    ],
)
def test_causal_work_is_cut_at_the_loop_end_and_masked_on_the_diagonal_only(
    seqlen_q, seqlen_k, is_causal, tiles, masked, monkeypatch
):
    calls = Counter()

    def counted(name):
        function = getattr(mock, name)

        def count(*args):
            calls[name] += 1
            return function(*args)

        monkeypatch.setattr(mock, name, count)

    counted("_scores")
    counted("visible_keys")
    q, k, v = make_qkv(1, None, seqlen_q, seqlen_k, 8, dtype=torch.float32)
    blocks = {"is_causal": is_causal, "block_m": 4, "block_n": 4}
    o, lse = flash_attention_mock_forward(q, k, v, **blocks)
    assert (calls["_scores"], calls["visible_keys"]) == (tiles, masked)

    calls.clear()
    flash_attention_mock_backward(q, k, v, o, lse, torch.ones_like(o), **blocks)
    assert (calls["_scores"], calls["visible_keys"]) == (tiles, masked)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_scores_of_half_precision_inputs_are_kept_in_float32(dtype, device):
    q, k, v = make_qkv(1, 2, 9, 33, 64, dtype=dtype, device=device)
    _, lse = flash_attention_mock_forward(q, k, v)
    _, expected = attention_reference(q.double(), k.double(), v.double())
    torch.testing.assert_close(lse.double(), expected, rtol=1e-6, atol=1e-6)


def test_second_order_gradients_are_refused():
    leaves = make_qkv(1, None, 4, 4, 8, dtype=torch.float64, requires_grad=True)
    o = FlashAttentionMock.apply(*leaves)
    with pytest.raises(RuntimeError, match="differentiable once"):
        torch.autograd.grad(o.square().sum(), leaves[:1], create_graph=True)


def test_bad_input_is_refused():
    q, k = torch.zeros(2, 4, 8), torch.zeros(2, 4, 16)
    message = "`k` must have shape [2, N, 8] to match `q`, got [2, 4, 16]."
    with pytest.raises(ValueError, match=re.escape(message)):
        FlashAttentionMock.apply(q, k, k)
    with pytest.raises(ValueError, match="`block_n` must be at least 1, got 0"):
        FlashAttentionMock.apply(q, q, q, block_n=0)

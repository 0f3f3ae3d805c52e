import re

import pytest
import torch

from flash_kernel.validation import check_inputs, check_qkv

Q = torch.zeros(2, 3, 4, 8)
K = torch.zeros(2, 3, 5, 8)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("leading", [(), (2,), (2, 3), (1, 2, 3)])
def test_every_float_dtype_and_number_of_leading_dimensions_is_accepted(dtype, leading):
    q, k = torch.zeros(*leading, 4, 8, dtype=dtype), torch.zeros(*leading, 5, 8, dtype=dtype)
    check_qkv(q, k, k)


@pytest.mark.parametrize(("seqlen_q", "seqlen_k", "batch"), [(0, 5, 2), (4, 0, 2), (4, 5, 0)])
def test_empty_sequences_and_batches_are_accepted(seqlen_q, seqlen_k, batch):
    k = torch.zeros(batch, seqlen_k, 8)
    check_qkv(torch.zeros(batch, seqlen_q, 8), k, k)


def test_strided_views_are_accepted():
    check_qkv(Q.mT.contiguous().mT, K.expand(2, 3, 5, 8)[..., ::1], K)


@pytest.mark.parametrize(
    ("q", "k", "v", "message"),
    [
        ([1.0], K, K, "`q` must be a torch.Tensor, got list."),
        (Q, None, K, "`k` must be a torch.Tensor, got NoneType."),
        (
            Q,
            K,
            K.long(),
            "`v` must be float16, bfloat16, float32 or float64, got int64. Convert it, for example",
        ),
        (Q, K, K.to(torch.complex64), "got complex64"),
        (Q.to_sparse(), K, K, "`q` must be a dense, strided tensor, got layout torch.sparse_coo."),
        (
            Q.half(),
            K.half(),
            K,
            "`q`, `k` and `v` must share one dtype, got float16, float16 and float32.",
        ),
    ],
)
def test_a_wrong_kind_of_input_raises_a_type_error_that_names_it(q, k, v, message):
    with pytest.raises(TypeError, match=re.escape(message)):
        check_qkv(q, k, v)


@pytest.mark.parametrize(
    ("scale", "error", "message"),
    [
        ("0.5", TypeError, "`scale` must be a number or None, got str."),
        (True, TypeError, "`scale` must be a number or None, got bool."),
        (float("nan"), ValueError, "`scale` must be finite, got nan."),
    ],
)
def test_a_scale_that_is_no_finite_number_is_refused(scale, error, message):
    check_inputs(Q, K, K, scale=2)
    with pytest.raises(error, match=re.escape(message)):
        check_inputs(Q, K, K, scale=scale)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_nested_tensor_raises_a_type_error():
    nested = torch.nested.nested_tensor([torch.zeros(4, 8), torch.zeros(2, 8)])
    with pytest.raises(TypeError, match="`q` must be a dense, strided tensor, got a nested tensor"):
        check_qkv(nested, K, K)


@pytest.mark.parametrize(
    ("q", "k", "v", "message"),
    [
        (torch.zeros(8), K, K, "`q` must have at least two dimensions"),
        (Q, torch.zeros(()), K, "got shape []"),
        (Q[..., :0], K, K, "`q` must have a head_dim of at least 1, got shape [2, 3, 4, 0]."),
        (
            Q,
            K[..., :4],
            K[..., :4],
            "`k` must have shape [2, 3, N, 8] to match `q`, got [2, 3, 5, 4].",
        ),
        (Q, K[:1], K[:1], "`k` must have shape [2, 3, N, 8] to match `q`, got [1, 3, 5, 8]."),
        (Q, K[:, :1], K, "Nothing is broadcast: expand or repeat `v` first."),
        (Q, K[:, :2], K[:, :2], "dimension -3, must divide the 3 heads of `q`, got 2."),
        (Q, K[0], K[0], "`k` must have shape [2, 3, N, 8] to match `q`, got [3, 5, 8]."),
        (
            Q,
            K,
            K[..., :4, :],
            "`v` must have shape [2, 3, 5, D_v] to match `k`, got [2, 3, 4, 8].",
        ),
        (Q, K, K.to("meta"), "`q`, `k` and `v` must share one device, got cpu, cpu and meta."),
    ],
)
def test_a_wrong_shape_or_device_raises_a_value_error_that_says_what_came(q, k, v, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        check_qkv(q, k, v)


def test_checks_are_traced_without_a_graph_break():
    def checked(q, k, v):
        check_qkv(q, k, v)
        return q + 1

    compiled = torch.compile(checked, fullgraph=True, backend="eager", dynamic=True)
    assert torch.equal(compiled(Q, K, K), Q + 1)

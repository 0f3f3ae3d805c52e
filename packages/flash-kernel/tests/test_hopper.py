"""The Hopper kernels on a GPU of compute capability 9.0: values, layouts, streams, repeats."""

from functools import partial
from itertools import accumulate, pairwise

import pytest
import torch

from flash_kernel import attention_reference, flash_attention, flash_attention_varlen
from flash_kernel.reference import dense_attention
from flash_kernel.testing import make_qkv
from flash_kernel.variant import PLAIN, Packing, Variant

pytest.importorskip("triton.experimental.gluon", reason="the kernels are written in Gluon")

from direct_launches import launch_forward, launch_hopper_forward

ON_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not ON_HOPPER, reason="needs a GPU of compute capability 9.0"),
]

hopper_attention = partial(flash_attention, impl="hopper", return_lse=True)
HALF = [torch.bfloat16, torch.float16]
HEAD_DIMS = [64, 96, 128, 192, 256]
PADDED_HEAD_DIMS = [8, 40, 72, 80, 160, 248]
# (M, N): one row, parts of a tile, whole tiles, several tiles, more and fewer keys than queries
LENGTHS = [(1, 1), (100, 100), (128, 128), (1000, 1000), (1152, 1152), (1, 777), (300, 700),
           (700, 300), (513, 449)]  # fmt: skip


def check(q, k, v, **options):
    """Compare o and lse with float64; the dense reference in the dtype of q sets the bound."""
    o, lse = hopper_attention(q, k, v, **options)
    expected, expected_lse = attention_reference(q.double(), k.double(), v.double(), **options)
    dense, _ = attention_reference(q, k, v, **options)
    unit = torch.finfo(q.dtype).eps / 2
    bound = 2 * (dense - expected).abs().max() + 2 * unit * expected.abs().max()
    error = (o - expected).abs().max()
    assert error <= bound, f"o: {error:.2e} > {bound:.2e} for {list(q.shape)}, {list(k.shape)}"
    assert torch.equal(lse.isinf(), expected_lse.isinf())
    finite = expected_lse.isfinite()
    torch.testing.assert_close(lse[finite].double(), expected_lse[finite], rtol=1e-5, atol=1e-5)
    return o, lse


def grouped(q, num_heads_k):
    """Return k and v for the queries, with fewer heads."""
    _, k, v = make_qkv(
        q.shape[0], num_heads_k, q.shape[2], q.shape[2], q.shape[3], dtype=q.dtype,
        device=q.device, seed=1,
    )  # fmt: skip
    return k, v


def growing(q, k, growth):
    """Make the scores of the last head grow leftwards, by more than the fixed reference allows."""
    q, k = q.clone(), k.clone()
    q[:, -1, :, 0] = 8
    k[:, -1, :, 0] = (
        torch.linspace(1, -1, k.shape[2], device=k.device) * growth * q.shape[-1] ** 0.5 / 8
    )
    return q, k


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("is_causal", [False, True])
def test_output_and_lse_match_float64(head_dim, dtype, is_causal, device):
    for seqlen_q, seqlen_k in LENGTHS:
        q, k, v = make_qkv(2, 3, seqlen_q, seqlen_k, head_dim, dtype=dtype, device=device)
        check(q, k, v, is_causal=is_causal)


@pytest.mark.parametrize("head_dim", PADDED_HEAD_DIMS)
def test_padded_heads_match_float64_and_nothing_is_written_past_them(head_dim, device):
    for seqlen_q, seqlen_k in ((300, 700), (513, 449)):
        q, k, v = make_qkv(2, 3, seqlen_q, seqlen_k, head_dim, dtype=HALF[0], device=device)
        expected = check(q, k, v, is_causal=True)
        # columns of a wider tensor: what lies beside them must be neither read nor written
        wide = [torch.full((*x.shape[:-1], head_dim + 8), float("nan")).to(x) for x in (q, k, v)]
        for x, y in zip(wide, (q, k, v), strict=True):
            x[..., :head_dim] = y
        o, lse = hopper_attention(*(x[..., :head_dim] for x in wide), is_causal=True)
        assert torch.equal(o, expected[0])
        assert torch.equal(lse, expected[1])


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_softcap_bounds_the_scores(head_dim, device):
    for dtype in HALF if head_dim == 64 else HALF[:1]:
        q, k, v = make_qkv(1, 2, 300, 700, head_dim, dtype=dtype, device=device)
        for softcap in (0.5, 30.0):
            check(4 * q, k, v, softcap=softcap, is_causal=True)
    check(4 * q, k, v, softcap=30.0, window=(100, 17))


@pytest.mark.parametrize("is_causal", [False, True])
def test_long_sequences_match_float64(is_causal, device):
    # the configurations that begin at 8192 keys, and more tiles than SMs
    for head_dim in (64, 256):
        inputs = make_qkv(1, 2, 8300, 8300, head_dim, dtype=torch.bfloat16, device=device)
        check(*inputs, is_causal=is_causal)


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_heads_of_a_group_share_keys(head_dim, device):
    q, _, _ = make_qkv(2, 12, 450, 450, head_dim, dtype=torch.bfloat16, device=device)
    for num_heads_k in (1, 2, 4):
        check(q, *grouped(q, num_heads_k), is_causal=True)
        check(q[:, :, :70], *grouped(q, num_heads_k), is_causal=False, scale=0.3)


@pytest.mark.parametrize("window", [(100, 0), (0, 0), (64, 64), (300, 17), (None, 5), (130, None)])
def test_window_hides_keys(window, device):
    for dtype in HALF:
        for seqlen_q, seqlen_k in ((1000, 1000), (300, 700), (700, 300)):
            q, k, v = make_qkv(1, 2, seqlen_q, seqlen_k, 64, dtype=dtype, device=device)
            check(q, k, v, window=window)
    q, k, v = make_qkv(1, 2, 1000, 1000, 256, dtype=torch.bfloat16, device=device)
    check(q, k, v, window=window)


def test_strided_views_equal_contiguous_tensors(device):
    wide = [
        torch.randn(2, 333, 5, 96, device=device).bfloat16().transpose(1, 2)[:, 1:4, :, 16:80]
        for _ in range(3)
    ]
    assert all(x.stride(-2) == 480 for x in wide)
    strided = check(*wide, is_causal=True)
    contiguous = hopper_attention(*(x.contiguous() for x in wide), is_causal=True)
    assert torch.equal(strided[0], contiguous[0])
    assert torch.equal(strided[1], contiguous[1])


def test_layout_the_copy_engine_cannot_read_is_refused_or_left_to_the_portable_kernels(device):
    odd = [torch.randn(1, 2, 300, 68, device=device).bfloat16()[..., 1:65] for _ in range(3)]
    with pytest.raises(ValueError, match=r"rows must be contiguous.* Pass impl='triton'"):
        hopper_attention(*odd)
    assert torch.equal(flash_attention(*odd), flash_attention(*odd, impl="triton"))


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("is_causal", [False, True])
def test_growing_scores_are_done_again_and_leave_other_heads_alone(head_dim, is_causal, device):
    for dtype, growth in ((torch.bfloat16, 200), (torch.float16, 60)):
        q, k, v = make_qkv(2, 3, 1000, 1000, head_dim, dtype=dtype, device=device)
        plain = check(q, k, v, is_causal=is_causal)
        q, k = growing(q, k, growth)
        mixed = check(q, k, v, is_causal=is_causal)
        alone = hopper_attention(q[1:, 2:], k[1:, 2:], v[1:, 2:], is_causal=is_causal)
        for x, y, z in zip(plain, mixed, alone, strict=True):
            assert torch.equal(x[:, :2], y[:, :2])
            assert torch.equal(y[1:, 2:], z)


def test_large_values_with_growing_scores_do_not_overflow(device):
    q, k, v = make_qkv(1, 2, 500, 500, 64, dtype=torch.bfloat16, device=device)
    q, k = growing(q, k, 20)
    check(q, k, v * 2.0**100)


def test_nan_and_infinity_stay_in_their_rows(device):
    q, k, v = make_qkv(1, 2, 300, 300, 64, dtype=torch.bfloat16, device=device)
    expected, _ = hopper_attention(q, k, v)
    q[0, 0, 7] = float("nan")
    q[0, 1, 200, 3] = float("inf")
    o, _ = hopper_attention(q, k, v)
    broken = torch.zeros(1, 2, 300, dtype=torch.bool, device=device)
    broken[0, 0, 7] = broken[0, 1, 200] = True
    assert o[broken].isnan().all()
    # rows of one tile may be done by the other softmax
    torch.testing.assert_close(o[~broken], expected[~broken], rtol=2e-2, atol=2e-2)


# sequences over the ends of tiles, of one row, with more queries than keys, and without either
PACKED = [(700, 900), (1, 300), (300, 100), (0, 40), (65, 0), (128, 128), (513, 449), (30, 30)]


def packed(head_dim, device, dtype=torch.bfloat16, heads=(4, 2)):
    """Return packed q, k and v as one batch, and where their sequences end."""
    of_q, of_k = zip(*PACKED, strict=True)
    q, _, _ = make_qkv(1, heads[0], sum(of_q), 1, head_dim, dtype=dtype, device=device)
    _, k, v = make_qkv(1, heads[1], 1, sum(of_k), head_dim, dtype=dtype, device=device, seed=1)
    ends = [
        torch.tensor([0, *accumulate(x)], dtype=torch.int32, device=device) for x in (of_q, of_k)
    ]
    return q, k, v, Packing(*ends)


def parts(x, ends):
    """Return what each sequence has of a packed tensor ``[1, H, total, ...]``."""
    return [x[:, :, start:end] for start, end in pairwise(ends.tolist())]


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize(
    "variant",
    [Variant(0.125), Variant(0.1, right=0), Variant(0.1, 100, 20)],
    ids=["full", "causal", "window"],
)
def test_packed_sequences_match_float64(variant, head_dim, device):
    q, k, v, packing = packed(head_dim, device, heads=(3, 3) if head_dim == 96 else (4, 2))
    o, lse = launch_hopper_forward(q, k, v, variant, packing)
    of_q, of_k = ([parts(x, ends) for x in tensors] for tensors, ends in
                  (((q, o, lse), packing[0]), ((k, v), packing[1])))  # fmt: skip
    for q_i, o_i, lse_i, k_i, v_i in zip(*of_q, *of_k, strict=True):
        if q_i.shape[2] == 0:
            continue
        exact = q_i.double(), k_i.double(), v_i.double()
        expected, expected_lse = dense_attention(*exact, variant, PLAIN)
        assert torch.equal(lse_i.isinf(), expected_lse.isinf())
        torch.testing.assert_close(o_i.double(), expected, rtol=2**-7, atol=2**-7)
        torch.testing.assert_close(lse_i.double(), expected_lse, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("right", [None, 0])
def test_packed_sequence_has_the_same_bits_whatever_its_neighbours_hold(right, head_dim, device):
    variant = Variant(0.125, right=right)
    q, k, v, packing = packed(head_dim, device)
    expected = launch_hopper_forward(q, k, v, variant, packing)
    again = launch_hopper_forward(q, k, v, variant, packing)
    others = [x.clone() for x in (q, k, v)]
    (first, last), (first_k, last_k) = (x[1:3].tolist() for x in packing[:2])
    bounds = (first, last), (first_k, last_k), (first_k, last_k)
    for x, (start, end) in zip(others, bounds, strict=True):
        x[:, :, :start] = x[:, :, end:] = float("nan")
    got = launch_hopper_forward(*others, variant, packing)
    for x, y, z in zip(expected, again, got, strict=True):
        assert torch.equal(x, y)
        assert torch.equal(x[:, :, first:last], z[:, :, first:last])


def test_public_function_of_packed_sequences_takes_hopper_and_is_differentiable(device):
    q, k, v, packing = packed(64, device)
    leaves = [x[0].transpose(0, 1).detach().requires_grad_() for x in (q, k, v)]
    o, lse = flash_attention_varlen(*leaves, *packing[:2], is_causal=True, return_lse=True)
    expected, expected_lse = launch_hopper_forward(q, k, v, Variant(0.125, right=0), packing)
    assert torch.equal(o, expected[0].transpose(0, 1))
    assert torch.equal(lse, expected_lse[0])
    do = torch.randn_like(o)
    got = torch.autograd.grad(o, leaves, do)
    portable = flash_attention_varlen(*leaves, *packing[:2], is_causal=True, impl="triton")
    for dx, dy in zip(got, torch.autograd.grad(portable, leaves, do), strict=True):
        torch.testing.assert_close(dx, dy, rtol=2e-2, atol=3e-2)


def test_growing_scores_of_packed_sequences_are_done_again(device):
    variant = Variant(0.125, right=0)
    q, k, v, packing = packed(64, device, heads=(2, 2))
    plain = launch_hopper_forward(q, k, v, variant, packing)
    q, k = growing(q, k, 200)
    o, lse = launch_hopper_forward(q, k, v, variant, packing)
    assert torch.equal(o[:, 0], plain[0][:, 0])
    expected, expected_lse = launch_forward(q, k, v, variant, packing=packing)
    torch.testing.assert_close(o, expected, rtol=2**-7, atol=2**-7)
    torch.testing.assert_close(lse, expected_lse, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("growth", [0, 200])
def test_repeats_are_bitwise_equal(growth, device):
    for head_dim in HEAD_DIMS:
        q, k, v = make_qkv(2, 40, 600, 600, head_dim, dtype=torch.bfloat16, device=device)
        if growth:
            q, k = growing(q, k, growth)
        expected = hopper_attention(q, k, v, is_causal=True)
        for _ in range(50):
            o, lse = hopper_attention(q, k, v, is_causal=True)
            assert torch.equal(o, expected[0])
            assert torch.equal(lse, expected[1])


def test_two_streams_and_a_graph_at_once(device):
    """Each launch has counters of its own: a shared one would lose tiles or do them twice."""
    q, k, v = make_qkv(2, 40, 700, 700, 64, dtype=torch.bfloat16, device=device)
    q, k = growing(q, k, 200)
    call = partial(hopper_attention, q, k, v, is_causal=True)
    expected = call()
    torch.cuda.synchronize()
    graphs, captured = [], []
    for _ in range(2):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured.append(call())
        graphs.append(graph)
    streams = [torch.cuda.Stream() for _ in range(3)]
    results = []
    for _ in range(20):
        for stream in streams[:2]:
            with torch.cuda.stream(stream):
                results.append(call())
        with torch.cuda.stream(streams[2]):
            for graph in graphs:
                graph.replay()
        results.append(call())
    torch.cuda.synchronize()
    for o, lse in (*results, *captured):
        assert torch.equal(o, expected[0])
        assert torch.equal(lse, expected[1])


def test_auto_takes_hopper_and_its_gradients_are_right(device):
    q, k, v = make_qkv(1, 2, 300, 300, 128, dtype=torch.bfloat16, device=device, requires_grad=True)
    o = flash_attention(q, k, v, is_causal=True)
    assert torch.equal(o, flash_attention(q, k, v, is_causal=True, impl="hopper"))
    do = torch.randn_like(o)
    gradients = torch.autograd.grad(o, (q, k, v), do)
    leaves = [x.detach().double().requires_grad_() for x in (q, k, v)]
    expected = torch.autograd.grad(
        attention_reference(*leaves, is_causal=True)[0], leaves, do.double()
    )
    for dx, exact in zip(gradients, expected, strict=True):
        torch.testing.assert_close(dx.double(), exact, rtol=2e-2, atol=3e-2)

"""The Hopper backward on a GPU: values against float64, every layout, order, streams and graphs."""

from functools import partial

import pytest
import torch

from flash_kernel import attention_reference, flash_attention
from flash_kernel.testing import assert_matches_reference, make_qkv

ON_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not ON_HOPPER, reason="needs a GPU of compute capability 9.0"),
]
HEAD_DIMS = pytest.mark.parametrize("head_dim", [64, 96, 128, 192, 256])
# above 128 there is one mode
MODES = pytest.mark.parametrize(
    ("head_dim", "deterministic"),
    [(64, True), (64, False), (96, True), (128, True), (128, False), (192, True), (256, True)],
)

# the portable forward, so that a wrong value points at the backward
attention = partial(flash_attention, impl="triton", backward="hopper")


def gradients(fn, q, k, v, do):
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    return torch.autograd.grad(fn(*leaves), leaves, do)


def assert_as_accurate_as_portable(q, k, v, do=None, *, deterministic=True, **options):
    """Errors against float64 are at most twice the portable backward's, and two roundings."""
    do = torch.randn_like(q) if do is None else do

    def reference(*inputs):
        return attention_reference(*inputs, **options)[0]

    exact = gradients(reference, *(x.double() for x in (q, k, v, do)))
    ours = gradients(partial(attention, deterministic=deterministic, **options), q, k, v, do)
    portable = partial(flash_attention, impl="triton", backward="triton", **options)
    theirs = gradients(portable, q, k, v, do)
    unit = torch.finfo(q.dtype).eps
    for name, x, y, z in zip(("dq", "dk", "dv"), ours, theirs, exact, strict=True):
        assert x.stride() == y.stride(), name
        for statistic in (torch.max, torch.mean):
            error, bound = ((g.double() - z).abs() for g in (x, y))
            limit = 2 * statistic(bound) + unit * statistic(z.abs())
            assert statistic(error) <= limit, f"{name}: {statistic(error):.3g} > {limit:.3g}"


@MODES
@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize(
    ("seqlen_q", "seqlen_k"),
    [(1, 1), (128, 128), (129, 127), (100, 700), (700, 100), (1151, 1151), (1024, 1024)],
)
def test_gradients_match_float64(seqlen_q, seqlen_k, is_causal, deterministic, head_dim):
    q, k, v = make_qkv(
        2, 3, seqlen_q, seqlen_k, head_dim, dtype=torch.bfloat16, device="cuda", seed=seqlen_q
    )
    fn = partial(attention, is_causal=is_causal, deterministic=deterministic)
    assert_matches_reference(fn, q, k, v, is_causal=is_causal)


@pytest.mark.parametrize("head_dim", [8, 40, 72, 120, 136, 200, 248])
@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
def test_head_dims_between_are_padded(head_dim, is_causal):
    q, k, v = make_qkv(2, 3, 300, 333, head_dim, dtype=torch.bfloat16, device="cuda")
    assert_matches_reference(partial(attention, is_causal=is_causal), q, k, v, is_causal=is_causal)


@MODES
@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
def test_float16_scale_and_gradient_of_lse(is_causal, deterministic, head_dim):
    q, k, v = make_qkv(1, 2, 300, 333, head_dim, dtype=torch.float16, device="cuda")
    dlse = torch.randn(q.shape[:-1], device="cuda")
    fn = partial(
        attention, is_causal=is_causal, scale=0.2, return_lse=True, deterministic=deterministic
    )
    assert_matches_reference(fn, q, k, v, is_causal=is_causal, scale=0.2, dlse=dlse)


@MODES
@pytest.mark.parametrize(
    ("heads_k", "window", "is_causal"),
    [(2, None, True), (1, None, False), (8, (200, None), True), (2, (64, 30), False),
     (2, (0, 0), False)],
)  # fmt: skip
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(512, 512), (333, 600), (600, 333)])
def test_shared_heads_and_windows(
    seqlen_q, seqlen_k, heads_k, window, is_causal, deterministic, head_dim
):
    q, _, _ = make_qkv(2, 8, seqlen_q, 1, head_dim, dtype=torch.bfloat16, device="cuda")
    _, k, v = make_qkv(2, heads_k, 1, seqlen_k, head_dim, dtype=torch.bfloat16, device="cuda")
    assert_as_accurate_as_portable(
        q, k, v, is_causal=is_causal, window=window, deterministic=deterministic
    )


@HEAD_DIMS
@pytest.mark.parametrize("layout", ["rows first", "padded", "expanded do", "transposed do"])
def test_strides_are_honoured(layout, head_dim):
    q, k, v = make_qkv(2, 3, 200, 260, head_dim, dtype=torch.bfloat16, device="cuda")
    do = torch.randn_like(q)
    if layout == "rows first":  # [B, M, H, D] seen as [B, H, M, D]
        q, k, v, do = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v, do))
    if layout == "padded":
        q, k, v = (torch.cat([x, x], -1)[..., :head_dim] for x in (q, k, v))
    if layout == "expanded do":
        do = torch.ones((), device="cuda", dtype=q.dtype).expand_as(q)
    if layout == "transposed do":
        do = torch.randn(2, 3, head_dim, 200, device="cuda", dtype=q.dtype).mT
    assert_as_accurate_as_portable(q, k, v, do, is_causal=True)


@MODES
@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
def test_scores_far_from_zero_stay_finite(is_causal, deterministic, head_dim):
    """lse near -300: p of the zero keys that pad the last tile would overflow unmasked."""
    q, k, v = make_qkv(1, 2, 260, 300, head_dim, dtype=torch.bfloat16, device="cuda")
    q[..., 0], k[..., 0] = 8.0, -300.0 * head_dim**0.5 / 8
    fn = partial(attention, is_causal=is_causal, deterministic=deterministic)
    assert_matches_reference(fn, q, k, v, is_causal=is_causal)


@HEAD_DIMS
@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize(("batch", "seqlen"), [(4, 2048), (1, 8192)], ids=["short", "rotated"])
def test_deterministic_gradients_are_bitwise_repeatable(batch, seqlen, is_causal, head_dim):
    q, k, v = make_qkv(batch, 16, seqlen, seqlen, head_dim, dtype=torch.bfloat16, device="cuda")
    do = torch.randn_like(q)
    fn = partial(attention, is_causal=is_causal)
    first = gradients(fn, q, k, v, do)
    for _ in range(50):
        again = gradients(fn, q, k, v, do)
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


@MODES
@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
def test_many_tiles_of_long_sequences_match_the_portable_backward(
    is_causal, deterministic, head_dim
):
    """More tiles than SMs, each with a long loop: 4 x 6 x 32."""
    q, k, v = make_qkv(4, 6, 4096, 4096, head_dim, dtype=torch.bfloat16, device="cuda")
    do = torch.randn_like(q)
    ours = gradients(partial(attention, is_causal=is_causal, deterministic=deterministic),
                     q, k, v, do)  # fmt: skip
    theirs = gradients(
        partial(flash_attention, impl="triton", backward="triton", is_causal=is_causal), q, k, v, do
    )
    for x, y in zip(ours, theirs, strict=True):
        # two roundings to bfloat16 of nearly the same number
        torch.testing.assert_close(x, y, rtol=2**-6, atol=2**-7 * y.abs().max().item())


@HEAD_DIMS
@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
def test_gradients_of_a_sequence_do_not_depend_on_its_batch(is_causal, head_dim):
    q, k, v = make_qkv(7, 8, 1000, 700, head_dim, dtype=torch.bfloat16, device="cuda")
    k, v, do = k[:, :4], v[:, :4], torch.randn_like(q)
    fn = partial(attention, is_causal=is_causal)
    together = gradients(fn, q, k, v, do)
    alone = gradients(fn, q[3:4], k[3:4], v[3:4], do[3:4])
    for x, y in zip(together, alone, strict=True):
        assert torch.equal(x[3:4], y)


@MODES
@pytest.mark.parametrize("options", [{"is_causal": True}, {"window": (70, 9)}], ids=str)
@pytest.mark.parametrize("where", ["q", "k", "v", "do"])
def test_nan_reaches_those_who_see_it_and_no_other(where, options, deterministic, head_dim):
    """Where a result is not finite, it is computed anew, and exactly."""
    seqlen, position = 500, 290
    names = ("q", "k", "v", "do")
    q, k, v = make_qkv(1, 4, seqlen, seqlen, head_dim, dtype=torch.bfloat16, device="cuda")
    clean = dict(zip(names, (q, k, v, torch.randn_like(q)), strict=True))
    dirty = {name: x.clone() for name, x in clean.items()}
    dirty[where][..., position, 3] = float("nan")
    left, right = options.get("window", (seqlen, 0))
    distance = torch.arange(seqlen)[None, :] - torch.arange(seqlen)[:, None]  # key - row
    visible = (distance <= right) & (distance >= -left)
    rows = torch.arange(seqlen) == position if where in ("q", "do") else visible[:, position]
    keys = visible[rows].any(0)
    fn = partial(attention, deterministic=deterministic, **options)
    got, expected = (gradients(fn, *x.values()) for x in (dirty, clean))
    for x, y, reached in zip(got, expected, (rows, keys, keys), strict=True):
        untouched = ~reached.cuda()
        torch.testing.assert_close(x[:, :, untouched], y[:, :, untouched], rtol=2**-6, atol=2**-7)
    assert not got[0][:, :, rows.cuda()].isfinite().flatten(2).all()


@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(8000, 5000), (3000, 9000), (4500, 4500)])
@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
def test_rotated_tiles_of_unequal_lengths_match_float64(seqlen_q, seqlen_k, is_causal):
    q, k, v = make_qkv(1, 4, seqlen_q, seqlen_k, 64, dtype=torch.bfloat16, device="cuda")
    k, v = k[:, :2], v[:, :2]
    assert_as_accurate_as_portable(q, k, v, is_causal=is_causal)


@pytest.mark.parametrize(
    ("head_dim", "deterministic"), [(128, True), (128, False), (192, True), (256, True)]
)
@pytest.mark.parametrize("seqlen", [1000, 4500])
def test_streams_and_graphs_do_not_share_counters(seqlen, head_dim, deterministic):
    q, k, v = make_qkv(2, 4, seqlen, seqlen, head_dim, dtype=torch.bfloat16, device="cuda")
    do = torch.randn_like(q)
    fn = partial(attention, is_causal=True, deterministic=deterministic)
    expected = gradients(fn, q, k, v, do)
    graphs, streams = [], [torch.cuda.Stream() for _ in range(2)]
    for _ in range(2):  # captured twice
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = gradients(fn, q, k, v, do)
        graphs.append((graph, captured))
    results = []
    for _ in range(10):
        for stream in streams:
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                results.append(gradients(fn, q, k, v, do))
        for graph, _ in graphs:
            graph.replay()
    torch.cuda.synchronize()
    results += [captured for _, captured in graphs]
    for result in results:
        for x, y in zip(result, expected, strict=True):
            if deterministic:
                assert torch.equal(x, y)
            else:
                torch.testing.assert_close(x, y, rtol=2**-6, atol=2**-7 * y.abs().max().item())

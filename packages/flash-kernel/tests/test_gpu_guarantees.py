"""What can only be shown on a GPU: sizes beyond any dense reference, memory, bits, and bounds."""

import itertools
import math
import shutil
import subprocess
import sys
from functools import partial

import pytest
import torch
from direct_launches import launch_backward, launch_forward

from flash_kernel import (
    attention_reference,
    flash_attention,
    flash_attention_varlen,
    merge_attention,
)
from flash_kernel._triton.config import FLOAT32, HALF_PRECISION
from flash_kernel.backward import flash_attention_backward, flash_attention_backward_compiled
from flash_kernel.testing import assert_matches_reference, make_qkv
from flash_kernel.variant import PLAIN, Modifiers, Variant

pytestmark = pytest.mark.gpu
TRITON = partial(flash_attention, impl="triton", backward="triton")
MIB = 2**20


def gradients_of(o, leaves, do):
    return torch.autograd.grad(o, leaves, do)


def draw(batch, heads, seqlen, head_dim, dtype=torch.bfloat16, **options):
    return make_qkv(batch, heads, seqlen, seqlen, head_dim, dtype=dtype, device="cuda", **options)


def peak_beyond(compute):
    """Return what ``compute`` returns, and the bytes it needed at most beyond those held before."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    result = compute()
    torch.cuda.synchronize()
    return result, torch.cuda.max_memory_allocated() - before


@pytest.mark.slow
def test_a_million_keys_take_memory_linear_in_their_number():
    seqlen, tail = 2**20, 64
    q, k, v = draw(1, 1, seqlen, 64, requires_grad=True)
    do = torch.randn_like(q)
    size = q.numel() * q.element_size()  # 128 MiB; the scores alone would be 2 TiB
    o, needed = peak_beyond(lambda: TRITON(q, k, v, is_causal=True))
    assert needed <= size + 4 * seqlen + MIB  # o and lse
    gradients, needed = peak_beyond(lambda: gradients_of(o, (q, k, v), do))
    assert needed <= 3 * size + 8 * seqlen + MIB  # dq, dk, dv and the row statistics

    # the last rows see every key, and nothing else sees the last keys: there a reference fits
    last = [x.detach().double() for x in (q[..., -tail:, :], k, v)]
    leaves = [x.requires_grad_() for x in last]
    expected, _ = attention_reference(*leaves, is_causal=True)
    reference = gradients_of(expected, leaves, do[..., -tail:, :].double())
    for ours, exact in zip((o, *gradients), (expected, *reference), strict=True):
        exact = exact[..., -tail:, :]
        error = (ours[..., -tail:, :].double() - exact).abs().max()
        assert error <= 2 * torch.finfo(q.dtype).eps * exact.abs().max()


def tolerance(x):
    """Two results that are each rounded to the dtype, from weights that are."""
    return {"rtol": 0, "atol": 4 * torch.finfo(x.dtype).eps * x.abs().max().item()}


OPTIONS = {
    "full": {},
    "causal": {"is_causal": True},
    "window": {"window": (1000, 300)},
    "softcap": {"softcap": 5.0, "is_causal": True},
}


@pytest.mark.parametrize("head_dim", [64, 128, 80])
@pytest.mark.parametrize("option", OPTIONS)
def test_rows_of_one_value_come_out_as_that_value(option, head_dim):
    """The weights sum to 1; so o = v, dq = dk = 0, and dv sums to the sum of do."""
    q, k, v = draw(1, 2, 16384, head_dim, requires_grad=True)
    value = torch.randn(1, 2, 1, head_dim, device="cuda", dtype=q.dtype)
    v = value.expand_as(v).clone().requires_grad_()
    o = TRITON(q, k, v, **OPTIONS[option])
    torch.testing.assert_close(o, v.detach(), rtol=2**-7, atol=1e-6)
    do = torch.randn_like(o)
    dq, dk, dv = gradients_of(o, (q, k, v), do)
    # what is left is the rounding of o in delta; terms that do not cancel would give about 10
    assert max(dq.abs().max(), dk.abs().max()) < 0.25
    sums = [x.double().sum(-2) for x in (dv, do)]
    torch.testing.assert_close(*sums, rtol=0, atol=0.25)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_order_of_the_keys_does_not_matter(head_dim):
    q, k, v = draw(1, 2, 8192, head_dim, dtype=torch.float16, requires_grad=True)
    order = torch.randperm(8192, device="cuda")
    do = torch.randn_like(q)
    results = []
    for keys in (torch.arange(8192, device="cuda"), order):
        leaves = [q, k[..., keys, :].detach().requires_grad_(), v[..., keys, :].detach()]
        leaves[2].requires_grad_()
        o = TRITON(*leaves)
        dq, dk, dv = gradients_of(o, leaves, do)
        back = torch.argsort(keys)
        results.append((o.detach(), dq, dk[..., back, :], dv[..., back, :]))
    for ours, other in zip(*results, strict=True):
        torch.testing.assert_close(ours, other, **tolerance(ours))


@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
def test_shift_of_all_scores_of_a_row_moves_lse_alone(is_causal):
    q, k, v = draw(1, 2, 8192, 64, dtype=torch.float16)
    k = (k * 16).round() / 16  # so that the sum below is exact
    shift = torch.randint(-8, 9, (1, 2, 1, 64), device="cuda").to(k.dtype) / 8
    fn = partial(TRITON, is_causal=is_causal, return_lse=True, scale=0.125)
    (o, lse), (shifted_o, shifted_lse) = fn(q, k, v), fn(q, k + shift, v)
    torch.testing.assert_close(shifted_o, o, **tolerance(o))
    expected = lse.double() + 0.125 * (q.double() * shift.double()).sum(-1)
    torch.testing.assert_close(shifted_lse.double(), expected, rtol=1e-5, atol=1e-5)


def test_merged_halves_are_the_whole():
    q, k, v = draw(1, 2, 16384, 128)
    whole, lse = TRITON(q, k, v, return_lse=True)
    cut = 5000
    parts = [
        TRITON(q, k[..., keys, :], v[..., keys, :], return_lse=True)
        for keys in (slice(cut), slice(cut, None))
    ]
    merged, merged_lse = merge_attention(parts)
    torch.testing.assert_close(merged, whole, **tolerance(whole))
    torch.testing.assert_close(merged_lse, lse, rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_many_keys_are_summed_as_exactly_as_few(dtype):
    """An error that each tile of keys adds to the running softmax would be seen here."""
    q, k, v = make_qkv(1, 2, 64, 65536, 64, dtype=dtype, device="cuda")
    assert_matches_reference(partial(TRITON, return_lse=True), q, k, v, is_causal=False)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_fifty_repeats_give_the_same_bits(head_dim):
    q, k, v = draw(4, 16, 2048, head_dim, requires_grad=True)
    do = torch.randn_like(q)

    def once():
        o, lse = TRITON(q, k, v, is_causal=True, return_lse=True)
        return o, lse, *gradients_of(o, (q, k, v), do)

    first = once()
    for _ in range(50):
        assert all(map(torch.equal, first, once()))


@pytest.mark.slow
def test_every_gradient_is_right_for_views_beyond_2_31_elements():
    """One of q, k, v, o and do at a time lies in rows that are 2^23 elements apart."""
    heads, seqlen, head_dim = 2, 600, 64
    apart = 2**31 // (seqlen // 2)  # the second half of a head lies beyond 2^31 elements
    storage = torch.zeros(apart * seqlen + heads * head_dim, dtype=torch.float16, device="cuda")
    wide = storage.as_strided((1, heads, seqlen, head_dim), (0, head_dim, apart, 1))
    q, k, v = draw(1, heads, seqlen, head_dim, dtype=torch.float16)
    variant = Variant(0.125, right=0)
    o, lse = launch_forward(q, k, v, variant)
    small = {"q": q, "k": k, "v": v, "o": o, "do": torch.randn_like(o)}
    order = ("q", "k", "v", "o", "do")

    def backward(tensors):
        q, k, v, o, do = (tensors[name] for name in order)
        return launch_backward(q, k, v, o, lse, do, None, variant)[:3]

    expected = backward(small)
    for name in order:
        wide.copy_(small[name])
        results = backward(small | {name: wide})
        for ours, exact in zip(results, expected, strict=True):
            assert torch.equal(ours, exact), name


@pytest.mark.slow
def test_batch_beyond_2_31_elements_and_grid_limits_is_right():
    batch, seqlen, head_dim = 2**31 // (64 * 128) + 3, 64, 128  # 262147 programs a tile
    assert batch > 4 * 65535
    q = torch.randn(batch, 1, seqlen, head_dim, dtype=torch.float16, device="cuda")
    leaves = [q.requires_grad_()]  # one tensor for all three: memory
    o = TRITON(q, q, q, is_causal=True)
    (dq,) = gradients_of(o, leaves, q.detach())
    for index in (0, batch // 2, batch - 1):
        alone = q[index : index + 1].detach().requires_grad_()
        expected = TRITON(alone, alone, alone, is_causal=True)
        assert torch.equal(o[index], expected[0]), index
        assert torch.equal(dq[index], gradients_of(expected, alone, alone.detach())[0][0]), index


def test_captured_forward_and_backward_equal_eager_ones():
    q, k, v = draw(2, 4, 600, 64, requires_grad=True)
    do = torch.randn_like(q)

    def once():
        o = TRITON(q, k, v, is_causal=True)
        # detached: the captured o would keep the leaves' nodes on the stream of the capture
        return o.detach(), *gradients_of(o, (q, k, v), do)

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        once()  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = once()
    for _ in range(2):
        with torch.no_grad():
            q.normal_()
        graph.replay()
        assert all(map(torch.equal, captured, once()))


@pytest.mark.slow
@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
def test_sanitizer_finds_nothing(tool):
    """By pointers: the racecheck tool does not know bulk copies."""
    sanitizer = shutil.which("compute-sanitizer")
    if sanitizer is None:
        pytest.skip("compute-sanitizer is not installed")
    script = """
import torch
from flash_kernel._triton.launch import prepare_forward
from flash_kernel._triton.launch_backward import prepare_backward
from flash_kernel.variant import Variant
q, k, v = (torch.randn(1, 2, n, 40, device="cuda", dtype=torch.float16) for n in (70, 130, 130))
variant = Variant(0.2, right=0)
o, lse = prepare_forward(q, k, v, variant, use_descriptors=False)(q, k, v)
backward = prepare_backward(q, k, v, o, o, variant, has_dlse=False, use_descriptors=False)
backward(q, k, v, o, lse, o, None)
torch.cuda.synchronize()
"""
    command = [sanitizer, "--tool", tool, "--error-exitcode", "7", sys.executable, "-c", script]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-2000:]


GUARD = 4096  # elements on either side of a tensor
CANARY = 1234.0


class Guarded:
    """Tensors that lie between guard pages: NaN around what is read, canaries around results."""

    def __init__(self):
        self.buffers = []

    def place(self, shape, dtype, fill, guard):
        size = math.prod(shape)
        buffer = torch.full((size + 2 * GUARD,), guard, dtype=dtype, device="cuda")
        self.buffers.append((buffer, size, guard))
        return buffer[GUARD : GUARD + size].fill_(fill).view(shape)

    def input(self, values):
        return self.place(values.shape, values.dtype, 0.0, math.nan).copy_(values)

    def empty_like(self, x, **options):
        order = sorted(range(x.dim()), key=lambda dim: -x.stride(dim))  # dense, in this order
        flat = self.place([x.shape[dim] for dim in order], x.dtype, math.nan, CANARY)
        return flat.permute([order.index(dim) for dim in range(x.dim())])

    def empty(self, shape, *, dtype, device):
        return self.place(shape, dtype, math.nan, CANARY)

    def assert_untouched(self):
        for buffer, size, guard in self.buffers:
            outside = torch.cat([buffer[:GUARD], buffer[GUARD + size :]])
            assert (outside.isnan() if math.isnan(guard) else outside == guard).all()


@pytest.mark.parametrize("use_descriptors", [False, True], ids=["pointers", "descriptors"])
@pytest.mark.parametrize("layout", ["bhnd", "bnhd"])
@pytest.mark.parametrize(
    ("head_dim", "dtype"),
    [(64, torch.float16), (40, torch.bfloat16), (128, torch.float32), (256, torch.bfloat16)],
)
def test_nothing_is_read_or_written_out_of_bounds(
    head_dim, dtype, layout, use_descriptors, monkeypatch
):
    if use_descriptors and torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("descriptors are used from compute capability 9.0 on")
    guarded = Guarded()
    monkeypatch.setattr(torch, "empty", guarded.empty)
    monkeypatch.setattr(torch, "empty_like", guarded.empty_like)

    def placed(x):
        x = x if layout == "bhnd" else x.transpose(1, 2).contiguous()
        x = guarded.input(x)
        return x if layout == "bhnd" else x.transpose(1, 2)

    for (seqlen_q, seqlen_k), right in itertools.product(
        [(131, 97), (1, 200), (200, 65)], [None, 0]
    ):
        inputs = make_qkv(2, 3, seqlen_q, seqlen_k, head_dim, dtype=dtype, device="cuda")
        q, k, v = map(placed, inputs)
        do = placed(inputs[0])
        variant = Variant(head_dim**-0.5, right=right)
        o, lse = launch_forward(q, k, v, variant, use_descriptors=use_descriptors)
        gradients = launch_backward(
            q, k, v, o, lse, do, None, variant, use_descriptors=use_descriptors
        )
        torch.cuda.synchronize()
        assert all(x.isfinite().all() for x in (o, *gradients[:3]))  # nothing of the NaN around
        guarded.assert_untouched()


VARIANTS = {
    "causal": (Variant(0.125, right=0), {}),
    "window": (Variant(0.125, left=300, right=40), {}),
    "softcap": (Variant(0.125, softcap=3.0), {}),
    "everything": (
        Variant(0.125, left=400, right=0, softcap=5.0), {"mask", "alibi_slopes", "sinks"}
    ),
}  # fmt: skip


@pytest.mark.parametrize("compiled", [False, True], ids=["dense", "compiled"])
@pytest.mark.parametrize("name", VARIANTS)
def test_two_backwards_agree(name, compiled):
    """The kernels', which rebuild the scores tile by tile, and dense formulas."""
    variant, present = VARIANTS[name]
    modifiers = {
        "mask": torch.rand(2, 4, 700, 900, device="cuda") < 0.8,
        "alibi_slopes": torch.rand(2, 4, device="cuda"),
        "sinks": torch.randn(4, device="cuda"),
    }
    chosen = Modifiers(**{x: modifiers[x] for x in present}) if present else PLAIN
    q, k, v = make_qkv(2, 4, 700, 900, 64, dtype=torch.float32, device="cuda")
    k, v = k[:, :2].contiguous(), v[:, :2].contiguous()
    o, lse = launch_forward(q, k, v, variant, chosen)
    do, dlse = torch.randn_like(o), torch.randn_like(lse)
    ours = launch_backward(q, k, v, o, lse, do, dlse, variant, chosen)
    dense = flash_attention_backward_compiled if compiled else flash_attention_backward
    expected = dense(q, k, v, o, lse, do, dlse, variant, chosen)
    for x, y in zip(ours, expected, strict=True):
        if x is not None:
            torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-4 * y.abs().max().item())


@pytest.mark.parametrize("head_dim", [16, 32, 64, 128, 256])
def test_float32_is_exact_where_all_terms_of_a_sum_have_one_sign(head_dim):
    """Tensor cores cut sums off, toward zero: over many terms of one sign that would add up."""
    q, k, v = (x.abs() for x in draw(1, 2, 700, head_dim, torch.float32))
    fn = partial(TRITON, is_causal=True, return_lse=True)
    assert_matches_reference(fn, q, k, v, is_causal=True, do=torch.randn_like(v).abs())


@pytest.mark.parametrize("factor", [1e-30, 1e30])
def test_float32_keeps_its_range(factor):
    q, k, v = draw(1, 2, 200, 64, torch.float32)
    fn = partial(TRITON, is_causal=True)
    assert_matches_reference(fn, factor * q, k / factor, v, is_causal=True)
    assert_matches_reference(fn, q, k, factor * v, is_causal=True)


TABLE = [
    (dtype, generation, head_dim)
    for dtype, table in ((torch.float16, HALF_PRECISION), (torch.float32, FLOAT32))
    for generation, configs in table.items()
    for head_dim in configs
]


class ByConfigs(torch.autograd.Function):
    """The kernels, causal, with configurations that the device would not choose."""

    @staticmethod
    def forward(ctx, q, k, v, configs):
        ctx.configs, ctx.variant = configs, Variant(q.shape[-1] ** -0.5, right=0)
        o, lse = launch_forward(q, k, v, ctx.variant, configs=configs)
        ctx.save_for_backward(q, k, v, o, lse)
        ctx.mark_non_differentiable(lse)
        return o, lse

    @staticmethod
    def backward(ctx, do, _):
        gradients = launch_backward(*ctx.saved_tensors, do, None, ctx.variant, configs=ctx.configs)
        return *gradients[:3], None


@pytest.mark.parametrize(("dtype", "generation", "head_dim"), TABLE)
def test_every_configuration_of_the_table_is_right(dtype, generation, head_dim):
    configs = (FLOAT32 if dtype == torch.float32 else HALF_PRECISION)[generation][head_dim]
    q, k, v = make_qkv(1, 2, 300, 333, head_dim, dtype=dtype, device="cuda")
    assert_matches_reference(
        lambda q, k, v: ByConfigs.apply(q, k, v, configs), q, k, v, is_causal=True
    )


def odd_rows(x):
    """The same numbers in rows that no vector load reads: of odd strides, at an odd address."""
    return torch.nn.functional.pad(x, (1, 2, 0, 1))[..., :-1, 1:-2]


# ptxas once lost the address of a second piece; see docs/tuning-log.md
@pytest.mark.parametrize("widths", [(130, 18), (152, 156), (162, 6), (96, 80), (256, 130)])
@pytest.mark.parametrize("is_by_columns", [False, True])
@pytest.mark.parametrize("seqlens", [(38, 262), (256, 263)])
def test_unaligned_rows_in_two_pieces_are_right(seqlens, is_by_columns, widths):
    shapes = zip((4, 2, 2), (seqlens[0], *[seqlens[1]] * 2), (widths[0], *widths), strict=True)
    q, k, v = (torch.randn(2, *s, device="cuda", dtype=torch.bfloat16) for s in shapes)
    k = k.mT.contiguous().mT if is_by_columns else k
    assert_matches_reference(partial(TRITON, is_causal=True), q, k, odd_rows(v), is_causal=True)


def test_packed_neighbours_that_are_not_finite_reach_nobody():
    lengths = [37, 200, 0, 129, 64]
    ends = torch.tensor([0, *lengths]).cumsum(0).to("cuda", torch.int32)
    q, k, v = (torch.randn(sum(lengths), 2, 64, dtype=torch.bfloat16, device="cuda") for _ in "qkv")
    dirty = [x.clone() for x in (q, k, v)]
    for x in dirty:
        x[37:237] = math.nan
    results = []
    for tensors in ((q, k, v), dirty):
        leaves = [x.detach().requires_grad_() for x in tensors]
        o = flash_attention_varlen(*leaves, ends, ends, is_causal=True, impl="triton")
        results.append((o.detach(), *gradients_of(o, leaves, torch.ones_like(o))))
    others = torch.ones(sum(lengths), dtype=torch.bool, device="cuda")
    others[37:237] = False
    for clean, beside in zip(*results, strict=True):
        assert torch.equal(clean[others], beside[others])
        assert beside[~others].isnan().all()


def test_packed_rows_beyond_the_tiles_of_a_grid_axis_are_right():
    """More rows in all than 65535 tiles of the row statistics: the last sequence is as alone."""
    rows, num_sequences = 1000, 2200
    ends = torch.arange(num_sequences + 1, dtype=torch.int32, device="cuda") * rows
    shape = (rows * num_sequences, 1, 16)
    tensors = [torch.randn(shape, dtype=torch.bfloat16, device="cuda") for _ in range(4)]
    results = []
    for *qkv, do in (tensors, [x[-rows:] for x in tensors]):
        leaves = [x.detach().requires_grad_() for x in qkv]
        cu_seqlens = ends[: len(do) // rows + 1]
        o = flash_attention_varlen(*leaves, cu_seqlens, cu_seqlens, is_causal=True, impl="triton")
        results.append((o.detach()[-rows:], *(x[-rows:] for x in gradients_of(o, leaves, do))))
    for among_many, alone in zip(*results, strict=True):
        assert torch.equal(among_many, alone)

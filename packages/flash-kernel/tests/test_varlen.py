"""Packed sequences: each is what it is alone, whatever lies beside it."""

import itertools
import shutil

import pytest
import torch
from direct_launches import launch_forward

from flash_kernel import attention_reference, calls, flash_attention, flash_attention_varlen
from flash_kernel._triton import launch
from flash_kernel._triton.config import BlockConfig, KernelConfigs
from flash_kernel.sequence_ops import packed_backward_op, packed_forward_op
from flash_kernel.variant import Packing, Variant

NEEDS_COMPILER = pytest.mark.skipif(
    not torch.cuda.is_available() and shutil.which("g++") is None,
    reason="torch.compile needs a C++ compiler on a CPU",
)

# queries and keys of each sequence: within a tile, over its end, one, none, and none at all
LENGTHS = [(33, 70), (70, 33), (0, 40), (1, 65), (65, 0), (0, 0), (64, 64)]
FEATURES = {
    "plain": {},
    "causal, shared heads": {"heads": (2, 1), "is_causal": True},
    "window, narrow values": {"window": (20, 7), "head_dim_v": 8},
    "everything": {
        "heads": (2, 1),
        "is_causal": True,
        "window": (40, None),
        "softcap": 3.0,
        "tensors": ["alibi_slopes", "sinks"],
    },
}


def ends(lengths, device):
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device=device)


def draw(device, lengths=LENGTHS, *, heads=(2, 2), head_dim_v=16, tensors=(), **options):
    """Return q, k, v in float64, where their sequences end, and the options of a call."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(device)

    (num_heads, num_heads_k), (of_q, of_k) = heads, zip(*lengths, strict=True)
    inputs = [
        normal(sum(of_q), num_heads, 16),
        normal(sum(of_k), num_heads_k, 16),
        normal(sum(of_k), num_heads_k, head_dim_v),
    ]
    modifiers = {
        "alibi_slopes": normal(len(lengths), num_heads).abs(),
        "sinks": normal(num_heads),
    }
    options |= {name: modifiers[name] for name in tensors}
    return inputs, (ends(of_q, device), ends(of_k, device)), options


def one_by_one(q, k, v, ends_q, ends_k, *, alibi_slopes=None, **options):
    """Return o and lse of the dense reference, sequence by sequence."""
    results = []
    bounds = [itertools.pairwise(x.tolist()) for x in (ends_q, ends_k)]
    for i, ((q0, q1), (k0, k1)) in enumerate(zip(*bounds, strict=True)):
        parts = [x.transpose(0, 1)[None] for x in (q[q0:q1], k[k0:k1], v[k0:k1])]
        slopes = (
            alibi_slopes if alibi_slopes is None or alibi_slopes.dim() == 1 else alibi_slopes[i]
        )
        results.append(attention_reference(*parts, alibi_slopes=slopes, **options))
    os, lses = zip(*results, strict=True)
    return torch.cat([o[0].transpose(0, 1) for o in os]), torch.cat([x[0] for x in lses], dim=-1)


def results(fn, inputs, packing, options):
    """Return o, lse and the gradients of q, k, v and sinks under seeded gradients of both."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    if "sinks" in options:
        options = options | {"sinks": options["sinks"].detach().requires_grad_()}
        leaves.append(options["sinks"])
    o, lse = fn(*leaves[:3], *packing, **options)
    generator = torch.Generator().manual_seed(1)
    do, dlse = (torch.randn(x.shape, generator=generator).to(x) for x in (o, lse))
    loss = (o * do).sum() + lse.where(lse.isfinite(), 0.0).mul(dlse).sum()
    return [o, lse, *torch.autograd.grad(loss, leaves)]


def varlen(**wish):
    return lambda *args, **options: flash_attention_varlen(
        *args, return_lse=True, **options, **wish
    )


def in_dtype(dtype, inputs, options):
    options = {n: x.to(dtype) if isinstance(x, torch.Tensor) else x for n, x in options.items()}
    return [x.to(dtype) for x in inputs], options


# interpreted, a case takes seconds: what others show as well is left to a GPU
ON_GPU = pytest.mark.gpu
IMPLEMENTATIONS = [("triton", "triton"), ("reference", "dense"), ("auto", "auto")]
INTERPRETED = ("window, narrow values", "everything")
CASES = [
    pytest.param(
        feature, *names, marks=ON_GPU if names[0] == "triton" and feature not in INTERPRETED else []
    )
    for feature in FEATURES
    for names in IMPLEMENTATIONS
]


@pytest.mark.parametrize(("feature", "impl", "backward"), CASES)
def test_every_sequence_matches_float64_forward_and_backward(feature, impl, backward, device):
    inputs, packing, options = draw(device, **FEATURES[feature])
    expected = results(one_by_one, inputs, packing, options)
    inputs, options = in_dtype(torch.float32, inputs, options)
    got = results(varlen(impl=impl, backward=backward), inputs, packing, options)
    for x, y in zip(got, expected, strict=True):
        torch.testing.assert_close(x.double(), y, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize(
    ("dtype", "head_dim", "lengths"),
    [
        (torch.bfloat16, 72, [(130, 70), (1, 65)]),
        *(
            pytest.param(dtype, head_dim, [(130, 190), (1, 65), (70, 70)], marks=ON_GPU)
            for dtype in (torch.float16, torch.bfloat16)
            for head_dim in (64, 72)
        ),
    ],
)
def test_half_precision_is_as_accurate_as_the_dense_reference(dtype, head_dim, lengths, device):
    """Error against float64 at most twice that of a dense attention in the same dtype."""
    (of_q, of_k), generator = zip(*lengths, strict=True), torch.Generator().manual_seed(0)
    inputs = [
        torch.randn(sum(rows), heads, head_dim, generator=generator).to(device, dtype)
        for rows, heads in ((of_q, 2), (of_k, 1), (of_k, 1))
    ]
    packing, options = (ends(of_q, device), ends(of_k, device)), {"is_causal": True}
    expected = results(one_by_one, [x.double() for x in inputs], packing, options)
    baseline = results(one_by_one, inputs, packing, options)
    got = results(varlen(impl="triton"), inputs, packing, options)
    unit = torch.finfo(dtype).eps / 2
    for x, dense, y in zip(got, baseline, expected, strict=True):
        finite = y.isfinite()
        assert torch.equal(x.isfinite(), finite)
        error, of_dense = ((z.double() - y)[finite].abs() for z in (x, dense))
        assert error.max() <= 2 * of_dense.max() + 2 * unit * y[finite].abs().max()
        assert error.mean() <= 2 * of_dense.mean() + 2 * unit * y[finite].abs().mean()


# the interpreter's numpy, of the rows that are NaN throughout
@pytest.mark.filterwarnings("ignore:All-NaN slice encountered:RuntimeWarning")
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
@pytest.mark.parametrize("impl", ["triton", "auto"])
@pytest.mark.parametrize("use_descriptors", [True, False])
def test_nan_of_a_neighbour_never_arrives(impl, use_descriptors, device, monkeypatch):
    """A sequence that ends within a tile lies between sequences of NaN."""
    if impl == "triton":
        monkeypatch.setattr(calls, "_calls", {})  # the choice is no part of a kind
        monkeypatch.setattr(launch, "can_use_descriptors", lambda *_, **__: use_descriptors)
    inputs, packing, _ = draw(device, [(20, 20), (33, 70), (9, 9)], heads=(1, 1))
    inputs = [x.float() for x in inputs]
    clean = results(varlen(impl=impl), inputs, packing, {"is_causal": True})
    bounds = [packing[0].tolist(), packing[1].tolist(), packing[1].tolist()]
    for x, rows in zip(inputs, bounds, strict=True):
        for i in (0, 2):
            x[rows[i] : rows[i + 1]] = float("nan")
    poisoned = results(varlen(impl=impl), inputs, packing, {"is_causal": True})
    by_row = [bounds[0], bounds[0], *bounds]
    for x, y, rows in zip(clean, poisoned, by_row, strict=True):
        x, y = (z.transpose(0, 1) if z.dim() == 2 else z for z in (x, y))
        assert torch.equal(x[rows[1] : rows[2]], y[rows[1] : rows[2]])
        assert y[: rows[1]].isnan().any()


def test_a_sequence_has_the_same_bits_in_any_company(device):
    """In another order, at other offsets, and alone."""
    inputs, packing, options = draw(device, heads=(2, 1), is_causal=True)
    inputs = [x.half() for x in inputs]
    got = varlen(impl="triton")(*inputs, *packing, **options)
    order = [6, 1, 4, 0, 3, 5, 2]
    bounds = [packing[0].tolist(), packing[1].tolist(), packing[1].tolist()]

    def permuted(x, rows, order):
        return torch.cat([x[rows[i] : rows[i + 1]] for i in order])

    for chosen in (order, [1]):
        moved = [permuted(x, rows, chosen) for x, rows in zip(inputs, bounds, strict=True)]
        of_q, of_k = zip(*(LENGTHS[i] for i in chosen), strict=True)
        again = varlen(impl="triton")(*moved, ends(of_q, device), ends(of_k, device), **options)
        assert torch.equal(again[0], permuted(got[0], bounds[0], chosen))
        assert torch.equal(again[1], permuted(got[1].T, bounds[0], chosen).T)


def test_a_sequence_alone_has_the_bits_of_flash_attention(device):
    inputs, packing, _ = draw(device, [(130, 130)], heads=(4, 2))
    q, k, v = (x.half() for x in inputs)
    o = flash_attention_varlen(q, k, v, *packing, is_causal=True, impl="triton")
    dense = [x.transpose(0, 1)[None] for x in (q, k, v)]
    expected = flash_attention(*dense, is_causal=True, impl="triton")
    assert torch.equal(o, expected[0].transpose(0, 1))


@pytest.mark.parametrize("count", [131, pytest.param(300, marks=ON_GPU)])
def test_many_sequences_are_found_beyond_one_block_of_them(count, device):
    """A slot's owner is searched 128 sequences at a time."""
    lengths = [(3 * (i % 4 == 2), (i + 1) % 3) for i in range(count)]
    inputs, packing, _ = draw(device, lengths, heads=(1, 1))
    o, lse = flash_attention_varlen(*(x.float() for x in inputs), *packing, return_lse=True,
                                    impl="triton")  # fmt: skip
    expected = one_by_one(*inputs, *packing)
    torch.testing.assert_close((o.double(), lse.double()), expected, rtol=2e-5, atol=2e-5)


def test_every_tile_size_gives_the_same_values(device):
    inputs, packing, _ = draw(device, [(33, 70), (0, 9), (50, 20)])
    views = [x.float().transpose(0, 1)[None] for x in inputs]
    packing = Packing(*packing)
    expected = one_by_one(*inputs, *packing[:2], is_causal=True)
    for config in (BlockConfig(16, 32), BlockConfig(32, 16)):
        configs = KernelConfigs(config, config, config)
        variant = Variant(16**-0.5, right=0)
        o, lse = launch_forward(*views, variant, packing=packing, configs=configs)
        got = o[0].transpose(0, 1).double(), lse[0].double()
        torch.testing.assert_close(got, expected, rtol=2e-5, atol=2e-5)


def test_int64_ends_and_strided_storage_change_nothing(device):
    inputs, packing, _ = draw(device, heads=(2, 2), head_dim_v=16)
    q, k, v = (x.float() for x in inputs)
    o = flash_attention_varlen(q, k, v, *packing, impl="triton")
    kv = torch.stack([k, v], dim=1)  # packed as [total, 2, H, D]
    heads_first = q.transpose(0, 1).contiguous().transpose(0, 1)
    long = [x.long() for x in packing]
    again = flash_attention_varlen(heads_first, kv[:, 0], kv[:, 1], *long, impl="triton")
    assert torch.equal(o, again)


@pytest.mark.parametrize("impl", ["auto", "triton"])
def test_no_sequences_and_no_rows_have_empty_differentiable_results(impl, device):
    x = torch.zeros(0, 2, 16, device=device, requires_grad=True)
    for count in (1, 3):
        packing = [torch.zeros(count, dtype=torch.int32, device=device)] * 2
        o, lse = flash_attention_varlen(x, x, x, *packing, return_lse=True, impl=impl)
        assert (o.shape, lse.shape) == ((0, 2, 16), (2, 0))
        (gradient,) = torch.autograd.grad(o.sum(), x)
        assert gradient.shape == x.shape


def test_second_order_gradients_are_refused(device):
    inputs, packing, _ = draw(device, [(5, 5)])
    q, k, v = (x.float().requires_grad_() for x in inputs)
    o = flash_attention_varlen(q, k, v, *packing, impl="triton")
    with pytest.raises(RuntimeError, match="differentiable once"):
        torch.autograd.grad(o.sum(), q, create_graph=True)


def test_autocast_converts_as_for_flash_attention(device):
    inputs, packing, _ = draw(device, [(5, 5)])
    with torch.autocast(device, dtype=torch.bfloat16):
        o = flash_attention_varlen(*(x.float() for x in inputs), *packing)
    assert o.dtype == torch.bfloat16


# opcheck itself reads .grad of tensors that are no leaves
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
@pytest.mark.parametrize(
    ("impl", "backward", "head_dim_v"), [("triton", "triton", 8), ("reference", "dense", 16)]
)
def test_operators_pass_opcheck_on_strided_tensors(impl, backward, head_dim_v, device):
    inputs, packing, options = draw(
        device, [(5, 9)], heads=(1, 1), head_dim_v=head_dim_v, tensors=["sinks"]
    )
    inputs, options = in_dtype(torch.float32, inputs, options)
    inputs = [x.mT.contiguous().mT for x in inputs]
    rest = [*packing, None, None, None, options["sinks"], 0.25, 20, 0, 5.0, impl, backward]
    o, lse = packed_forward_op(*inputs, *rest)
    saved = [*inputs, o, lse, torch.randn_like(o), None]
    torch.library.opcheck(packed_backward_op, (*saved, *rest))
    leaves = [x.detach().requires_grad_() for x in inputs]
    torch.library.opcheck(packed_forward_op, (*leaves, *rest))


@NEEDS_COMPILER
def test_full_graph_compiles_for_any_lengths_and_equals_eager(device):
    @torch.compile(fullgraph=True, dynamic=True)
    def layer(q, k, v, ends_q, ends_k):
        return flash_attention_varlen(2 * q, k, v, ends_q, ends_k, is_causal=True)

    for lengths in ([(20, 33), (5, 5)], [(7, 9), (0, 3), (40, 40)]):
        inputs, packing, _ = draw(device, lengths)
        leaves = [x.float().requires_grad_() for x in inputs]
        q, k, v = leaves
        eager = flash_attention_varlen(2 * q, k, v, *packing, is_causal=True)
        compiled = layer(q, k, v, *packing)
        torch.testing.assert_close(compiled, eager, rtol=1e-5, atol=1e-5)
        gradients = [torch.autograd.grad(x.square().sum(), leaves) for x in (compiled, eager)]
        torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-4)


X = torch.zeros(12, 2, 16)
ENDS = torch.tensor([0, 5, 12], dtype=torch.int32)


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"q": X[0]}, ValueError, r"must be packed, \[total, heads, D\] .* got shape \[2, 16\]"),
        ({"k": X[:, :, :8]}, ValueError, r"`k` must have shape \[total_k, 2, 16\] to match `q`"),
        ({"v": X[:5]}, ValueError, r"`v` must have shape \[12, 2, D_v\] to match `k`"),
        ({"q": X[:, :1].expand(12, 3, 16)}, ValueError, "dimension -2, must divide the 3 heads"),
        ({"cu_seqlens_q": [0, 12]}, TypeError, "`cu_seqlens_q` must be a torch.Tensor, got list"),
        ({"cu_seqlens_k": ENDS.float()}, TypeError, "`cu_seqlens_k` must be int32 or int64, got"),
        ({"cu_seqlens_q": torch.stack([ENDS, ENDS], 1)[:, 0]}, ValueError,
         r"`cu_seqlens_q` must be contiguous, got strides \[2\]. Pass cu_seqlens_q.contiguous"),
        ({"cu_seqlens_k": ENDS[None]}, ValueError, r"must have shape \[B \+ 1\], got \[1, 3\]"),
        ({"cu_seqlens_k": ENDS[:0]}, ValueError, "must hold at least the 0 that it starts at"),
        ({"cu_seqlens_k": ENDS[1:]}, ValueError, r"as many sequences, got shapes \[3\] and \[2\]"),
        ({"cu_seqlens_q": ENDS + 1}, ValueError, r"must start at 0, .* got \[1, 6, 13\]"),
        ({"cu_seqlens_q": ENDS - 5}, ValueError, r"must start at 0, .* got \[-5, 0, 7\]"),
        ({"cu_seqlens_k": ENDS.clamp(max=11)}, ValueError, "end at the 12 rows of `k`"),
        ({"cu_seqlens_k": ENDS[[0, 2, 1, 2]], "cu_seqlens_q": ENDS[[0, 1, 1, 2]]}, ValueError,
         "never decrease"),
        ({"max_seqlen_q": 6}, ValueError, "`max_seqlen_q` must be at least the longest .* 7 rows"),
        ({"max_seqlen_k": 7.0}, TypeError, "`max_seqlen_k` must be an integer or None, got 7.0"),
        ({"sinks": torch.zeros(3)}, ValueError, r"`sinks` must have shape \[H\]"),
        ({"alibi_slopes": torch.zeros(3, 2)}, ValueError, r"`alibi_slopes` must have shape \[H\]"),
        ({"window": 5}, TypeError, r"`window` must be None or \(left, right\)"),
        ({"impl": "cuda"}, ValueError, "`impl` must be one of"),
        ({"return_lse": 1}, TypeError, "`return_lse` must be True or False, got 1"),
    ],
)  # fmt: skip
def test_bad_input_is_refused_in_one_line(changed, error, message):
    arguments = {"q": X, "k": X, "v": X, "cu_seqlens_q": ENDS, "cu_seqlens_k": ENDS} | changed
    with pytest.raises(error, match=message) as caught:
        flash_attention_varlen(**arguments)
    assert "\n" not in str(caught.value)


def test_functional_transforms_are_refused_in_words(device):
    rows, ends = torch.randn(9, 2, 8, device=device), torch.tensor([0, 4, 9], device=device)

    def attention(q):
        return flash_attention_varlen(q, rows, rows, ends, ends, impl="mock").sum()

    with pytest.raises(RuntimeError, match=r"flash_attention_varlen .* Pass impl='reference'"):
        torch.func.grad(attention)(rows)

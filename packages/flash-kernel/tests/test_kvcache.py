"""Caches: what is appended, what is seen, and that nothing else matters."""

import shutil
from functools import partial

import pytest
import torch

from flash_kernel import (
    attention_reference,
    calls,
    flash_attention,
    flash_attention_with_kvcache,
)
from flash_kernel._triton import launch_decode
from flash_kernel._triton.config import DECODE_BLOCK_M, BlockConfig
from flash_kernel.sequence_ops import cached_forward_appending_op, cached_forward_op
from flash_kernel.variant import Variant

NEEDS_COMPILER = pytest.mark.skipif(
    not torch.cuda.is_available() and shutil.which("g++") is None,
    reason="torch.compile needs a C++ compiler on a CPU",
)
CAPACITY, PAGE = 640, 32
SEQLENS = [0, 5, 300, 630]
NAN = float("nan")
CASES = {
    "one query, nothing new": {},
    "one query, appended": {"num_new": 1, "is_causal": True},
    "shared heads, several queries": {"num_new": 7, "num_queries": 7, "heads": (8, 2),
                                      "is_causal": True},
    "fewer queries than new keys": {"num_new": 9, "num_queries": 3, "is_causal": True},
    "window, wide values": {"num_new": 1, "num_queries": 4, "window": (100, 0), "head_dim_v": 24},
    "everything": {"num_new": 2, "num_queries": 5, "heads": (6, 2), "window": (280, 1),
                   "softcap": 3.0, "tensors": ["alibi_slopes", "sinks"]},
}  # fmt: skip


def draw(device, *, heads=(2, 2), num_queries=1, num_new=0, head_dim_v=16, tensors=(), **options):
    """Return float64 q, caches of NaN past each sequence's end, new k and v, and options."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(device)

    (num_heads, num_heads_k), batch = heads, len(SEQLENS)
    q = normal(batch, num_heads, num_queries, 16)
    # stored as [B, capacity, H_kv, D], as flash-attn has it
    caches = [normal(batch, CAPACITY, num_heads_k, d).transpose(1, 2) for d in (16, head_dim_v)]
    for i, seqlen in enumerate(SEQLENS):
        for cache in caches:
            cache[i, :, seqlen:] = NAN
    new = [normal(batch, num_heads_k, num_new, d) for d in (16, head_dim_v)] if num_new else []
    modifiers = {"alibi_slopes": normal(batch, num_heads).abs(), "sinks": normal(num_heads)}
    options |= {name: modifiers[name] for name in tensors}
    return q, caches, new, options


def in_dtype(dtype, q, caches, new, options):
    options = {n: x.to(dtype) if isinstance(x, torch.Tensor) else x for n, x in options.items()}
    return q.to(dtype), [x.to(dtype) for x in caches], [x.to(dtype) for x in new], options


def in_pages(caches, seed=0):
    """Return the caches in pages of any order, and the table; unused entries name no page."""
    batch, num_pages = len(SEQLENS), CAPACITY // PAGE
    order = torch.randperm(batch * num_pages, generator=torch.Generator().manual_seed(seed))
    table = order.reshape(batch, num_pages).to(caches[0].device)
    paged = []
    for cache in caches:
        pages = cache.unflatten(2, (num_pages, PAGE)).transpose(1, 2).flatten(0, 1)
        paged.append(torch.full_like(pages, NAN).contiguous())
        paged[-1][table.flatten()] = pages
    table = table.int()
    for i, seqlen in enumerate(SEQLENS):
        table[i, -(-(seqlen + 16) // PAGE) :] = -(2**30)
    return paged, table


def lengths(device):
    return torch.tensor(SEQLENS, dtype=torch.int32, device=device)


def one_by_one(q, caches, new, *, alibi_slopes=None, **options):
    """Return o and lse of the dense reference, sequence by sequence."""
    results = []
    for i, seqlen in enumerate(SEQLENS):
        k, v = (
            torch.cat([cache[i, :, :seqlen], x[i]], dim=1) if new else cache[i, :, :seqlen]
            for cache, x in zip(caches, new or caches, strict=True)
        )
        slopes = None if alibi_slopes is None else alibi_slopes[i]
        inputs = (q[i, None], k[None], v[None])
        results.append(attention_reference(*inputs, alibi_slopes=slopes, **options))
    os, lses = zip(*results, strict=True)
    return torch.cat(os), torch.cat(lses)


# interpreted, a case takes seconds: some of a cache as a whole, others in pages, all on a GPU
ON_GPU = pytest.mark.gpu
INTERPRETED = {
    False: ("one query, nothing new", "fewer queries than new keys", "window, wide values"),
    True: ("one query, appended", "everything"),
}
LAYOUTS = [
    pytest.param(
        impl,
        paged,
        case,
        marks=ON_GPU if impl == "triton" and case not in INTERPRETED[paged] else [],
    )
    for impl in ("triton", "auto")
    for paged in (False, True)
    for case in CASES
]


@pytest.mark.parametrize(("impl", "paged", "case"), LAYOUTS)
def test_appends_and_attends_as_float64_says(case, paged, impl, device):
    q, caches, new, options = draw(device, **CASES[case])
    expected = one_by_one(q, caches, new, **options)
    q, caches, new, options = in_dtype(torch.float32, q, caches, new, options)
    held, table = in_pages(caches) if paged else ([x.clone() for x in caches], None)
    got = flash_attention_with_kvcache(
        q, *held, *new, cache_seqlens=lengths(device), block_table=table, return_lse=True,
        impl=impl, **options,
    )  # fmt: skip
    for x, y in zip(got, expected, strict=True):
        torch.testing.assert_close(x.double(), y, rtol=2e-5, atol=2e-5)
    # the new rows lie where they belong, and no other was touched
    for cache, x in zip(caches, new, strict=False):
        for i, seqlen in enumerate(SEQLENS):
            cache[i, :, seqlen : seqlen + x.shape[2]] = x[i]
    changed = in_pages(caches)[0] if paged else caches
    torch.testing.assert_close(held, list(changed), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    ("num_splits", "combined_at_once"),
    [(1, 4), (5, 2), pytest.param(2, 4, marks=ON_GPU), pytest.param(128, 64, marks=ON_GPU)],
)
def test_every_number_of_splits_gives_the_same_values(
    num_splits, combined_at_once, device, monkeypatch
):
    monkeypatch.setattr(calls, "_calls", {})  # what is combined at once is no part of a kind
    monkeypatch.setattr(launch_decode, "COMBINE_ELEMENTS", 16 * combined_at_once)
    q, caches, _, options = draw(device, heads=(4, 2), tensors=["sinks"])
    expected = one_by_one(q, caches, [], **options)
    q, caches, _, options = in_dtype(torch.float32, q, caches, [], options)
    got = flash_attention_with_kvcache(
        q, *caches, cache_seqlens=lengths(device), num_splits=num_splits, return_lse=True,
        impl="triton", **options,
    )  # fmt: skip
    for x, y in zip(got, expected, strict=True):
        torch.testing.assert_close(x.double(), y, rtol=2e-5, atol=2e-5)


def test_rows_in_narrow_pieces_give_the_same_values(device):
    q, k, v = (torch.randn(2, *shape, device=device) for shape in ((4, 1, 40), *[(2, 100, 40)] * 2))
    seqlens, variant = torch.tensor([70, 100], dtype=torch.int32, device=device), Variant(0.3)
    results = [
        launch_decode.prepare_decode(
            q, k, v, None, 0, variant, num_splits=2, config=BlockConfig(16, 32, max_width=max_width)
        )(q, k, v, seqlens, None)
        for max_width in (None, 16)
    ]
    for x, y in zip(*results, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [pytest.param(torch.float16, marks=ON_GPU), torch.bfloat16])
def test_half_precision_is_as_accurate_as_the_dense_reference(dtype, device):
    q, caches, *_ = in_dtype(dtype, *draw(device, heads=(8, 2)))
    inputs = q.double(), [x.double() for x in caches], []
    expected, baseline = one_by_one(*inputs)[0], one_by_one(q, caches, [])[0]
    o = flash_attention_with_kvcache(q, *caches, cache_seqlens=lengths(device), impl="triton")
    error, of_dense = ((x.double() - expected).abs().max() for x in (o, baseline))
    assert error <= 2 * of_dense + torch.finfo(dtype).eps * expected.abs().max()


def test_a_sequence_has_the_same_bits_in_any_batch(device):
    q, caches, *_ = in_dtype(torch.float16, *draw(device, heads=(4, 2), num_queries=2))
    seqlens = lengths(device)
    o = flash_attention_with_kvcache(q, *caches, cache_seqlens=seqlens, impl="triton")
    for chosen in ([3, 1], [2]):
        alone = flash_attention_with_kvcache(
            q[chosen], *(x[chosen] for x in caches), cache_seqlens=seqlens[chosen], impl="triton"
        )
        assert torch.equal(alone, o[chosen])


def test_split_follows_from_the_sequence_and_not_from_the_batch():
    q = torch.zeros(1, 32, 1, 128)
    splits = [
        launch_decode.default_splits(q.expand(b, -1, -1, -1), 8, capacity, 16)
        for b in (1, 64)
        for capacity in (128, 4096, 32768)
    ]
    assert splits == [1, 16, 32] * 2


def test_nan_that_a_row_can_see_is_not_hidden(device):
    q, caches, *_ = in_dtype(torch.float32, *draw(device))
    caches[0][2, :, 17] = NAN
    o, lse = flash_attention_with_kvcache(
        q, *caches, cache_seqlens=lengths(device), return_lse=True, impl="triton"
    )
    assert [x.isnan().any().item() for x in o] == [False, False, True, False]
    assert [x.isnan().any().item() for x in lse] == [False, False, True, False]


def test_gradients_are_refused(device):
    q, caches, *_ = in_dtype(torch.float32, *draw(device))
    q.requires_grad_()
    with pytest.raises(RuntimeError, match=r"has no gradients.* Call it under torch.no_grad"):
        flash_attention_with_kvcache(q, *caches, cache_seqlens=lengths(device))
    with torch.no_grad():
        flash_attention_with_kvcache(q, *caches, cache_seqlens=lengths(device))


@pytest.mark.parametrize("impl", ["triton", pytest.param("reference", marks=ON_GPU)])
def test_operators_pass_opcheck(impl, device):
    q, caches, new, options = in_dtype(
        torch.float32, *draw(device, heads=(2, 1), num_new=2, num_queries=2, tensors=["sinks"])
    )
    paged, table = in_pages([x.nan_to_num() for x in caches])
    one = slice(1, 2)  # sequence: opcheck calls an operator a dozen times
    paged = [x.mT.contiguous().mT for x in paged]  # an operator takes any strides
    inputs = (q[one], *paged, lengths(device)[one], table[one])
    extras = (None, options["sinks"], 0.25, 200, 0, None, None, impl)
    torch.library.opcheck(cached_forward_op, (*inputs, *extras))
    appended = [x[one] for x in new]
    torch.library.opcheck(cached_forward_appending_op, (*inputs, *extras, *appended))


@NEEDS_COMPILER
def test_full_graph_appends_in_place_and_equals_eager(device):
    @torch.compile(fullgraph=True)
    def step(q, k_cache, v_cache, k, v, seqlens):
        return flash_attention_with_kvcache(
            2 * q, k_cache, v_cache, k, v, cache_seqlens=seqlens, is_causal=True
        )

    q, caches, new, _ = in_dtype(torch.float32, *draw(device, num_new=1))
    eager, compiled = ([x.clone() for x in caches] for _ in range(2))
    for i in range(2):
        seqlens = lengths(device) + i
        expected = flash_attention_with_kvcache(
            2 * q, *eager, *new, cache_seqlens=seqlens, is_causal=True
        )
        o = step(q, *compiled, *new, seqlens)
        torch.testing.assert_close(o, expected, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(compiled, eager, rtol=0, atol=0, equal_nan=True)


@pytest.mark.gpu
@pytest.mark.slow
def test_more_tiles_than_an_axis_of_a_grid_has_are_appended_and_attended_to():
    """An axis other than the first ends at 65535."""
    num_new = 65536 * launch_decode.APPEND_BLOCK_N + 5
    half = {"dtype": torch.float16, "device": "cuda"}
    k_cache, v_cache = (torch.zeros(1, 1, num_new + 3, 16, **half) for _ in "kv")
    k, v = (torch.randn(1, 1, num_new, 16, **half) for _ in "kv")
    length = torch.tensor([3], dtype=torch.int32, device="cuda")
    # two queries more than fill 65536 tiles
    group = 128
    q = torch.randn(1, group, 65536 * DECODE_BLOCK_M // group + 2, 16, **half)
    attend = partial(flash_attention_with_kvcache, q, impl="triton", cache_seqlens=length)
    attend(k_cache, v_cache, k, v, window=(0, 0))
    assert torch.equal(k_cache[:, :, 3:], k)
    assert torch.equal(v_cache[:, :, 3:], v)
    o = attend(k_cache, v_cache)
    expected = flash_attention(q[..., -3:, :], k_cache[:, :, :3], v_cache[:, :, :3], impl="triton")
    torch.testing.assert_close(o[..., -3:, :], expected, rtol=0, atol=2e-3)


@pytest.mark.gpu
def test_captured_graph_follows_the_lengths(device):
    """Replayed with other lengths and tokens, a CUDA graph decodes as an eager call does."""
    q, caches, new, _ = in_dtype(torch.float16, *draw(device, heads=(8, 2), num_new=1))
    eager, captured = ([x.clone() for x in caches] for _ in range(2))
    seqlens = lengths(device)

    def step(caches):
        return flash_attention_with_kvcache(
            q, *caches, *new, cache_seqlens=seqlens, is_causal=True, impl="triton"
        )

    step([x.clone() for x in caches])  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o = step(captured)
    for _ in range(3):
        graph.replay()
        assert torch.equal(o, step(eager))
        torch.testing.assert_close(captured, eager, rtol=0, atol=0, equal_nan=True)
        seqlens += 1
        q.normal_()
        new[0].normal_()


@pytest.mark.gpu
def test_what_exceeds_the_capacity_is_dropped(device):
    """On a GPU lengths are not checked: nothing may be written beyond a sequence's rows."""
    q, caches, new, _ = in_dtype(torch.float16, *draw(device, num_new=16, num_queries=16))
    before = [x.clone() for x in caches]
    flash_attention_with_kvcache(
        q, *caches, *new, cache_seqlens=lengths(device), is_causal=True, impl="triton"
    )
    for cache, old, x in zip(caches, before, new, strict=True):
        assert torch.equal(cache[3, :, 630:], x[3, :, :10])
        assert torch.equal(cache[1, :, 5:21], x[1])
        assert torch.equal(cache[0, :, 16:].isnan(), old[0, :, 16:].isnan())


Q, CACHE, NEW = torch.zeros(2, 4, 1, 16), torch.zeros(2, 2, 8, 16), torch.zeros(2, 2, 1, 16)
COUNTS = torch.tensor([0, 8], dtype=torch.int32)
TABLE = torch.tensor([[0], [1]], dtype=torch.int32)


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"q": Q[0]}, ValueError, r"`q` must have four dimensions, .* got shape \[4, 1, 16\]"),
        ({"k": NEW}, ValueError, "`k` and `v` must be given together"),
        ({"k": NEW[:1], "v": NEW}, ValueError, r"`k` must have shape \[2, 2, rows, 16\]"),
        ({"k_cache": CACHE[:1]}, ValueError, r"`k_cache` must have shape \[2, 2, rows, 16\]"),
        ({"v_cache": CACHE[:, :, :4]}, ValueError, r"`v_cache` must have shape \[2, 2, 8, D_v\]"),
        ({"q": Q[:, :3]}, ValueError, "must divide the 3 heads of `q`"),
        ({"q": Q.half()}, TypeError, "must share one dtype, got float16, float32 and float32"),
        ({"cache_seqlens": 3}, TypeError, "`cache_seqlens` must be a torch.Tensor, got int"),
        ({"cache_seqlens": COUNTS.float()}, TypeError, "`cache_seqlens` must be int32 or int64"),
        ({"cache_seqlens": COUNTS[:1].expand(len(COUNTS))}, ValueError, "must be contiguous, got"),
        (
            {"cache_seqlens": COUNTS[:1]},
            ValueError,
            "one length for each of the 2 sequences, got 1",
        ),
        ({"cache_seqlens": COUNTS + 1}, ValueError, "must lie from 0 to 8, .* got 9"),
        (
            {"cache_seqlens": COUNTS, "k": NEW, "v": NEW},
            ValueError,
            "must lie from 0 to 7, .* got 8",
        ),
        ({"block_table": TABLE[0]}, ValueError, r"`block_table` must have shape \[B, max_pages\]"),
        (
            {"block_table": TABLE[:1]},
            ValueError,
            "`block_table` must have one row for each of the 2",
        ),
        ({"block_table": TABLE + 1}, ValueError, r"must name pages from 0 to 1 .* got \[2\]"),
        ({"num_splits": 0}, ValueError, "`num_splits` must be None or an integer from 1 to 128"),
        ({"sinks": torch.zeros(3)}, ValueError, r"`sinks` must have shape \[H\]"),
        ({"impl": "cuda"}, ValueError, "`impl` must be one of"),
        ({"return_lse": 1}, TypeError, "`return_lse` must be True or False, got 1"),
    ],
)
def test_bad_input_is_refused_in_one_line(changed, error, message):
    arguments = {"q": Q, "k_cache": CACHE, "v_cache": CACHE, "cache_seqlens": COUNTS} | changed
    with pytest.raises(error, match=message) as caught:
        flash_attention_with_kvcache(**arguments)
    assert "\n" not in str(caught.value)


# torch's own, when a dual tensor is made
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
def test_forward_mode_tangent_is_refused_not_dropped(device):
    q, k_cache = torch.randn(1, 2, 1, 16, device=device), torch.randn(1, 2, 9, 16, device=device)
    lengths = torch.tensor([3], device=device)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(q, torch.ones_like(q))
        with pytest.raises(RuntimeError, match="no forward mode, and an input has a tangent"):
            flash_attention_with_kvcache(dual, k_cache, k_cache, cache_seqlens=lengths)

"""The choice of implementation as data, and attention put together from parts."""

from functools import partial
from itertools import pairwise

import pytest
import torch

from flash_kernel import attention_reference, explain, flash_attention, merge_attention
from flash_kernel.testing import make_qkv

SHAPES = ((2, 8, 512, 64), (2, 8, 512, 64))


def test_explain_needs_no_gpu_to_say_what_one_would_run():
    answer = explain(*SHAPES, is_causal=True)
    assert (answer.impl, answer.backward) == ("hopper", "hopper")
    assert str(answer) == "runs impl='hopper', backward='hopper'"
    answer = explain(*SHAPES, is_causal=True, capability=80)
    assert (answer.impl, answer.backward) == ("triton", "triton")
    assert set(answer.refusals) == {"impl='hopper'", "backward='hopper'"}


@pytest.mark.parametrize(
    ("wish", "impl", "backward", "refused"),
    [
        ({"capability": None}, "torch", "autograd", "impl='triton'"),
        ({"capability": None, "softcap": 30.0}, "reference", "autograd", "impl='torch'"),
        ({"dtype": torch.float64}, "torch", "autograd", "impl='triton'"),
        ({"trained": ["bias"]}, "triton", "dense", "backward='triton'"),
        ({"trained": ["alibi_slopes"]}, "reference", "autograd", "backward='dense'"),
        ({"window": (64, 0)}, "hopper", "hopper", "impl='mock'"),
        ({"softcap": 30.0}, "hopper", "triton", "backward='hopper'"),
        ({"softcap": 1000.1}, "triton", "triton", "impl='hopper'"),
        ({"dtype": torch.float32}, "triton", "triton", "impl='hopper'"),
        ({"capability": 100}, "triton", "triton", "impl='hopper'"),
        ({"backward": "compiled"}, "hopper", "compiled", None),
    ],
)
def test_explain_says_what_runs_and_what_is_refused(wish, impl, backward, refused, monkeypatch):
    from triton import knobs

    monkeypatch.setattr(knobs.runtime, "interpret", False)
    from flash_kernel import dispatch

    dispatch._triton_failure.cache_clear()
    answer = explain(*SHAPES, **wish)
    dispatch._triton_failure.cache_clear()
    assert (answer.impl, answer.backward) == (impl, backward)
    assert refused is None or refused in answer.refusals


@pytest.mark.parametrize(
    ("seqlen_q", "seqlen_k", "impl"),
    [
        (256, 256, "triton"), (1, 256, "triton"), (1, 257, "hopper"), (257, 1, "hopper"),
        # here the keys are split
        (64, 512, "triton"), (65, 512, "hopper"), (1, 100_000, "triton"),
    ],
)  # fmt: skip
def test_heads_of_few_rows_go_to_the_portable_kernels_unless_named(seqlen_q, seqlen_k, impl):
    for batch in (1, 64):
        shapes = (batch, 8, seqlen_q, 64), (batch, 8, seqlen_k, 64)
        assert explain(*shapes).impl == impl
        assert explain(*shapes, impl="hopper").impl == "hopper"


@pytest.mark.parametrize(
    ("head_dim", "auto", "named"),
    [(32, "triton", "hopper"), (40, "hopper", "hopper"), (80, "hopper", "hopper"),
     (84, "triton", None), (96, "hopper", "hopper"), (192, "hopper", "hopper")],
)  # fmt: skip
def test_hopper_pads_heads_to_its_widths(head_dim, auto, named):
    shapes = [(1, 8, 512, head_dim)] * 2
    assert explain(*shapes).impl == auto
    answer = explain(*shapes, impl="hopper")
    assert answer.impl == named
    if named is None:
        assert "takes multiples of 8 up to 256 as `head_dim`, got 84" in str(answer)


def test_packed_sequences_go_one_way_however_long_they_are_together():
    for rows in (5, 100_000):
        shapes = (rows, 8, 64), (rows, 2, 64)
        answer = explain(*shapes, layout="packed")
        assert (answer.impl, answer.backward) == ("hopper", "triton")


def test_explain_reports_a_call_that_would_raise_with_its_message():
    answer = explain((1, 2, 8, 320), (1, 2, 8, 320), impl="triton")
    assert answer.impl is None
    ((option, reason),) = answer.refusals.items()
    assert option == "impl='triton', backward='auto'"
    assert "`head_dim` must be at most 256" in reason
    assert str(answer).startswith("would raise\n  not impl='triton'")


@pytest.mark.parametrize(
    ("wish", "chosen"),
    [
        ({"layout": "packed"}, ("hopper", "triton")),
        ({"layout": "packed", "capability": None}, ("torch", "autograd")),
        ({"layout": "packed", "capability": None, "return_lse": True}, ("reference", "autograd")),
        ({"layout": "cache"}, ("triton", None)),
        ({"layout": "cache", "capability": None, "softcap": 2.0}, ("reference", None)),
    ],
)
def test_explain_answers_for_packed_sequences_and_caches(wish, chosen):
    packed = wish["layout"] == "packed"
    answer = explain(*([(300, 8, 64), (500, 2, 64)] if packed else [(3, 8, 1, 64), (3, 2, 99, 64)]),
                     **wish)  # fmt: skip
    assert (answer.impl, answer.backward) == chosen
    assert "shared heads" in answer.refusals["impl='mock'"]
    assert ("backward=" in str(answer)) == packed


def test_packed_sequences_may_be_longer_in_all_than_one_sequence_may_be():
    one = explain((1, 1, 3_000_000, 64), (1, 1, 99, 64))
    assert "a sequence must have at most 2097120 rows" in one.refusals["impl='triton'"]
    for impl in ("hopper", "triton"):
        assert explain((3_000_000, 1, 64), (99, 1, 64), layout="packed", impl=impl).impl == impl
    assert explain((2**30, 1, 64), (99, 1, 64), layout="packed").impl == "hopper"
    packed = explain((2**30 + 1, 1, 64), (99, 1, 64), layout="packed")
    assert "packed sequences together must have at most" in packed.refusals["impl='triton'"]


def test_explain_agrees_with_what_is_run():
    q, k, v = make_qkv(1, 2, 8, 8, 16, dtype=torch.float32)
    for wish in ({}, {"return_lse": True}, {"softcap": 2.0}, {"impl": "mock"}):
        answer = explain(q.shape, k.shape, dtype=q.dtype, capability=None, **wish)
        named = flash_attention(q, k, v, **(wish | {"impl": answer.impl}))
        chosen = flash_attention(q, k, v, **wish)
        torch.testing.assert_close(chosen, named, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("wish", "message"),
    [
        ({"impl": "cuda"}, "`impl` must be one of"),
        ({"modifiers": ["dropout"]}, "must be names among 'alibi_slopes'.* got 'dropout'"),
        ({"window": (-1, 0)}, "None, for unbounded"),
        ({"layout": "ragged"}, "`layout` must be one of 'dense', 'packed', 'cache', got 'ragged'"),
        ({"layout": "packed"}, r"must have 3 dimensions with layout='packed', got \[2, 8, 512"),
        ({"layout": "cache", "modifiers": ["bias"]}, "'alibi_slopes', 'sinks' with layout='cache'"),
        ({"layout": "cache", "trained": ["sinks"]}, "has no gradients"),
    ],
)
def test_explain_refuses_what_does_not_exist(wish, message):
    with pytest.raises(ValueError, match=message):
        explain(*SHAPES, **wish)


def test_explain_takes_a_capability_as_one_number():
    with pytest.raises(TypeError, match=r"`capability` must be an integer, .* got \(9, 0\)"):
        explain(*SHAPES, capability=(9, 0))


@pytest.mark.parametrize(
    ("shapes", "layout", "message"),
    [
        ([(64,), (64,)], "dense", "`q` must have at least two dimensions"),
        ([(1, 8, 9, 64), (1, 3, 9, 64)], "dense", "must divide the 8 heads of `q`, got 3"),
        ([(1, 8, 9, 64), (1, 8, 9, 32)], "dense", r"`k` must have shape \[1, 8, N, 64\]"),
        ([(9, 8, 64), (9, 0, 64)], "packed", "must divide the 8 heads of `q`, got 0"),
        ([(3, 8, 1, 64), (2, 8, 9, 64)], "cache", r"`k_cache` must have shape \[3, 8, rows, 64\]"),
    ],
)
def test_explain_refuses_shapes_that_the_call_would_refuse(shapes, layout, message):
    with pytest.raises(ValueError, match=message):
        explain(*shapes, layout=layout)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
def test_merged_parts_equal_one_call_over_all_keys(dtype):
    q, k, v = make_qkv(1, 2, 20, 70, 16, dtype=dtype, requires_grad=True)
    attention = partial(attention_reference, scale=0.3)
    bounds = [0, 7, 7, 50, 70]
    parts = [attention(q, k[..., a:b, :], v[..., a:b, :]) for a, b in pairwise(bounds)]
    merged, expected = merge_attention(parts), attention(q, k, v)
    # the parts' o are rounded to float16 before they are joined
    tolerance = dict.fromkeys(("rtol", "atol"), 1e-10 if dtype == torch.float64 else 2e-3)
    torch.testing.assert_close(merged, expected, **tolerance)
    assert [x.dtype for x in merged] == [x.dtype for x in expected]
    gradients = [
        torch.autograd.grad(o.sum() + lse.sum(), (q, k, v), retain_graph=True)
        for o, lse in (merged, expected)
    ]
    torch.testing.assert_close(*gradients, **tolerance)


def test_merged_row_that_sees_nothing_is_zero():
    o, lse = torch.zeros(1, 3, 8), torch.full((1, 3), float("-inf"))
    merged = merge_attention([(o, lse), (o, lse)])
    assert torch.equal(merged[0], o)
    assert torch.equal(merged[1], lse)


def test_parts_that_do_not_fit_are_refused():
    o, lse = torch.zeros(1, 3, 8), torch.zeros(1, 3)
    with pytest.raises(ValueError, match="at least one"):
        merge_attention([])
    with pytest.raises(ValueError, match="must have the shapes of the first"):
        merge_attention([(o, lse), (o[:, :2], lse[:, :2])])

"""Known calls: a call that differs in anything that matters is not taken for one met before."""

import threading
from contextlib import nullcontext
from itertools import pairwise

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import Parameter

from flash_kernel import (
    attention_reference,
    calls,
    dispatch,
    flash_attention,
    flash_attention_varlen,
    flash_attention_with_kvcache,
)
from flash_kernel.testing import make_qkv

MATMUL = torch.backends.cuda.matmul


@pytest.fixture(autouse=True)
def known(monkeypatch):
    """The calls met in this test, by their kind."""
    known = {}
    monkeypatch.setattr(calls, "_calls", known)
    return known


@pytest.fixture
def qkv(device):
    return make_qkv(1, 2, 16, 16, 16, dtype=torch.float32, device=device)


def assert_right(o, q, k, v, **options):
    torch.testing.assert_close(o, attention_reference(q, k, v, **options)[0], rtol=2e-5, atol=2e-5)


def test_a_known_call_decides_and_prepares_nothing(qkv, known, monkeypatch):
    first = flash_attention(*qkv, impl="triton")
    monkeypatch.setattr(dispatch, "checked_request", None)
    monkeypatch.setattr("flash_kernel._triton.launch.prepare_forward", None)
    again = flash_attention(*(x.clone() for x in qkv), impl="triton")
    assert torch.equal(first, again)
    assert len(known) == 1


def test_a_known_backward_prepares_nothing(qkv, monkeypatch):
    leaves = [x.requires_grad_() for x in qkv]

    def gradients():
        return torch.autograd.grad(flash_attention(*leaves, impl="triton").sum(), leaves)

    first = gradients()
    monkeypatch.setattr("flash_kernel._triton.launch_backward.prepare_backward", None)
    for x, y in zip(first, gradients(), strict=True):
        assert torch.equal(x, y)


def in_memory_of_heads_last(x):
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def at_an_odd_address(x):
    return torch.cat([x.flatten()[:1], x.flatten()])[1:].view(x.shape)


@pytest.mark.parametrize("changed", [in_memory_of_heads_last, at_an_odd_address, Parameter])
def test_other_layouts_of_the_same_values_give_the_same_result(changed, qkv, known):
    first = flash_attention(*qkv, impl="triton")
    for i in range(3):
        inputs = [changed(x) if i == j else x for j, x in enumerate(qkv)]
        torch.testing.assert_close(flash_attention(*inputs, impl="triton"), first)
    assert len(known) == 4


@pytest.mark.parametrize(
    "options",
    [
        {"is_causal": True}, {"scale": 0.5}, {"window": (2, 3)}, {"softcap": 1.0},
        {"sinks": torch.tensor([1.0, 2.0])}, {"alibi_slopes": torch.tensor([0.5, 2.0])},
        {"bias": torch.randn(16, 16)}, {"mask": torch.ones(16, 16).tril().bool()},
    ],
    ids=lambda options: next(iter(options)),
)  # fmt: skip
def test_an_option_makes_another_call(options, qkv, device):
    options = {
        name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in options.items()
    }
    for chosen in ({}, options, {}):
        assert_right(flash_attention(*qkv, impl="triton", **chosen), *qkv, **chosen)


@pytest.mark.parametrize(
    ("good", "bad"),
    [
        ({"is_causal": True}, {"is_causal": 1}),
        ({"scale": 1.0}, {"scale": True}),
        ({"window": (1, None)}, {"window": (True, None)}),
        ({"window": (1, None)}, {"window": [1, None]}),
        ({"softcap": 1}, {"softcap": True}),
        ({"deterministic": True}, {"deterministic": 1}),
    ],
)
def test_an_equal_option_of_the_wrong_type_is_refused_after_the_right_one(good, bad, qkv):
    flash_attention(*qkv, **good)
    with pytest.raises((TypeError, ValueError), match=next(iter(bad))):
        flash_attention(*qkv, **bad)


def test_recording_follows_grad_mode_and_each_input(qkv):
    q, k, v = qkv
    assert not flash_attention(q, k, v, impl="triton").requires_grad
    for i in range(3):
        inputs = [x.detach().requires_grad_(i == j) for j, x in enumerate(qkv)]
        with torch.no_grad():  # met first where nothing is recorded
            flash_attention(*inputs, impl="triton")
        o = flash_attention(*inputs, impl="triton")
        assert o.requires_grad
        expected = attention_reference(*inputs)[0]
        got = torch.autograd.grad(o.sum(), inputs[i])
        torch.testing.assert_close(got, torch.autograd.grad(expected.sum(), inputs[i]))
        for without in (torch.no_grad, torch.inference_mode):
            with without():
                assert not flash_attention(*inputs, impl="triton").requires_grad
        assert flash_attention(*inputs, impl="triton").requires_grad


def test_autocast_is_seen_on_a_known_call(qkv, device):
    flash_attention(*qkv)
    with torch.autocast(device, dtype=torch.bfloat16):
        assert flash_attention(*qkv).dtype == torch.bfloat16
    assert flash_attention(*qkv).dtype == torch.float32


def test_tf32_is_asked_for_at_each_call(qkv, monkeypatch):
    asked = []

    def prepare_forward(*tensors, view, **_):
        asked.append(MATMUL.fp32_precision)
        return lambda q, k, v, extras: (q, q[..., 0])

    monkeypatch.setattr("flash_kernel._triton.launch.prepare_forward", prepare_forward)
    before = MATMUL.fp32_precision
    try:
        for precision in ("ieee", "tf32", "ieee", "tf32"):
            MATMUL.fp32_precision = precision
            flash_attention(*qkv, impl="triton")
    finally:
        MATMUL.fp32_precision = before
    assert asked == ["ieee", "tf32"]


def test_determinism_follows_torchs_switch_on_a_known_call(qkv, known, monkeypatch):
    for wanted in (False, True, False):
        monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda x=wanted: x)
        flash_attention(*qkv, deterministic=False)
    assert [call.plan.is_deterministic for call in known.values()] == [False, True]


@pytest.mark.parametrize("transform", ["grad", "vmap"])
def test_transforms_are_refused_after_a_known_call(transform, qkv):
    q, k, v = qkv
    flash_attention(q, k, v, impl="triton")
    run = {
        # a transform is active, and yet no tensor is wrapped
        "grad": lambda: torch.func.grad(
            lambda x: (flash_attention(q, k, v, impl="triton") * x).sum()
        )(torch.ones((), device=q.device)),
        "vmap": lambda: torch.func.vmap(lambda q: flash_attention(q, k, v, impl="triton"))(q[None]),
    }[transform]
    with pytest.raises(RuntimeError, match=r"torch\.func transforms"):
        run()
    assert_right(flash_attention(q, k, v, impl="triton"), q, k, v)


# torch's own, when a dual tensor is made
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
def test_forward_mode_is_refused_after_a_known_call(qkv):
    q, k, v = qkv
    flash_attention(q, k, v, impl="triton")
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(q, torch.ones_like(q))
        with pytest.raises(RuntimeError, match=r"forward mode|jvp"):
            flash_attention(dual, k, v, impl="triton")


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
def test_a_tangent_is_refused_over_a_cache_too_where_one_call_had_none(device):
    q, k, v = make_qkv(1, 2, 1, 8, 16, dtype=torch.float32, device=device)
    seqlens = torch.tensor([8], dtype=torch.int32, device=device)
    with torch.autograd.forward_ad.dual_level():
        flash_attention_with_kvcache(q, k, v, cache_seqlens=seqlens, impl="triton")
        dual = torch.autograd.forward_ad.make_dual(q, torch.ones_like(q))
        with pytest.raises(RuntimeError, match="no forward mode, and an input has a tangent"):
            flash_attention_with_kvcache(dual, k, v, cache_seqlens=seqlens, impl="triton")


def test_compiling_takes_its_own_path_after_a_known_call(qkv):
    flash_attention(*qkv, impl="reference")
    run = torch.compile(lambda *x: flash_attention(*x, impl="reference"), backend="eager")
    assert_right(run(*qkv), *qkv)


class Marked(torch.Tensor):
    """A subclass: what it does is not known."""


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_subclasses_and_tensors_without_memory_decide_each_time(qkv, known):
    q, k, v = qkv
    assert calls.kind_of("f", (q.as_subclass(Marked), k, v), ()) is None
    for kind in (q[0, 0].to_sparse(), torch.nested.nested_tensor([q[0]])):
        assert calls.kind_of("f", (kind, k, v), ()) is None
        with pytest.raises(TypeError, match="`q` must be a dense, strided tensor"):
            flash_attention(kind, k, v)
    o = flash_attention(q.as_subclass(Marked), k, v)
    assert_right(torch.Tensor(o), q, k, v)
    assert known == {}


def test_negative_of_memory_is_refused_after_a_known_call(qkv):
    q, k, v = qkv
    flash_attention(q, k, v, impl="triton")
    negative = torch.view_as_complex(torch.stack([q, q], -1)).conj().imag
    with pytest.raises(TypeError, match=r"`q` is the negative .* Pass q.resolve_neg\(\)"):
        flash_attention(negative, k, v, impl="triton")
    assert_right(flash_attention(negative.resolve_neg(), k, v, impl="triton"), -q, k, v)


def test_gradients_are_right_where_hooks_lay_out_anew_what_was_saved(qkv):
    inputs = [in_memory_of_heads_last(x).requires_grad_() for x in qkv]
    expected = torch.autograd.grad(flash_attention(*inputs, impl="triton").sin().sum(), inputs)
    with saved_tensors_hooks(lambda x: x, lambda x: x.contiguous().clone()):
        o = flash_attention(*inputs, impl="triton").sin().sum()
    torch.testing.assert_close(torch.autograd.grad(o, inputs), expected)


@pytest.mark.parametrize("name", ["mask", "bias", "alibi_slopes"])
def test_gradients_are_right_where_hooks_lay_out_anew_what_hides_and_biases(name, qkv, device):
    modifier = {
        "mask": (torch.rand(16, 16, device=device) > 0.4).T,
        "bias": torch.randn(16, 16, device=device).T,
        "alibi_slopes": torch.rand(2, 1, device=device).T,
    }[name]
    leaves = [x.requires_grad_() for x in qkv]
    expected = torch.autograd.grad(
        attention_reference(*leaves, **{name: modifier})[0].sin().sum(), leaves
    )
    hooks = saved_tensors_hooks(lambda x: x, lambda x: x.contiguous().clone())
    for context in (nullcontext(), hooks, nullcontext()):
        with context:
            o = flash_attention(*leaves, **{name: modifier}, impl="triton").sin().sum()
        torch.testing.assert_close(torch.autograd.grad(o, leaves), expected)


def test_packed_gradients_are_right_where_hooks_lay_out_anew_the_slopes(device):
    leaves = [torch.randn(12, 2, 16, device=device, requires_grad=True) for _ in range(3)]
    ends = torch.tensor([0, 5, 12], dtype=torch.int32, device=device)
    slopes = torch.rand(2, 2, device=device).T

    def gradients(impl):
        o = flash_attention_varlen(*leaves, ends, ends, alibi_slopes=slopes, impl=impl)
        return o.sin().sum()

    expected = torch.autograd.grad(gradients("reference"), leaves)
    hooks = saved_tensors_hooks(lambda x: x, lambda x: x.contiguous().clone())
    for context in (nullcontext(), hooks):
        with context:
            loss = gradients("triton")
        torch.testing.assert_close(torch.autograd.grad(loss, leaves), expected)


def test_gradients_are_right_whatever_the_layout_of_the_incoming_one(qkv):
    leaves = [x.requires_grad_() for x in qkv]
    do = torch.randn_like(qkv[0])
    layouts = (do, in_memory_of_heads_last(do), at_an_odd_address(do), do[..., :1].expand_as(do))
    for incoming in layouts:
        o, _ = flash_attention(*leaves, return_lse=True, impl="triton")
        expected = torch.autograd.grad(attention_reference(*leaves)[0], leaves, incoming)
        torch.testing.assert_close(torch.autograd.grad(o, leaves, incoming), expected)


def test_lse_wants_a_gradient_or_not_on_the_same_known_call(qkv):
    leaves = [x.requires_grad_() for x in qkv]

    def gradients(attention, loss, **options):
        return torch.autograd.grad(loss(*attention(*leaves, **options)), leaves)

    losses = (lambda o, lse: o.sum(), lambda o, lse: o.sum() + lse.sin().sum())
    for loss in (*losses, *losses):
        got = gradients(flash_attention, loss, return_lse=True, impl="triton")
        expected = gradients(attention_reference, loss)
        torch.testing.assert_close(got, expected)


def test_packed_calls_are_known_by_their_layout_and_not_by_their_lengths(device, known):
    q, k, v = (torch.randn(12, 2, 16, device=device) for _ in range(3))
    for lengths in ([0, 5, 12], [0, 12, 12], [0, 5, 12]):
        ends = torch.tensor(lengths, dtype=torch.int32, device=device)
        o = flash_attention_varlen(q, k, v, ends, ends, impl="triton", is_causal=True)
        for start, end in pairwise(lengths):
            part = [x[start:end].transpose(0, 1) for x in (q, k, v)]
            expected = attention_reference(*part, is_causal=True)[0].transpose(0, 1)
            torch.testing.assert_close(o[start:end], expected, rtol=2e-5, atol=2e-5)
    assert len(known) == 1
    for bound in (12, 13):  # another bound is no other kind
        flash_attention_varlen(q, k, v, ends, ends, max_seqlen_q=bound, impl="triton")
    assert len(known) == 2
    if device == "cpu":  # what lies on a GPU is not read
        with pytest.raises(ValueError, match="`max_seqlen_q` must be at least the longest"):
            flash_attention_varlen(q, k, v, ends, ends, max_seqlen_q=2, impl="triton")
    known.clear()
    ends = ends.long()
    flash_attention_varlen(q, k, v, ends, ends, impl="triton", is_causal=True)
    assert len(known) == 1


def test_cache_calls_are_known_whatever_the_lengths_and_refuse_gradients(device, known):
    q = torch.randn(1, 2, 1, 16, device=device)
    k, v = (torch.randn(1, 2, 8, 16, device=device) for _ in range(2))
    for length in (3, 8):
        seqlens = torch.tensor([length], dtype=torch.int32, device=device)
        o = flash_attention_with_kvcache(q, k, v, cache_seqlens=seqlens, impl="triton")
        assert_right(o, q, k[:, :, :length], v[:, :, :length])
    assert len(known) == 1
    with pytest.raises(RuntimeError, match="has no gradients"):
        flash_attention_with_kvcache(q.requires_grad_(), k, v, cache_seqlens=seqlens)


def tensors_within(x):
    """Return the tensors that an object of ours holds, however deep."""
    if isinstance(x, torch.Tensor):
        return [x]
    if isinstance(x, dict):
        x = list(x.values())
    elif hasattr(type(x), "__slots__") and not isinstance(x, (tuple, str)):
        x = [getattr(x, name) for name in type(x).__slots__ if hasattr(x, name)]
    return [y for part in x for y in tensors_within(part)] if isinstance(x, (list, tuple)) else []


@pytest.mark.parametrize("seqlen_q", [1, 20])
def test_what_is_kept_of_a_call_holds_no_memory(seqlen_q, device, known):
    q, k, v = make_qkv(1, 2, seqlen_q, 600, 16, dtype=torch.float16, device=device)
    seqlens = torch.tensor([600], dtype=torch.int32, device=device)
    flash_attention_with_kvcache(q, k, v, cache_seqlens=seqlens, impl="triton")
    flash_attention_with_kvcache(q, k, v, cache_seqlens=seqlens, impl="triton", num_splits=1)
    flash_attention(q, k, v, impl="triton")
    held = tensors_within(known)
    assert len(known) == 3
    assert len(held) >= 3
    assert all(x.untyped_storage().nbytes() == 0 for x in held)


def test_too_many_kinds_of_calls_are_forgotten_and_not_kept(qkv, known, monkeypatch):
    monkeypatch.setattr(calls, "MAX_CALLS", 2)
    for rows in (3, 4, 5, 3):
        q = qkv[0][:, :, :rows]
        assert_right(flash_attention(q, *qkv[1:]), q, *qkv[1:])
        assert len(known) <= 2


@pytest.mark.gpu  # the interpreter has room for one thread
def test_threads_share_known_calls(qkv):
    results = []

    def run():
        results.extend(flash_attention(*qkv, impl="triton") for _ in range(3))

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 12
    assert all(torch.equal(x, results[0]) for x in results)

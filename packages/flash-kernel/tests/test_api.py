"""What a user meets: options, choices, errors."""

import warnings

import pytest
import torch

import flash_kernel
from flash_kernel import FlashAttention, attention_reference, dispatch, flash_attention
from flash_kernel.testing import make_qkv
from flash_kernel.variant import Variant

QKV = make_qkv(1, 2, 8, 8, 16, dtype=torch.float32)


def test_apply_takes_is_causal_by_position_and_by_keyword(device):
    q, k, v = make_qkv(2, None, 33, 33, 16, dtype=torch.float32, device=device, requires_grad=True)
    expected, _ = attention_reference(q, k, v, is_causal=True)
    by_position = FlashAttention.apply(q, k, v, True)
    by_keyword = FlashAttention.apply(q, k, v, is_causal=True)
    torch.testing.assert_close(by_position, expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(by_position, by_keyword)
    assert not torch.allclose(FlashAttention.apply(q, k, v), expected)


def test_flash_attention_is_an_autograd_function():
    assert issubclass(FlashAttention, torch.autograd.Function)


@pytest.mark.parametrize("impl", ["auto", "torch", "mock", "reference", "triton"])
def test_every_implementation_has_the_same_gradients(impl, device):
    if impl == "triton" and device == "cpu" and not dispatch_interprets():
        pytest.skip("Triton does not interpret here")
    q, k, v = make_qkv(2, None, 20, 33, 16, dtype=torch.float32, device=device, requires_grad=True)
    do = torch.randn(2, 20, 16, device=device)
    expected = torch.autograd.grad(attention_reference(q, k, v, is_causal=True)[0], (q, k, v), do)
    o = flash_attention(q, k, v, is_causal=True, impl=impl)
    gradients = torch.autograd.grad(o, (q, k, v), do)
    torch.testing.assert_close(gradients, expected, rtol=1e-5, atol=1e-5)


def dispatch_interprets():
    return dispatch.triton_failure(torch.device("cpu")) is None


def test_cpu_tensors_get_torch_attention_by_default():
    plan = dispatch.resolve(request(), impl="auto", backward="auto")
    assert plan == dispatch.Plan("torch", "autograd")


def test_auto_finds_an_implementation_for_every_wish_on_a_cpu():
    for return_lse in (False, True):
        for backward in ("auto", "dense"):
            result = flash_attention(*QKV, return_lse=return_lse, backward=backward)
            o = result[0] if return_lse else result
            torch.testing.assert_close(o, attention_reference(*QKV)[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(5, 9), (9, 5), (4, 0), (0, 4)])
def test_torch_attention_has_our_causal_alignment_and_empty_rows(seqlen_q, seqlen_k):
    q, k, v = make_qkv(1, 2, seqlen_q, seqlen_k, 8, dtype=torch.float64, requires_grad=True)
    o = flash_attention(q, k, v, is_causal=True, impl="torch")
    expected, _ = attention_reference(q, k, v, is_causal=True)
    torch.testing.assert_close(o, expected)
    results = torch.autograd.grad(o.square().sum(), (q, k, v))
    torch.testing.assert_close(
        results, torch.autograd.grad(expected.square().sum(), (q, k, v), allow_unused=True)
    )


def test_float64_works_on_a_cpu():
    q, k, v = make_qkv(1, 2, 8, 8, 16, dtype=torch.float64)
    o, lse = flash_attention(q, k, v, return_lse=True)
    assert (o.dtype, lse.dtype) == (torch.float64, torch.float64)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"impl": "cuda"}, ValueError, "`impl` must be one of 'auto', 'hopper'.* got 'cuda'"),
        ({"backward": "fast"}, ValueError, "`backward` must be one of .* got 'fast'"),
        ({"impl": "torch", "return_lse": True}, ValueError, "returns no lse. Pass impl="),
        ({"impl": "torch", "backward": "dense"}, ValueError, "Pass backward='auto'"),
        ({"scale": float("nan")}, ValueError, "`scale` must be finite, got nan"),
        ({"scale": "0.5"}, TypeError, "`scale` must be a number or None, got str"),
        ({"scale": 10**400}, ValueError, "`scale` must be finite"),
        ({"impl": ["triton"]}, ValueError, r"`impl` must be one of .* got \['triton'\]"),
        ({"deterministic": 1}, TypeError, "`deterministic` must be True or False, got 1"),
        ({"impl": "hopper"}, RuntimeError, "capability 9.0, got .* Pass impl='triton'"),
        ({"backward": "hopper", "impl": "mock"}, RuntimeError, "capability 9.0, got .* Pass back"),
        ({"return_lse": "o"}, TypeError, "`return_lse` must be True or False, got 'o'"),
        ({"is_causal": "no"}, TypeError, "`is_causal` must be True or False, got 'no'"),
        ({"causal": True}, TypeError, "unexpected keyword argument 'causal'"),
    ],
)
def test_bad_option_is_refused_in_one_line(options, error, message):
    with pytest.raises(error, match=message) as caught:
        flash_attention(*QKV, **options)
    assert "\n" not in str(caught.value)


def test_head_dim_beyond_the_limit_is_refused_by_triton_and_taken_by_auto(device):
    q, k, v = make_qkv(1, 1, 4, 4, 320, dtype=torch.float16, device=device)
    with pytest.raises(ValueError, match=r"`head_dim` must be at most 256 .* got 320. Pass impl="):
        flash_attention(q, k, v, impl="triton")
    with pytest.raises(ValueError, match=r"backward='triton' .* Pass backward='dense'"):
        flash_attention(q, k, v, impl="reference", backward="triton")
    expected, _ = attention_reference(q, k, v)
    torch.testing.assert_close(flash_attention(q, k, v), expected, rtol=0, atol=2e-3)


def test_float64_is_refused_by_triton(device):
    q, k, v = (x.to(device).double() for x in QKV)
    with pytest.raises(TypeError, match=r"takes float16, bfloat16 or float32, got torch.float64"):
        flash_attention(q, k, v, impl="triton")


def test_triton_refuses_a_cpu_tensor_where_it_does_not_interpret(monkeypatch):
    from triton import knobs

    monkeypatch.setattr(knobs.runtime, "interpret", False)
    dispatch._triton_failure.cache_clear()
    with pytest.raises(RuntimeError, match=r"needs a CUDA tensor, got device 'cpu'. Pass 'auto'"):
        flash_attention(*QKV, impl="triton")
    dispatch._triton_failure.cache_clear()


@pytest.fixture
def broken_triton(monkeypatch):
    reason = "cannot launch on cuda: FileNotFoundError: no C compiler"
    monkeypatch.setattr(dispatch, "triton_failure", lambda device: reason)
    dispatch._warn_if_triton_fails.cache_clear()
    yield reason
    dispatch._warn_if_triton_fails.cache_clear()


def request(device="cpu", **changes):
    """A request of half-precision tensors ``[1, 2, 8, 64]``, described without making them."""
    plain = dispatch.Request(
        device=torch.device(device),
        capability=90 if device == "cuda" else 0,
        dtype=torch.float16,
        seqlen_q=8,
        seqlen_k=8,
        head_dim=64,
        head_dim_v=64,
        group=1,
        variant=Variant(0.125),
        modifiers=frozenset(),
        trained=frozenset(),
        return_lse=False,
    )
    return plain._replace(**changes)


def test_auto_falls_back_with_one_warning_where_triton_cannot_launch(broken_triton):
    with pytest.warns(RuntimeWarning, match=f"falls back to torch's attention.*{broken_triton}"):
        plan = dispatch.resolve(request("cuda"), impl="auto", backward="auto")
    assert plan == dispatch.Plan("torch", "autograd")
    with warnings.catch_warnings(record=True) as second:
        warnings.simplefilter("always")
        dispatch.resolve(request("cuda"), impl="auto", backward="auto")
    assert second == []


def test_explicit_triton_never_falls_back(broken_triton):
    with pytest.raises(RuntimeError, match=f"impl='triton' {broken_triton}"):
        dispatch.resolve(request("cuda"), impl="triton", backward="auto")


@pytest.mark.parametrize(
    ("options", "torch_wants_it", "expected"),
    [({}, False, True), ({"deterministic": False}, False, False),
     ({"deterministic": False}, True, True)],
)  # fmt: skip
def test_gradients_are_deterministic_unless_the_caller_and_torch_allow_otherwise(
    options, torch_wants_it, expected, monkeypatch
):
    plans = []

    def spy(*arguments):
        call = dispatch.checked_call(*arguments)
        plans.append(call.plan)
        return call

    monkeypatch.setattr(flash_kernel.api, "checked_call", spy)
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: torch_wants_it)
    flash_attention(*QKV, **options)
    assert [plan.is_deterministic for plan in plans] == [expected]


@pytest.mark.parametrize("impl", ["triton", "torch", "mock", "reference"])
def test_every_path_runs_where_torch_demands_determinism(impl, device):
    """And repeats its bits; torch raises where an operation has no such form."""
    if impl == "torch" and device == "cuda":
        pytest.skip("which of its backends runs, and whether it raises, is torch's affair")
    q, k, v = make_qkv(2, 4, 33, 40, 16, dtype=torch.float32, device=device)
    k, v = (k, v) if impl == "mock" else (k[:, :2], v[:, :2])
    options = {"is_causal": True, "impl": impl}
    if impl in ("triton", "reference"):
        options |= {"sinks": torch.zeros(4, device=device), "bias": q.new_zeros(4, 33, 40)}

    def once():
        leaves = {n: x.detach().requires_grad_() for n, x in {"q": q, "k": k, "v": v}.items()}
        extra = {n: options[n].detach().requires_grad_() for n in ("sinks", "bias") if n in options}
        o = flash_attention(**leaves, **(options | extra))
        return [o, *torch.autograd.grad(o.square().sum(), [*leaves.values(), *extra.values()])]

    torch.use_deterministic_algorithms(True)
    try:
        first, second = once(), once()
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(map(torch.equal, first, second))


@pytest.mark.parametrize(("layout", "impl"), [("packed", "hopper"), ("cache", "triton")])
def test_hopper_takes_packed_sequences_forward_alone_and_no_cache(layout, impl):
    assumed = request("cuda", seqlen_q=512, seqlen_k=512, is_assumed=True)
    assert dispatch.resolve(assumed, impl="auto", backward="auto")[:2] == ("hopper", "hopper")
    assumed = assumed._replace(layout=layout)
    assert dispatch.resolve(assumed, impl="auto", backward="auto")[:2] == (impl, "triton")
    refusal = dispatch.refuse_backward(assumed, "triton", "hopper")
    message = f"='hopper' takes dense tensors only, got the layout {layout!r}. Pass"
    assert str(refusal).startswith(f"backward{message}")
    refusal = dispatch.refuse_impl(assumed, "hopper")
    assert (refusal is None) == (impl == "hopper")


def test_numpy_numbers_are_scales():
    numpy = pytest.importorskip("numpy")
    o = flash_attention(*QKV, scale=numpy.float32(0.5), impl="mock")
    torch.testing.assert_close(o, attention_reference(*QKV, scale=0.5)[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("impl", ["auto", "triton", "torch", "mock", "reference"])
def test_autocast_converts_the_inputs_for_every_implementation(impl, device):
    q, k, v = (x.to(device).requires_grad_() for x in QKV)
    with torch.autocast(device, dtype=torch.bfloat16):
        o = flash_attention(q, k, v.half(), impl=impl)
    assert o.dtype == torch.bfloat16
    expected = attention_reference(*(x.bfloat16().double() for x in (q, k, v.half())))[0]
    torch.testing.assert_close(o.double(), expected, rtol=0, atol=2e-2)
    o.sum().backward()
    assert q.grad.dtype == torch.float32


# torch's own, when a dual tensor is made
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
@pytest.mark.parametrize("impl", ["triton", "mock"])
@pytest.mark.parametrize("transform", ["grad", "vmap", "jvp"])
def test_functional_transforms_raise_in_words(transform, impl, device):
    q, k, v = (x.to(device) for x in QKV)

    def transformed(impl):
        def fn(q):
            return flash_attention(q, k, v, impl=impl)

        if transform == "grad":
            return torch.func.grad(lambda q: fn(q).sum())(q)
        if transform == "vmap":
            return torch.func.vmap(fn)(q[None])
        return torch.func.jvp(fn, (q,), (q,))[1]

    with pytest.raises(RuntimeError, match=r"torch.func transforms .* Pass impl='reference'"):
        transformed(impl)
    o, pull_back = torch.autograd.functional.vjp(
        lambda q: attention_reference(q, k, v)[0], q, 0 * q + 1
    )
    _, pushed = torch.autograd.functional.jvp(lambda q: attention_reference(q, k, v)[0], q, q)
    expected = {"grad": pull_back, "vmap": o[None], "jvp": pushed}[transform]
    torch.testing.assert_close(transformed("reference"), expected)


# torch's own, when a dual tensor is made
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
@pytest.mark.parametrize("impl", ["triton", "mock"])
def test_forward_mode_tangent_is_refused_not_dropped(impl, device):
    q, k, v = (x.to(device) for x in QKV)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(q, torch.ones_like(q))
        with pytest.raises(
            (RuntimeError, NotImplementedError), match=r"forward mode|jvp|torch.func"
        ):
            flash_attention(dual, k, v, impl=impl)


# the row that sees nothing computes inf - inf, in the interpreter with a warning
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
def test_infinite_query_that_sees_nothing_gives_zero(device):
    q, k, v = make_qkv(1, 1, 4, 2, 16, dtype=torch.float32, device=device)
    q[..., 0, :] = float("inf")
    for impl in ("triton", "torch", "mock", "reference"):
        o = flash_attention(q, k, v, is_causal=True, impl=impl)
        assert (o[..., :2, :] == 0).all(), impl


def test_public_names_exist_and_unknown_ones_raise():
    for name in flash_kernel.__all__:
        assert getattr(flash_kernel, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'FlashAtention'"):
        _ = flash_kernel.FlashAtention

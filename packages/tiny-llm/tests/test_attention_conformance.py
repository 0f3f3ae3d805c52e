"""Every built-in backend passes the conformance kit, and the kit finds what is wrong."""

import pytest
import torch

from tiny_llm import attention
from tiny_llm.attention import AttentionBackend, Traits
from tiny_llm.attention.backend import FunctionBackend
from tiny_llm.attention.cases import CASES, attention_by_rows
from tiny_llm.attention.eager import scaled_dot_product_attention
from tiny_llm.attention.testing import assert_conforms, check_backend

MASKS = {"key lengths", "key lengths, decoding", "key lengths and window"}
# the CPU tests have every mask; what these show on a GPU is that the compiled kernels agree
SLOW_TO_COMPILE = ("flex", "flash")
CPU_BACKENDS = ("eager", "sdpa", "sdpa-flash", "sdpa-math", "flash", "flash-mock")


def available(name):
    if not attention.backend(name).probe().ok:
        pytest.skip(f"{name} is not available here")
    return name


@pytest.mark.parametrize("name", CPU_BACKENDS)
def test_backend_conforms_on_the_cpu(name):
    checks = assert_conforms(available(name), dtypes=("float64", "float32", "bfloat16"))
    refused = {check.case for check in checks if check.outcome == "refused"}
    assert refused == set() or name.startswith("flash")
    # without windows, key lengths and documents even a flash-kernel of the first version
    plain = {case.name for case in CASES if not (case.window or case.key_lengths or case.documents)}
    assert not refused & plain


def test_flex_conforms_forward():
    checks = assert_conforms("flex", dtypes=("float32",))
    assert {each.case for each in checks if each.outcome == "refused"} >= MASKS


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("name", attention.names())
def test_backend_conforms_on_the_gpu(name):
    assert_conforms(available(name), device="cuda", dtypes=("bfloat16",), cases=cases_on_gpu(name))
    others = CASES[:1] if name in SLOW_TO_COMPILE else CASES
    assert_conforms(name, device="cuda", dtypes=("float32", "float16"), cases=others)


def cases_on_gpu(name):
    """All, but of what compiles for each new shape and mask one of each kind of call."""
    kinds = ("causal", "cross attention", "rows that see no key", "window with a cache")
    kinds += ("key lengths, decoding", "documents", "documents, shared heads and window")
    return [case for case in CASES if name not in SLOW_TO_COMPILE or case.name in kinds]


def ignores_window(q, k, v, *, is_causal, window=None):
    return scaled_dot_product_attention(q, k, v, is_causal=is_causal)


def is_top_left(q, k, v, *, is_causal):
    if not is_causal or q.shape[-2] > k.shape[-2]:
        return scaled_dot_product_attention(q, k, v, is_causal=is_causal)
    rows = q.shape[-2]
    return scaled_dot_product_attention(q, k[..., :rows, :], v[..., :rows, :], is_causal=True)


def has_a_wrong_gradient(q, k, v, *, is_causal):
    return scaled_dot_product_attention(q.detach() + 0 * q, k, v, is_causal=is_causal)


def returns_another_dtype(q, k, v, *, is_causal):
    return scaled_dot_product_attention(q, k, v, is_causal=is_causal).float()


def raises(q, k, v, *, is_causal):
    raise ZeroDivisionError("no luck")


@pytest.mark.parametrize(
    ("wrong", "finding"),
    [
        (ignores_window, r"window \[float64\]: o is off by"),
        (is_top_left, r"decoding with a cache \[float64\]: o is off by"),
        (has_a_wrong_gradient, r"causal \[float64\]: dq is off by"),
        (returns_another_dtype, r"o must have the dtype of q, torch.float64, got torch.float32"),
        (raises, r"ZeroDivisionError: no luck"),
    ],
)
def test_kit_finds_a_wrong_backend(wrong, finding):
    attention.register("wrong", wrong)
    try:
        with pytest.raises(AssertionError, match=finding):
            assert_conforms("wrong", dtypes=("float64",))
    finally:
        attention.unregister("wrong")


def test_kit_finds_a_broken_promise_of_determinism():
    def noisy(q, k, v, *, is_causal):
        o = scaled_dot_product_attention(q, k, v, is_causal=is_causal)
        return o + 1e-16 * torch.randn_like(o)

    class Noisy(AttentionBackend):
        def limits(self, request):
            return FunctionBackend("bare", noisy).installed_limits(request)

        def traits(self, request):
            return Traits(forward="dense", backward="dense", deterministic=True)

    attention.register("noisy", Noisy("noisy", noisy))
    try:
        with pytest.raises(AssertionError, match="declared deterministic, but o differed"):
            assert_conforms("noisy", dtypes=("float64",))
    finally:
        attention.unregister("noisy")


def test_backend_that_refuses_everything_does_not_conform():
    with pytest.raises(AssertionError, match="runs on cuda, got cpu"):
        assert_conforms("sdpa-cudnn", dtypes=("bfloat16",))


def test_refusals_are_reported_with_their_reason():
    checks = check_backend("flex", dtypes=("float32",))
    (check,) = [check for check in checks if check.case == "key lengths"]
    assert check.outcome == "refused"
    assert "new block mask for every call" in check.detail


def test_reference_is_the_definition():
    q = torch.tensor([[[[1.0, 0.0], [0.0, 2.0]]]], dtype=torch.float64)
    k, v = q.clone(), torch.tensor([[[[1.0, 2.0], [3.0, 4.0]]]], dtype=torch.float64)
    o = attention_by_rows(q, k, v, is_causal=True, scale=1.0)
    weight = torch.exp(torch.tensor(4.0)) / (1 + torch.exp(torch.tensor(4.0)))
    expected = torch.stack((v[0, 0, 0], v[0, 0, 0] + 2 * weight))
    torch.testing.assert_close(o[0, 0], expected, check_dtype=False)
    seen = attention_by_rows(q, k, v, is_causal=True, window=1)
    torch.testing.assert_close(seen, v)

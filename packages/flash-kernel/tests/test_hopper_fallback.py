"""Where the Hopper kernels cannot be had: the portable ones stand in, and say so once."""

import sys
import warnings

import pytest
import torch

from flash_kernel import attention_reference, dispatch
from flash_kernel._hopper.config import BuildFailure
from flash_kernel.autograd import run_forward
from flash_kernel.calls import Call
from flash_kernel.packed_autograd import run_packed_forward
from flash_kernel.request import Plan, Request
from flash_kernel.testing import make_qkv
from flash_kernel.variant import PLAIN, Packing, Variant

pytest.importorskip("triton.experimental.gluon", reason="it is Gluon that is taken away here")

REQUEST = Request(
    device=torch.device("cuda"),
    capability=90,
    dtype=torch.bfloat16,
    seqlen_q=512,
    seqlen_k=512,
    head_dim=64,
    head_dim_v=64,
    group=1,
    variant=Variant(0.125),
    modifiers=frozenset(),
    trained=frozenset(),
    return_lse=False,
)


@pytest.fixture(autouse=True)
def _working_triton(monkeypatch):
    monkeypatch.setattr(dispatch, "triton_failure", lambda device: None)
    caches = dispatch._gluon_failure, dispatch.warn_of_portable_path
    for cached in caches:
        cached.cache_clear()
    yield
    for cached in caches:
        cached.cache_clear()


@pytest.fixture
def no_gluon(monkeypatch):
    monkeypatch.delitem(sys.modules, "flash_kernel._hopper.compat", raising=False)
    monkeypatch.setitem(sys.modules, "triton.experimental.gluon", None)


@pytest.fixture
def broken_compiler(monkeypatch):
    """A kernel that no compiler takes, and that counts how often it was tried."""
    from flash_kernel._hopper import launch

    class Kernel:
        tries = 0

        def __getitem__(self, grid):
            self.tries += 1
            raise KeyError("no such layout\nand where it was missed")

    kernel = Kernel()

    def prepare_forward(q, k, v, variant, num_sequences=None, *, view, lse_shape=None):
        prepared = launch.Launch(kernel, (1, 1), [None] * 3, (q.shape[2], "SPEC"), {})
        return lambda q, k, v, _: prepared(q, k, v)

    monkeypatch.setattr(launch, "_failures", {})
    monkeypatch.setattr(launch, "prepare_forward", prepare_forward)
    return kernel


def test_auto_warns_once_where_gluon_is_missing(no_gluon):
    with pytest.warns(RuntimeWarning, match=r"portable Triton kernels: .* needs Triton's Gluon"):
        plan = dispatch.resolve(REQUEST, impl="auto", backward="auto")
    assert (plan.impl, plan.backward) == ("triton", "triton")
    with warnings.catch_warnings(record=True) as second:
        warnings.simplefilter("always")
        dispatch.resolve(REQUEST, impl="auto", backward="auto")
    assert second == []


def test_named_hopper_raises_where_gluon_is_missing(no_gluon):
    with pytest.raises(RuntimeError, match="impl='hopper' needs Triton's Gluon, which fails"):
        dispatch.resolve(REQUEST, impl="hopper", backward="auto")


def test_auto_warns_once_where_the_compiler_fails(broken_compiler, device):
    q, k, v = make_qkv(1, 2, 9, 9, 16, dtype=torch.float32, device=device)
    call = Call(Plan("hopper", "triton"), Variant(0.25))
    message = "portable Triton kernels: .* cannot be built: KeyError: 'no such layout"
    with pytest.warns(RuntimeWarning, match=message):
        o, _ = run_forward(call, q, k, v, PLAIN)
    torch.testing.assert_close(o, attention_reference(q, k, v)[0], rtol=1e-5, atol=1e-5)
    with warnings.catch_warnings(record=True) as second:
        warnings.simplefilter("always")
        for rows in (9, 8):
            other = Call(Plan("hopper", "triton"), Variant(0.25))
            run_forward(other, q[:, :, :rows], k, v, PLAIN)
    assert not [x for x in second if "portable" in str(x.message)]
    assert broken_compiler.tries == 1, "what failed is not compiled at each call, or in each shape"


def test_named_hopper_raises_where_the_compiler_fails(broken_compiler, device):
    q, k, v = make_qkv(1, 2, 9, 9, 16, dtype=torch.float32, device=device)
    call = Call(Plan("hopper", "triton", impl_is_named=True), Variant(0.25))
    with pytest.raises(BuildFailure, match="cannot be built: KeyError"):
        run_forward(call, q, k, v, PLAIN)


def test_what_fails_to_compile_together_is_told_by_the_launch(broken_compiler, monkeypatch):
    from flash_kernel._hopper.launch import Launch
    from flash_kernel._triton import prepared

    monkeypatch.setattr(prepared.PreparedLaunch, "is_new_to_gpu", lambda *_: True)
    x = torch.zeros(1)
    launch = Launch(broken_compiler, (1, 1), [None], ("SPEC",), {})
    prepared.compile_together((launch, (x,)), (launch, (x,)))
    with pytest.raises(BuildFailure, match="cannot be built: KeyError"):
        launch(x)


def test_packed_sequences_fall_back_too(broken_compiler, device):
    q, k, v = (
        x[0].transpose(0, 1) for x in make_qkv(1, 2, 9, 9, 16, dtype=torch.float16, device=device)
    )
    ends = torch.tensor([0, 4, 9], dtype=torch.int32, device=device)
    arguments = q, k, v, Packing(ends, ends), PLAIN
    variant = Variant(0.25)
    with pytest.warns(RuntimeWarning, match="portable Triton kernels: .* cannot be built"):
        o, _ = run_packed_forward(Call(Plan("hopper", "triton"), variant), *arguments)
    portable = run_packed_forward(Call(Plan("triton", "triton"), variant), *arguments)
    assert torch.equal(o, portable[0])
    named = Call(Plan("hopper", "triton", impl_is_named=True), variant)
    with pytest.raises(BuildFailure, match="cannot be built: KeyError"):
        run_packed_forward(named, *arguments)


def test_cached_keys_are_refused():
    request = REQUEST._replace(layout="cache", is_assumed=True)
    assert dispatch.resolve(request, impl="auto", backward="auto").impl == "triton"
    with pytest.raises(
        ValueError, match="takes dense and packed tensors only, got the layout 'cac"
    ):
        dispatch.resolve(request, impl="hopper", backward="auto")

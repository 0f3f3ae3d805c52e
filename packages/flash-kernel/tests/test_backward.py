"""Two interchangeable backwards, dense and memory-linear, against each other and float64."""

import shutil
from functools import partial

import pytest
import torch
from direct_launches import launch_backward

from flash_kernel import flash_attention
from flash_kernel._triton.config import BlockConfig, KernelConfigs
from flash_kernel.backward import flash_attention_backward, flash_attention_backward_compiled
from flash_kernel.reference import attention_reference
from flash_kernel.testing import assert_matches_reference, make_qkv
from flash_kernel.variant import Variant

NEEDS_COMPILER = pytest.mark.skipif(
    not torch.cuda.is_available() and shutil.which("g++") is None,
    reason="torch.compile needs a C++ compiler on a CPU",
)


def saved(seqlen_q, seqlen_k, head_dim, *, dtype, device, is_causal):
    """What the forward saves, and the gradients that flow in."""
    q, k, v = make_qkv(1, 2, seqlen_q, seqlen_k, head_dim, dtype=dtype, device=device)
    o, lse = attention_reference(q, k, v, is_causal=is_causal)
    return q, k, v, o, lse, torch.randn_like(o), torch.randn_like(lse)


@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(65, 65), (33, 97), (97, 33), (1, 64)])
@pytest.mark.parametrize("has_dlse", [False, True], ids=["do", "do+dlse"])
def test_triton_backward_equals_dense_backward(seqlen_q, seqlen_k, is_causal, has_dlse, device):
    *tensors, dlse = saved(
        seqlen_q, seqlen_k, 40, dtype=torch.float32, device=device, is_causal=is_causal
    )
    variant = Variant(0.2, right=0 if is_causal else None)
    tensors[3], tensors[4] = attention_reference(*tensors[:3], is_causal=is_causal, scale=0.2)
    dlse = dlse if has_dlse else None
    expected = flash_attention_backward(*tensors, dlse, variant)
    results = launch_backward(*tensors, dlse, variant)
    torch.testing.assert_close(results[:3], expected[:3], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("backward", ["triton", "dense"])
def test_gradient_of_lse_is_honoured(backward, is_causal, device):
    q, k, v = make_qkv(1, 2, 40, 70, 32, dtype=torch.float32, device=device)
    fn = partial(
        flash_attention, is_causal=is_causal, return_lse=True, impl="triton", backward=backward
    )
    dlse = torch.randn(1, 2, 40, device=device)
    assert_matches_reference(fn, q, k, v, is_causal=is_causal, dlse=dlse)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("backward", ["triton", "dense"])
# the backward exponentiates hidden scores, which may overflow, before it masks them
@pytest.mark.filterwarnings("ignore:overflow encountered in exp2:RuntimeWarning")
def test_gradients_stay_accurate_where_every_row_attends_to_one_key(backward, dtype, device):
    """As in trained models: lse is then far from 0, and dv of that key sums over all rows."""
    q, k, v = make_qkv(1, 2, 200, 200, 64, dtype=dtype, device=device)
    q = q + 3
    k[..., 0, :] += 3
    fn = partial(flash_attention, is_causal=True, impl="triton", backward=backward)
    assert_matches_reference(fn, q, k, v, is_causal=True)


def test_lse_alone_can_be_differentiated(device):
    q, k, v = make_qkv(1, 1, 20, 20, 16, dtype=torch.float32, device=device, requires_grad=True)
    for impl in ("triton", "reference"):
        _, lse = flash_attention(q, k, v, return_lse=True, impl=impl)
        gradients = torch.autograd.grad(lse.sum(), (q, k, v), allow_unused=True)
        if impl == "triton":
            ours = gradients
    torch.testing.assert_close(ours[:2], gradients[:2], rtol=1e-5, atol=1e-5)
    assert (ours[2] == 0).all()


@pytest.mark.parametrize("config", [BlockConfig(16, 32), BlockConfig(32, 16)], ids=str)
def test_gradients_do_not_depend_on_block_size(config, device):
    *tensors, _ = saved(70, 100, 16, dtype=torch.float32, device=device, is_causal=True)
    variant = Variant(16**-0.5, right=0)
    expected = launch_backward(*tensors, None, variant)
    configs = KernelConfigs(config, config, config)
    can_describe = device == "cpu" or torch.cuda.get_device_capability() >= (9, 0)
    for use_descriptors in (False, True) if can_describe else (False,):
        results = launch_backward(
            *tensors, None, variant, configs=configs, use_descriptors=use_descriptors
        )
        torch.testing.assert_close(results[:3], expected[:3], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("head_dim", [32, 40])
def test_gradients_are_right_where_rows_are_in_narrow_pieces(head_dim, device):
    *tensors, _ = saved(33, 40, head_dim, dtype=torch.float32, device=device, is_causal=True)
    variant = Variant(head_dim**-0.5, right=0)
    expected = flash_attention_backward(*tensors, None, variant)
    config = BlockConfig(32, 32, max_width=16)
    configs = KernelConfigs(config, config, config)
    results = launch_backward(*tensors, None, variant, configs=configs)
    torch.testing.assert_close(results[:3], expected[:3], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("use_descriptors", [False, True], ids=["pieces", "padded"])
@pytest.mark.parametrize("head_dim", [72, 96])
def test_gradients_are_right_where_rows_are_padded_or_in_pieces(head_dim, use_descriptors, device):
    if use_descriptors and device == "cuda" and torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("descriptors are used from compute capability 9.0 on")
    *tensors, _ = saved(33, 40, head_dim, dtype=torch.float32, device=device, is_causal=True)
    variant = Variant(head_dim**-0.5, right=0)
    expected = flash_attention_backward(*tensors, None, variant)
    results = launch_backward(*tensors, None, variant, use_descriptors=use_descriptors)
    torch.testing.assert_close(results[:3], expected[:3], rtol=1e-5, atol=1e-5)


def test_dense_backward_passes_gradcheck():
    q, k, v = make_qkv(1, 1, 5, 7, 4, dtype=torch.float64, requires_grad=True)
    fn = partial(
        flash_attention, is_causal=True, return_lse=True, impl="reference", backward="dense"
    )
    assert torch.autograd.gradcheck(fn, (q, k, v))


@NEEDS_COMPILER
def test_compiled_backward_equals_eager_backward_without_recompiling_for_a_new_length(device):
    compilations = torch._dynamo.utils.counters["stats"]
    counts = []
    for seqlen_q, seqlen_k in ((20, 24), (33, 70), (65, 65), (97, 33)):
        tensors = saved(seqlen_q, seqlen_k, 16, dtype=torch.float32, device=device, is_causal=True)
        variant = Variant(0.25, right=0)
        expected = flash_attention_backward(*tensors, variant)
        results = flash_attention_backward_compiled(*tensors, variant)
        torch.testing.assert_close(results[:3], expected[:3], rtol=1e-5, atol=1e-5)
        counts.append(compilations["unique_graphs"])
    # one more for seqlen_q == seqlen_k at the most; never one for each length
    assert counts[-1] <= counts[0] + 1


def test_unneeded_gradients_may_be_left_out(device):
    q, k, v = make_qkv(1, 1, 20, 20, 16, dtype=torch.float32, device=device)
    k.requires_grad_()
    flash_attention(q, k, v, impl="triton").sum().backward()
    expected = torch.autograd.grad(attention_reference(q, k, v)[0].sum(), k)[0]
    torch.testing.assert_close(k.grad, expected, rtol=1e-5, atol=1e-5)
    assert q.grad is None


@pytest.mark.parametrize("layout", ["expanded", "transposed"])
def test_strides_of_the_incoming_gradient_are_honoured(layout, device):
    q, k, v = make_qkv(1, 2, 40, 40, 16, dtype=torch.float32, device=device)
    do = torch.randn(1, 2, 16, 40, device=device).mT
    if layout == "expanded":
        do = torch.ones((), device=device).expand(1, 2, 40, 16)
    fn = partial(flash_attention, impl="triton")
    assert_matches_reference(fn, q, k, v, is_causal=False, do=do)


def test_backward_is_bitwise_repeatable(device):
    *tensors, dlse = saved(131, 131, 32, dtype=torch.float16, device=device, is_causal=True)
    variant = Variant(0.2, right=0)
    first = launch_backward(*tensors, dlse, variant)[:3]
    for _ in range(50 if device == "cuda" else 2):
        again = launch_backward(*tensors, dlse, variant)[:3]
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


@pytest.mark.parametrize("impl", ["triton", "mock"])
def test_second_derivative_raises_instead_of_dropping_a_term(impl, device):
    q, k, v = make_qkv(1, 1, 8, 8, 16, dtype=torch.float32, device=device, requires_grad=True)
    o = flash_attention(q, k, v, impl=impl)
    with pytest.raises(RuntimeError, match=r"differentiable once.*impl='reference'"):
        torch.autograd.grad(o.sum(), q, create_graph=True)


def test_reference_can_be_differentiated_twice(device):
    q, k, v = make_qkv(1, 1, 4, 4, 2, dtype=torch.float64, device=device, requires_grad=True)
    fn = partial(flash_attention, is_causal=True, impl="reference")
    assert torch.autograd.gradgradcheck(fn, (q, k, v))


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 128])
def test_forward_and_backward_memory_is_linear_in_the_sequence(head_dim):
    def peak(seqlen):
        q, k, v = make_qkv(
            1, 1, seqlen, seqlen, head_dim, dtype=torch.float16, device="cuda", requires_grad=True
        )
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        flash_attention(q, k, v, is_causal=True).sum().backward()
        return torch.cuda.max_memory_allocated() - before

    assert peak(32768) < 2.2 * peak(16384)
    assert peak(32768) < 16 * 32768 * head_dim * 2  # a score matrix alone would be 2 GiB

"""Under ``torch.compile``: the operators' fakes, and graphs without a break."""

import shutil

import pytest
import torch

from flash_kernel import FlashAttention, flash_attention
from flash_kernel.ops import backward_op, forward_op
from flash_kernel.testing import make_qkv

NEEDS_COMPILER = pytest.mark.skipif(
    not torch.cuda.is_available() and shutil.which("g++") is None,
    reason="torch.compile needs a C++ compiler on a CPU",
)


def requires_grad(x):
    return None if x is None else x.requires_grad_()


def transposed(shapes, device):
    return [torch.randn(shape, device=device).transpose(1, 2) for shape in shapes]


# opcheck itself reads .grad of tensors that are no leaves
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
@pytest.mark.parametrize(("impl", "backward"), [("triton", "triton"), ("reference", "dense")])
@pytest.mark.parametrize("contiguous", [True, False], ids=["contiguous", "transposed"])
def test_operators_pass_opcheck(impl, backward, contiguous, device):
    inputs = transposed([(1, 20, 2, 16), (1, 33, 1, 16), (1, 33, 1, 16)], device)
    if contiguous:
        inputs = [x.contiguous() for x in inputs]
    sinks = torch.randn(2, device=device)
    inputs += [None, None, None, sinks]
    options = (0.25, 20, 0, 5.0, impl, backward, False)
    o, lse = forward_op(*inputs, *options)
    torch.library.opcheck(forward_op, (*map(requires_grad, inputs), *options))
    saved = [None if x is None else x.detach() for x in inputs]
    saved += [o, lse, torch.randn_like(o), None]
    torch.library.opcheck(backward_op, (*saved, *options, False))


@NEEDS_COMPILER
def test_function_compiles_into_a_full_graph(device):
    @torch.compile(fullgraph=True, dynamic=True)
    def layer(q, k, v):
        o = FlashAttention.apply(q, k, v, True)
        return o + FlashAttention.apply(q, k, v, is_causal=False)

    for seqlen in (33, 40):
        inputs = make_qkv(2, None, seqlen, seqlen, 16, dtype=torch.float32, device=device)
        leaves = [x.requires_grad_() for x in inputs]
        expected = FlashAttention.apply(*leaves, True) + FlashAttention.apply(*leaves)
        compiled = layer(*leaves)
        torch.testing.assert_close(compiled, expected, rtol=1e-5, atol=1e-5)
        gradients = [torch.autograd.grad(o.square().sum(), leaves) for o in (compiled, expected)]
        torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-4)


@NEEDS_COMPILER
@pytest.mark.parametrize("impl", ["auto", "mock", "torch"])
def test_full_graph_compiles_and_equals_eager(impl, device):
    @torch.compile(fullgraph=True)
    def layer(q, k, v):
        return flash_attention(2 * q, k, v, is_causal=True, impl=impl)

    q, k, v = make_qkv(1, 2, 33, 33, 16, dtype=torch.float32, device=device, requires_grad=True)
    eager = flash_attention(2 * q, k, v, is_causal=True, impl=impl)
    expected = torch.autograd.grad(eager.square().sum(), (q, k, v))
    compiled = layer(q, k, v)
    gradients = torch.autograd.grad(compiled.square().sum(), (q, k, v))
    torch.testing.assert_close(compiled, eager, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(gradients, expected, rtol=1e-4, atol=1e-4)

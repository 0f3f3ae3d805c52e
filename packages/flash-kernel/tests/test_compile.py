"""Under ``torch.compile``, in exported programs, in checkpoints: operators, and graphs of them."""

import io
import shutil
from functools import partial

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from flash_kernel import (
    FlashAttention,
    autograd,
    flash_attention,
    flash_attention_varlen,
    ops,
)
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


def test_default_compiles_where_its_first_choice_is_refused(device):
    q, k, v = make_qkv(1, 2, 5, 7, 8, dtype=torch.float32, device=device)
    attention = partial(flash_attention, softcap=2.0, return_lse=True)  # torch has neither
    compiled = torch.compile(attention, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(q, k, v), attention(q, k, v))


def test_gradient_of_slopes_is_as_in_eager_mode_or_refused(device):
    q, k, v = make_qkv(1, 2, 5, 7, 8, dtype=torch.float32, device=device)
    slopes = torch.tensor([0.1, 0.2], device=device, requires_grad=True)

    def dense(slopes):
        return flash_attention(q, k, v, alibi_slopes=slopes, impl="reference").sum()

    compiled = torch.compile(dense, backend="aot_eager", fullgraph=True)
    (expected,) = torch.autograd.grad(dense(slopes), slopes)
    (found,) = torch.autograd.grad(compiled(slopes), slopes)
    torch.testing.assert_close(found, expected)

    rows, ends = torch.randn(9, 2, 8, device=device), torch.tensor([0, 4, 9], device=device)

    def packed(slopes):
        return flash_attention_varlen(
            rows, rows, rows, ends, ends, alibi_slopes=slopes, impl="reference"
        )

    packed(slopes)
    with pytest.raises(Exception, match="gradient of `alibi_slopes` needs packed sequences"):
        torch.compile(packed, backend="aot_eager", fullgraph=True)(slopes)


def test_second_order_through_the_operator_is_refused_in_words(device):
    q, k, v = make_qkv(1, 2, 5, 7, 8, dtype=torch.float32, device=device)
    variant = (0.25, None, None, None)
    o, _ = forward_op(q.requires_grad_(), k, v, *[None] * 4, *variant, "reference", "dense", True)
    with pytest.raises(RuntimeError, match=r"create_graph=True .* Pass impl='reference'"):
        torch.autograd.grad(o.sum(), q, create_graph=True)


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


@pytest.mark.parametrize("impl", ["auto", "triton"])
def test_new_lengths_batches_and_heads_do_not_compile_anew(impl, device):
    counted = CompileCounterWithBackend("aot_eager")

    @torch.compile(backend=counted, fullgraph=True, dynamic=True)
    def layer(q, k, v):
        return flash_attention(2 * q, k, v, is_causal=True, impl=impl)

    for batch, heads, seqlen in ((2, 3, 20), (3, 2, 24), (4, 5, 33), (2, 4, 17)):
        inputs = make_qkv(batch, heads, seqlen, seqlen, 16, dtype=torch.float32, device=device)
        layer(*(x.requires_grad_() for x in inputs)).sum().backward()
    assert counted.frame_count == 1


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


class Attention(torch.nn.Module):
    def __init__(self, impl):
        super().__init__()
        self.impl = impl
        self.projection = torch.nn.Linear(16, 16)

    def forward(self, q, k, v):
        return flash_attention(self.projection(q), k, v, is_causal=True, impl=self.impl)


# torch's own, where 2.11 loads a program
@pytest.mark.filterwarnings("ignore:The given buffer is not writable:UserWarning")
@pytest.mark.parametrize("impl", ["triton", "auto"])
def test_exported_module_is_saved_loaded_and_equal_at_another_length(impl, device):
    module = Attention(impl).to(device)
    example = make_qkv(1, 2, 8, 8, 16, dtype=torch.float32, device=device)
    seqlen = torch.export.Dim("seqlen", min=2, max=64)
    program = torch.export.export(module, example, dynamic_shapes=({2: seqlen},) * 3)
    targets = {node.target for node in program.graph.nodes}
    assert (torch.ops.flash_kernel.forward.default in targets) == (
        impl == "triton" or device == "cuda"
    )
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    loaded = torch.export.load(file).module()
    other = make_qkv(1, 2, 13, 13, 16, dtype=torch.float32, device=device)
    torch.testing.assert_close(loaded(*other), module(*other))


def save_attention(ctx, op, *args, **kwargs):
    if op is torch.ops.flash_kernel.forward.default:
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


@pytest.mark.parametrize(("is_compiled", "num_forwards"), [(True, 1), (False, 2)])
def test_selective_checkpoint_keeps_attention_where_it_is_an_operator(
    is_compiled, num_forwards, device, monkeypatch
):
    """Compiled, the attention that a policy keeps runs once; eager, where it is none, twice."""
    forwards = []

    def counted(*args):
        forwards.append(args[0].plan.impl)
        return run_forward(*args)

    run_forward = autograd.run_forward
    monkeypatch.setattr(ops, "run_forward", counted)
    monkeypatch.setattr(autograd, "run_forward", counted)

    def layer(q, k, v):
        return flash_attention(2 * q, k, v, impl="triton").sin()

    q, k, v = make_qkv(1, 2, 8, 8, 16, dtype=torch.float32, device=device, requires_grad=True)
    expected = torch.autograd.grad(layer(q, k, v).sum(), (q, k, v))
    forwards.clear()
    run = torch.compile(layer, backend="aot_eager", fullgraph=True) if is_compiled else layer
    contexts = partial(create_selective_checkpoint_contexts, save_attention)
    o = checkpoint(run, q, k, v, use_reentrant=False, context_fn=contexts)
    gradients = torch.autograd.grad(o.sum(), (q, k, v))
    assert forwards == ["triton"] * num_forwards
    torch.testing.assert_close(gradients, expected)

"""The Hopper dq for head dims above 128 on a simulated SM: who waits for whom, what comes out."""

import numpy as np
import pytest
import torch

pytest.importorskip("triton.experimental.gluon", reason="the kernel is written in Gluon")

from gluon_simulator import Descriptor, Pointer, ProtocolError, Simulator, Value

from flash_kernel._hopper import producer, wide_dq
from flash_kernel._hopper.wide_launch import dq_arguments, dq_spec
from flash_kernel._triton.launch_backward import padded_rows
from flash_kernel.reference import dense_attention
from flash_kernel.variant import Modifiers, Variant


def make_inputs(lengths, head_dim, variant, heads, dtype):
    """Return q, k, v, do, lse and delta, and dq in float64."""
    torch.manual_seed(0)
    seqlen_q, seqlen_k = lengths
    q, k, v = (
        torch.randn(1, h, n, head_dim, dtype=dtype)
        for h, n in ((heads[0], seqlen_q), (heads[1], seqlen_k), (heads[1], seqlen_k))
    )
    do = torch.randn_like(q)
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    o, lse = dense_attention(*leaves, variant, Modifiers())
    dlse = torch.randn(lse.shape).masked_fill(lse.isinf(), 0)
    finite = lse.masked_fill(lse.isinf(), 0)
    (dq,) = torch.autograd.grad((o, finite), leaves[:1], (do.double(), dlse.double()))
    delta = (do.double() * o).sum(-1) - dlse
    lse = lse.masked_fill(lse.isinf(), float("inf"))
    return q, k, v, do, lse.detach(), delta.detach(), dq


def row_statistics(lse, delta):
    """Return what the kernel before leaves: lse is infinite past the end."""
    batch, num_heads, seqlen_q = lse.shape
    statistics = np.zeros((batch, num_heads, 2, padded_rows(seqlen_q, None)), np.float32)
    statistics[:, :, 0] = np.inf
    statistics[:, :, 0, :seqlen_q], statistics[:, :, 1, :seqlen_q] = lse, delta
    return statistics


def simulate(
    lengths, head_dim, variant, *, heads=(2, 2), dtype=torch.bfloat16, seed=0, edits=None,
    nan_at=None, ctas=2,
):  # fmt: skip
    """Return dq as the kernel leaves it and as it should be, and the marks."""
    q, k, v, do, lse, delta, expected = make_inputs(lengths, head_dim, variant, heads, dtype)
    if nan_at is not None:
        k[:, :, nan_at, 3] = torch.nan
    q, k, v, do = (x.float().numpy() for x in (q, k, v, do))
    dq = np.full_like(q, np.nan)
    marks = np.full((1, heads[0], -(-lengths[0] // 64)), -1)
    workspace = np.zeros(2, np.int64)
    variant, spec, sizes = dq_spec(torch.from_numpy(q), torch.from_numpy(k), variant, dtype)
    scalars, tiles = dq_arguments(spec, sizes, variant)
    numbers = []
    simulator = Simulator(seed, edits)
    simulator.watch(producer.locate, lambda number, *_: numbers.append(int(number)))
    simulator.launch(
        wide_dq.flash_attention_wide_dq_kernel,
        min(ctas, tiles),
        (
            *descriptors((q, k, v, do, dq), spec, str(dtype).removeprefix("torch.")),
            Pointer(row_statistics(lse.numpy(), delta.numpy()).reshape(-1)),
            *(Pointer(marks.reshape(-1)), Pointer(workspace)),
            *map(Value, scalars),
            spec,
        ),
    )
    assert not workspace.any(), "the workspace is left as it was found"
    assert sorted(numbers) == list(range(tiles))
    return torch.from_numpy(dq), expected, marks


def descriptors(tensors, spec, dtype):
    """Return the kernel's first ten arguments."""
    heights = (64, spec.BLOCK_N, spec.BLOCK_N, 64, 64)
    made = [
        Descriptor(x, [1, 1, rows, width], dtype)
        for width in spec.WIDTHS
        for x, rows in zip(tensors, heights, strict=True)
    ]
    return made + [None] * (10 - len(made))


def check(*arguments, **options):
    dq, expected, _ = simulate(*arguments, **options)
    # p and ds are rounded, o was, and so is the result
    error, bound = (dq.double() - expected).norm(), 6e-3 * expected.norm() + 1e-6
    assert error <= bound, f"dq: {error:.3g} > {bound:.3g}"


@pytest.mark.parametrize(
    ("head_dim", "lengths", "right"),
    [(256, (1, 1), None), (256, (257, 129), None), (256, (70, 300), 0), (256, (300, 70), 0),
     (256, (256, 256), 0), (248, (130, 130), 0), (192, (130, 300), 0), (136, (129, 64), None)],
    ids=str,
)  # fmt: skip
def test_dq_is_right_and_its_barriers_hold(head_dim, lengths, right):
    for seed in (0, 1):
        check(lengths, head_dim, Variant(head_dim**-0.5, right=right), seed=seed)


@pytest.mark.parametrize("window", [(100, 0), (0, 0), (64, 64), (200, 17), (None, 5), (130, None)])
def test_window_hides_keys(window):
    for lengths in ((130, 300), (300, 130)):
        check(lengths, 192, Variant(0.07, *window), heads=(1, 1))


@pytest.mark.parametrize("heads", [(4, 1), (3, 1)])
def test_heads_of_a_group_share_keys(heads):
    check((150, 150), 192, Variant(0.07, right=0), heads=heads, dtype=torch.float16)

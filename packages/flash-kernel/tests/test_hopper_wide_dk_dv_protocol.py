"""dk and dv for head dims above 128 on a simulated SM: who waits for whom, and what comes out."""

import pytest
import torch

pytest.importorskip("triton.experimental.gluon", reason="the kernel is written in Gluon")

from wide_simulator import simulated_dk_dv

from flash_kernel._hopper import wide_dk_dv_consumer, wide_dk_dv_producer
from flash_kernel._hopper.forward_spec import Sizes
from flash_kernel._triton.launch_backward import padded_rows
from flash_kernel.reference import dense_attention
from flash_kernel.variant import PLAIN, Variant


def make_inputs(sizes, dtype):
    """Return q, k, v and do."""
    torch.manual_seed(0)
    queries, keys = (sizes.num_heads, sizes.seqlen_q), (sizes.num_heads_k, sizes.seqlen_k)
    shapes = [(sizes.batch, *rows, sizes.head_dim) for rows in (queries, keys, keys, queries)]
    return [torch.randn(shape, dtype=dtype) for shape in shapes]


def row_statistics(o, lse, do, dlse):
    """Return what the kernel before leaves: lse is infinite past the end, and for empty rows."""
    seqlen_q = lse.shape[2]
    statistics = torch.zeros(*lse.shape[:2], 2, padded_rows(seqlen_q, None))
    statistics[:, :, 0] = torch.inf
    statistics[:, :, 0, :seqlen_q] = torch.where(lse.isinf(), torch.inf, lse)
    statistics[:, :, 1, :seqlen_q] = (o * do).sum(-1) - dlse
    return statistics


def simulate(
    sizes, variant, *, dtype=torch.bfloat16, seed=0, edits=None, ctas=2, together=None, nan_at=None
):
    """Return dk and dv as the kernel leaves them and as they should be, and the marks.

    The rows ``nan_at`` of do, of one head, hold a NaN that is not expected anywhere.
    """
    q, k, v, do = make_inputs(sizes, dtype)
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    o, lse = dense_attention(*leaves, variant, PLAIN)
    dlse = torch.randn(lse.shape)
    finite = lse.masked_fill(lse.isinf(), 0)
    expected = torch.autograd.grad((o, finite), leaves[1:], (do.double(), dlse.double()))
    if nan_at is not None:
        do[:, 0, nan_at, 3] = torch.nan
    statistics = row_statistics(o.detach(), lse.detach(), do.double(), dlse)
    dk, dv = torch.empty_like(k), torch.empty_like(v)
    tiles = sizes.batch * sizes.num_heads_k * -(-sizes.seqlen_k // 64)
    marks, workspace = (torch.full([n], x, dtype=torch.int32) for n, x in ((tiles, -1), (2, 0)))
    tiled = q, k, v, do, dk, dv
    launch = simulated_dk_dv(
        q, k, variant, together=together, seed=seed, edits=edits, ctas=min(ctas, tiles)
    )
    launch(*tiled, *tiled, statistics, marks, workspace)
    return (dk, dv), expected, marks


def check(*arguments, **options):
    results, expected, marks = simulate(*arguments, **options)
    for name, x, y in zip(("dk", "dv"), results, expected, strict=True):
        # p and ds are rounded, and so is the result
        error, bound = (x.double() - y).norm(), 6e-3 * y.norm() + 1e-6
        assert error <= bound, f"{name}: {error:.3g} > {bound:.3g}"
    return marks


@pytest.mark.parametrize("right", [None, 0], ids=["full", "causal"])
@pytest.mark.parametrize(
    ("head_dim", "lengths", "dtype"),
    [
        (256, (256, 256), torch.bfloat16),
        (256, (200, 330), torch.float16),
        (192, (330, 200), torch.bfloat16),
        (136, (1, 70), torch.bfloat16),
    ],
    ids=str,
)
def test_gradients_are_right_and_the_barriers_hold(head_dim, lengths, dtype, right):
    check(Sizes(1, 2, 2, *lengths, head_dim), Variant(head_dim**-0.5, right=right), dtype=dtype)


@pytest.mark.parametrize("window", [(50, 0), (70, 30), (0, 0), (None, 100)], ids=str)
def test_window_hides_keys(window):
    marks = check(Sizes(2, 1, 1, 200, 330, 256), Variant(0.1, *window), together=1)
    assert (marks == 0).all()


@pytest.mark.parametrize("together", [1, 2])
def test_heads_of_a_group_share_keys(together):
    check(Sizes(1, 6, 2, 150, 150, 256), Variant(0.1, right=0), together=together, ctas=3)


def test_gradients_are_the_same_whatever_runs_first():
    sizes = Sizes(1, 2, 1, 200, 300, 256)
    alone, *others = (
        simulate(sizes, Variant(0.1, right=0), ctas=ctas, seed=seed)[0]
        for ctas, seed in ((1, 0), (3, 1), (4, 2))
    )
    for other in others:
        assert all(torch.equal(x, y) for x, y in zip(alone, other, strict=True))


def test_hidden_row_that_is_not_finite_marks_the_tiles_that_it_may_have_reached():
    """Row 100 sees the keys up to 100: tile 0 has a NaN, and tile 1 one in keys that are hidden."""
    (dk, dv), expected, marks = simulate(
        Sizes(1, 1, 1, 256, 256, 256), Variant(0.1, right=0), nan_at=100
    )
    assert marks.tolist() == [1, 1, 0, 0]
    for x, y in ((dk, expected[0]), (dv, expected[1])):
        torch.testing.assert_close(x[:, :, 128:].double(), y[:, :, 128:], atol=0.05, rtol=0.05)


CONSUMER, PRODUCER = wide_dk_dv_consumer, wide_dk_dv_producer


@pytest.mark.parametrize(
    ("function", "old", "new", "error"),
    [
        # the room of q or do, of v, or of k is never given back
        (CONSUMER.walk_blocks, "barrier_arrive(SECOND_FREE + this_stage, BOTH)", "pass",
         "deadlock; .*produce"),
        (CONSUMER.store, "barrier_arrive(gl.to_tensor(TILE_FREE + 1), ONE)", "pass",
         "deadlock; .*produce_do"),
        (CONSUMER.walk_blocks, "barrier_arrive(gl.to_tensor(TILE_FREE), OTHER_TOO)", "pass",
         "deadlock; .*produce_q"),
        # the room of q, and with it that of p, is given back while ds is still to come
        (CONSUMER.walk_blocks, "acc, operand = wait_for_product(acc, operand, PIECES)",
         "acc, operand = wait_for_product(acc, operand, PIECES + 1)",
         "before it was waited for|still being read"),
        # p is read before it is there
        (CONSUMER.make_ds, "barrier_sync(P_FULL + stage, PAIR)", "pass",
         "dk: |more threads|half full"),
        # dv overwrites columns, and the next v dk, on the way out
        (CONSUMER.store_columns, "tma_store_wait(1)", "pass", "still being read"),
        (CONSUMER.store, "tma_store_wait(0)\n        barrier_arrive", "barrier_arrive",
         "still being read"),
        # do is read before it has landed
        (PRODUCER.load_queries, "mbarrier.expect(full, BLOCK_M * (SPEC.ROW_BYTES + 4))",
         "mbarrier.expect(full, BLOCK_M * 4)", "on its way|more arrivals|deadlock"),
        # k and the tile are replaced while somebody still needs them
        (PRODUCER.load_keys, "barrier_sync(gl.to_tensor(TILE_FREE + W), READERS)", "pass",
         "still being read|on its way|more"),
    ],
)  # fmt: skip
def test_broken_kernel_is_noticed(function, old, new, error):
    def try_schedules():
        for seed in range(8):
            check(
                Sizes(1, 1, 1, 200, 300, 256),
                Variant(0.1),
                seed=seed,
                edits={function.fn: (old, new)},
            )

    with pytest.raises(AssertionError, match=error):
        try_schedules()

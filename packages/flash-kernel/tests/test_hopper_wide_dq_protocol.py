"""The Hopper dq for head dims above 128 on a simulated SM: who waits for whom, what comes out."""

import pytest
import torch

pytest.importorskip("triton.experimental.gluon", reason="the kernel is written in Gluon")

from gluon_simulator import ProtocolError
from wide_simulator import simulated_dq

from flash_kernel._hopper import wide_dq_consumer, wide_dq_producer
from flash_kernel._triton.launch import Options
from flash_kernel._triton.launch_backward import padded_rows
from flash_kernel._triton.launch_backward import prepare_dq as prepare_portable_dq
from flash_kernel._triton.prepared import is_interpreted
from flash_kernel.reference import dense_attention
from flash_kernel.variant import PLAIN, Variant


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
    o, lse = dense_attention(*leaves, variant, PLAIN)
    dlse = torch.randn(lse.shape).masked_fill(lse.isinf(), 0)
    finite = lse.masked_fill(lse.isinf(), 0)
    (dq,) = torch.autograd.grad((o, finite), leaves[:1], (do.double(), dlse.double()))
    delta = (do.double() * o).sum(-1) - dlse
    lse = lse.masked_fill(lse.isinf(), float("inf"))
    return q, k, v, do, lse.detach(), delta.detach(), dq


def row_statistics(lse, delta):
    """Return what the kernel before leaves: lse is infinite past the end."""
    statistics = torch.zeros(*lse.shape[:2], 2, padded_rows(lse.shape[2], None))
    statistics[:, :, 0] = torch.inf
    statistics[:, :, 0, : lse.shape[2]], statistics[:, :, 1, : lse.shape[2]] = lse, delta
    return statistics


def simulate(
    lengths, head_dim, variant, *, heads=(2, 2), dtype=torch.bfloat16, seed=0, edits=None,
    nan_at=None, ctas=2,
):  # fmt: skip
    """Return dq as the kernel leaves it and as it should be, and the marks."""
    q, k, v, do, lse, delta, expected = make_inputs(lengths, head_dim, variant, heads, dtype)
    if nan_at is not None:
        k[:, :, nan_at, 3] = torch.nan
    dq, tiles = torch.empty_like(q), -(-lengths[0] // 64)
    marks = torch.full((1, heads[0], tiles), -1, dtype=torch.int32)
    workspace = torch.zeros(2, dtype=torch.int32)
    tiled = q, k, v, do, dq
    launch = simulated_dq(q, k, variant, seed=seed, edits=edits, ctas=min(ctas, heads[0] * tiles))
    launch(*tiled, *tiled, row_statistics(lse, delta), marks, workspace)
    return dq, expected, marks


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


@pytest.mark.parametrize(
    ("heads", "window"), [((4, 1), (None, 0)), ((3, 1), (None, 0)), ((8, 2), (100, 0))]
)
def test_heads_of_a_group_share_keys(heads, window):
    check((150, 200), 192, Variant(0.07, *window), heads=heads, dtype=torch.float16)


@pytest.mark.skipif(not is_interpreted(), reason="Triton interprets only where there is no GPU")
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("variant", [Variant(0.07, right=0), Variant(0.07, 70, 9)], ids=str)
def test_nan_in_a_key_reaches_the_rows_that_see_it_and_no_others(variant):
    """The kernel marks tiles that are not finite; those alone are done again, and exactly."""
    lengths, nan_at, dtype = (200, 200), 150, torch.float16
    options = {"heads": (2, 1), "dtype": dtype}
    dq, expected, marks = simulate(lengths, 136, variant, nan_at=nan_at, **options)
    position = torch.arange(200)
    sees = position >= nan_at - (variant.right or 0)
    if variant.left is not None:
        sees &= position <= nan_at + variant.left
    assert dq[0, :, ~sees].isnan().any(), "0 * NaN is NaN"
    finite = ~dq.isnan().any(-1)[0]
    assert marks.tolist() == [[[int(not x.all()) for x in y.split(64)] for y in finite]]
    q, k, v, do, lse, delta, _ = make_inputs(lengths, 136, variant, (2, 1), dtype)
    k[:, :, nan_at, 3] = torch.nan
    statistics = row_statistics(lse, delta)
    untouched = torch.cat([x.all(-1, keepdim=True).expand_as(x) for x in finite.split(64, -1)], -1)
    dq = torch.where(untouched[None, ..., None], 7, dq).to(dtype)
    redo = prepare_portable_dq(
        q, k, v, do, dq, PLAIN, Options(variant, "ieee", None, None, redoes=True)
    )
    redo(q, k, v, do, dq, statistics, None, None, None, None, None, marks)
    assert (dq[0][untouched] == 7).all()
    redone = ~untouched & ~sees
    assert redone.any()
    torch.testing.assert_close(dq[0][redone].double(), expected[0][redone], rtol=4e-3, atol=4e-3)
    assert dq[0][:, sees].isnan().any(-1).all()


def simulate_broken(head_dim, function, old, new):
    """Run a kernel with other text, several times over: not every order of events shows it."""
    for seed in (1, 0, 5, 2):
        check((300, 300), head_dim, Variant(0.07, right=0), seed=seed, edits={function: (old, new)})


WAIT_FOR_K = "mbarrier.wait(buffers.k_full.index(ring.k), ring.k_phase)"
WAIT_FOR_V = "mbarrier.wait(buffers.v_full.index(0), ring.v_phase)"
FREE_K = "barrier_arrive(K_FREE + ring.k, SPEC.THREADS)"
FREE_V = "barrier_arrive(V_FREE + ring.v, SPEC.THREADS)"
FREE_Q = "        barrier_arrive(gl.to_tensor(Q_FREE), SPEC.THREADS)\n"
UNLANDED = "on its way|written while it is still being read|parity .* twice"


@pytest.mark.parametrize(
    ("error", "function", "old", "new"),
    [
        # a stage that is never given back
        ("deadlock; .*produce .*: named barrier 1[01]", wide_dq_consumer.step, FREE_K, ""),
        ("deadlock; .*produce .*: named barrier 13", wide_dq_consumer.step, FREE_V, ""),
        # a stage given back while a product reads it
        ("written while it is still being read", wide_dq_consumer.step,
         "    dq, ds, p = wait_for_output(dq, ds, p)\n" + f"    {FREE_K}\n",
         f"    {FREE_K}\n" + "    dq, ds, p = wait_for_output(dq, ds, p)\n"),
        # scores of two pieces, used when the first is there
        ("used before it was waited for", wide_dq_consumer.step, "len(dq)", "len(dq) + 1"),
        # K, V or do read before it has landed
        (UNLANDED, wide_dq_consumer.step, WAIT_FOR_K, ""),
        (UNLANDED, wide_dq_consumer.step, WAIT_FOR_V, ""),
        (UNLANDED, wide_dq_consumer.step,
         "mbarrier.wait(buffers.do_full.index(0), parity)", "pass"),
        # a stage given back before it has landed, by rows that skip it
        (UNLANDED, wide_dq_consumer.skip_blocks, WAIT_FOR_K, ""),
        (UNLANDED, wide_dq_consumer.skip_blocks, WAIT_FOR_V, ""),
        # do of the next tile where dq still leaves
        ("written while it is still being read", wide_dq_consumer.store,
         "    tma_store_wait(0)\n", ""),
        # q of the next tile where scores are still to be made
        (UNLANDED, wide_dq_consumer.consume,
         "        if SPEC.MAY_BE_EMPTY and", FREE_Q + "        if SPEC.MAY_BE_EMPTY and"),
        # blocks in an order that waits for itself
        ("deadlock", wide_dq_producer.load_keys, "if i == 0:", "if i == tile.blocks - 1:"),
        # releases that are not taken back at the end
        ("ends half full", wide_dq_producer.finish,
         "barrier_sync(gl.to_tensor(K_FREE + stage), SPEC.THREADS)", "pass"),
    ],
)  # fmt: skip
def test_broken_kernel_is_noticed(error, function, old, new):
    with pytest.raises(ProtocolError, match=error):
        simulate_broken(192, function, old, new)

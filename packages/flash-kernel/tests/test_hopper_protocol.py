"""The Hopper forward on a simulated SM: who waits for whom, and what comes out."""

import numpy as np
import pytest
import torch

pytest.importorskip("triton.experimental.gluon", reason="the kernel is written in Gluon")

from gluon_simulator import Descriptor, Pointer, ProtocolError, Simulator, Value, rounded

from flash_kernel._hopper import consumer, primitives, producer, softmax, tiles
from flash_kernel._hopper.config import FORWARD, FORWARD_LONG
from flash_kernel._hopper.forward import flash_attention_hopper_forward_kernel
from flash_kernel._hopper.launch import LOG2_E, Sizes, clipped, count_tiles, forward_spec
from flash_kernel._triton.launch import NO_EXTRAS, redo_launch
from flash_kernel._triton.prepared import is_interpreted
from flash_kernel.reference import dense_attention
from flash_kernel.variant import PLAIN, Variant


def make_inputs(sizes, dtype, growth, seed):
    """Return q, k and v; the scores of the last head grow leftwards by ``growth``."""
    random = np.random.default_rng(seed)
    shapes = [(sizes.num_heads, sizes.seqlen_q)] + [(sizes.num_heads_k, sizes.seqlen_k)] * 2
    q, k, v = (
        rounded(random.standard_normal((sizes.batch, *shape, sizes.head_dim), np.float32), dtype)
        for shape in shapes
    )
    if growth:
        q[:, -1, :, 0] = 8
        ramp = np.linspace(1, -1, sizes.seqlen_k) * growth * sizes.head_dim**0.5 / 8
        k[:, -1, :, 0] = rounded(ramp, dtype)
    return q, k, v


def simulate(
    sizes, variant, config, *, dtype=torch.bfloat16, growth=0, nan_at=None, seed=0, edits=None
):
    """Run the kernel on two CTAs; return q, k and v, and the o and lse that it leaves."""
    name = str(dtype).removeprefix("torch.")
    q, k, v = make_inputs(sizes, name, growth, seed)
    if nan_at is not None:
        v[:, :, nan_at, 3] = np.nan
    o = np.full_like(q, np.nan)
    lse = np.full(q.shape[:3], np.nan, np.float32)
    variant = clipped(variant, sizes)
    spec = forward_spec(config, dtype, sizes, variant)
    units, row_tiles = count_tiles(spec, sizes)
    ctas = min(2, units * row_tiles)
    workspace = np.zeros(2, np.int64)

    def descriptor(x, rows):
        return Descriptor(x, [1, 1, rows, sizes.head_dim], name)

    scalars = (sizes.seqlen_q, sizes.seqlen_k, variant.left or 0, variant.right or 0)
    scalars += (sizes.num_heads, sizes.group, units, row_tiles, max(1, units - 1))
    numbers = []
    simulator = Simulator(seed, edits)
    simulator.watch(producer.post, lambda number, *_: numbers.append(int(number)))
    simulator.launch(
        flash_attention_hopper_forward_kernel,
        ctas,
        (
            *(descriptor(x, rows) for x, rows in ((q, 64), (k, config.block_n))),
            *(descriptor(x, rows) for x, rows in ((v, config.block_n), (o, 64))),
            *(Pointer(lse.reshape(-1)), Pointer(workspace)),
            *map(Value, scalars),
            *(variant.scale * LOG2_E, spec),
        ),
    )
    assert not workspace.any(), "the workspace is left as it was found"
    assert sorted(numbers) == [tiles.END.value] * ctas + list(range(units * row_tiles))
    return tuple(map(torch.from_numpy, (q, k, v, o, lse)))


def assert_right(q, k, v, o, lse, variant, columns=slice(None)):
    """Compare o, or some of its columns, and lse with float64."""
    expected, expected_lse = dense_attention(q.double(), k.double(), v.double(), variant, PLAIN)
    # p is rounded to bfloat16, and so is o
    error = dict.fromkeys(("rtol", "atol"), 2**-8)
    torch.testing.assert_close(o.double()[..., columns], expected[..., columns], **error)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-6, atol=1e-5)


def check(sizes, *, left=None, right=None, **options):
    """Simulate scores that do not grow: no row is marked, and all are right."""
    config = options.pop("config", FORWARD.get(sizes.head_dim))
    variant = Variant(sizes.head_dim**-0.5, left, right)
    assert_right(*simulate(sizes, variant, config, **options), variant)


# several tiles for each CTA, ends within and at the edge of blocks, few and many keys
@pytest.mark.parametrize(
    ("head_dim", "seqlen_q", "seqlen_k", "right"),
    [(64, 1, 1, None), (64, 257, 129, None), (64, 70, 300, 0), (64, 300, 70, 0), (64, 256, 256, 0),
     (128, 257, 257, 0), (256, 200, 200, 0), (256, 130, 300, None)],
)  # fmt: skip
def test_forward_is_right_and_its_barriers_hold(head_dim, seqlen_q, seqlen_k, right):
    for seed in (0, 1) if head_dim == 64 else (1,):
        check(Sizes(1, 2, 2, seqlen_q, seqlen_k, head_dim), right=right, seed=seed)


def test_three_consumers_hold():
    check(Sizes(1, 1, 1, 257, 450, 64), right=0, config=FORWARD_LONG[64])


@pytest.mark.parametrize("window", [(100, 0), (0, 0), (64, 64), (200, 17), (None, 5), (130, None)])
def test_window_hides_keys(window):
    for lengths in ((130, 300), (300, 130)):
        check(Sizes(1, 1, 1, *lengths, 64), left=window[0], right=window[1])


@pytest.mark.parametrize(("num_heads", "num_heads_k"), [(4, 1), (3, 1)])
def test_heads_of_a_group_share_keys(num_heads, num_heads_k):
    check(Sizes(2, num_heads, num_heads_k, 150, 150, 64), right=0)


@pytest.mark.parametrize(("dtype", "growth"), [(torch.bfloat16, 200), (torch.float16, 60)])
def test_rows_of_growing_scores_are_marked_and_others_keep_their_bits(dtype, growth):
    sizes, variant = Sizes(1, 3, 3, 200, 300, 64), Variant(0.125, right=0)
    plain = simulate(sizes, variant, FORWARD[64], dtype=dtype)
    grown = simulate(sizes, variant, FORWARD[64], dtype=dtype, growth=growth)
    assert not plain[4].isnan().any()
    assert grown[4][:, 2].isnan().any()
    for x, y in zip(plain, grown, strict=True):
        assert torch.equal(x[:, :2], y[:, :2])
    # what is not marked is right
    q, k, v, o, lse = (x[:, 2:] for x in grown)
    holds = ~lse.isnan()
    expected = dense_attention(q.double(), k.double(), v.double(), variant, PLAIN)[0]
    torch.testing.assert_close(o.double()[holds], expected[holds], rtol=2**-8, atol=2**-8)


@pytest.mark.skipif(not is_interpreted(), reason="Triton interprets only where there is no GPU")
@pytest.mark.parametrize(
    ("variant", "num_heads_k"), [(Variant(0.125, right=0), 1), (Variant(0.125, 70, 9), 2)]
)
def test_marked_tiles_are_done_again_and_no_others(variant, num_heads_k):
    sizes = Sizes(1, 2, num_heads_k, 200, 300, 64)
    before = simulate(sizes, variant, FORWARD[64], dtype=torch.float16, growth=60)
    q, k, v, o, lse = (x.to(torch.float16) if x.dim() == 4 else x.clone() for x in before)
    marked = lse.isnan()
    assert marked.any()
    o[~marked] += 1  # a tile that is computed anew loses this
    redo_launch(q, k, v, o, variant)(q, k, v, o, lse, *NO_EXTRAS)
    # with no capability, tiles have 64 rows
    redone = torch.cat([x.any(-1, True).expand_as(x) for x in marked.split(64, -1)], -1)
    assert not redone.all()
    o[~redone] -= 1
    assert_right(*before[:3], o.float(), lse, variant)


@pytest.mark.skipif(not is_interpreted(), reason="Triton interprets only where there is no GPU")
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_nan_in_a_value_reaches_the_rows_that_see_it_and_no_others():
    sizes, variant = Sizes(1, 1, 1, 200, 200, 64), Variant(0.125, right=0)
    before = simulate(sizes, variant, FORWARD[64], dtype=torch.float16, nan_at=150)
    q, k, v, o, lse = (x.to(torch.float16) if x.dim() == 4 else x.clone() for x in before)
    assert lse[..., 128:150].isnan().any(), "the fixed reference cannot tell what is hidden"
    redo_launch(q, k, v, o, variant)(q, k, v, o, lse, *NO_EXTRAS)
    assert o[..., 150:, 3].isnan().all()
    o[..., 150:, 3] = v[..., 150, 3] = 0
    right = torch.arange(64) != 3
    assert_right(*before[:2], v.float(), o.float(), lse, variant, right)


def simulate_broken(head_dim, function, old, new):
    """Run a kernel with other text, several times over: not every order of events shows it."""
    sizes, variant = Sizes(1, 2, 2, 300, 300, head_dim), Variant(0.125, right=0)
    for seed in (1, 0, 3, 2):
        simulate(sizes, variant, FORWARD[head_dim], seed=seed, edits={function: (old, new)})


WAIT_FOR_K = "mbarrier.wait(buffers.k_full.index(ring.k), ring.k_phase)"


@pytest.mark.parametrize(
    ("error", "head_dim", "function", "old", "new"),
    [
        # a stage that is never given back
        ("deadlock; .*producer .*: named barrier 1[012]", 64, softmax.step,
         "barrier_arrive(K_FREE + ring.k, THREADS)", ""),
        ("deadlock", 64, consumer.attend_tile, "barrier_arrive(V_FREE + ring.v, THREADS)", ""),
        # a turn that is kept
        ("deadlock; .*consumer", 64, softmax.step, "give_turn(W, CONSUMERS)", ""),
        # a stage given back while a product reads it
        ("written while it is still being read", 64, softmax.step,
         "s = warpgroup_mma_wait(1, deps=[s_token])", "s = s_token.value"),
        # K or V read before it has landed
        ("read while a copy into it is on its way|parity .* twice", 64, softmax.first_step,
         WAIT_FOR_K, ""),
        ("read while a copy into it is on its way|parity .* twice", 64, softmax.first_step,
         "mbarrier.wait(buffers.v_full.index(ring.v), ring.v_phase)", ""),
        # a stage given back before it has landed, by rows that skip it
        ("a copy into it is on its way|parity .* twice", 256, consumer.skip_blocks, WAIT_FOR_K, ""),
        # o laid down where the one before still leaves
        ("written while it is still being read", 64, consumer.store_output,
         "    tma_store_wait(0)\n", ""),
        ("written while it is still being read", 256, consumer.consumer,
         "            tma_store_wait(0)", "            pass"),
        # a parity that does not turn when the ring is round
        ("one parity of an mbarrier twice", 64, primitives.next_stage,
         "phase ^ wraps.to(gl.int32)", "phase"),
        # bytes that nobody announced
        ("deadlock|more arrivals", 64, producer.load_tile,
         "CONSUMERS * 64 * ROW_BYTES", "64 * ROW_BYTES"),
        # releases that are not taken back at the end
        ("ends half full", 64, producer.producer,
         "barrier_sync(gl.to_tensor(K_FREE + stage), THREADS)", "pass"),
    ],
)  # fmt: skip
def test_broken_kernel_is_noticed(error, head_dim, function, old, new):
    with pytest.raises(ProtocolError, match=error):
        simulate_broken(head_dim, function, old, new)


def test_failed_row_that_is_not_marked_is_wrong():
    edits = {consumer.has_failed: ("(holds == 0)", "(holds != holds)")}
    variant = Variant(0.125)
    left = simulate(Sizes(1, 1, 1, 70, 300, 64), variant, FORWARD[64], growth=200, edits=edits)
    with pytest.raises(AssertionError, match="not close"):
        assert_right(*left, variant)

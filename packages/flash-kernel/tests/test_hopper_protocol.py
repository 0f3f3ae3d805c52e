"""The Hopper forward on a simulated SM: who waits for whom, and what comes out."""

import numpy as np
import pytest
import torch

pytest.importorskip("triton.experimental.gluon", reason="the kernel is written in Gluon")

from direct_launches import launch_forward
from gluon_simulator import (
    Descriptor,
    PackedDescriptor,
    Pointer,
    ProtocolError,
    Simulator,
    Value,
    rounded,
)

from flash_kernel._hopper import consumer, primitives, producer, softmax
from flash_kernel._hopper.config import LONG, forward_config
from flash_kernel._hopper.forward import flash_attention_hopper_forward_kernel
from flash_kernel._hopper.forward_spec import (
    Sizes,
    clipped,
    count_tiles,
    forward_spec,
    score_factors,
)
from flash_kernel._triton.launch import NO_EXTRAS, redo_launch
from flash_kernel._triton.prepared import is_interpreted
from flash_kernel.reference import dense_attention
from flash_kernel.variant import PLAIN, Packing, Variant


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
    q, k, v = make_inputs(sizes, str(dtype).removeprefix("torch."), growth, seed)
    if nan_at is not None:
        v[:, :, nan_at, 3] = np.nan
    o, lse = run(q, k, v, sizes, variant, config, dtype=dtype, seed=seed, edits=edits)
    return tuple(map(torch.from_numpy, (q, k, v, o, lse)))


def run(q, k, v, sizes, variant, config, *, dtype, seed, edits=None, ends=(None, None)):
    """Return o and lse; ``ends`` say where packed sequences do."""
    o = np.full_like(q, np.nan)
    lse = np.full(q.shape[:3], np.nan, np.float32)
    variant = clipped(variant, sizes)
    spec = forward_spec(config, dtype, sizes, variant)
    units, row_tiles = count_tiles(spec, sizes)
    ctas = min(2, units * row_tiles)
    workspace = np.zeros(2, np.int64)
    scalars = (sizes.seqlen_q, sizes.seqlen_k, variant.left or 0, variant.right or 0)
    scalars += (sizes.num_heads, sizes.group, units, row_tiles, max(1, units - 1))
    numbers = []
    simulator = Simulator(seed, edits)
    simulator.watch(producer.locate, lambda number, *_: numbers.append(int(number)))
    simulator.launch(
        flash_attention_hopper_forward_kernel,
        ctas,
        (
            *descriptors(q, k, v, o, spec, dtype),
            *(Pointer(lse.reshape(-1)), Pointer(workspace)),
            *(None if x is None else Pointer(np.array(x)) for x in ends),
            *map(Value, (*scalars, sizes.num_sequences or 0)),
            *(*score_factors(variant), spec),
        ),
    )
    assert not workspace.any(), "the workspace is left as it was found"
    assert sorted(numbers) == list(range(units * row_tiles))
    return o, lse


def descriptors(q, k, v, o, spec, dtype):
    """Return the kernel's first eight arguments."""
    kind, leading = (PackedDescriptor, [1, 1, 1]) if spec.IS_PACKED else (Descriptor, [1, 1])
    blocks = ((q, 64), (k, spec.BLOCK_N), (v, spec.BLOCK_N), (o, 64))
    made = [
        kind(x, [*leading, rows, width], str(dtype).removeprefix("torch."))
        for width in spec.WIDTHS
        for x, rows in blocks
    ]
    return made + [None] * (8 - len(made))


def assert_right(q, k, v, o, lse, variant, columns=slice(None)):
    """Compare o, or some of its columns, and lse with float64."""
    expected, expected_lse = dense_attention(q.double(), k.double(), v.double(), variant, PLAIN)
    # p is rounded to bfloat16, and so is o
    error = dict.fromkeys(("rtol", "atol"), 2**-8)
    torch.testing.assert_close(o.double()[..., columns], expected[..., columns], **error)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-6, atol=1e-5)


def check(sizes, *, left=None, right=None, softcap=None, **options):
    """Simulate scores that do not grow: no row is marked, and all are right."""
    config = options.pop("config", forward_config(sizes.head_dim, sizes.seqlen_k))
    variant = Variant(sizes.head_dim**-0.5, left, right, softcap)
    assert_right(*simulate(sizes, variant, config, **options), variant)


# several tiles for each CTA, ends within and at the edge of blocks, few and many keys
@pytest.mark.parametrize(
    ("head_dim", "seqlen_q", "seqlen_k", "right"),
    [(64, 1, 1, None), (64, 257, 129, None), (64, 70, 300, 0), (64, 300, 70, 0), (64, 256, 256, 0),
     (96, 257, 257, 0), (80, 130, 300, None), (128, 257, 257, 0), (192, 130, 300, 0),
     (256, 200, 200, 0), (256, 130, 300, None)],
)  # fmt: skip
def test_forward_is_right_and_its_barriers_hold(head_dim, seqlen_q, seqlen_k, right):
    for seed in (0, 1) if head_dim == 64 else (1,):
        check(Sizes(1, 2, 2, seqlen_q, seqlen_k, head_dim), right=right, seed=seed)


def test_three_consumers_hold():
    check(Sizes(1, 1, 1, 257, 450, 64), right=0, config=forward_config(64, LONG))


@pytest.mark.parametrize("window", [(100, 0), (0, 0), (64, 64), (200, 17), (None, 5), (130, None)])
def test_window_hides_keys(window):
    for lengths in ((130, 300), (300, 130)):
        check(Sizes(1, 1, 1, *lengths, 64), left=window[0], right=window[1])


def test_softcap_bounds_the_scores():
    check(Sizes(1, 1, 1, 130, 300, 64), right=0, softcap=0.5)


@pytest.mark.parametrize(("num_heads", "num_heads_k"), [(4, 1), (3, 1)])
def test_heads_of_a_group_share_keys(num_heads, num_heads_k):
    check(Sizes(2, num_heads, num_heads_k, 150, 150, 64), right=0)


# queries and keys of each sequence: over the end of a tile, one row, more queries than keys, none
PACKED = [(70, 200), (1, 65), (200, 70), (0, 40), (65, 0), (64, 64)]


def simulate_packed(lengths, variant, *, heads=(2, 1), head_dim=64, seed=0, alone=None):
    """Return q, k, v, o and lse of packed sequences, by sequence.

    ``alone``: the others are NaN, and what they get does not count.
    """
    of_q, of_k = zip(*lengths, strict=True)
    sizes = Sizes(1, *heads, sum(of_q), sum(of_k), head_dim, len(lengths))
    q, k, v = make_inputs(sizes, "bfloat16", 0, 0)
    ends_q, ends_k = np.cumsum([0, *of_q]), np.cumsum([0, *of_k])
    if alone is not None:
        for x, ends in ((q, ends_q), (k, ends_k), (v, ends_k)):
            x[:, :, : ends[alone]] = x[:, :, ends[alone + 1] :] = np.nan
    config = forward_config(head_dim, sizes.longest_keys)
    o, lse = run(
        q, k, v, sizes, variant, config, dtype=torch.bfloat16, seed=seed, ends=(ends_q, ends_k)
    )
    ends = ends_q, ends_k, ends_k, ends_q, ends_q
    by_tensor = [
        torch.from_numpy(x).split(np.diff(e).tolist(), 2)
        for x, e in zip((q, k, v, o, lse), ends, strict=True)
    ]
    return list(zip(*by_tensor, strict=True))


@pytest.mark.parametrize(
    ("left", "right", "heads"), [(None, None, (2, 1)), (None, 0, (3, 1)), (50, 10, (1, 1))]
)
def test_packed_sequences_are_right(left, right, heads):
    variant = Variant(0.125, left, right)
    for seed in (0, 1):
        for one in simulate_packed(PACKED, variant, heads=heads, seed=seed):
            if one[0].shape[2]:
                assert_right(*one, variant)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("right", [None, 0])
def test_packed_sequence_never_sees_its_neighbours(right):
    variant = Variant(0.125, None, right)
    together = simulate_packed(PACKED, variant)
    for index in (0, 2):
        alone = simulate_packed(PACKED, variant, alone=index)
        for x, y in zip(together[index], alone[index], strict=True):
            assert torch.equal(x, y)


@pytest.mark.parametrize(("dtype", "growth"), [(torch.bfloat16, 200), (torch.float16, 60)])
def test_rows_of_growing_scores_are_marked_and_others_keep_their_bits(dtype, growth):
    sizes, variant = Sizes(1, 3, 3, 200, 300, 64), Variant(0.125, right=0)
    plain = simulate(sizes, variant, forward_config(64, 300), dtype=dtype)
    grown = simulate(sizes, variant, forward_config(64, 300), dtype=dtype, growth=growth)
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
    before = simulate(sizes, variant, forward_config(64, 300), dtype=torch.float16, growth=60)
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
def test_marked_tiles_of_packed_sequences_are_done_again_and_no_others():
    ends = torch.tensor([0, 20, 20, 120, 150], dtype=torch.int32)
    random = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 1, 2, 150, 64, generator=random).half()
    packing, variant = Packing(ends, ends), Variant(0.125, right=0)
    expected, expected_lse = launch_forward(q, k, v, variant, packing=packing)
    o, lse = torch.full_like(q, 7), expected_lse.clone()
    # rows 20 to 119 are tiles of 64 and 36 rows: the first, and all of the last sequence
    lse[0, 1, 50] = lse[0, 0, 149] = float("nan")
    redo_launch(q, k, v, o, variant, 4)(q, k, v, o, lse, *PLAIN, ends, ends)
    redone = torch.zeros(1, 2, 150, dtype=torch.bool)
    redone[0, 1, 20:84] = redone[0, 0, 120:] = True
    assert torch.equal(lse, expected_lse)
    assert (o[~redone] == 7).all()
    torch.testing.assert_close(o[redone], expected[redone], rtol=2**-9, atol=2**-9)


@pytest.mark.skipif(not is_interpreted(), reason="Triton interprets only where there is no GPU")
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_nan_in_a_value_reaches_the_rows_that_see_it_and_no_others():
    sizes, variant = Sizes(1, 1, 1, 200, 200, 64), Variant(0.125, right=0)
    before = simulate(sizes, variant, forward_config(64, 300), dtype=torch.float16, nan_at=150)
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
    for seed in (1, 0, 5, 2):
        simulate(
            sizes, variant, forward_config(head_dim, 300), seed=seed, edits={function: (old, new)}
        )


WAIT_FOR_K = "mbarrier.wait(buffers.k_full.index(ring.k), ring.k_phase)"


@pytest.mark.parametrize(
    ("error", "head_dim", "function", "old", "new"),
    [
        # a stage that is never given back
        ("deadlock; .*producer .*: named barrier 1[012]", 64, softmax.step,
         "barrier_arrive(K_FREE + ring.k, SPEC.THREADS)", ""),
        ("deadlock", 64, consumer.attend_tile, "barrier_arrive(V_FREE + ring.v, SPEC.THREADS)", ""),
        # a turn that is kept
        ("deadlock; .*consumer", 64, softmax.step, "give_turn(W, SPEC.CONSUMERS)", ""),
        # a stage given back while a product reads it
        ("written while it is still being read", 64, softmax.step,
         "s = warpgroup_mma_wait(len(acc), deps=[s_token])", "s = s_token.value"),
        # scores of two pieces, used when the first is there
        ("used before it was waited for", 96, softmax.step,
         "warpgroup_mma_wait(len(acc), deps", "warpgroup_mma_wait(len(acc) + 1, deps"),
        # K or V read before it has landed
        ("read while a copy into it is on its way|parity .* twice", 64, softmax.first_step,
         WAIT_FOR_K, ""),
        ("read while a copy into it is on its way|parity .* twice", 64, softmax.first_step,
         "mbarrier.wait(buffers.v_full.index(ring.v), ring.v_phase)", ""),
        # a stage given back before it has landed, by rows that skip it
        ("a copy into it is on its way|parity .* twice", 256, consumer.skip_blocks, WAIT_FOR_K, ""),
        # o laid down where the one before still leaves
        ("written while it is still being read", 64, consumer.store,
         "    tma_store_wait(0)\n", ""),
        ("written while it is still being read", 256, consumer.consumer,
         "            tma_store_wait(0)", "            pass"),
        # a parity that does not turn when the ring is round
        ("one parity of an mbarrier twice", 64, primitives.next_stage,
         "phase ^ wraps.to(gl.int32)", "phase"),
        # bytes that nobody announced
        ("deadlock|more arrivals", 64, producer.load_rows,
         "CONSUMERS * 64 * SPEC.ROW_BYTES", "64 * SPEC.ROW_BYTES"),
        # releases that are not taken back at the end
        ("ends half full", 64, producer.finish,
         "barrier_sync(gl.to_tensor(K_FREE + stage), SPEC.THREADS)", "pass"),
    ],
)  # fmt: skip
def test_broken_kernel_is_noticed(error, head_dim, function, old, new):
    with pytest.raises(ProtocolError, match=error):
        simulate_broken(head_dim, function, old, new)


def test_failed_row_that_is_not_marked_is_wrong():
    edits = {consumer.has_failed: ("(holds == 0)", "(holds != holds)")}
    variant = Variant(0.125)
    left = simulate(
        Sizes(1, 1, 1, 70, 300, 64), variant, forward_config(64, 300), growth=200, edits=edits
    )
    with pytest.raises(AssertionError, match="not close"):
        assert_right(*left, variant)

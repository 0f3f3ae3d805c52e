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
from flash_kernel.reference import dense_attention
from flash_kernel.variant import Modifiers, Variant


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


def simulate(sizes, variant, config, *, dtype=torch.bfloat16, growth=0, seed=0, edits=None):
    """Run the kernel on two CTAs; return o, lse, float64's, and the tiles done again."""
    name = str(dtype).removeprefix("torch.")
    q, k, v = make_inputs(sizes, name, growth, seed)
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
    words = []
    simulator = Simulator(seed, edits)
    simulator.watch(producer.post, lambda word, *_: words.append(int(word)))
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
    done = [word >> 1 for word in words if word != tiles.END.value and word % 2 == 0]
    assert sorted(done) == list(range(units * row_tiles)), "each tile is handed out once"
    again = [word >> 1 for word in words if word != tiles.END.value and word % 2 == 1]
    expected = dense_attention(
        *(torch.from_numpy(x).double() for x in (q, k, v)), variant, Modifiers()
    )
    return (torch.from_numpy(o), torch.from_numpy(lse)), expected, again


def check(sizes, *, left=None, right=None, **options):
    """Compare o and lse with float64; return them, and the tiles done again."""
    config = options.pop("config", FORWARD.get(sizes.head_dim))
    variant = Variant(sizes.head_dim**-0.5, left, right)
    (o, lse), (expected, expected_lse), again = simulate(sizes, variant, config, **options)
    assert not o.isnan().any()
    # p is rounded to bfloat16, and so is o
    torch.testing.assert_close(o.double(), expected, rtol=2**-8, atol=2**-8)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-6, atol=1e-5)
    return o, lse, again


# several tiles for each CTA, ends within and at the edge of blocks, few and many keys
@pytest.mark.parametrize("right", [None, 0], ids=["full", "causal"])
@pytest.mark.parametrize(
    ("head_dim", "seqlen_q", "seqlen_k"),
    [(64, 1, 1), (64, 200, 200), (64, 256, 256), (64, 70, 300), (64, 300, 70), (64, 257, 129),
     (128, 257, 257), (128, 300, 70), (256, 200, 200), (256, 130, 300)],
)  # fmt: skip
def test_forward_is_right_and_its_barriers_hold(head_dim, seqlen_q, seqlen_k, right):
    sizes = Sizes(1, 2, 2, seqlen_q, seqlen_k, head_dim)
    for seed in (0, 1) if head_dim == 64 else (head_dim // 128,):
        assert check(sizes, right=right, seed=seed)[2] == []


@pytest.mark.parametrize("right", [None, 0], ids=["full", "causal"])
@pytest.mark.parametrize("config", FORWARD_LONG.values(), ids=map(str, FORWARD_LONG))
def test_configurations_of_long_sequences_hold(config, right):
    head_dim = 64 if config.consumers == 3 else 256
    check(Sizes(1, 1, 1, 257, 450, head_dim), right=right, config=config)


@pytest.mark.parametrize("window", [(100, 0), (0, 0), (64, 64), (200, 17), (None, 5), (130, None)])
def test_window_hides_keys(window):
    for lengths in ((300, 300), (130, 400), (400, 130)):
        check(Sizes(1, 1, 1, *lengths, 64), left=window[0], right=window[1])


@pytest.mark.parametrize(("num_heads", "num_heads_k"), [(4, 1), (4, 2), (3, 1)])
def test_heads_of_a_group_share_keys(num_heads, num_heads_k):
    for right in (None, 0):
        check(Sizes(2, num_heads, num_heads_k, 150, 150, 64), right=right)


@pytest.mark.parametrize(
    ("dtype", "growth", "head_dim"),
    [(torch.bfloat16, 200, 64), (torch.bfloat16, 200, 256), (torch.float16, 60, 64)],
)
def test_tiles_of_growing_scores_alone_are_done_again(dtype, growth, head_dim):
    for right in (None, 0):
        plain = check(Sizes(1, 3, 3, 300, 300, head_dim), right=right, dtype=dtype)
        grown = check(Sizes(1, 3, 3, 300, 300, head_dim), right=right, dtype=dtype, growth=growth)
        assert plain[2] == []
        assert 1 <= len(set(grown[2])) == len(grown[2]) <= 3
        for x, y in zip(plain[:2], grown[:2], strict=True):
            assert torch.equal(x[:, :2], y[:, :2]), "heads without growth keep their bits"


def simulate_broken(head_dim, function, old, new):
    """Run a kernel with other text, several times over: not every order of events shows it."""
    sizes, variant = Sizes(1, 2, 2, 600, 600, head_dim), Variant(0.125, right=0)
    for seed in range(4):
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
        ("deadlock|more arrivals", 64, producer.load_queries,
         "CONSUMERS * 64 * ROW_BYTES", "64 * ROW_BYTES"),
        # releases that are not taken back at the end
        ("ends half full", 64, producer.producer,
         "barrier_sync(gl.to_tensor(K_FREE + stage), THREADS)", "pass"),
    ],
)  # fmt: skip
def test_broken_kernel_is_noticed(error, head_dim, function, old, new):
    with pytest.raises(ProtocolError, match=error):
        simulate_broken(head_dim, function, old, new)


def test_overflow_without_a_verdict_shows_in_the_values():
    edits = {consumer.failed_rows: ("(holds == 0)", "(holds != holds)")}
    (o, _), (expected, _), again = simulate(
        Sizes(1, 1, 1, 300, 300, 64), Variant(0.125), FORWARD[64], growth=200, edits=edits
    )
    assert again == []
    assert not torch.allclose(o.double(), expected, rtol=1e-2, atol=1e-2)

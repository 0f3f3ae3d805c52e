"""The Hopper backward on a simulated SM: who waits for whom, and what comes out."""

import dataclasses
import types
from functools import cache, partial

import numpy as np
import pytest
import torch

pytest.importorskip("triton.experimental.gluon", reason="the kernel is written in Gluon")

import triton.language as tl
from direct_launches import launch_hopper_backward
from gluon_simulator import (
    Buffer,
    Descriptor,
    Mbarrier,
    Pointer,
    Simulator,
    Value,
    View,
    plain,
)

from flash_kernel._hopper import (
    backward,
    backward_copies,
    backward_launch,
    backward_step,
    backward_tiles,
    reduce,
)
from flash_kernel._hopper.backward_launch import LOG2_E
from flash_kernel._triton.prepared import is_aligned
from flash_kernel.reference import dense_attention
from flash_kernel.variant import Modifiers, Variant

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(),
    reason="the small kernels before and after run in Triton's interpreter, which is off here",
)


class Joined:
    """Buffers seen as one: what happens to it happens to all of them."""

    def __init__(self, parts):
        self.parts, self.dtype = parts, parts[0].dtype

    def check_written(self):
        for part in self.parts:
            part.check_written()
            part.array[...] = np.nan  # what lay there has another shape

    def check_read(self):
        for part in self.parts:
            part.check_read()

    @property
    def readers(self):
        return self.parts[0].readers

    @readers.setter
    def readers(self, count):
        change = count - self.readers
        for part in self.parts:
            part.readers += change


class BackwardSimulator(Simulator):
    """Adds what only the backward uses: sums in global memory, turns, and memory seen anew."""

    def __init__(self, seed, edits):
        super().__init__(seed, edits)
        self.stand_ins |= {
            id(tl): self._triton(),
            id(reduce.tma_reduce_add): partial(self.copy_out, add=True),
            id(backward_copies.tma_store): self.copy_out,
            id(reduce.reductions_have_landed): self.wait_for_landing,
            id(reduce.reinterpret): self.reinterpret,
            id(backward_copies.wait_for_turn): self.wait_for_turn,
        }
        self.landing = {}
        self.landings = []
        run = self.scheduler.run

        def run_until_sums_have_landed():
            run()
            # the end of a kernel waits for them
            for event in [x for x in self.scheduler.events if x in self.landings]:
                self.scheduler.events.remove(event)
                event()

        self.scheduler.run = run_until_sums_have_landed

    def _triton(self):
        language = self._language()
        return types.SimpleNamespace(**vars(language), cast=lambda x, _: x)

    def _language(self):
        language = super()._language()
        allocate = language.allocate_shared_memory

        def allocate_any(dtype, shape, layout):
            if len(shape) > 1:
                memory = allocate(dtype, shape, layout)
                memory.layout = layout
                return memory
            if dtype == "int64":
                self.mbarriers.append(Mbarrier())
                return self.mbarriers[-1]
            buffer = Buffer(shape, dtype)
            return View(buffer, buffer.array)

        def atomic_add(pointer, value, sem=None):
            self.scheduler.block(lambda: True, "")
            where = np.asarray(pointer.offset).astype(np.int64)
            old = pointer.array[where].copy()
            np.add.at(pointer.array, where, plain(value))
            return Value(old)

        language.allocate_shared_memory = allocate_any
        language.atomic_add = atomic_add
        language.convert_layout = lambda x, _, assert_trivial=False: x
        language.cdiv = lambda x, y: (x + y - 1) // y
        language.num_warps = lambda: 4
        language.NVMMASharedLayout = lambda **_: None
        return language

    def copy_out(self, descriptor, where, view, add=False):
        """Read shared memory at some time, and write to global memory at some later time."""
        where, task = [int(x) for x in where], self.task
        view.buffer.check_read()
        view.buffer.readers += 1
        self.landing[task] = self.landing.get(task, 0) + 1

        def leave():
            inside, filled = descriptor.box(where)
            tile = view.array.reshape(descriptor.block_shape)[filled].copy()
            view.buffer.readers -= 1
            task.stores.remove(leave)

            def land():
                descriptor.array[inside] = tile + (descriptor.array[inside] if add else 0)
                self.landing[task] -= 1

            self.scheduler.events.append(land)
            self.landings.append(land)

        task.stores.append(leave)
        self.scheduler.events.append(leave)

    def wait_for_landing(self):
        task = self.task
        self.scheduler.block(lambda: not self.landing.get(task), "its sums")

    def wait_for_turn(self, pointer, rank):
        where = int(pointer.offset)
        self.scheduler.block(lambda: pointer.array[where] >= plain(rank), f"turn {rank}")

    def reinterpret(self, stages, shape, layout):
        size = stages.buffers[0].array.size
        share = len(stages.buffers) * size // shape[0]

        @cache
        def index(i):
            first, last = i * share // size, ((i + 1) * share - 1) // size
            joined = Joined(stages.buffers[first : last + 1])
            return View(joined, np.full(shape[1:], np.nan, np.float32))

        return types.SimpleNamespace(index=index)


def as_float(x):
    return x.float().numpy()


def simulated_launch(seed, edits, ctas, together):
    """Return what takes the place of `prepare_main`: a launch that runs on the simulator."""

    def prepare(q, k, variant, spec, _):
        problem = backward_launch.problem_of(q, k, variant, spec)._replace(heads_together=together)
        name = str(q.dtype).removeprefix("torch.")

        def launch(q, k, v, do, dk, dv, statistics, dq_sum, _, counters, marks):
            queries, keys = ([1, 1, rows, spec.BLOCK_D] for rows in (spec.BLOCK_M, 64))
            dk_out, dv_out = (np.full(x.shape, np.nan, np.float32) for x in (dk, dv))
            sums = dq_sum.numpy()
            simulator = BackwardSimulator(seed, edits)
            simulator.launch(
                backward.flash_attention_backward_kernel,
                min(ctas, problem.num_tiles),
                (
                    Descriptor(as_float(q), queries, name),
                    Descriptor(as_float(k), keys, name),
                    Descriptor(as_float(v), keys, name),
                    Descriptor(as_float(do), queries, name),
                    Descriptor(dk_out, keys, name),
                    Descriptor(dv_out, keys, name),
                    Descriptor(statistics.numpy(), [2 * spec.BLOCK_M], "float32"),
                    Descriptor(sums, [16, 256], "float32"),
                    Pointer(sums.reshape(-1)),
                    Pointer(counters.numpy()),
                    Pointer(np.zeros(0) if marks is None else marks.numpy().reshape(-1)),
                    *map(Value, problem),
                    *(variant.scale, variant.scale * LOG2_E, spec),
                ),
            )
            dk.copy_(torch.from_numpy(dk_out))
            dv.copy_(torch.from_numpy(dv_out))

        launch.compiled = "simulated"
        return launch

    return prepare


def simulate(
    monkeypatch, lengths, head_dim, variant, *, heads=(2, 2), dtype=torch.bfloat16, seed=0,
    is_deterministic=True, is_rotated=False, edits=None, ctas=3, together=2, by_tma=None,
    nan_in=None,
):  # fmt: skip
    """Return dq, dk and dv of the whole host path, the main kernel simulated, and the expected.

    Row POSITION of ``nan_in`` holds a NaN that is not expected anywhere.
    """
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
    expected = torch.autograd.grad((o, finite), leaves, (do.double(), dlse.double()))
    if nan_in is not None:
        dict(zip(NAMES, (q, k, v, do), strict=True))[nan_in][..., POSITION, 3] = torch.nan
    prepare = simulated_launch(seed, edits, ctas, together)
    monkeypatch.setattr(backward_launch, "prepare_main", prepare)
    if is_rotated:
        monkeypatch.setattr(backward_launch, "ROTATED_FROM", 1)
    if by_tma is not None:
        specify = backward_launch.specify
        monkeypatch.setattr(
            backward_launch,
            "specify",
            lambda *x, **y: dataclasses.replace(specify(*x, **y), DQ_BY_TMA=by_tma),
        )
    results = launch_hopper_backward(
        q, k, v, o.detach().to(dtype), lse.detach().float(), do, dlse.float(), variant,
        is_deterministic=is_deterministic,
    )  # fmt: skip
    return results[:3], expected


NAMES = ("q", "k", "v", "do")
SEQLEN, POSITION = 150, 100


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize(
    ("head_dim", "heads", "window", "is_deterministic", "where"),
    [
        (64, (1, 1), (None, 0), True, "q"),
        (40, (1, 1), (30, 5), False, "v"),
        (128, (2, 1), (None, 0), True, "k"),
        (72, (1, 1), (30, 5), False, "do"),
    ],
    ids=str,
)
def test_nan_reaches_those_who_see_it_and_no_other(
    monkeypatch, head_dim, heads, window, is_deterministic, where
):
    """Where a result is not finite, it is computed anew, and exactly."""
    left, right = window
    options = {
        "variant": Variant(0.1, left, right), "heads": heads, "is_deterministic": is_deterministic,
        "lengths": (SEQLEN, SEQLEN), "head_dim": head_dim, "dtype": torch.float16,
    }  # fmt: skip
    got, expected = simulate(monkeypatch, **options, nan_in=where)
    distance = torch.arange(SEQLEN)[None, :] - torch.arange(SEQLEN)[:, None]  # key - row
    visible = (distance <= right) & (distance >= -(SEQLEN if left is None else left))
    rows = torch.arange(SEQLEN) == POSITION if where in ("q", "do") else visible[:, POSITION]
    keys = visible[rows].any(0)
    assert not rows.all()
    for x, y, reached in zip(got, expected, (rows, keys, keys), strict=True):
        x, y = x[:, :, ~reached].double(), y[:, :, ~reached]
        torch.testing.assert_close(x, y, rtol=2**-7, atol=2**-7)
    assert not got[0][:, :, rows].isfinite().flatten(2).all()
    assert not got[1][:, :, keys].isfinite().flatten(2).all()


def check(*arguments, **options):
    results, expected = simulate(*arguments, **options)
    for name, x, y in zip(("dq", "dk", "dv"), results, expected, strict=True):
        # p and ds are rounded, o was, and so is the result
        error, bound = (x.double() - y).norm(), 6e-3 * y.norm() + 1e-6
        assert error <= bound, f"{name}: {error:.3g} > {bound:.3g}"


def test_layout_the_copy_engine_cannot_read_is_refused_with_advice():
    q, k = torch.randn(1, 2, 8, 65), torch.randn(1, 2, 8, 64)
    lse = torch.randn(1, 2, 8)
    with pytest.raises(ValueError, match=r"`q` .* got strides .* Pass backward='triton'"):
        launch_hopper_backward(q[..., 1:], k, k, k, lse, k, None, Variant(0.125))


def test_contiguous_gradient_at_an_odd_address_is_copied_to_an_aligned_one():
    do = torch.randn(1 + 2 * 8 * 64)[1:].view(1, 2, 8, 64)  # as a slice of a larger gradient
    assert do.is_contiguous()
    assert not is_aligned(do)
    copy = backward_launch.copied(do)
    assert is_aligned(copy)
    assert torch.equal(copy, do)


MODES = pytest.mark.parametrize(
    "mode",
    [{"is_deterministic": True}, {"is_rotated": True}, {"is_deterministic": False}],
    ids=["ordered", "rotated", "fast"],
)


@MODES
@pytest.mark.parametrize(
    ("head_dim", "lengths", "right"),
    [(64, (256, 256), None), (64, (200, 200), 0), (128, (300, 70), 0), (128, (70, 300), None)],
    ids=str,
)
def test_backward_is_right_and_its_barriers_hold(monkeypatch, lengths, head_dim, right, mode):
    variant = Variant(head_dim**-0.5, right=right)
    check(monkeypatch, lengths, head_dim, variant, **mode)


@pytest.mark.parametrize(("window", "is_deterministic"), [((50, 0), True), ((70, 30), False)])
def test_window_hides_keys(monkeypatch, window, is_deterministic):
    check(
        monkeypatch, (200, 330), 64, Variant(0.125, *window), heads=(1, 1),
        is_deterministic=is_deterministic,
    )  # fmt: skip


@MODES
def test_heads_of_a_group_share_keys(monkeypatch, mode):
    check(
        monkeypatch, (150, 150), 64, Variant(0.2, right=0), heads=(3, 1), dtype=torch.float16,
        **mode,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("lengths", "right"),
    [((900, 900), None), ((900, 900), 0), ((500, 1000), 0), ((1000, 400), 0), ((1000, 400), None)],
    ids=str,
)
def test_rotated_tiles_reach_every_block_they_see(monkeypatch, lengths, right):
    check(
        monkeypatch, lengths, 128, Variant(0.1, right=right), heads=(1, 1), is_rotated=True, ctas=5
    )


@pytest.mark.parametrize("head_dim", [8, 40, 72])
def test_head_dim_between_is_padded(monkeypatch, head_dim):
    check(monkeypatch, (130, 130), head_dim, Variant(0.1, right=0), heads=(1, 1))


@pytest.mark.parametrize("is_rotated", [False, True], ids=["ordered", "rotated"])
def test_ordered_sums_are_the_same_whatever_runs_first(monkeypatch, is_rotated):
    options = {"heads": (1, 1), "is_rotated": is_rotated}
    alone, *others = (
        simulate(monkeypatch, (300, 500), 64, Variant(0.125), ctas=ctas, seed=seed, **options)[0]
        for ctas, seed in ((1, 0), (3, 1), (4, 2))
    )
    for other in others:
        for x, y in zip(alone, other, strict=True):
            assert torch.equal(x, y)


@pytest.mark.parametrize(
    ("function", "old", "new", "error"),
    [
        # the room of q and do is never given back, or that of k and v
        (backward_step.step, "mbarrier.arrive(barriers.q_empty.index(stage), count=1)", "",
         "deadlock; .*produce"),
        (backward.store_tile, "mbarrier.arrive(barriers.tile_empty, count=1)", "",
         "deadlock; .*produce"),
        # ds of the other warpgroup is read before it is there
        (backward_step.step, "mbarrier.wait(barriers.ds_full.index(stage), phase)", "",
         "dq: |written while it is still being read"),
        # dv overwrites ds while the other warpgroup reads it
        (backward.store_tile, "mbarrier.wait(barriers.ds_empty, parity)", "",
         "dq: |written while it is still being read"),
        # ds overwrites dk on its way out
        (backward.consume, "tma_store_wait(0)  # of the tile before", "pass  #",
         "written while it is still being read"),
        # do is read before it has landed
        (backward_copies.produce, "mbarrier.expect(do_full, BYTES + BLOCK_M * 8)",
         "mbarrier.expect(do_full, BLOCK_M * 8)", "on its way|more arrivals|deadlock"),
        # the reducer gives a buffer back before it has been read, or never
        (backward_copies.reduce_block, "    tma_store_wait(0)\n", "",
         "written while it is still being read"),
        (backward_copies.reduce_block, "barriers.dq_empty.index(slot + w), count=1",
         "barriers.dq_empty.index(slot + w), count=w", "deadlock"),
        # turns: given on before the sum is in memory, never given on, taken before they come
        (backward_copies.reduce_block, "        reductions_have_landed()\n", "", "dq: "),
        (backward_copies.reduce_block, 'gl.atomic_add(turn_ptr, 1, sem="release")', "pass",
         "deadlock; .*turn"),
        (backward_copies.reduce_block, "wait_for_turn(turn_ptr, rank)", "pass", "dq: "),
        # a turn for which a tile with a higher number has to be done
        (backward_tiles.turn_of, "return row, tile_k - first_tile",
         "return row, gl.cdiv(x.seqlen_k, SPEC.BLOCK_N) - 1 - tile_k", "deadlock; .*turn"),
    ],
)  # fmt: skip
def test_broken_kernel_is_noticed(monkeypatch, function, old, new, error):
    def try_schedules():
        for seed in range(8):
            check(
                monkeypatch, (300, 500), 64, Variant(0.125), heads=(1, 1), seed=seed, ctas=2,
                edits={function.fn: (old, new)},
            )  # fmt: skip

    with pytest.raises(AssertionError, match=error):
        try_schedules()

"""dk and dv of wide heads on a simulated SM: who waits for whom, and what comes out."""

import types

import numpy as np
import pytest
import torch

pytest.importorskip("triton.experimental.gluon", reason="the kernel is written in Gluon")

import triton.language as tl
from gluon_simulator import Descriptor, Pointer, Simulator, Value

from flash_kernel._hopper import wide_dk_dv
from flash_kernel._hopper.forward_spec import Sizes, clipped
from flash_kernel._hopper.wide_dk_dv_launch import problem_of, specify
from flash_kernel.reference import dense_attention
from flash_kernel.variant import Modifiers, Variant


class WideSimulator(Simulator):
    """Adds the functions of plain Triton that the kernel shares with the portable ones."""

    def __init__(self, seed, edits):
        super().__init__(seed, edits)
        language = vars(self._language())
        self.stand_ins[id(tl)] = types.SimpleNamespace(**language, cast=lambda x, _: x)

    def _language(self):
        language = super()._language()
        language.cdiv = lambda x, y: (x + y - 1) // y
        language.convert_layout = lambda x, _, assert_trivial=False: x
        return language


def make_inputs(sizes, dtype):
    torch.manual_seed(0)
    lengths = {"q": sizes.seqlen_q, "k": sizes.seqlen_k, "v": sizes.seqlen_k, "do": sizes.seqlen_q}
    heads = {"q": sizes.num_heads, "do": sizes.num_heads}
    return {
        name: torch.randn(
            sizes.batch, heads.get(name, sizes.num_heads_k), n, sizes.head_dim, dtype=dtype
        )
        for name, n in lengths.items()
    }


def row_statistics(o, lse, do, dlse, padded):
    """Return what the portable kernel of that name does."""
    delta = (o * do).sum(-1) - dlse
    statistics = torch.zeros(*lse.shape[:2], 2, padded)
    statistics[:, :, 0] = torch.inf
    statistics[:, :, 0, : lse.shape[2]] = torch.where(lse.isinf(), torch.inf, lse)
    statistics[:, :, 1, : lse.shape[2]] = delta
    return statistics


def simulate(
    sizes, variant, *, dtype=torch.bfloat16, seed=0, edits=None, ctas=2, together=None, nan_at=None,
    scores_first=(False, False),
):  # fmt: skip
    """Return dk, dv and the marks, and the dk and dv expected."""
    inputs = make_inputs(sizes, dtype)
    leaves = [inputs[name].double().requires_grad_() for name in ("q", "k", "v")]
    o, lse = dense_attention(*leaves, variant, Modifiers())
    dlse = torch.randn(lse.shape)
    finite = lse.masked_fill(lse.isinf(), 0)
    do = inputs["do"].double()
    expected = torch.autograd.grad((o, finite), leaves, (do, dlse.double()))
    if nan_at is not None:
        inputs["do"][:, :, nan_at, 3] = torch.nan
    variant = clipped(variant, sizes)
    spec = specify(sizes, variant)
    import dataclasses

    spec = dataclasses.replace(spec, SCORES_FIRST=scores_first)
    problem = problem_of(sizes, variant, spec)
    if together is not None:
        problem = problem._replace(heads_together=together)
    name = str(dtype).removeprefix("torch.")
    keys = sizes.batch, sizes.num_heads_k, sizes.seqlen_k
    dk, dv = (np.full((*keys, sizes.head_dim), np.nan, np.float32) for _ in range(2))
    tensors = [inputs[x].float().numpy() for x in ("q", "k", "v", "do")] + [dk, dv]
    pieces = [[Descriptor(x, [1, 1, 64, width], name) for x in tensors] for width in spec.WIDTHS]
    statistics = row_statistics(
        o.detach(), lse.detach(), inputs["do"].double(), dlse, problem.padded_q
    )
    marks = np.full(problem.num_tiles, -1)
    workspace = np.zeros(2, np.int64)
    WideSimulator(seed, edits).launch(
        wide_dk_dv.flash_attention_wide_dk_dv_kernel,
        min(ctas, problem.num_tiles),
        (
            *pieces[0],
            *pieces[-1],
            Descriptor(statistics.float().numpy().reshape(-1), [64], "float32"),
            Pointer(marks),
            Pointer(workspace),
            *map(Value, problem),
            spec,
        ),
    )
    assert not workspace.any(), "the next launch counts from 0"
    return (torch.from_numpy(dk), torch.from_numpy(dv), marks), expected[1:]


def check(*arguments, **options):
    (*results, marks), expected = simulate(*arguments, **options)
    for name, x, y in zip(("dk", "dv"), results, expected, strict=True):
        # p and ds are rounded, and so is the result
        error, bound = (x.double() - y).norm(), 6e-3 * y.norm() + 1e-6
        assert error <= bound, f"{name}: {error:.3g} > {bound:.3g}"
    return marks


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
@pytest.mark.parametrize("right", [None, 0], ids=["full", "causal"])
@pytest.mark.parametrize(
    ("head_dim", "lengths"),
    [(256, (256, 256)), (256, (200, 330)), (192, (330, 200)), (136, (1, 70))],
    ids=str,
)
def test_gradients_are_right_and_the_barriers_hold(head_dim, lengths, right, dtype):
    variant = Variant(head_dim**-0.5, right=right)
    for first in ((False, False), (True, True), (True, False), (False, True)):
        for seed in range(4):
            check(
                Sizes(1, 2, 2, *lengths, head_dim),
                variant,
                dtype=dtype,
                seed=seed,
                scores_first=first,
            )


@pytest.mark.parametrize("window", [(50, 0), (70, 30), (0, 0), (None, 100)], ids=str)
def test_window_hides_keys(window):
    marks = check(Sizes(2, 1, 1, 200, 330, 256), Variant(0.1, *window), together=1)
    assert (marks == 0).all()


def test_heads_of_a_group_share_keys():
    for together in (1, 2):
        check(Sizes(1, 6, 2, 150, 150, 256), Variant(0.1, right=0), together=together, ctas=3)


if __name__ == "__main__":
    import time

    t = time.time()
    check(Sizes(1, 2, 2, 200, 330, 256), Variant(1 / 16, right=0), scores_first=(True, True))
    print(time.time() - t)

"""Whatever is asked, the answer is as near to float64 as the rule of `flash_kernel.testing` says.

Hypothesis draws the question: lengths, widths, strides, dtype, magnitudes, and any combination of
options.  The numbers come from its seed, so that an example that fails can be repeated.
"""

from dataclasses import dataclass
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

from flash_kernel import flash_attention
from flash_kernel.testing import assert_matches_reference
from flash_kernel.variant import Modifiers

REPEATABLE = settings(
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
HALF = (torch.float16, torch.bfloat16)
LAYOUTS = ("contiguous", "rows first", "padded", "columns first")
MODIFIERS = ("alibi_slopes", "bias", "mask", "sinks")
TAKES = {  # the modifiers that each implementation has
    "mock": (),
    "torch": ("bias", "mask"),
    "reference": MODIFIERS,
    "triton": MODIFIERS,
}
# not autograd of the reference, which would be compared with itself
BACKWARD = {"mock": "auto", "torch": "auto", "reference": "dense", "triton": "triton"}


@dataclass(frozen=True)
class Problem:
    """A question, in numbers and names alone."""

    seed: int
    dtype: torch.dtype
    batch: int
    heads: tuple[int, int]  # of q, and of k and v
    lengths: tuple[int, int]
    widths: tuple[int, int]  # of q and k, and of v
    layouts: tuple[str, str, str, str]  # of q, k, v and do
    magnitude: float  # of q, k and v
    is_causal: bool
    window: tuple[int | None, int | None] | None
    softcap: float | None
    modifiers: frozenset[str]
    has_dlse: bool


def problems(impl, *, max_length, width, dtypes):
    """Return a strategy of questions that an implementation can answer."""
    is_plain, has_all = impl == "mock", TAKES[impl] == MODIFIERS
    side = st.none() | st.integers(0, max_length)
    length = st.integers(1, max_length)
    return st.builds(
        Problem,
        seed=st.integers(0, 2**16),
        dtype=st.sampled_from(dtypes),
        batch=st.integers(1, 2),
        heads=st.sampled_from([(2, 2), (3, 3)] if is_plain else [(2, 2), (4, 2), (3, 1)]),
        lengths=st.tuples(length, length),
        widths=width.map(lambda d: (d, d)) if is_plain else st.tuples(width, width),
        layouts=st.tuples(*[st.sampled_from(LAYOUTS)] * 4),
        magnitude=st.sampled_from([0.01, 1.0, 4.0]),
        is_causal=st.booleans(),
        window=st.none() if is_plain else st.none() | st.tuples(side, side),
        softcap=st.sampled_from([None, 0.5, 20.0]) if has_all else st.none(),
        modifiers=st.frozensets(st.sampled_from(TAKES[impl])) if TAKES[impl] else st.just(()),
        has_dlse=st.booleans() if impl != "torch" else st.just(False),
    )


def laid_out(x, layout):
    """Return the same ``[B, H, rows, D]`` by other strides."""
    if layout == "rows first":
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    if layout == "padded":  # odd strides, and a start that no TMA takes
        return F.pad(x, (1, 2, 0, 1))[..., :-1, 1:-2]
    return x.mT.contiguous().mT if layout == "columns first" else x.contiguous()


def check(impl, problem, device):
    """Draw the numbers of a question, and judge the answer by the rule."""
    generator = torch.Generator().manual_seed(problem.seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator).to(device, problem.dtype)

    batch, (heads, heads_kv), (seqlen_q, seqlen_k) = problem.batch, problem.heads, problem.lengths
    width, width_v = problem.widths
    shapes = [(heads, seqlen_q, width), (heads_kv, seqlen_k, width), (heads_kv, seqlen_k, width_v)]
    q, k, v = (problem.magnitude * normal(batch, *shape) for shape in shapes)
    do, dlse = normal(batch, heads, seqlen_q, width_v), normal(batch, heads, seqlen_q)
    q, k, v, do = (laid_out(x, y) for x, y in zip((q, k, v, do), problem.layouts, strict=True))
    drawn = {
        "alibi_slopes": torch.rand(heads, generator=generator).to(device),
        "bias": normal(heads, seqlen_q, seqlen_k),
        "mask": (torch.rand(batch, 1, seqlen_q, seqlen_k, generator=generator) < 0.7).to(device),
        "sinks": normal(heads),
    }
    modifiers = {name: drawn[name] for name in problem.modifiers}
    options = {
        "is_causal": problem.is_causal,
        "window": problem.window,
        "softcap": problem.softcap,
    }
    wish = {"impl": impl, "backward": BACKWARD[impl], "return_lse": impl != "torch"}
    fn = partial(flash_attention, **options, **modifiers, **wish)
    # the gradient of lse is as exact as lse
    dlse = dlse.to(torch.promote_types(problem.dtype, torch.float32)) if problem.has_dlse else None
    assert_matches_reference(
        fn, q, k, v, **options, modifiers=Modifiers(**modifiers), do=do, dlse=dlse
    )


@pytest.mark.parametrize(
    ("impl", "max_length", "max_examples"),
    [("reference", 40, 40), ("torch", 40, 60), ("mock", 130, 12)],  # a tile of the mock is 64
)
def test_answers_on_a_cpu_are_as_exact_as_promised(impl, max_length, max_examples):
    dtypes = (*HALF, torch.float32, torch.float64)

    @given(problem=problems(impl, max_length=max_length, width=st.integers(1, 40), dtypes=dtypes))
    @settings(REPEATABLE, max_examples=max_examples)
    def every(problem):
        check(impl, problem, "cpu")

    every()


def test_kernels_are_as_exact_as_promised_on_a_few_tiny_problems(device):
    dtypes = (*HALF, torch.float32)

    @given(problem=problems("triton", max_length=20, width=st.integers(1, 16), dtypes=dtypes))
    @settings(REPEATABLE, max_examples=5)
    def every(problem):
        check("triton", problem, device)

    every()


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("part", range(8))  # nearly every example compiles: spread them
def test_kernels_are_as_exact_as_promised_on_a_gpu(part, device):
    dtypes, width = (*HALF, torch.float32), st.sampled_from([8, 40, 64, 128])

    @seed(part)
    @given(problem=problems("triton", max_length=300, width=width, dtypes=dtypes))
    @settings(REPEATABLE, max_examples=25)
    def every(problem):
        check("triton", problem, device)

    every()

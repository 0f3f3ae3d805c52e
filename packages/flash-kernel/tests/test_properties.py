"""Whatever is asked, the answer is as near to float64 as the rule of `flash_kernel.testing` says.

Hypothesis draws the question: lengths, widths, strides, dtype, magnitudes, and any combination of
options.  The numbers come from its seed, so that an example that fails can be repeated.
"""

from dataclasses import dataclass
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from flash_kernel import flash_attention
from flash_kernel.testing import assert_matches_reference
from flash_kernel.variant import Modifiers

REPEATABLE = settings(
    derandomize=True,
    database=None,
    deadline=None,
    phases=[Phase.generate],  # to shrink an example, kernels would be compiled for hours
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
class Kernel:
    """What decides which kernel is compiled; its questions differ in numbers alone."""

    dtype: torch.dtype
    heads: tuple[int, int]  # of q, and of k and v
    widths: tuple[int, int]  # of q and k, and of v
    layouts: tuple[str, str, str, str]  # of q, k, v and do
    lengths: tuple[range, range]  # of q, and of k and v: in steps of 16, as alignment counts
    is_causal: bool
    sides: tuple[bool, bool]  # of a window: which are bounded
    has_softcap: bool
    modifiers: frozenset[str]
    has_dlse: bool


@dataclass(frozen=True)
class Problem:
    """A question to a kernel."""

    kernel: Kernel
    seed: int
    batch: int
    lengths: tuple[int, int]
    magnitude: float  # of q, k and v
    sides: tuple[int, int]
    softcap: float

    @property
    def options(self):
        """The options of a call that are numbers."""
        given = zip(self.sides, self.kernel.sides, strict=True)
        return {
            "is_causal": self.kernel.is_causal,
            "window": tuple(side if is_bounded else None for side, is_bounded in given),
            "softcap": self.softcap if self.kernel.has_softcap else None,
        }


def kernels(impl, *, max_length, max_width, dtypes):
    """Return a strategy of kernels that an implementation has."""
    is_plain, has_all = impl == "mock", TAKES[impl] == MODIFIERS
    width, side = st.integers(1, max_width), st.just(False) if is_plain else st.booleans()
    lengths = st.integers(1, 16).map(lambda first: range(first, max_length + 1, 16))
    # heads of more than 256 rows are read through descriptors
    of_keys = lengths | lengths.map(lambda x: [y for y in x if y > 256] or x)
    return st.builds(
        Kernel,
        dtype=st.sampled_from(dtypes),
        heads=st.sampled_from([(2, 2), (3, 3)] if is_plain else [(2, 2), (4, 2), (3, 1)]),
        widths=width.map(lambda d: (d, d)) if is_plain else st.tuples(width, width),
        layouts=st.tuples(*[st.sampled_from(LAYOUTS)] * 4),
        lengths=st.tuples(lengths, of_keys),
        is_causal=st.booleans(),
        sides=st.tuples(side, side),
        has_softcap=st.booleans() if has_all else st.just(False),
        modifiers=st.frozensets(st.sampled_from(TAKES[impl])) if TAKES[impl] else st.just(()),
        has_dlse=st.booleans() if impl != "torch" else st.just(False),
    )


def problems(kernel):
    """Return a strategy of questions to a kernel."""
    side = st.integers(0, max(max(x) for x in kernel.lengths))
    return st.builds(
        Problem,
        kernel=st.just(kernel),
        seed=st.integers(0, 2**16),
        batch=st.integers(1, 2),
        lengths=st.tuples(*map(st.sampled_from, kernel.lengths)),
        magnitude=st.sampled_from([0.01, 1.0, 4.0]),
        sides=st.tuples(side, side),
        softcap=st.sampled_from([0.5, 20.0]),
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
        return torch.randn(*shape, generator=generator).to(device, kernel.dtype)

    kernel, batch, (seqlen_q, seqlen_k) = problem.kernel, problem.batch, problem.lengths
    (heads, heads_kv), (width, width_v) = kernel.heads, kernel.widths
    shapes = [(heads, seqlen_q, width), (heads_kv, seqlen_k, width), (heads_kv, seqlen_k, width_v)]
    q, k, v = (problem.magnitude * normal(batch, *shape) for shape in shapes)
    do, dlse = normal(batch, heads, seqlen_q, width_v), normal(batch, heads, seqlen_q)
    q, k, v, do = (laid_out(x, y) for x, y in zip((q, k, v, do), kernel.layouts, strict=True))
    drawn = {
        "alibi_slopes": torch.rand(heads, generator=generator).to(device),
        "bias": normal(heads, seqlen_q, seqlen_k),
        "mask": (torch.rand(batch, 1, seqlen_q, seqlen_k, generator=generator) < 0.7).to(device),
        "sinks": normal(heads),
    }
    modifiers = {name: drawn[name] for name in kernel.modifiers}
    wish = {"impl": impl, "backward": BACKWARD[impl], "return_lse": impl != "torch"}
    fn = partial(flash_attention, **problem.options, **modifiers, **wish)
    # the gradient of lse is as exact as lse
    dlse = dlse.to(torch.promote_types(kernel.dtype, torch.float32)) if kernel.has_dlse else None
    assert_matches_reference(
        fn, q, k, v, **problem.options, modifiers=Modifiers(**modifiers), do=do, dlse=dlse
    )


@pytest.mark.parametrize(
    ("impl", "max_length", "max_examples"),
    [("reference", 40, 40), ("torch", 40, 60), ("mock", 130, 12)],  # a tile of the mock is 64
)
def test_answers_on_a_cpu_are_as_exact_as_promised(impl, max_length, max_examples):
    dtypes = (*HALF, torch.float32, torch.float64)
    asked = kernels(impl, max_length=max_length, max_width=40, dtypes=dtypes).flatmap(problems)

    @given(problem=asked)
    @settings(REPEATABLE, max_examples=max_examples)
    def every(problem):
        check(impl, problem, "cpu")

    every()


# the interpreter's numpy, in the tanh of a large score: 1 - 2 / (1 + inf); and in hidden scores
@pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning")
def test_kernels_are_as_exact_as_promised_on_a_few_tiny_problems(device):
    dtypes = (*HALF, torch.float32)
    asked = kernels("triton", max_length=20, max_width=16, dtypes=dtypes).flatmap(problems)

    @given(problem=asked)
    @settings(REPEATABLE, max_examples=5)
    def every(problem):
        check("triton", problem, device)

    every()


# nearly all the time is the compiler's: so each kernel is asked several questions, and the parts
# are small enough to be spread
@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("part", range(32))
def test_kernels_are_as_exact_as_promised_on_a_gpu(part, device):
    # exact products of float32 take the compiler longest where they are wide
    dtypes, max_width = (HALF, 256) if part % 4 else ((torch.float32,), 64)
    compiled = kernels("triton", max_length=320, max_width=max_width, dtypes=dtypes)

    @seed(part)
    @given(data=st.data(), kernel=compiled)
    @settings(REPEATABLE, max_examples=3)
    def every(data, kernel):
        for _ in range(6):
            check("triton", data.draw(problems(kernel)), device)

    every()

from dataclasses import replace

import pytest

from attn_bench.case import PRESETS, Case, Grid
from attn_bench.errors import InputError


def test_paper_preset_keeps_tokens_and_width() -> None:
    cases = PRESETS["paper"].cases()
    assert len(cases) == 2 * 2 * 6 * 2  # head dims, masks, lengths, modes
    assert {case.batch * case.seqlen_q for case in cases} == {16384}
    assert {case.num_heads * case.head_dim for case in cases} == {2048}
    assert {case.dtype for case in cases} == {"bf16"}


def test_grid_puts_the_modes_of_a_shape_next_to_each_other() -> None:
    cases = PRESETS["smoke"].cases()
    assert all(a.shape == b.shape for a, b in zip(cases[::2], cases[1::2], strict=True))
    assert {case.mode for case in cases[::2]} == {"fwd"}


def test_d_model_and_heads_give_the_head_dim() -> None:
    grid = Grid(("fp32",), (8,), d_models=(64, 128), num_heads=(4,), batches=(3,))
    assert {(case.num_heads, case.head_dim) for case in grid.cases()} == {(4, 16), (4, 32)}


def test_keys_may_outnumber_queries() -> None:
    grid = Grid(("fp32",), (8,), num_heads=(1,), head_dims=(4,), seqlens_k=(20,), batches=(1,))
    assert {(case.seqlen_q, case.seqlen_k) for case in grid.cases()} == {(8, 20)}


@pytest.mark.parametrize(
    ("preset", "given", "expected"),
    [
        ("paper", {"head_dims": (256,)}, {(8, 256)}),
        ("paper", {"num_heads": (4,)}, {(4, 64), (4, 128)}),
        ("smoke", {"d_models": (128,)}, {(4, 32)}),
        ("smoke", {"head_dims": (8,)}, {(2, 8)}),
        ("smoke", {"d_models": (128,), "num_heads": (8,)}, {(8, 16)}),
    ],
)
def test_given_heads_replace_what_contradicts_them_in_the_preset(
    preset: str, given: dict[str, tuple[int, ...]], expected: set[tuple[int, int]]
) -> None:
    cases = PRESETS[preset].with_axes(given).cases()
    assert {(case.num_heads, case.head_dim) for case in cases} == expected


def test_a_given_batch_replaces_the_preset_tokens() -> None:
    cases = replace(PRESETS["paper"], batches=(3,)).cases()
    assert {case.batch for case in cases} == {3}


@pytest.mark.parametrize(
    ("axes", "message"),
    [
        ({"num_heads": (3,)}, "exactly two of `--d-model`, `--heads` and `--head-dim`"),
        ({"head_dims": (48,)}, "`d_model` 2048 is not a multiple of head_dim 48"),
        ({"total_tokens": 100}, "must be at least the length 512, got 100"),
        ({"dtypes": ("fp8",)}, "unknown dtype 'fp8'; choose from 'fp32', 'fp16', 'bf16'"),
        ({"modes": ("sideways",)}, "unknown mode 'sideways'"),
    ],
)
def test_contradicting_axes_are_refused(axes: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        replace(PRESETS["paper"], **axes).cases()  # type: ignore[arg-type]


def test_a_size_of_zero_is_refused() -> None:
    with pytest.raises(InputError, match="`seqlen_k` must be at least 1, got 0"):
        Case("fp32", 1, 1, 4, 0, 8, False, "fwd")

from dataclasses import replace
from pathlib import Path

import pytest

from attn_bench.case import Case
from attn_bench.errors import InputError
from attn_bench.grid import DECODE_PRESETS, PRESETS, Grid, grid_of_model
from attn_bench.run_file import read_run_file

SUITE_PRESETS = {"flash": PRESETS, "decode": DECODE_PRESETS}


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


def test_heads_of_k_and_v_divide_those_of_q() -> None:
    with pytest.raises(InputError, match="`num_heads` 6 is not a multiple of num_kv_heads 4"):
        Case("fp32", 1, 6, 4, 4, 8, False, "fwd", num_kv_heads=4)
    case = Case("bf16", 1, 32, 4, 4, 8, True, "fwd", num_kv_heads=8, window=2)
    assert case.kv_heads == 8
    assert str(case) == "bf16 b=1 h=32/8 n=4 d=8 causal w=2 fwd"


def test_as_many_heads_of_k_and_v_as_of_q_is_the_plain_case() -> None:
    grid = Grid(("fp32",), (8,), num_heads=(4,), head_dims=(8,), batches=(1,))
    assert replace(grid, num_kv_heads=(4,)).cases() == grid.cases()


def test_course_preset_reaches_65536_in_both_dtypes() -> None:
    cases = PRESETS["course"].cases()
    assert {case.seqlen_q for case in cases} == {2**power for power in range(7, 17)}
    assert {case.dtype for case in cases} == {"bf16", "fp32"}
    assert {(case.batch, case.is_causal) for case in cases} == {(1, True)}


def test_the_shapes_of_a_model_have_its_heads_and_window() -> None:
    cases = grid_of_model("mistral-7b").cases()
    assert {(case.num_heads, case.kv_heads, case.head_dim, case.window) for case in cases} == {
        (32, 8, 128, 4096)
    }
    assert {case.kv_heads for case in grid_of_model("gpt2").cases()} == {12}
    with pytest.raises(InputError, match="unknown model 'gpt5'; choose from 'gpt2'"):
        grid_of_model("gpt5")


def test_a_run_file_holds_grids_of_its_own_and_of_presets(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(
        'providers = ["sdpa"]\n[[grid]]\npreset = "smoke"\nseqlens_q = [16]\nmodes = ["fwd"]\n'
        '[[grid]]\ndtypes = ["bf16"]\nseqlens_q = [8]\nnum_heads = [4]\nnum_kv_heads = [2]\n'
        'head_dims = [8]\nbatches = [1]\ncausal = [true]\nwindows = [3]\nmodes = ["fwd"]\n'
    )
    asked = read_run_file(path, SUITE_PRESETS)
    assert (asked.suite, asked.providers) == ("flash", ["sdpa"])
    assert [str(case) for case in asked.cases] == [
        "fp32 b=1 h=2 n=16 d=32 full fwd",
        "fp32 b=1 h=2 n=16 d=32 causal fwd",
        "bf16 b=1 h=4/2 n=8 d=8 causal w=3 fwd",
    ]


def test_a_run_file_of_a_suite_starts_from_that_suites_presets(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text('suite = "decode"\n[[grid]]\npreset = "serving"\nbatches = [8]\n')
    asked = read_run_file(path, SUITE_PRESETS)
    assert asked.suite == "decode"
    assert {(case.seqlen_q, case.batch) for case in asked.cases} == {(1, 8)}
    path.write_text('suite = "flash"\n[[grid]]\npreset = "serving"\n')
    with pytest.raises(InputError, match="unknown preset 'serving'; choose from 'smoke'"):
        read_run_file(path, SUITE_PRESETS)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "needs at least one table"),
        ('suite = "speed"\n[[grid]]', "unknown suite in .*: 'speed'; choose from 'flash'"),
        ("grid = 3", "needs at least one table"),
        ("[[grid]", "is not TOML"),
        ("speed = 1", "unknown key in .*: 'speed'; choose from 'suite', 'providers', 'grid'"),
        ("[[grid]]\nseqlen = [1]", "unknown axis in .*: 'seqlen'"),
        ('[[grid]]\nseqlens_q = ["8"]', "`seqlens_q` must be a list of int, got"),
        ("[[grid]]\nseqlens_q = [8]", "a grid without a preset needs `dtypes`"),
        ('[[grid]]\npreset = "huge"', "unknown preset 'huge'"),
        ("providers = 3\n[[grid]]", "`providers` must be a list of names, got 3"),
    ],
)
def test_a_bad_run_file_is_refused_in_one_line(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "run.toml"
    path.write_text(text)
    with pytest.raises(InputError, match=message) as caught:
        read_run_file(path, SUITE_PRESETS)
    assert "\n" not in str(caught.value)

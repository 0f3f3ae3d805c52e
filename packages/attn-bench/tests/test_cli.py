import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from attn_bench.cli import main
from attn_bench.providers import DECODE_PROVIDERS, Attention, Provider
from attn_bench.results import RowWriter, read_results
from attn_bench.tables import NOT_PERFORMANCE
from flash_kernel import attention_reference

CPU = ["--device", "cpu"]
TINY = [*CPU, "--seqlen", "9", "--causal", "yes", "--milliseconds", "1"]
Plant = Callable[[str, Attention], Provider]


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    path = tmp_path / "flash.jsonl"
    providers = ["--provider", "dense-eager", "sdpa"]
    assert main(["flash", *TINY, *providers, "--mode", "fwd", "--save", str(path)]) == 0
    return path


def test_flash_checks_times_prints_and_saves(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "flash.jsonl"
    arguments = ["flash", *TINY, "--mode", "fwd", "--provider", "dense-eager", "sdpa"]
    assert main([*arguments, "--save", str(path)]) == 0
    out = capsys.readouterr().out
    assert NOT_PERFORMANCE in out
    assert "x sdpa" in out  # the baseline is torch's own choice where the flash backend is left out
    assert "FLOPs: fwd 4*B*H*P*D" in out
    results = read_results(path)
    assert [(row.provider, row.state) for row in results.rows] == [
        ("dense-eager", "ok"),
        ("sdpa", "ok"),
    ]
    assert results.environment["torch"] == torch.__version__
    expected = {"device", "driver", "triton", "python", "commit", "dirty", "date"}
    assert expected <= set(results.environment)


def test_flash_takes_the_axes_of_the_original(tmp_path: Path) -> None:
    path = tmp_path / "grid.jsonl"
    axes = ["--dtype", "fp32", "bf16", "--d-model", "32", "64", "--heads", "2"]
    axes += ["--seqlen", "8", "--seqlen-k", "12", "--batch", "1", "2", "--causal", "no", "yes"]
    arguments = ["flash", *axes, "--mode", "bwd", "--provider", "dense-eager"]
    run = [*CPU, "--milliseconds", "1", "--save", str(path)]
    assert main([*arguments, *run]) == 0
    cases = [row.case for row in read_results(path).rows]
    assert len(set(cases)) == 2**4
    assert {(case.num_heads, case.head_dim) for case in cases} == {(2, 16), (2, 32)}
    assert {(case.seqlen_q, case.seqlen_k, case.mode) for case in cases} == {(8, 12, "bwd")}


def test_a_wrong_provider_makes_the_command_fail(
    plant: Plant, capsys: pytest.CaptureFixture[str]
) -> None:
    def forgets_the_mask(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention_reference(q, k, v, is_causal=False)[0]

    plant("planted", forgets_the_mask)
    assert main(["flash", *TINY, "--mode", "fwd", "--provider", "planted"]) == 1
    out = capsys.readouterr().out
    assert "planted: wrong: `o`: error max" in out
    assert "TFLOP/s" in out


def test_the_baseline_is_one_that_was_timed(capsys: pytest.CaptureFixture[str]) -> None:
    different = ["--seqlen", "9", "--seqlen-k", "12", "--causal", "yes", "--mode", "fwd"]
    providers = ["--provider", "sdpa-flash", "dense-eager", "sdpa"]
    run = [*CPU, "--milliseconds", "1"]
    assert main(["flash", *different, *providers, *run]) == 0
    out = capsys.readouterr().out
    assert "x sdpa " in out
    assert "sdpa-flash: unsupported: torch aligns its causal mask top-left" in out


def test_layer_times_tiny_llms_attention(tmp_path: Path) -> None:
    path = tmp_path / "layer.jsonl"
    assert main(["layer", *TINY, "--provider", "layer-eager", "--save", str(path)]) == 0
    rows = read_results(path).rows
    assert {(row.suite, row.provider, row.state) for row in rows} == {
        ("attention_layer", "layer-eager", "ok")
    }


def test_layer_compares_with_and_without_compiling(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Inductor itself is left to the GPU's tests: on two CPU cores it takes a minute."""

    def compiled_in_half_a_second(module: torch.nn.Module, **_: object) -> torch.nn.Module:
        is_new = True

        def compile_at_first(*_: object) -> None:
            nonlocal is_new
            if is_new:
                time.sleep(0.5)
                is_new = False

        module.register_forward_pre_hook(compile_at_first)
        return module

    monkeypatch.setattr("torch.compile", compiled_in_half_a_second)
    monkeypatch.setenv("CXX", sys.executable)  # as if there was a compiler
    path = tmp_path / "layer.jsonl"
    assert main(["layer", *TINY, "--mode", "fwd", "--save", str(path)]) == 0
    eager, compiled = read_results(path).rows
    assert (eager.state, compiled.state) == ("ok", "ok")
    # compiling is in the first call's time and not in the other one
    assert compiled.first_call_ms is not None
    assert compiled.median_ms is not None
    assert compiled.first_call_ms > 500 > 20 * compiled.median_ms


def test_list_says_why_a_provider_is_unavailable(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", "--device", "cpu"]) == 0
    lines = capsys.readouterr().out.splitlines()
    (cudnn,) = (line for line in lines if line.startswith("sdpa-cudnn"))
    assert cudnn.endswith("cuDNN needs a CUDA device")
    (dense,) = (line for line in lines if line.startswith("dense-eager"))
    assert dense.endswith("available")
    assert "attn-bench layer: tiny-llm's ScaledDotProductAttention" in "\n".join(lines)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "the following arguments are required: COMMAND"),
        (["fly"], "invalid choice: 'fly'"),
        (["flash", "--preset", "huge"], "argument --preset: invalid choice: 'huge'"),
        (["flash", "--seqlen", "0"], "argument --seqlen: needs an integer of at least 1, got '0'"),
        (
            ["flash", *CPU, "--provider", "falsh"],
            "unknown provider 'falsh'; choose from",
        ),
        (
            ["flash", *CPU, "--baseline", "flex"],
            "unknown baseline 'flex'; choose from",
        ),
        (
            ["flash", *CPU, "--d-model", "64", "--heads", "2", "--head-dim", "32"],
            "exactly two of `--d-model`, `--heads` and `--head-dim`",
        ),
        (["flash", "--device", "tpu"], "device 'tpu'"),
        (["flash", *CPU, "--save", "no/such/folder/r.jsonl"], "No such file or directory"),
        (["quick", *CPU, "--save", "."], "it is a folder; give a file name"),
        (["quick", "--device", "cuda:99"], "device 'cuda:99' is not there"),
        (["table", "missing.jsonl"], "cannot read missing.jsonl: No such file or directory"),
        (["docs", "missing.md"], "cannot read missing.md: No such file or directory"),
    ],
)
def test_bad_input_is_one_line_and_status_2(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    (line,) = captured.err.splitlines()
    assert line.startswith("attn-bench")
    assert message in line


def test_an_unwritable_path_is_found_before_anything_is_measured(
    plant: Plant, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def never(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        raise AssertionError("was called")

    plant("never", never)
    path = tmp_path / "file" / "r.jsonl"
    path.parent.write_text("a file, no folder")
    assert main(["flash", *TINY, "--provider", "never", "--save", str(path)]) == 2
    assert "cannot write" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == [path.parent]


def test_an_interrupted_run_is_gone_on_with(
    plant: Plant, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stop = True
    calls = []

    def interrupted(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        calls.append(q.shape[2])
        if q.shape[2] == 9 and stop:
            raise KeyboardInterrupt
        return attention_reference(q, k, v, is_causal=True)[0]

    plant("interrupted", interrupted)
    path = tmp_path / "r.jsonl"
    arguments = ["flash", *TINY, "--seqlen", "8", "9", "--mode", "fwd", "--save", str(path)]
    arguments += ["--provider", "sdpa", "interrupted"]
    assert main(arguments) == 130
    assert "interrupted; `--resume` goes on if rows were saved" in capsys.readouterr().err
    assert [each.name for each in tmp_path.iterdir()] == ["r.jsonl.partial"]
    assert main(arguments) == 2
    assert "pass `--resume`" in capsys.readouterr().err
    stop = False
    calls.clear()
    assert main([*arguments, "--resume"]) == 0
    assert set(calls) == {9}
    rows = read_results(path).rows
    assert [(row.case.seqlen_q, row.provider) for row in rows] == [
        *((8, "sdpa"), (8, "interrupted")),
        *((9, "sdpa"), (9, "interrupted")),
    ]
    assert list(tmp_path.iterdir()) == [path]


def test_a_row_carries_its_semantics_rates_and_predictions(saved: Path) -> None:
    results = read_results(saved)
    assert set(results.environment["ceilings"]) == {"matmul_tflops", "copy_gb_s"}
    for row in results.rows:
        assert row.semantics["alignment"] == "bottom-right"
        assert row.median_ms is not None
        assert row.predicted_mib is not None
        assert row.roofline_share is not None
        assert row.roofline_share > 0
        assert row.tflops_unmasked == pytest.approx((row.tflops or 0) * 81 / 45)
        assert min(row.samples_ms) <= row.median_ms <= max(row.samples_ms)


def test_decode_reads_the_cache_with_one_query(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "decode.jsonl"
    arguments = ["decode", *CPU, "--seqlen-k", "33", "--milliseconds", "1", "--save", str(path)]
    assert main([*arguments, "--provider", "sdpa", "dense-eager"]) == 0
    assert "GB/s" in capsys.readouterr().out
    for row in read_results(path).rows:
        assert (row.suite, row.state) == ("decode", "ok")
        assert (row.case.seqlen_q, row.case.seqlen_k, row.case.kv_heads) == (1, 33, 2)
        # q, o: 2 sequences of 4 heads; k, v: of 2 heads with 33 keys; 32 numbers of 4 bytes
        bytes_moved = 2 * (2 * 4 + 2 * 2 * 33) * 32 * 4
        assert row.gb_s == pytest.approx(bytes_moved / ((row.median_ms or 0) * 1e6))


def test_decode_takes_providers_that_cannot_differentiate(
    plant: Plant, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def forward_only(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q.detach(), k, v, enable_gqa=True)

    provider = plant("forward-only", forward_only)
    monkeypatch.setitem(DECODE_PROVIDERS, provider.name, provider)
    path = tmp_path / "decode.jsonl"
    arguments = ["decode", *CPU, "--milliseconds", "1", "--provider", provider.name]
    assert main([*arguments, "--save", str(path)]) == 0
    assert {row.state for row in read_results(path).rows} == {"ok"}
    assert {tuple(row.errors) for row in read_results(path).rows} == {("o",)}
    assert main([*arguments, "--mode", "fwd+bwd"]) == 2


def test_env_prints_what_goes_with_a_result(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["env", *CPU]) == 0
    lines = capsys.readouterr().out.splitlines()
    printed = dict(line.split(maxsplit=1) for line in lines)
    assert printed["torch"] == torch.__version__
    assert printed["device_type"] == "cpu"
    assert printed["ceilings"].startswith("matmul fp32 ")


def test_run_takes_its_grids_from_a_file(tmp_path: Path) -> None:
    grid, path = tmp_path / "grid.toml", tmp_path / "r.jsonl"
    grid.write_text(
        'providers = ["sdpa", "layer-eager"]\n[[grid]]\npreset = "smoke"\nseqlens_q = [8]\n'
        'num_kv_heads = [1]\nwindows = [3]\ncausal = [true]\nmodes = ["fwd"]\n'
    )
    run = [*CPU, "--milliseconds", "1", "--save", str(path)]
    assert main(["run", str(grid), *run]) == 0
    sdpa, layer = read_results(path).rows
    assert (sdpa.state, layer.state) == ("ok", "unsupported")
    assert (sdpa.case.num_kv_heads, sdpa.case.window) == (1, 3)


@pytest.mark.slow
def test_the_first_call_in_a_new_process_is_a_figure_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    arguments = ["flash", *TINY, "--mode", "fwd", "--provider", "sdpa", "--cold-start"]
    assert main([*arguments, "--save", str(path)]) == 0
    (row,) = read_results(path).rows
    assert row.cold_call_ms is not None
    assert 0 < row.cold_call_ms < 60_000
    assert row.note == ""


def test_table_prints_markdown(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    assert main(["table", str(saved), "--metric", "ms"]) == 0
    out = capsys.readouterr().out
    assert f"**{NOT_PERFORMANCE}.**" in out
    assert "| dense-eager |" in " ".join(out.split())


def test_table_takes_some_of_the_rows(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    assert main(["table", str(saved), "--csv", "--provider", "sdpa"]) == 0
    assert [line.split(",")[1] for line in capsys.readouterr().out.splitlines()] == [
        *("provider", "sdpa")
    ]
    assert main(["table", str(saved), "--mode", "bwd"]) == 2
    assert "none of the rows was timed" in capsys.readouterr().err
    assert main(["table", str(saved), "--metric", "speed"]) == 2
    assert "unknown metric 'speed'" in capsys.readouterr().err


def test_rows_that_were_only_checked_are_in_no_table(
    saved: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    row = read_results(saved).rows[0].failed("ok", "")
    with saved.open("a") as file:
        RowWriter(file, None).write(replace(row, suite="quick_check", provider="only-checked"))
    capsys.readouterr()
    assert main(["table", str(saved)]) == 0
    assert "only-checked" not in capsys.readouterr().out


def test_a_reader_that_leaves_early_is_no_failure(saved: Path) -> None:
    table = f"{sys.executable} -m attn_bench table {saved}"
    command = ["bash", "-c", f"{table} | true; echo ${{PIPESTATUS[0]}}"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == "141\n"
    assert done.stderr == ""


def test_help_needs_no_torch() -> None:
    code = "import sys; from attn_bench.cli import main; main(['flash', '--help'])"
    command = [sys.executable, "-c", f"{code}; print('torch' in sys.modules)"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "False"
    for flag in ("--dtype", "--d-model", "--seqlen", "--batch", "--causal", "--mode", "--provider"):
        assert flag in done.stdout

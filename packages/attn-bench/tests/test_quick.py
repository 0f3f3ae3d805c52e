import math
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from attn_bench import interpreter
from attn_bench.cli import main
from attn_bench.interpreter import run_interpreted, why_not_interpreted
from attn_bench.model_checks import checks_to_make
from attn_bench.providers import FLASH_PROVIDERS, Attention, Provider
from attn_bench.quick import SPEED_GRIDS, left_out, parity_table
from attn_bench.results import read_results
from attn_bench.training import (
    LOSS_BOUND_PER_STEP,
    Parity,
    capture,
    make_plan,
    prepare_text,
    train,
)
from flash_kernel import attention_reference

CPU = torch.device("cpu")
Plant = Callable[[str, Attention], Provider]


def test_quick_trains_checks_interprets_and_times(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if reason := why_not_interpreted():
        pytest.skip(reason)
    # one tile and a piece of the next: the interpreter takes a minute for more
    monkeypatch.setattr("attn_bench.model_checks.INTERPRETED_LENGTH", 33)
    monkeypatch.setattr(
        "attn_bench.quick.SPEED_GRIDS", {"cpu": replace(SPEED_GRIDS["cpu"], seqlens_q=(64,))}
    )
    path = tmp_path / "quick.jsonl"
    assert main(["quick", "--steps", "2", "--device", "cpu", "--save", str(path)]) == 0
    printed = capsys.readouterr()
    assert "the losses agree: largest difference" in printed.out
    assert "CPU: not a performance figure" in printed.out
    assert printed.out.splitlines()[-1].startswith("everything agrees (")
    rows = read_results(path).rows
    assert {row.state for row in rows} == {"ok"}
    checked = {row.provider for row in rows if row.suite == "quick_check"}
    assert {"dense-eager", "sdpa", "flash-auto"} <= checked
    assert {each for each in checked if each.startswith("flash-triton")} == {
        "flash-triton, triton backward (interpreted)",
        "flash-triton, dense backward (interpreted)",
    }
    assert all(row.median_ms for row in rows if row.suite == "quick_speed")


def test_the_profiler_is_told_to_be_quiet_before_torch_is_imported() -> None:
    """Torch's profiler, which meters memory on a CPU, reads this once and writes to stderr."""
    code = (
        "import os, sys; os.environ.pop('KINETO_LOG_LEVEL', None); from attn_bench.cli import main;"
        "main(['--version']); print(os.environ['KINETO_LOG_LEVEL'], 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "99 False"


def test_quick_fails_if_one_implementation_disagrees(
    plant: Plant, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def scale_is_off(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention_reference(q, k, v, is_causal=True, scale=0.126)[0]

    for name in list(FLASH_PROVIDERS):
        monkeypatch.delitem(FLASH_PROVIDERS, name)
    plant("planted", scale_is_off)
    monkeypatch.setattr("attn_bench.quick.check_interpreted", lambda _captured: [])
    assert main(["quick", "--steps", "1", "--device", "cpu"]) == 1
    out = capsys.readouterr().out
    assert "planted: wrong: `o`: error max" in out
    assert out.splitlines()[-1].startswith("SOMETHING DISAGREES")


def test_losses_disagree_beyond_the_bound_or_if_one_is_nan() -> None:
    bound = 2 * LOSS_BOUND_PER_STEP
    assert Parity([5.0, 4.0], [5.0, 4.0 + 0.9 * bound]).agrees
    assert not Parity([5.0, 4.0], [5.0 + 1.1 * bound, 4.0]).agrees
    assert not Parity([5.0, math.nan], [5.0, 4.0]).agrees
    assert "THE LOSSES DISAGREE" in parity_table(Parity([5.0], [4.0]))


def test_captured_tensors_are_those_that_attention_was_given(tmp_path: Path) -> None:
    plan = make_plan(CPU, steps=1)
    tokens = prepare_text(tmp_path)
    model, losses = train(plan, "eager", tokens, CPU, lambda: None)
    given = []

    def spy(q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool) -> Tensor:
        given.append((q, k, v))
        return attention_reference(q, k, v, is_causal=is_causal)[0]

    for block in model.blocks:
        block.attention.attention_fn = spy
    captured = capture(model, tokens, plan)
    assert len(losses) == 1
    assert len(given) == plan.model.num_layers
    for index in range(3):
        assert torch.equal(captured[index], torch.cat([layer[index] for layer in given]))
        assert captured[index].requires_grad
    assert all(block.attention.attention_fn is spy for block in model.blocks)


def test_a_failing_interpreter_is_reported_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    # whatever is installed here
    monkeypatch.setattr(interpreter, "why_not_interpreted", lambda: None)
    monkeypatch.setattr(interpreter, "BACKWARDS", ())
    monkeypatch.setattr("sys.executable", "/bin/false")
    interpreted = run_interpreted([])
    assert interpreted.state == "error"
    assert interpreted.reason == "Triton's interpreter failed: exit status 1"


def test_without_triton_the_interpreter_is_unsupported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    interpreted = run_interpreted([])
    assert interpreted.state == "unsupported"
    assert "install flash-kernel[triton]" in interpreted.reason


def test_on_a_gpu_what_compiles_is_checked_once_per_dtype() -> None:
    flex, sdpa = FLASH_PROVIDERS["flex"], FLASH_PROVIDERS["sdpa"]
    made = [
        (dtype, is_causal, provider.name)
        for dtype, is_causal, provider in checks_to_make([flex, sdpa], torch.device("cuda"))
    ]
    assert [check for check in made if check[2] == "flex"] == [
        ("fp32", True, "flex"),
        ("bf16", True, "flex"),
    ]
    assert len([check for check in made if check[2] == "sdpa"]) == 4
    text = left_out([flex, sdpa], [sdpa])
    assert text.startswith("left out of the speed table to stay short: flex (")
    assert left_out([sdpa], [sdpa]) == ""


def test_an_old_triton_with_a_new_numpy_is_not_interpreted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    versions = {"triton": "3.6.0", "numpy": "2.4.1"}
    monkeypatch.setattr("importlib.util.find_spec", lambda _: object())
    monkeypatch.setattr(interpreter, "version", versions.__getitem__)
    assert "upgrade Triton" in str(why_not_interpreted())
    versions["numpy"] = "2.3.5"
    assert why_not_interpreted() is None

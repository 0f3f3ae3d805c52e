"""The command line does the whole way, and answers every mistake with one line."""

import io
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import tiny_llm
from tiny_llm import attention
from tiny_llm.attention.eager import scaled_dot_product_attention
from tiny_llm.bpe import BPETokenizer
from tiny_llm.checkpoint import load_checkpoint
from tiny_llm.cli import main
from tiny_llm.data import TokenFile

SMALL = ["--d-model", "16", "--num-layers", "1", "--num-heads", "2", "--d-ff", "16"]
SMALL += ["--seq-len", "16", "--batch-size", "2"]
# where there is a GPU the commands would take it
CPU = ["--device", "cpu"]
# a child process finds the package whether it is installed or merely on a relative PYTHONPATH
SOURCES = os.pathsep.join(
    [str(Path(tiny_llm.__file__).resolve().parents[1]), os.environ.get("PYTHONPATH", "")]
)


@pytest.fixture
def workdir(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def tokens(workdir):
    assert main(["prepare", "--out", "tokens.bin", "--max-bytes", "50000"]) == 0
    return "tokens.bin"


def train(*arguments):
    return main(["train", "--tokens", "tokens.bin", *CPU, *arguments])


@pytest.fixture
def trained(tokens):
    assert train("--out", "runs/x", "--steps", "4", *SMALL) == 0
    return "runs/x"


def test_the_three_commands_lead_from_the_standard_library_to_text(trained, capsys):
    capsys.readouterr()
    arguments = ["--checkpoint", trained, "--prompt", "déf ", "--max-new-tokens", "5", *CPU]
    assert main(["generate", *arguments]) == 0
    first = capsys.readouterr().out
    assert first.startswith("déf ")
    assert main(["generate", *arguments]) == 0
    assert capsys.readouterr().out == first
    assert main(["generate", *arguments, "--seed", "1"]) == 0
    assert capsys.readouterr().out != first


def test_training_shows_a_progress_bar_with_the_loss_and_says_where_it_saved(tokens, capsys):
    capsys.readouterr()
    assert train("--out", "run", "--steps", "3", *SMALL) == 0
    out, err = capsys.readouterr()
    assert "3/3" in err
    assert "loss=5." in err
    assert out.startswith("step 3: loss 5.")
    assert out.endswith("nats per token; saved run/checkpoint.pt\n")


def test_prepare_shows_a_progress_bar_and_counts(workdir, capsys):
    (workdir / "a.txt").write_bytes(b"abc")
    assert main(["prepare", "a.txt", "a.txt", "--out", "t.bin"]) == 0
    out, err = capsys.readouterr()
    assert "100%" in err
    assert out == "t.bin: 8 tokens from 2 files\n"


def test_held_out_files_are_every_20th_and_in_no_training_token(workdir, capsys):
    names = [f"{i:02}.txt" for i in range(45)]
    for i, name in enumerate(names):
        (workdir / name).write_bytes(bytes([i]))
    arguments = ["--out", "t.bin", "--held-out", "h.bin", "--vocab-size", "257"]
    assert main(["prepare", *names, *arguments]) == 0
    assert capsys.readouterr().out.endswith("h.bin: 4 tokens from 2 files, held out\n")
    kept, held_out = (TokenFile.open(workdir / name) for name in ("t.bin", "h.bin"))
    tokenizer = BPETokenizer.load(workdir / "t.tokenizer.json")
    assert tokenizer.decode_bytes(held_out[:].tolist()) == bytes([19, 39])
    assert tokenizer.decode_bytes(kept[:].tolist()) == bytes(sorted({*range(45)} - {19, 39}))
    assert held_out.tokenizer_checksum == kept.tokenizer_checksum == tokenizer.checksum
    assert main(["prepare", *names[:19], *arguments]) == 2
    assert "--held-out takes every 20th file, there are only 19" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("out", "held_out"),
    [
        ("t.bin", "t.bin"),
        ("t.bin", "folder/../t.bin"),
        ("t.bin", "t.tokenizer.json"),
        ("shards", "shards/shard-00000.bin"),
        ("shards/all", "shards"),
    ],
)
def test_held_out_tokens_never_go_where_the_training_tokens_go(workdir, capsys, out, held_out):
    (workdir / "folder").mkdir()
    for i in range(20):
        (workdir / "folder" / f"{i:02}.txt").write_bytes(b"abc")
    shards = ["--shard-tokens", "10"] if out.startswith("shards") else []
    arguments = ["--vocab-size", "257", "--out", out, "--held-out", held_out, *shards]
    assert main(["prepare", "folder", *arguments]) == 2
    expected = f"--held-out {held_out} is where --out {out} goes; name another"
    assert expected in capsys.readouterr().err
    assert [path.name for path in workdir.iterdir()] == ["folder"], "nothing was written"


def test_prompt_may_be_empty(trained, capsys):
    capsys.readouterr()
    arguments = ["--checkpoint", trained, "--max-new-tokens", "0", *CPU]
    assert main(["generate", *arguments]) == 0
    assert capsys.readouterr().out == "\n"


def test_interrupted_training_resumes_to_the_very_weights_of_an_uninterrupted_one(tokens, capsys):
    calls = 0

    def power_cut(q, k, v, *, is_causal):
        nonlocal calls
        calls += 1
        if calls == 4:
            raise KeyboardInterrupt
        return scaled_dot_product_attention(q, k, v, is_causal=is_causal)

    assert train("--out", "whole", "--steps", "5", *SMALL) == 0
    attention.register("power-cut", power_cut)
    try:
        status = train(
            *("--out", "cut", "--steps", "5", "--checkpoint-every", "2"),
            *("--attention", "power-cut", *SMALL),
        )
    finally:
        attention.unregister("power-cut")
    assert status == 130
    assert "train goes on with --resume" in capsys.readouterr().err
    assert load_checkpoint("cut").step == 2

    assert train("--out", "cut", "--resume", "--attention", "eager") == 0
    whole, resumed = load_checkpoint("whole"), load_checkpoint("cut")
    assert (whole.step, whole.model_config) == (resumed.step, resumed.model_config)
    for name, weight in whole.model_state.items():
        assert torch.equal(resumed.model_state[name], weight), name


def test_finished_run_resumes_only_to_more_steps(trained, capsys):
    capsys.readouterr()
    assert train("--out", trained, "--resume") == 0
    assert "is at step 4 already; pass more --steps" in capsys.readouterr().out
    assert train("--out", trained, "--resume", "--steps", "6") == 0
    assert load_checkpoint(trained).step == 6
    assert load_checkpoint(trained).training_config.steps == 6


# what is typed after `prepare` and `trained` have run, and what the one line must say
MISTAKES = {
    "no-command": ([], "a command is required; there are prepare, train, resume, eval, generate"),
    "unknown-flag": (["train", "--colour", "red"], "Unrecognized options: --colour, red"),
    "bad-integer": (
        ["train", "--tokens", "tokens.bin", "--out", "n", "--steps", "many"],
        "Error parsing --steps: invalid literal for int() with base 10: 'many'",
    ),
    "no-tokens": (
        ["train", "--tokens", "no.bin", "--out", "n"],
        "token file no.bin does not exist; make it with tiny-llm prepare",
    ),
    "foreign-tokens": (
        ["train", "--tokens", "runs/x/checkpoint.pt", "--out", "n"],
        "runs/x/checkpoint.pt is not a tiny-llm token file",
    ),
    "bad-setting": (
        ["train", "--tokens", "tokens.bin", "--out", "n", "--num-heads", "3"],
        "`d_model` must be a multiple of `num_heads`, got d_model=128 and num_heads=3",
    ),
    "short-text": (
        ["train", "--tokens", "tokens.bin", "--out", "n", "--seq-len", "100000"],
        "seq_len=100000 needs at least 100001 tokens",
    ),
    "unknown-attention": (
        ["train", "--tokens", "tokens.bin", "--out", "n", "--attention", "falsh"],
        "unknown attention 'falsh'; registered: 'eager'",
    ),
    "unknown-device": (
        ["train", "--tokens", "tokens.bin", "--out", "n", "--device", "abacus"],
        "--device abacus is not available here; there is: cpu",
    ),
    "absent-device": (
        ["generate", "--checkpoint", "runs/x", "--device", "cuda:99"],
        "--device cuda:99 is not available here",
    ),
    "checkpoint-every": (
        ["train", "--tokens", "tokens.bin", "--out", "n", "--checkpoint-every", "0"],
        "`checkpoint_every` must be at least 1, got 0",
    ),
    "run-exists": (
        ["train", "--tokens", "tokens.bin", "--out", "runs/x"],
        "runs/x/checkpoint.pt exists already: pass --resume",
    ),
    "nothing-to-resume": (
        ["train", "--tokens", "tokens.bin", "--out", "n", "--resume"],
        "n holds no run to go on with: there is no n/config.toml",
    ),
    "resume-with-another-seed": (
        ["train", "--tokens", "tokens.bin", "--out", "runs/x", "--resume", "--seed", "1"],
        "--seed cannot change on --resume: it was 0, got 1",
    ),
    "out-is-a-file": (
        ["train", "--tokens", "tokens.bin", "--out", "tokens.bin", *SMALL],
        "cannot write into tokens.bin: File exists",
    ),
    "too-large": (  # for the address space: less might be promised, and the machine run out later
        ["train", "--tokens", "tokens.bin", "--out", "n", "--d-model", str(10**15), *CPU],
        "out of memory: raise --micro-batches, or lower --batch-size, --seq-len or the model's",
    ),
    "no-checkpoint": (
        ["generate", "--checkpoint", "none"],
        "checkpoint none does not exist; make it with tiny-llm train",
    ),
    "foreign-checkpoint": (
        ["generate", "--checkpoint", "tokens.bin"],
        "tokens.bin is not a tiny-llm checkpoint, or it is truncated",
    ),
    "bad-sampling": (
        ["generate", "--checkpoint", "runs/x", "--top-k", "0"],
        "`top_k` must be at least 1, got 0",
    ),
    "bad-seed": (
        ["generate", "--checkpoint", "runs/x", "--seed", "-1"],
        "--seed must be 0 to 9223372036854775807, got -1",
    ),
    "missing-source": (
        ["prepare", "no.txt", "--out", "n"],
        "cannot read no.txt: No such file or directory",
    ),
    "unwritable-output": (
        ["prepare", "tokens.bin", "--out", "missing/t.bin"],
        "cannot write missing/t.bin: No such file or directory",
    ),
    "useless-cap": (
        ["prepare", "tokens.bin", "--out", "n", "--max-bytes", "5"],
        "--max-bytes is for the standard library's sources",
    ),
    "nothing-given": (["train"], "the following options are required: --tokens, --out"),
    "unknown-command": (["fly"], "unknown command 'fly'; there are prepare, train"),
    "unknown-precision": (
        ["train", "--tokens", "tokens.bin", "--out", "n", "--precision", "fp8"],
        "`precision` must be fp32, bf16, fp16, got 'fp8'",
    ),
    "unknown-preset": (
        ["train", "--tokens", "tokens.bin", "--out", "n", "--preset", "9b"],
        "unknown preset '9b'; there are toy, 10m",
    ),
    "missing-config": (
        ["train", "--config", "none.toml"],
        "cannot read none.toml: No such file or directory",
    ),
    "fsdp-alone": (
        ["train", "--tokens", "tokens.bin", "--out", "n", "--parallel", "fsdp"],
        "--parallel fsdp needs torchrun",
    ),
    "eval-of-nothing": (["eval", "--checkpoint", "runs/x"], "are required: --tokens"),
    "two-tokenizers": (
        ["prepare", "--out", "n", "--vocab-size", "300", "--tokenizer", "t.json"],
        "--vocab-size trains a tokenizer, --tokenizer names one",
    ),
    "column-of-text": (
        ["prepare", "tokens.bin", "--column", "text", "--out", "n"],
        "--column text needs .jsonl or .parquet files, got tokens.bin",
    ),
    "nothing-to-describe": (["info", "none"], "none does not exist"),
    "unknown-dtype": (
        ["attention", "explain", "--dtype", "float7"],
        "`dtype` must be the name of a torch dtype",
    ),
    "bad-cap": (["prepare", "--out", "n", "--max-bytes", "-1"], "--max-bytes must be at least 1"),
}


@pytest.fixture(scope="module")
def workdir_with_run(tmp_path_factory):
    """A folder with tokens.bin and runs/x, made once; each mistake gets a copy."""
    folder = tmp_path_factory.mktemp("mistakes")
    tokens, run = str(folder / "tokens.bin"), str(folder / "runs" / "x")
    assert main(["prepare", "--out", tokens, "--max-bytes", "50000"]) == 0
    assert main(["train", "--tokens", tokens, "--out", run, "--steps", "1", *SMALL, *CPU]) == 0
    return folder


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistake_is_one_line_with_status_2_and_leaves_nothing_behind(
    mistake, workdir_with_run, tmp_path, monkeypatch, capsys
):
    folder = tmp_path / "copy"
    shutil.copytree(workdir_with_run, folder)
    monkeypatch.chdir(folder)
    before = sorted(folder.rglob("*"))
    arguments, message = MISTAKES[mistake]
    if {"train", "generate", "eval"} & set(arguments) and "--device" not in arguments:
        arguments = [*arguments, *CPU]
    capsys.readouterr()

    status = main(arguments)
    out, err = capsys.readouterr()

    assert status == 2
    assert out == ""
    last_line = err.splitlines()[-1]
    assert last_line.startswith("tiny-llm: error: ")
    assert message in last_line
    # nothing but a progress bar may come before
    assert all("%|" in line for line in err.splitlines()[:-1] if line)
    assert sorted(folder.rglob("*")) == before


def test_output_is_text_whatever_the_terminal_can_show(trained, monkeypatch):
    terminal = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr("sys.stdout", terminal)
    arguments = ["--prompt", "déf ", "--max-new-tokens", "3"]
    assert main(["generate", "--checkpoint", trained, *CPU, *arguments]) == 0
    assert terminal.buffer.getvalue().startswith(b"d?f ")


def test_closed_output_ends_quietly(trained, monkeypatch, capfd):
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as stdout:
        monkeypatch.setattr("sys.stdout", stdout)
        assert main(["generate", "--checkpoint", trained, *CPU, "--max-new-tokens", "3"]) == 141
        # what the interpreter does at its end finds an open file
        stdout.write("more")
        stdout.flush()
        monkeypatch.undo()
    assert capfd.readouterr().err == ""


def test_resuming_on_other_tokens_is_refused(trained, workdir, capsys):
    (workdir / "other.txt").write_bytes(bytes(100))
    assert main(["prepare", "other.txt", "--out", "other.bin"]) == 0
    assert main(["train", "--tokens", "other.bin", "--out", trained, "--resume", *CPU]) == 2
    err = capsys.readouterr().err
    assert "other.bin is not the token file that runs/x/checkpoint.pt was trained on" in err


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_wrong_value_is_one_line_whatever_box_the_terminal_can_show(encoding):
    done = subprocess.run(
        [sys.executable, "-m", "tiny_llm", "train", "--steps", "many"],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": SOURCES, "PYTHONIOENCODING": encoding},
    )
    assert done.returncode == 2
    assert done.stderr == (
        "tiny-llm: error: Error parsing --steps: invalid literal for int() with base 10: 'many' "
        "(see tiny-llm train --help)\n"
    )


def test_module_runs_as_the_command_and_help_needs_no_torch(workdir):
    (workdir / "torch.py").write_text("raise ImportError('torch was imported')")
    path = os.pathsep.join([str(workdir), SOURCES])
    environment = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run(
        [sys.executable, "-m", "tiny_llm", "train", "--help"],
        capture_output=True,
        text=True,
        check=True,
        env=environment,
    )
    assert "--learning-rate FLOAT" in done.stdout
    assert "attention backend: eager (readable)" in done.stdout
    assert "tiny-llm train --tokens tokens.bin --out runs/first" in done.stdout
